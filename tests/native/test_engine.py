"""The engine's operations against numpy, inside a machine, between machines and without shared memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_driver.errors import DuplicateNameError, HorovodInternalError, MismatchError
from elastic_driver.worker.engine.protocol import region
from elastic_driver.worker.engine.trace import Trace

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import PATIENCE_S, Kind, Operation, ReduceOp, allreduce, barrier, each_rank, engines, spec, together

# Letters: ranks with the same one share memory. "staged" does not read private memory of peers.
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "three": (3, {}),
    "three-staged": (3, {"direct_reads": False}),
    "two-machines": (4, {"machines": "aabb"}),
    "two-machines-staged": (4, {"machines": "aabb", "direct_reads": False}),
    "uneven-machines": (5, {"machines": "abaab"}),
    "no-shared-memory": (3, {"shared_memory": False}),
}
REDUCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]
# Nothing, small, on both sides of a slot's size, and of what is staged.
COUNTS = (0, 1, 5, 1021, 32 * 1024 // 4, 32 * 1024 // 4 + 1, 300_007)

world = pytest.mark.parametrize("world", WORLDS)


def values(rank: int, dtype: str, count: int) -> npt.NDArray[Any]:
    random = np.random.default_rng(1000 + rank)
    if dtype.startswith("float"):
        return random.normal(size=count).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, size=count, dtype=dtype, endpoint=True)


def check_close(mine: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> None:
    if mine.dtype == np.float16:
        np.testing.assert_allclose(mine, wanted.astype(np.float16), rtol=4e-3, atol=4e-3)
    elif mine.dtype.kind == "f":
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize(
    ("world", "op"),
    [
        # What a rank adds up is the same in all of them.
        pytest.param(world, op, id=f"{op.name}-{world}", marks=[] if is_early else pytest.mark.release)
        for op in REDUCTIONS
        for world in WORLDS
        for is_early in [op is ReduceOp.SUM or world in ("two", "two-machines")]
    ],
)
def test_allreduce(world: str, op: ReduceOp) -> None:
    size, options = WORLDS[world]
    cases = []
    for dtype in DTYPES:
        for count in COUNTS:
            inputs = [values(rank, dtype, count) for rank in range(size)]
            wide = np.float32 if dtype == "float16" else dtype
            with np.errstate(all="ignore"):
                wanted = functools.reduce(REDUCTIONS[op], [each.astype(wide) for each in inputs])
            cases.append((f"{dtype}{count}", inputs, wanted))

    def body(engine: Any, rank: int) -> None:
        for name, inputs, wanted in cases:
            mine = inputs[rank]
            output = np.empty_like(mine)
            engine.submit(Operation(Kind.ALLREDUCE, (spec(mine, output),), name=name, reduce_op=op)).result()
            allreduce(engine, mine, reduce_op=op)
            check_close(output, wanted)
            assert output.tobytes() == mine.tobytes()

    with engines(size, **options) as made:
        together(made, body)


@world
def test_averages_and_factors(world: str) -> None:
    size, options = WORLDS[world]

    def body(engine: Any, rank: int) -> None:
        for count in (3, 100_000):
            mine = np.full(count, rank + 1, np.float32)
            allreduce(engine, mine, reduce_op=ReduceOp.AVERAGE, prescale=2.0, postscale=0.5)
            np.testing.assert_allclose(mine, (size + 1) / 2)
            whole = np.full(count, -(rank + 1), np.int64)
            allreduce(engine, whole, reduce_op=ReduceOp.AVERAGE)
            assert set(whole) == {int(-(size + 1) * size / 2 / size)}

    with engines(size, **options) as made:
        together(made, body)


@world
def test_all_ranks_get_the_same_bits(world: str) -> None:
    size, options = WORLDS[world]
    results: dict[int, bytes] = {}

    def body(engine: Any, rank: int) -> None:
        parts = [values(rank + 7 * i, "float32", count) for i, count in enumerate((3, 70_001, 500_009))]
        engine.submit(Operation(Kind.ALLREDUCE, tuple(spec(part) for part in parts))).result()
        results[rank] = b"".join(part.tobytes() for part in parts)

    with engines(size, **options) as made:
        together(made, body)
    assert len(set(results.values())) == 1


@world
def test_allgather_broadcast_alltoall_reducescatter(world: str) -> None:
    size, options = WORLDS[world]

    def body(engine: Any, rank: int) -> None:
        for rows in (1, 40_000):
            mine = np.full((rank * rows, 3), rank, np.int16)
            got = engine.submit(Operation(Kind.ALLGATHER, (spec(mine),))).result()
            wanted = np.concatenate([np.full((r * rows, 3), r, np.int16) for r in range(size)])
            assert got.rows == [len(wanted)]
            np.testing.assert_array_equal(got.arrays[0].view(np.int16).reshape(-1, 3), wanted)

            root = size - 1
            tensor = np.full(rows, rank, np.complex128)
            engine.submit(Operation(Kind.BROADCAST, (spec(tensor),), root=root)).result()
            np.testing.assert_array_equal(tensor, root)

            splits = tuple((rank + to) % 3 * rows for to in range(size))
            mine = np.repeat([100 * rank + to for to in range(size)], splits)
            got = engine.submit(Operation(Kind.ALLTOALL, (spec(mine),), splits=(splits,))).result()
            theirs = [(other + rank) % 3 * rows for other in range(size)]
            assert got.received == [tuple(theirs)]
            wanted = np.repeat([100 * other + rank for other in range(size)], theirs)
            np.testing.assert_array_equal(got.arrays[0].view(np.int64), wanted)

            # Each tensor has splits of its own.
            other_splits = tuple((rank + 2 * to) % 4 * rows for to in range(size))
            others = np.repeat([100 * rank + to for to in range(size)], other_splits).astype(np.int32)
            both = Operation(Kind.ALLTOALL, (spec(mine), spec(others)), splits=(splits, other_splits))
            got = engine.submit(both).result()
            np.testing.assert_array_equal(got.arrays[0].view(np.int64), wanted)
            theirs = [(other + 2 * rank) % 4 * rows for other in range(size)]
            wanted = np.repeat([100 * other + rank for other in range(size)], theirs)
            np.testing.assert_array_equal(got.arrays[1].view(np.int32), wanted)

            # One row more for the first ranks where it does not come out even.
            mine = np.arange((size * rows + 1) * 2, dtype=np.float64).reshape(-1, 2)
            got = engine.submit(Operation(Kind.REDUCESCATTER, (spec(mine),))).result()
            part = np.array_split(mine * size, size)[rank]
            assert got.rows == [len(part)]
            np.testing.assert_allclose(got.arrays[0].view(np.float64).reshape(-1, 2), part)
        barrier(engine)

    with engines(size, **options) as made:
        together(made, body)


@pytest.mark.parametrize("machines", ["", "aabb", "aab"])
def test_tensors_larger_than_what_is_staged(machines: str) -> None:
    """Where peers read no private memory they go through slices, also beside a rank that has them in shared memory."""
    size = max(3, len(machines))
    count = 4_500_011  # 18 MB, more than two slices: not a multiple of anything
    inputs = [np.resize(np.arange(1000, dtype=np.int32) + rank, count) for rank in range(size)]
    wanted = inputs[0] * size + sum(range(size))

    def body(engine: Any, rank: int) -> None:
        mine = inputs[rank]
        output = np.empty_like(mine)
        if rank == 1:
            shared = engine.allocate(mine.nbytes).view(np.int32)
            shared[:] = mine
            mine = shared
        engine.submit(Operation(Kind.ALLREDUCE, (spec(mine, output),))).result()
        assert np.array_equal(output, wanted)
        got = engine.submit(Operation(Kind.REDUCESCATTER, (spec(mine),))).result()
        assert np.array_equal(got.arrays[0].view(np.int32), np.array_split(wanted, size)[rank])
        rows = count - rank  # uneven
        got = engine.submit(Operation(Kind.ALLGATHER, (spec(mine[:rows]),))).result()
        gathered = got.arrays[0].view(np.int32)
        ends = np.cumsum([count - other for other in range(size)])
        assert len(gathered) == ends[-1]
        for other, part in enumerate(np.split(gathered, ends[:-1])):
            assert np.array_equal(part, inputs[other][: count - other])
        splits = tuple(rows // size + (to == 0) * (rows % size) for to in range(size))
        got = engine.submit(Operation(Kind.ALLTOALL, (spec(mine[:rows]),), splits=(splits,))).result()
        sent = []
        for other in range(size):
            share, rest = divmod(count - other, size)
            first = 0 if rank == 0 else rank * share + rest
            sent.append(inputs[other][first : first + share + (rank == 0) * rest])
        assert np.array_equal(got.arrays[0].view(np.int32), np.concatenate(sent))
        if rank != 1:
            mine = mine.copy()  # the others look at what they were sent
        allreduce(engine, mine)
        assert np.array_equal(mine, wanted)
        mine[:] = rank
        engine.submit(Operation(Kind.BROADCAST, (spec(mine),), root=size - 1)).result()
        assert (mine == size - 1).all()
        barrier(engine)

    with engines(size, machines=machines, direct_reads=False) as made:
        together(made, body)


def shared_memory_bytes() -> int:
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if "memfd:elastic_driver" in os.readlink(descriptor):
                total += descriptor.stat().st_blocks * 512
    return total


def test_what_is_staged_is_bounded() -> None:
    """Whatever the tensor's size: two slices of 8 MB, beside the first MB."""
    taken: list[int] = []

    def body(engine: Any, rank: int) -> None:
        array = np.ones(1 << 24, np.float32)  # 64 MB
        allreduce(engine, array)
        engine.submit(Operation(Kind.BROADCAST, (spec(array),))).result()
        engine.submit(Operation(Kind.ALLGATHER, (spec(array),))).result()
        assert array[0] == array[-1] == 2
        barrier(engine)
        taken.append(shared_memory_bytes())
        barrier(engine)

    with engines(2, direct_reads=False) as made:
        together(made, body)
    assert 2 << 20 < max(taken) <= 2 * (17 << 20)


