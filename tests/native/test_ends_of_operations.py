"""Who may still write into a tensor when a round is over, and who keeps its memory until then."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_driver.errors import DuplicateNameError, HorovodInternalError

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import Kind, Operation, ReduceOp, allreduce, barrier, each_rank, engines, spec, together
from .limits import PATIENCE_S

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "three": (3, {}),
    "three-staged": (3, {"direct_reads": False}),
    "two-machines": (4, {"machines": "aabb"}),
    "no-shared-memory": (3, {"shared_memory": False}),
}
TENSORS, COUNT = 4, 1 << 20


def begin(engine: Any, draw: random.Random, number: int, memory: list[Any]) -> Any:
    """Submits an operation that writes into the memory, or reads it; the same one on each rank that draws the same."""
    kind = draw.choice([Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER, Kind.REDUCESCATTER])
    if kind is Kind.ALLREDUCE and draw.random() < 0.3:  # grouped, and packed
        tensors = tuple(spec(tensor[:5000]) for tensor in memory)
    else:
        tensors = (spec(memory[draw.randrange(TENSORS)]),)
    return engine.submit(
        Operation(
            kind,
            tensors,
            name=f"operation {number}",
            reduce_op=draw.choice([ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX]),
            prescale=draw.choice([1.0, 2.0]) if kind is Kind.ALLREDUCE else 1.0,
        )
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", WORLDS)
def test_what_is_restored_stays_as_it_is(world: str, seed: int) -> None:
    size, options = WORLDS[world]
    drawn = random.Random(f"{world} {seed}")
    victim, count, before = drawn.randrange(size), drawn.randint(4, 12), drawn.randrange(4)
    memory = [[np.full(COUNT, 7, np.float32) for _ in range(TENSORS)] for _ in range(size)]
    died, restored = threading.Event(), threading.Barrier(size)

    def body(engine: Any, rank: int) -> None:
        draw = random.Random(seed)
        try:
            handles = [begin(engine, draw, number, memory[rank]) for number in range(count)]
            for handle in handles[:before]:
                handle.result()
        except HorovodInternalError:
            pass  # the victim was quicker
        if rank == victim:
            died.set()
            engine.close()
        else:
            # Not from an operation: one that fails has ended, and this is to be before the end.
            assert died.wait(PATIENCE_S)
            engine.abort("a peer is gone")
        assert engine.quiesce(PATIENCE_S)
        for tensor in memory[rank]:
            tensor[:] = rank
        restored.wait()

    with engines(size, **options) as made:
        assert not each_rank(made, body)
    for rank in range(size):
        for tensor in memory[rank]:
            assert np.all(tensor == rank)


def test_nothing_is_quiet_before_the_end() -> None:
    with engines(2) as made:
        assert not made[0].quiesce(0.01)
        made[0].abort("enough")
        assert made[0].quiesce(PATIENCE_S)


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_under_way_is_completed_before_a_rank_leaves(world: str) -> None:
    size, options = WORLDS[world]
    left = threading.Event()

    def body(engine: Any, rank: int) -> None:
        engine.add_process_set(1, [0, 1])
        arrays = [np.full(300_000, rank + 1.0, np.float32) for _ in range(3)]
        if rank == 1:
            assert left.wait(PATIENCE_S)  # the others have left before this one submits what they have
        sets = [0, 1, 0] if rank < 2 else [0, 0]
        handles = [
            engine.submit(Operation(Kind.ALLREDUCE, (spec(array),), name=f"{place}", process_set=place))
            for array, place in zip(arrays, sets[:2] if rank < 2 else sets[:1], strict=False)
        ]
        leaving = engine.leave()
        if rank == 0:
            left.set()
        leaving.result()
        assert all(handle.done() for handle in handles)
        assert arrays[0].tolist()[::1000] == [sum(range(1, size + 1))] * 300
        if rank < 2:
            assert np.all(arrays[1] == 3)
        with pytest.raises(HorovodInternalError, match="this rank has left the round"):
            allreduce(engine, np.ones(3), name="late")
        assert engine.leave().done()

    with engines(size, **options) as made:
        together(made, body)


def test_what_a_rank_left_without_breaks_the_round_on_all() -> None:
    def body(engine: Any, rank: int) -> None:
        array = np.ones(1000)
        operation = Operation(Kind.ALLREDUCE, (spec(array),), name="lonely")
        handle = engine.submit(operation) if rank == 0 else engine.leave()
        with pytest.raises(HorovodInternalError, match="rank 1 left the round without 'lonely'"):
            handle.result()
        assert engine.quiesce(PATIENCE_S)
        assert np.all(array == 1)

    for _ in range(20):  # either may be first
        with engines(2) as made:
            together(made, body)


def test_ranks_that_have_joined_learn_that_the_others_left() -> None:
    def body(engine: Any, rank: int) -> None:
        if rank == 1:
            with pytest.raises(HorovodInternalError, match="all ranks that have not joined have left the round"):
                engine.submit(Operation(Kind.JOIN)).result()
            return
        array = np.ones(1000)
        handle = engine.submit(Operation(Kind.ALLREDUCE, (spec(array),), name="with the joined one"))
        engine.leave().result()
        assert handle.done()
        assert np.all(array == 2)

    with engines(3) as made:
        together(made, body)


def test_what_is_done_for_others_after_a_join_is_not_counted_as_this_ranks_own() -> None:
    def body(engine: Any, rank: int) -> None:
        if rank == 1:
            join = engine.submit(Operation(Kind.JOIN))
        for number in range(5 if rank == 0 else 0):
            allreduce(engine, np.ones(3), name=f"{number}")
        if rank == 0:
            assert engine.own_finished() == 5
            join = engine.submit(Operation(Kind.JOIN))
        join.result()
        assert engine.own_finished() == (6 if rank == 0 else 1)
        assert engine.progress()[0] == 6

    with engines(2) as made:
        together(made, body)


def test_what_waits_for_its_turn_on_a_device_is_being_carried_out() -> None:
    def body(engine: Any, rank: int) -> None:
        handles = [engine.submit(Operation(Kind.BARRIER, name=name, device=1)) for name in ("first", "second")]
        turns = [engine.next_turn(20.0)]
        barrier(engine)  # all are agreed on
        engine.conclude(turns[0], "")
        assert handles[0].done()
        assert engine.own_finished() == 2
        for _ in range(20):
            assert engine.carries_out()
        engine.conclude(engine.next_turn(20.0), "")
        assert engine.own_finished() == 3

    with engines(2) as made:
        together(made, body)


def test_a_rank_that_leaves_waits_for_its_devices() -> None:
    def body(engine: Any, rank: int) -> None:
        handle = engine.submit(Operation(Kind.BARRIER, name="on a device", device=1))
        turn = engine.next_turn(PATIENCE_S)
        leaving = engine.leave()
        # Also when the others are through: this one is not.
        for _ in range(20):
            assert not leaving.done()
        engine.conclude(turn, "")
        leaving.result()
        handle.result()

    with engines(3) as made:
        together(made, body)


def test_a_process_set_goes_when_its_devices_have_done() -> None:
    taken, removed = threading.Event(), threading.Event()

    def body(engine: Any, rank: int) -> None:
        engine.add_process_set(1, [0, 1])
        engine.submit(Operation(Kind.BARRIER, name="on a device", device=1, process_set=1))

        def run() -> None:
            turn = engine.next_turn(PATIENCE_S)
            taken.set()
            if rank == 0:
                removed.wait(PATIENCE_S)
            engine.conclude(turn, "")

        runner = threading.Thread(target=run)
        runner.start()
        assert taken.wait(PATIENCE_S)
        if rank == 0:
            remover = threading.Thread(target=engine.remove_process_set, args=(1,))
            remover.start()
            remover.join(0.2)
            assert remover.is_alive()
            removed.set()
            remover.join()
        else:
            engine.remove_process_set(1)
        runner.join()

    with engines(2) as made:
        together(made, body)


class Owner:
    """What can be looked at without being held."""


def test_the_engine_keeps_memory_that_nobody_else_keeps() -> None:
    with engines(2) as made:
        owners = [Owner(), Owner()]
        looks = [weakref.ref(owner) for owner in owners]
        arrays = [np.ones(10), np.ones(10)]
        for name, owner, array in zip("ab", owners, arrays, strict=True):
            made[0].submit(Operation(Kind.ALLREDUCE, (spec(array),), name=name, keep=owner))
        del owner
        owners.clear()
        gc.collect()
        assert None not in [look() for look in looks]
        allreduce(made[1], np.ones(10), name="a")
        made[0].submit(Operation(Kind.ALLREDUCE, (spec(np.ones(10)),), name="another"))
        allreduce(made[1], np.ones(10), name="another")
        # What was let go of is free at the next call, at the latest.
        barriers = [threading.Thread(target=barrier, args=(engine,)) for engine in made]
        for thread in barriers:
            thread.start()
        for thread in barriers:
            thread.join()
        assert [look() is None for look in looks] == [True, False]
        made[0].abort("enough")
        assert made[0].quiesce(PATIENCE_S)
        made[0].close()
        with pytest.raises(HorovodInternalError):
            barrier(made[0])
        assert looks[1]() is None


def test_memory_of_what_was_refused_is_not_kept() -> None:
    with engines(2) as made:
        owner = Owner()
        look = weakref.ref(owner)
        made[0].submit(Operation(Kind.BARRIER, name="taken"))
        with pytest.raises(DuplicateNameError):
            made[0].submit(Operation(Kind.BARRIER, name="taken", keep=owner))
        with pytest.raises(ValueError, match="process set"):
            made[0].submit(Operation(Kind.BARRIER, process_set=7, keep=owner))
        del owner
        made[0].submit(Operation(Kind.BARRIER, name="next"))
        gc.collect()
        assert look() is None


def test_signals_that_strike_in_a_submission_cost_no_memory() -> None:
    program = """
