"""What reductions compute at the ends of ranges, and with ranks that have joined: alike in both engines."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from elastic_driver.worker.engine.collectives import Bytes, Group, ReduceOp, SoloCollectives
from elastic_driver.worker.engine.plain import PlainEngine

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import PATIENCE_S, Kind, Operation, TensorSpec, allreduce, engines, spec, together

FUNCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
COMPARISONS = {ReduceOp.MIN: np.less, ReduceOp.MAX: np.greater}
DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]


class Threads(SoloCollectives):
    """A backend's collectives between threads."""

    def __init__(self, group: Group, meeting: threading.Barrier, slots: list[Bytes]) -> None:
        self._index, self._meeting, self._slots = group.index, meeting, slots

    def connect(self, exchange: Any, *, timeout_s: float) -> None:
        pass

    def _swap(self, data: Bytes) -> list[Bytes]:
        self._slots[self._index] = data.copy()
        self._meeting.wait(PATIENCE_S)
        parts = list(self._slots)
        self._meeting.wait(PATIENCE_S)
        return parts

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        values = [part.view(dtype) for part in self._swap(data)]
        with np.errstate(all="ignore"):
            if op in COMPARISONS:  # as torch's Gloo does: what is not less, or not greater, is not taken
                data.view(dtype)[:] = functools.reduce(
                    lambda first, second: np.where(COMPARISONS[op](second, first), second, first), values
                )
            else:
                data.view(dtype)[:] = functools.reduce(FUNCTIONS[op], values)

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        output[:] = np.concatenate(self._swap(data))


@contextlib.contextmanager
def plain_engines(size: int) -> Iterator[list[Any]]:
    meeting, slots = threading.Barrier(size), [np.empty(0, np.uint8)] * size
    made = [
        PlainEngine(lambda group: Threads(group, meeting, slots), rank=rank, size=size, build_s=5.0, collective_s=5.0)
        for rank in range(size)
    ]
    for engine in made:
        engine.connect(lambda scope, **unused: [], timeout_s=5.0)
    try:
        yield made
    finally:
        for engine in made:
            engine.close()


WORLDS = {
    "one": lambda: plain_engines(1),
    "plain": lambda: plain_engines(3),
    "native": lambda: engines(3),
    "native-machines": lambda: engines(3, machines="aab"),
    "native-alone": lambda: engines(1),
}
each_world = pytest.mark.parametrize("world", WORLDS)


@each_world
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_averages_of_small_integers_do_not_overflow(world: str, dtype: str) -> None:
    high = np.iinfo(dtype).max

    def body(engine: Any, rank: int) -> None:
        for count in (5, 300_000):
            mine = np.full(count, high - rank, dtype)
            other = np.full(3, high, dtype)
            operation = Operation(Kind.ALLREDUCE, (spec(mine), spec(other)), reduce_op=ReduceOp.AVERAGE)
            engine.submit(operation).result()
            assert set(mine.tolist()) == {high - (1 if size > 1 else 0)}
            assert set(other.tolist()) == {high}
            rows = np.full((count, 2), high, dtype)
            result = engine.submit(Operation(Kind.REDUCESCATTER, (spec(rows),), reduce_op=ReduceOp.AVERAGE)).result()
            assert set(result.arrays[0].view(dtype).tolist()) == {high}
            # Both factors count, before and after; each result is one of the type's.
            allreduce(engine, mine, reduce_op=ReduceOp.AVERAGE, prescale=0.5, postscale=3.0)
            assert set(mine.tolist()) == {high}

    with WORLDS[world]() as made:
        size = len(made)
        together(made, body)


@each_world
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_factors_beyond_the_range_saturate(world: str, dtype: str) -> None:
    limits = np.iinfo(dtype)

    def body(engine: Any, rank: int) -> None:
        for factors in ({"prescale": 1e30}, {"postscale": 1e30}):
            mine = np.array([0, 1, 2] if limits.min == 0 else [-1, 0, 1], dtype)
            allreduce(engine, mine, reduce_op=ReduceOp.MAX, **factors)
            ends = {-1: limits.min, 0: 0, 1: limits.max, 2: limits.max}
            assert mine.tolist() == [ends[value] for value in ([0, 1, 2] if limits.min == 0 else [-1, 0, 1])]
        for factor in (float("inf"), float("nan")):
            mine = np.array([1, 0], dtype)
            allreduce(engine, mine, reduce_op=ReduceOp.MAX, prescale=factor)
            assert mine.tolist() == [limits.max if factor > 0 else 0, 0]

    with WORLDS[world]() as made:
        together(made, body)