@world
def test_adasum(world: str) -> None:
    size, options = WORLDS[world]

    def tree(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        while len(arrays) > 1:
            paired = []
            for a, b in zip(arrays[::2], arrays[1::2], strict=False):
                dot = a @ b
                paired.append(a * (1 - dot / (2 * a @ a)) + b * (1 - dot / (2 * b @ b)))
            arrays = paired + arrays[len(arrays) // 2 * 2 :]
        return arrays[0]

    def body(engine: Any, rank: int) -> None:
        same = np.ones(100, np.float32)
        allreduce(engine, same, reduce_op=ReduceOp.ADASUM)
        np.testing.assert_allclose(same, 1.0)  # what all have in common counts once
        apart = np.zeros(size, np.float64)
        apart[rank] = rank + 1.0
        allreduce(engine, apart, reduce_op=ReduceOp.ADASUM)
        np.testing.assert_allclose(apart, np.arange(1, size + 1))  # what they have not is added up
        mine = values(rank, "float32", 1000)
        allreduce(engine, mine, reduce_op=ReduceOp.ADASUM)
        wanted = tree([values(r, "float32", 1000).astype(np.float64) for r in range(size)])
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)

    with engines(size, **options) as made:
        together(made, body)


def test_ranks_may_submit_in_any_order() -> None:
    def body(engine: Any, rank: int) -> None:
        random = np.random.default_rng(rank)
        for _ in range(20):  # the first step is spelled out, later ones go by number
            arrays = {f"t{i}": np.full(10 + 900 * i, rank + i, np.float32) for i in range(40)}
            names = list(arrays)
            random.shuffle(names)
            handles = [engine.submit(Operation(Kind.ALLREDUCE, (spec(arrays[n]),), name=n)) for n in names]
            for handle in handles:
                handle.result()
            for i in range(40):
                np.testing.assert_array_equal(arrays[f"t{i}"], 3 * i + 3)

    with engines(3) as made:
        together(made, body)


def test_grouped_tensors_of_several_types() -> None:
    def body(engine: Any, rank: int) -> None:
        arrays = [np.full(n, rank + 1, dtype) for dtype in DTYPES for n in (0, 3, 200_000)]
        operation = Operation(Kind.ALLREDUCE, tuple(spec(array) for array in arrays), name="all")
        engine.submit(operation).result()
        for array in arrays:
            np.testing.assert_array_equal(array, 3)

    with engines(2) as made:
        together(made, body)


@pytest.mark.parametrize("machines", ["", "abab"])
def test_process_sets(machines: str) -> None:
    def body(engine: Any, rank: int) -> None:
        engine.add_process_set(1, [0, 3])
        engine.add_process_set(2, [2, 1])
        mine = 1 if rank in (0, 3) else 2
        for count in (10, 400_000):
            array = np.full(count, rank, np.int32)
            allreduce(engine, array, name="same name", process_set=mine)
            np.testing.assert_array_equal(array, 3)
            allreduce(engine, array, name="same name")
            np.testing.assert_array_equal(array, 12)
        if mine == 2:
            token = np.array([rank])
            engine.submit(Operation(Kind.BROADCAST, (spec(token),), root=2, process_set=2)).result()
            assert token[0] == 2
            got = engine.submit(Operation(Kind.ALLGATHER, (spec(np.array([rank])),), process_set=2)).result()
            assert got.arrays[0].view(np.int64).tolist() == [2, 1]  # in the set's order
            with pytest.raises(ValueError, match=r"rank . is not in process set 1"):
                engine.submit(Operation(Kind.BARRIER, process_set=1))
            with pytest.raises(ValueError, match="root rank 0 is not in process set 2"):
                engine.submit(Operation(Kind.BROADCAST, (spec(token),), root=0, process_set=2))
        engine.remove_process_set(1)
        with pytest.raises(ValueError, match="no process set number 1"):
            engine.submit(Operation(Kind.BARRIER, process_set=1))
        engine.add_process_set(1, [1, 2, 3])
        if rank:
            array = np.ones(3, np.float32)
            allreduce(engine, array, process_set=1)
            np.testing.assert_array_equal(array, 3)

    with engines(4, machines=machines) as made:
        together(made, body)


def test_removing_a_process_set_ends_what_is_under_way_in_it() -> None:
    def body(engine: Any, rank: int) -> None:
        engine.add_process_set(1, [0, 1])
        array = np.ones(3, np.float32)
        left = []
        if rank == 1:
            left = [
                engine.submit(Operation(Kind.ALLREDUCE, (spec(array, array),), name="alone", process_set=1)),
                engine.submit(Operation(Kind.BARRIER, process_set=1)),
            ]
        engine.remove_process_set(1)
        for handle in left:
            with pytest.raises(MismatchError, match=r"(allreduce 'alone'|barrier '.*'): its process set was removed"):
                handle.result()
        # The round goes on, and nothing of it is warned of or waited for.
        allreduce(engine, array)
        np.testing.assert_array_equal(array, 3)
        barrier(engine)

    with engines(3, stall_warn_s=0.01) as made:
        together(made, body)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"array": np.ones((2, 3), np.float32)}, {"array": np.ones((3, 2), np.float32)}, r"shape \(2, 3\).*\(3, 2\)"),
        ({"array": np.ones(3, np.float32)}, {"array": np.ones(3, np.int32)}, "dtype float32.*dtype int32"),
        ({}, {"kind": Kind.BROADCAST}, "operation allreduce.*operation broadcast"),
        ({"kind": Kind.BROADCAST}, {"kind": Kind.BROADCAST, "root": 1}, "root rank 0.*root rank 1"),
        ({}, {"reduce_op": ReduceOp.MAX}, "op Sum.*op Max"),
        ({}, {"prescale": 0.5}, "prescale_factor 1.*prescale_factor 0.5"),
        ({}, {"count": 2}, "number of tensors 1.*number of tensors 2"),
        (
            {"kind": Kind.ALLGATHER, "array": np.ones((2, 3))},
            {"kind": Kind.ALLGATHER, "array": np.ones((2, 4))},
            r"shape \(rows, 3\).*\(rows, 4\)",
        ),
    ],
)
def test_what_differs_is_an_error_on_all_ranks(one: dict[str, Any], other: dict[str, Any], said: str) -> None:
    def submit(engine: Any, what: dict[str, Any]) -> None:
        options = dict(what)
        array = options.pop("array", np.ones(3, np.float32)).copy()
        count = options.pop("count", 1)
        kind = options.pop("kind", Kind.ALLREDUCE)
        engine.submit(Operation(kind, (spec(array),) * count, name="grad", **options)).result()

    def body(engine: Any, rank: int) -> None:
        submit(engine, {})
        submit(engine, other if rank == 2 else one)

    with engines(4) as made:
        errors = each_rank(made, body)
        assert sorted(errors) == [0, 1, 2, 3]
        for error in errors.values():
            assert isinstance(error, MismatchError), error
            assert str(error) == str(errors[0])
        assert "'grad'" in str(errors[0])
        # Two ranks' values: of one that most agree with, and of rank 2.
        assert re.search(said, str(errors[0])), str(errors[0])
        assert "rank 2 has" in str(errors[0])
        # Nothing else is broken by it.
        together(made, lambda engine, rank: allreduce(engine, np.ones(3), name="grad"))