import random, signal, threading
import numpy as np
from elastic_driver.errors import DuplicateNameError
from elastic_driver.worker.engine.byte_collectives import array_spec
from tests.native.engines import Kind, Operation, engines

class Strike(Exception):
    pass

# A signal that another thread receives strikes some time after the timer was stopped.
armed = False

def strike(*unused):
    if armed:
        raise Strike

def attempt(engine, number, after_s):
    # Whether the operation was submitted; it may have been all the same.
    global armed
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, after_s)
        array = np.full(3000, 1.0)
        engine.submit(Operation(Kind.ALLREDUCE, (array_spec(array, array),), f"{number}", keep=array))
        signal.setitimer(signal.ITIMER_REAL, 0)
        return True
    except Strike:
        return False
    except DuplicateNameError:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return True

struck, rounds, draw = 0, 1000, random.Random(1)
with engines(2) as made:
    def peer():
        for number in range(rounds):
            array = np.full(3000, 2.0)
            made[1].submit(Operation(Kind.ALLREDUCE, (array_spec(array, array),), f"{number}", keep=array)).result()
    thread = threading.Thread(target=peer)
    thread.start()
    signal.signal(signal.SIGALRM, strike)
    for number in range(rounds):
        tries, done = 0, False
        while not done:
            tries += 1
            try:
                done = attempt(made[0], number, draw.uniform(1e-6, 50e-6 * tries))
                struck += not done
            except Strike:
                struck += 1
        armed = False
        # Of the same size: takes the place of memory that nobody keeps, and is written to.
        others = [np.zeros(3000) for _ in range(4)]
        assert not any(map(np.any, others))
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    thread.join()
print("struck" if struck else "never struck", flush=True)
"""
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert (ran.stdout, ran.returncode) == ("struck\n", 0), ran.stderr
