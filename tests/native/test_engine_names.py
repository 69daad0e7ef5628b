"""Which operations are paired: names that users write, those of the library's own, and what ranks that join leave."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from elastic_driver.errors import MismatchError

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import Kind, Operation, allreduce, barrier, engines, spec, together


def join(engine: Any) -> int:
    return int(engine.submit(Operation(Kind.JOIN)).result().last_joined)


@pytest.mark.parametrize("machines", ["", "aab"])
def test_names_of_users_are_not_those_of_the_library(machines: str) -> None:
    names = ["join", "elastic_driver.process_set.1", "elastic_driver.process_set.1.removal"]

    def body(engine: Any, rank: int) -> None:
        if rank != 1:
            for name in names:
                mine = np.ones(3, np.float32)
                allreduce(engine, mine, name=name)
                np.testing.assert_array_equal(mine, 2)
        assert join(engine) in (0, 2)
        # Under way while the library uses what is written the same way.
        arrays = [np.ones(3, np.float32) for _ in names]
        handles = [
            engine.submit(Operation(Kind.ALLREDUCE, (spec(array),), name=name))
            for array, name in zip(arrays, names, strict=True)
            if rank != 1
        ]
        engine.add_process_set(1, [0, 1])
        engine.remove_process_set(1)
        if rank == 1:
            for array, name in zip(arrays, names, strict=True):
                allreduce(engine, array, name=name)
        for handle in handles:
            handle.result()
        for array in arrays:
            np.testing.assert_array_equal(array, 3)

    joined = threading.Event()

    def ordered(engine: Any, rank: int) -> None:
        if rank == 1:
            handle = engine.submit(Operation(Kind.JOIN))
            joined.set()
            handle.result()
        else:
            joined.wait()
            mine = np.ones(3, np.float32)
            allreduce(engine, mine, name="join")
            join(engine)

    with engines(3, machines=machines) as made:
        together(made, ordered)
        together(made, body)


def test_unnamed_operations_of_other_threads_while_ranks_join() -> None:
    """Those that are submitted after a rank's join are paired with those after the others' joins."""

    def body(engine: Any, rank: int) -> None:
        for turn in range(10):
            for _ in range((rank + turn) % 3):  # so many more than others
                allreduce(engine, np.ones(3, np.float32))
            joining = engine.submit(Operation(Kind.JOIN))
            results: list[float] = []

            def go_on(results: list[float] = results) -> None:
                for step in range(5):
                    mine = np.full(3, step + 1, np.float32)
                    allreduce(engine, mine)
                    results.append(float(mine[0]))

            other = threading.Thread(target=go_on)
            other.start()  # some of it before the others join, some after
            joining.result()
            other.join()
            assert results == [3.0, 6.0, 9.0, 12.0, 15.0]
            barrier(engine)

    with engines(3) as made:
        together(made, body)


def test_a_named_operation_that_is_submitted_after_the_own_join_waits_for_the_others() -> None:
    joined = threading.Event()

    def body(engine: Any, rank: int) -> None:
        mine = np.full(3, rank + 1, np.float32)
        if rank == 0:
            joining = engine.submit(Operation(Kind.JOIN))
            handle = engine.submit(Operation(Kind.ALLREDUCE, (spec(mine),), name="after"))
            joined.set()
            joining.result()
            handle.result()
        else:
            joined.wait()
            join(engine)
            allreduce(engine, mine, name="after")
        np.testing.assert_array_equal(mine, 3)

    with engines(2) as made:
        together(made, body)


def test_sizes_that_cannot_be_are_refused_on_all_ranks() -> None:
    def body(engine: Any, rank: int) -> None:
        mine = np.ones(1, np.int64)
        huge = spec(mine)
        huge = type(huge)(huge.address, huge.nbytes, "int64", (1 << 59,), 0)
        with pytest.raises(MismatchError, match="more than memory has addresses for"):
            engine.submit(Operation(Kind.ALLGATHER, (huge,), name="huge")).result()
        for shape in ((1 << 62,), (1 << 40, 1 << 40), (0, 1 << 62), (2, -1)):
            wrong = type(huge)(huge.address, huge.nbytes, "int64", shape, huge.address)
            with pytest.raises(ValueError, match=r"addresses|negative"):
                engine.submit(Operation(Kind.ALLREDUCE, (wrong,)))
        barrier(engine)

    with engines(2) as made:
        together(made, body)


def test_only_all_ranks_join() -> None:
    with engines(2) as made:
        together(made, lambda engine, rank: engine.add_process_set(1, [0, 1]))
        with pytest.raises(ValueError, match="only all ranks together can join"):
            made[0].submit(Operation(Kind.JOIN, process_set=1))