def test_a_name_under_way_is_refused() -> None:
    with engines(2) as made:
        array = np.ones(3, np.float32)
        operation = Operation(Kind.ALLREDUCE, (spec(array),), name="twice")
        handle = made[0].submit(operation)
        assert not handle.done()
        with pytest.raises(DuplicateNameError, match=r"cannot allreduce 'twice': .* under way"):
            made[0].submit(operation)
        other = np.ones(3, np.float32)
        allreduce(made[1], other, name="twice")
        handle.result()
        assert array.tolist() == other.tolist() == [2, 2, 2]


def test_bad_operations_are_refused() -> None:
    with engines(2) as made:
        array = np.ones(3, np.float32)
        for operation, said in [
            (Operation(Kind.BROADCAST, (spec(array),), root=2), "root rank 2"),
            (Operation(Kind.ALLTOALL, (spec(array),), splits=((3,),)), "the splits must be one for each of the 2"),
            (Operation(Kind.ALLTOALL, (spec(array),), splits=((4, -1),)), "negative"),
            (Operation(Kind.ALLTOALL, (spec(array),), splits=((4, 1),)), "do not add up"),
            (Operation(Kind.ALLGATHER, (spec(np.array(1.0)),)), "no first dimension"),
            (Operation(Kind.ALLREDUCE, (spec(np.ones(2, np.complex64)),)), "cannot reduce elements of type complex64"),
            (Operation(Kind.REDUCESCATTER, (spec(array),), reduce_op=ReduceOp.ADASUM), "Adasum"),
            (Operation(Kind.BARRIER, process_set=7), "no process set number 7"),
        ]:
            with pytest.raises(ValueError, match=said):
                made[0].submit(operation)