@pytest.mark.parametrize("world", ["plain", "native", "native-machines"])
@pytest.mark.parametrize("op", [*FUNCTIONS, ReduceOp.AVERAGE, ReduceOp.ADASUM], ids=lambda op: op.name)
def test_ranks_that_have_joined_change_nobodys_values(world: str, op: ReduceOp) -> None:
    joined = threading.Event()

    def body(engine: Any, rank: int) -> None:
        if rank == 1:
            handle = engine.submit(Operation(Kind.JOIN))
            joined.set()
            handle.result()
            return
        joined.wait()
        for dtype in DTYPES:
            if op is ReduceOp.ADASUM and "float" not in dtype:
                continue
            for sign in (1,) if dtype == "uint8" else (1, -1):
                # Small, so that they run together, with a factor that would make something of what is neutral; large.
                arrays = [np.full(count, sign * (rank + 2), dtype) for count in (3, 5, 300_000)]
                handles = [
                    engine.submit(
                        Operation(
                            Kind.ALLREDUCE, (spec(array),), name=f"{dtype}{sign}{place}", reduce_op=op, prescale=2.0
                        )
                    )
                    for place, array in enumerate(arrays)
                ]
                for handle in handles:
                    handle.result()
                for array in arrays:
                    check(array, sign, dtype)
        engine.submit(Operation(Kind.JOIN)).result()

    def check(array: npt.NDArray[Any], sign: int, dtype: str) -> None:
        theirs = [np.array(sign * 2 * (rank + 2), dtype) for rank in (0, 2)]
        if op is ReduceOp.AVERAGE:  # by all ranks, as Horovod's
            wanted = np.trunc(sum(theirs) / 3) if "int" in dtype else sum(theirs) / 3
        elif op is ReduceOp.ADASUM:
            wanted = np.float64(sign * 6)  # what they have in common counts once
        else:
            wanted = FUNCTIONS[op](*theirs)
        np.testing.assert_allclose(array, np.array(wanted, dtype), rtol=2e-3)

    with WORLDS[world]() as made:
        together(made, body)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
def test_bfloat16_of_ranks_that_have_joined(op: ReduceOp) -> None:
    def body(engine: Any, rank: int) -> None:
        if rank == 0:
            mine = np.full(3, 0xC000 if op is ReduceOp.MAX else 0x4000, np.uint16)  # -2 and 2
            tensor = spec(mine)
            tensor = type(tensor)(tensor.address, tensor.nbytes, "bfloat16", tensor.shape, tensor.output)
            engine.submit(Operation(Kind.ALLREDUCE, (tensor,), name="b", reduce_op=op)).result()
            assert set(mine.tolist()) == {0xC000 if op is ReduceOp.MAX else 0x4000}
        engine.submit(Operation(Kind.JOIN)).result()

    with engines(2) as made:
        together(made, body)


NAN, INF = float("nan"), float("inf")
# A row for each rank.
FLOATS = {
    1: [[NAN, 1.0, INF, -INF, -0.5, NAN]],
    3: [
        [NAN, 1.0, 1.0, -INF, -1.0, INF, NAN, 0.5, INF, -2.0],
        [2.0, NAN, 2.0, NAN, -2.0, INF, NAN, -0.5, -INF, -2.0],
        [3.0, 3.0, NAN, INF, -1.5, INF, NAN, 0.0, 1.0, -4.0],
    ],
}


def as_dtype(values: list[float], dtype: str) -> npt.NDArray[Any]:
    """NumPy has no bfloat16: as the upper halves of float32, which hold these values."""
    if dtype == "bfloat16":
        return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.array(values, dtype)


def as_floats(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data


@each_world
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("op", "has_joined"),
    [
        pytest.param(ReduceOp.MIN, False, id="MIN"),
        pytest.param(ReduceOp.MAX, True, id="MAX-without-rank-1"),
        # Who has joined is the same to both.
        pytest.param(ReduceOp.MIN, True, id="MIN-without-rank-1", marks=pytest.mark.release),
        pytest.param(ReduceOp.MAX, False, id="MAX", marks=pytest.mark.release),
    ],
)
def test_nan_of_any_rank_is_the_least_and_the_greatest(world: str, op: ReduceOp, dtype: str, has_joined: bool) -> None:
    joined = threading.Event()

    def body(engine: Any, rank: int) -> None:
        if has_joined and rank == 1:
            handle = engine.submit(Operation(Kind.JOIN))
            joined.set()
            handle.result()
            return
        if has_joined and size > 1:
            joined.wait()
        rows = [row for member, row in enumerate(FLOATS[size]) if not (has_joined and member == 1)]
        wanted = FUNCTIONS[op].reduce(rows)
        memory, specs = [], []
        for times in (1, 3, 30_000):  # small ones in one group, and a large one
            data = as_dtype(FLOATS[size][rank] * times, dtype)
            memory.append(data)
            address = data.ctypes.data
            specs.append(TensorSpec(address, data.nbytes, dtype, data.shape, address))
        engine.submit(Operation(Kind.ALLREDUCE, tuple(specs[:2]), name="group", reduce_op=op)).result()
        engine.submit(Operation(Kind.ALLREDUCE, tuple(specs[2:]), name="large", reduce_op=op)).result()
        for data, times in zip(memory, (1, 3, 30_000), strict=True):
            np.testing.assert_array_equal(as_floats(data), np.tile(wanted, times))
        engine.submit(Operation(Kind.JOIN)).result()

    with WORLDS[world]() as made:
        size = len(made)
        together(made, body)


@each_world
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
def test_nan_in_scattered_rows(world: str, op: ReduceOp) -> None:
    def body(engine: Any, rank: int) -> None:
        rows = np.array([FLOATS[size][rank]] * size, "float32")
        result = engine.submit(Operation(Kind.REDUCESCATTER, (spec(rows),), reduce_op=op)).result()
        np.testing.assert_array_equal(result.arrays[0].view("float32"), FUNCTIONS[op].reduce(FLOATS[size]))

    with WORLDS[world]() as made:
        size = len(made)
        together(made, body)


@pytest.mark.parametrize("world", ["plain", "native"])
def test_a_users_name_that_is_written_like_one_of_the_librarys(world: str) -> None:
    def body(engine: Any, rank: int) -> None:
        mine = np.ones(2)
        allreduce(engine, mine, name="elastic_driver.leaving")
        assert mine.tolist() == [3, 3]

    with WORLDS[world]() as made:
        together(made, body)