def test_join_serves_the_others_until_all_have_joined() -> None:
    lasts: dict[int, int] = {}
    steps = (1, 5, 3)  # of each rank

    def body(engine: Any, rank: int) -> None:
        for step in range(steps[rank]):
            for count in (4, 200_000):
                array = np.full(count, 1, np.float32)
                allreduce(engine, array, name=f"step{count}")
                np.testing.assert_array_equal(array, sum(step < steps[r] for r in range(3)))
        lasts[rank] = engine.submit(Operation(Kind.JOIN)).result().last_joined
        allreduce(engine, np.ones(3), name="after")

    with engines(3) as made:
        together(made, body)
    assert lasts == {0: 1, 1: 1, 2: 1}


def test_unnamed_operations_before_and_after_a_join() -> None:
    def body(engine: Any, rank: int) -> None:
        for _ in range(3):
            for _ in range(rank + 1):
                allreduce(engine, np.ones(3))
            engine.submit(Operation(Kind.JOIN)).result()
        array = np.ones(3)
        allreduce(engine, array)
        assert array.tolist() == [3, 3, 3]

    with engines(3) as made:
        together(made, body)


@pytest.mark.parametrize(
    "kind",
    [Kind.ALLTOALL, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.BARRIER],
    ids=lambda kind: kind.name,
)
def test_only_allreduces_go_on_after_a_join(kind: Kind) -> None:
    """As in Horovod, whose scripts rely on the error; whichever comes first, the join or the operation."""

    def body(engine: Any, rank: int) -> None:
        if rank == 0:
            engine.submit(Operation(Kind.JOIN)).result()
            return
        specs = () if kind is Kind.BARRIER else (spec(np.ones(2)),)
        splits = ((1, 1),) if kind is Kind.ALLTOALL else ()
        with pytest.raises(MismatchError, match=f"{kind.name.lower()} is not supported while rank 0 has joined"):
            engine.submit(Operation(kind, specs, splits=splits, root=1)).result()
        allreduce(engine, np.ones(3))
        engine.submit(Operation(Kind.JOIN)).result()

    with engines(2) as made:
        together(made, body)


def test_a_rank_that_never_submits_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    # Warned of again and again: once all of them are late in the same look.
    with engines(2, stall_warn_s=0.01, stall_fail_s=3.0) as made:
        handles = [made[0].submit(Operation(Kind.ALLREDUCE, (spec(np.ones(3)),), name=f"g{i}")) for i in range(7)]
        for handle in handles:
            with pytest.raises(HorovodInternalError, match=r"rank 1 did not submit 'g.' within 3 s"):
                handle.result()
        with pytest.raises(HorovodInternalError):
            barrier(made[1])
    said = capfd.readouterr().err
    assert "stalled: rank 1 has not submitted what the others have" in said
    assert "g0, g1, g2, g3, g4 and 2 more" in said


def test_timeline(tmp_path: Path) -> None:
    """Its names are Horovod's: tools look for them."""
    with engines(2) as made:
        made[0].start_timeline(str(tmp_path / "trace.json"), mark_cycles=True)
        together(made, lambda engine, rank: allreduce(engine, np.ones(3), name='a "name"'))
        pair = Operation(Kind.ALLREDUCE, (spec(np.ones(3)), spec(np.ones(4))), name="pair")
        together(made, lambda engine, rank: engine.submit(pair).result())
        one = Operation(Kind.ALLREDUCE, (spec(np.ones(3)),), name="allreduce.steps", reduce_op=ReduceOp.ADASUM)
        together(made, lambda engine, rank: engine.submit(one).result())
        together(made, lambda engine, rank: barrier(engine))
        made[0].stop_timeline()
        together(made, lambda engine, rank: allreduce(engine, np.ones(3), name="after"))
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    operations = {"ALLREDUCE", "ADASUM", "BARRIER"}
    assert set(spans) == {
        *operations,
        *(f"NEGOTIATE_{operation}" for operation in operations),
        *("QUEUE", "MEMCPY_IN_FUSION_BUFFER", "SHARED_MEMORY", "MEMCPY_OUT_FUSION_BUFFER"),
    }
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans.values())
    about, *rows = [event["args"] for event in events if event["ph"] == "M"]
    assert about["name"] == "rank 0"
    assert about["start_time_since_epoch_in_micros"] > 1e15
    assert [row["name"] for row in rows] == [
        'allreduce.a "name"',
        "allreduce.pair",
        "allreduce.steps",
        "barrier.noname.0",
    ]
    assert {event["name"] for event in events if event["ph"] == "i"} == {"CYCLE_START"}


def test_what_is_done_is_in_the_timeline(tmp_path: Path) -> None:
    """Who waits for an operation and then stops the timeline finds it there."""
    with engines(2) as made:
        for number in range(100):
            made[0].start_timeline(str(tmp_path / "trace.json"))
            together(made, lambda engine, rank: allreduce(engine, np.ones(3), name="traced"))
            made[0].stop_timeline()
            events = json.loads((tmp_path / "trace.json").read_text())
            assert "ALLREDUCE" in {event["name"] for event in events}, number


def test_a_timeline_is_whole_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def names() -> set[str]:
        try:
            events = json.loads(path.read_text())
        except ValueError:  # read in the middle of a write
            return set()
        return {event["args"]["name"] for event in events if event["ph"] == "M"}

    with engines(2) as made:
        made[0].start_timeline(str(path))
        wanted = {"rank 0"}
        assert names() == wanted
        for name in ("first", "second"):
            together(made, lambda engine, rank, name=name: allreduce(engine, np.ones(3), name=name))
            wanted.add(f"allreduce.{name}")
            deadline = time.monotonic() + PATIENCE_S
            while names() != wanted:
                assert time.monotonic() < deadline, path.read_text()
                time.sleep(0.002)
        assert "CYCLE_START" not in path.read_text()


def test_a_timeline_that_cannot_be_written(tmp_path: Path) -> None:
    with engines(1) as made:
        with pytest.raises(OSError, match="No such file"):
            made[0].start_timeline(str(tmp_path / "missing" / "trace.json"))
        with pytest.raises(OSError, match="No space left"):
            made[0].start_timeline("/dev/full")
        made[0].stop_timeline()


def test_a_timeline_is_not_written_over_what_it_should_not_be(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "trace.json").hardlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    with engines(1) as made:
        for start in (made[0].start_timeline, functools.partial(Trace, rank=0)):
            with pytest.raises(OSError, match="it is a hard link"):
                start(str(tmp_path / "trace.json"))
            with pytest.raises(OSError, match="no process reads that pipe"):
                start(str(tmp_path / "pipe"))
    assert (tmp_path / "victim").read_text() == "precious"


def test_allocated_memory_is_shared_and_outlives_the_engine() -> None:
    arrays: dict[int, npt.NDArray[np.uint8]] = {}

    def body(engine: Any, rank: int) -> None:
        memory = engine.allocate(3_000_000)
        assert memory.nbytes == 3_000_000
        assert not memory.any()
        view = memory.view(np.float32)
        view += rank + 1
        allreduce(engine, view)
        arrays[rank] = memory

    with engines(2) as made:
        together(made, body)
    for memory in arrays.values():
        np.testing.assert_array_equal(memory.view(np.float32), 3)
        memory[:] = 0


PROGRAM = st.lists(
    st.tuples(
        st.sampled_from([Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.BARRIER]),
        st.sampled_from([0, 1, 7, 5000, 20_000, 70_000]),
        st.integers(0, 1),  # process set
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=PROGRAM, seeds=st.lists(st.integers(0, 1000), min_size=3, max_size=3), staged=st.booleans())
def test_random_programs_in_random_orders(
    program: list[tuple[Kind, int, int]], seeds: list[int], *, staged: bool
) -> None:
    sets = {0: [0, 1, 2], 1: [0, 2]}

    def body(engine: Any, rank: int) -> None:
        engine.add_process_set(1, sets[1])
        steps = [(i, *step) for i, step in enumerate(program) if rank in sets[step[2]]]
        np.random.default_rng(seeds[rank]).shuffle(steps)
        running = []
        for i, kind, count, number in ((int(a), Kind(int(b)), int(c), int(d)) for a, b, c, d in steps):
            members = sets[number]
            array = np.full(count, 10 * rank + i, np.int32)
            splits = ((count - count // 2, count // 2, 0)[: len(members)],) if kind is Kind.ALLTOALL else ()
            if kind is Kind.ALLTOALL and len(members) == 3:
                splits = ((count - count // 2, 0, count // 2),)
            tensors = () if kind is Kind.BARRIER else (spec(array),)
            operation = Operation(kind, tensors, name=f"op{i}", root=2, splits=splits, process_set=number)
            running.append((i, kind, count, members, array, engine.submit(operation)))
        for i, kind, count, members, array, handle in running:
            got = handle.result()
            if kind is Kind.ALLREDUCE:
                np.testing.assert_array_equal(array, sum(10 * r + i for r in members))
            elif kind is Kind.BROADCAST:
                np.testing.assert_array_equal(array, 20 + i)
            elif kind is Kind.ALLGATHER:
                wanted = np.repeat([10 * r + i for r in members], count)
                np.testing.assert_array_equal(got.arrays[0].view(np.int32), wanted)
            elif kind is Kind.ALLTOALL:
                rows = {members[0]: count - count // 2, members[-1]: count // 2}.get(rank, 0)
                wanted = np.repeat([10 * r + i for r in members], rows)
                np.testing.assert_array_equal(got.arrays[0].view(np.int32), wanted)

    with engines(3, direct_reads=not staged) as made:
        together(made, body)


def test_region_is_the_memory_itself() -> None:
    array = np.arange(10, dtype=np.uint8)
    seen = region(array.ctypes.data, 10)
    array[3] = 77
    assert seen.tolist() == array.tolist()
    assert region(0, 0).size == 0


def test_device_operations_take_turns_in_one_order() -> None:
    orders: dict[int, list[str]] = {}

    def body(engine: Any, rank: int) -> None:
        names = [f"t{i}" for i in range(20)]
        np.random.default_rng(rank).shuffle(names)
        tensors = [np.ones(4, np.float32) for _ in names]
        handles = {}
        for name, tensor in zip(names, tensors, strict=True):
            handles[name] = engine.submit(Operation(Kind.ALLREDUCE, (spec(tensor),), name=name, device=1, keep=name))
        orders[rank] = []
        while len(orders[rank]) < 20:
            turn = engine.next_turn(1.0)
            assert turn is not None
            assert (turn.kind, turn.tensors, turn.sizes) == (Kind.ALLREDUCE, [("float32", (4,))], [])
            assert not handles[turn.keep].done()
            orders[rank].append(turn.keep)
            engine.conclude(turn, "")
            handles[turn.keep].result()
        assert engine.next_turn(0.01) is None

    with engines(3) as made:
        together(made, body)
        handle = made[0].submit(Operation(Kind.BARRIER, name="late", device=1))
        made[0].abort("enough")
        with pytest.raises(HorovodInternalError, match="enough"):
            handle.result()
        with pytest.raises(HorovodInternalError, match="enough"):
            made[0].next_turn(10.0)
    assert orders[0] == orders[1] == orders[2]


def test_memory_on_different_devices_is_an_error() -> None:
    def body(engine: Any, rank: int) -> None:
        array = np.ones(4, np.float32)
        with pytest.raises(MismatchError, match="rank 0 has memory on the CPU, rank 1 has memory on the GPU"):
            engine.submit(Operation(Kind.ALLREDUCE, (spec(array),), name="g", device=rank)).result()

    with engines(2) as made:
        together(made, body)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_send_more_than_sockets_hold_do_not_wait_for_each_other(size: int) -> None:
    """Names in the tens of megabytes: what rank 0 answers to the first is on its way while others submit the next."""

    def body(engine: Any, rank: int) -> None:
        handles = []
        for step in range(6):
            for i in range(40):
                name = f"{step}.{i}." + "x" * 100_000
                handles.append(engine.submit(Operation(Kind.BARRIER, name=name)))
        for handle in handles:
            handle.result()

    with engines(size) as made:
        together(made, body)
