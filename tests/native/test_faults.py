"""Aborts, dead and frozen peers, and what a context leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest

from .conftest import Processes, groups_of, in_threads, native
from .limits import NEVER_S, PATIENCE_S

# An abort takes milliseconds (benchmarks/contexts.py prints how many). The tests tell it from a time limit by ending.


def test_abort_ends_a_blocked_collective_with_its_reason() -> None:
    entered = threading.Event()
    told: dict[int, str] = {}
    members: dict[int, Any] = {}

    def body(member: Any, rank: int) -> None:
        members[rank] = member
        member.barrier("global", NEVER_S)
        if rank == 0:
            entered.wait()  # rank 1 is in its collective, or just before: either must end
            members[1].abort("the driver said so")
            return
        entered.set()
        try:
            member.allreduce("global", np.zeros(1 << 20, np.float32), "float32", "sum", NEVER_S)
        except native.CollectiveError as error:
            told[rank] = str(error)

    assert not in_threads(2, body)
    assert told == {1: "the driver said so"}


def test_after_an_abort_everything_is_refused() -> None:
    def body(member: Any, rank: int) -> None:
        member.barrier("global", NEVER_S)
        member.abort("first")
        member.abort("second")
        for _ in range(2):
            with pytest.raises(native.AbortedError, match=r"^first$"):
                member.barrier("global", NEVER_S)

    assert not in_threads(2, body)


def test_abort_before_and_during_connect() -> None:
    member = native.ContextGroup(groups_of(1, 2), host="127.0.0.1")
    other = native.ContextGroup(groups_of(0, 2), host="127.0.0.1")
    blobs = [other.prepare(), member.prepare()]
    # Of two, one connects and one listens; the listener waits for a peer that never comes.
    failures = []

    def connect(one: Any) -> None:
        try:
            one.connect(blobs, NEVER_S)
        except native.AbortedError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=connect, args=(one,)) for one in (member,)]
    for thread in threads:
        thread.start()
    member.abort("gone")
    for thread in threads:
        thread.join()
    member.close()
    other.abort("gone before")
    with pytest.raises(native.AbortedError, match="gone before"):
        other.connect(blobs, NEVER_S)
    other.close()


def test_a_peer_that_never_comes_is_named() -> None:
    members = [native.ContextGroup(groups_of(rank, 3), host="127.0.0.1") for rank in range(3)]
    blobs = [member.prepare() for member in members]
    members[2].close()
    failed = []

    def connect(rank: int) -> None:
        # Or rank 0, which has given up because of rank 2.
        with pytest.raises(native.CollectiveError, match="rank 2" if rank == 0 else "rank 0|rank 2"):
            members[rank].connect(blobs, 0.5)
        failed.append(rank)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(failed) == [0, 1]
    for member in members:
        member.close()


def test_a_collective_ends_at_its_time_limit() -> None:
    def body(member: Any, rank: int) -> None:
        if rank == 0:
            member.barrier("global", NEVER_S)
            with pytest.raises(native.CollectiveTimeout, match=r"did not end within 0\.3"):
                member.allreduce("global", np.zeros(10, np.float32), "float32", "sum", 0.3)
        else:
            member.barrier("global", NEVER_S)

    assert not in_threads(2, body)


def test_two_threads_in_one_group_are_refused() -> None:
    told = []

    def body(member: Any, rank: int) -> None:
        member.barrier("global", NEVER_S)
        if rank == 1:
            return
        # Of the two one is in, forever; the other is told, and ends it.
        other = threading.Thread(target=try_it, args=(member,))
        other.start()
        try_it(member)
        other.join()

    def try_it(member: Any) -> None:
        try:
            member.allreduce("global", np.zeros(10, np.float32), "float32", "sum", NEVER_S)
        except native.CollectiveError as error:
            told.append(str(error))
            member.abort("enough")

    assert not in_threads(2, body)
    assert len(told) == 2
    assert "another thread" in told[0]
    assert told[1] == "enough"


def survivor(member: Any, rank: int, pipe: Connection) -> None:
    data = np.ones(1 << 20, np.float32)
    pipe.send("started")
    try:
        while True:
            member.allreduce("global", data, "float32", "max", NEVER_S)
    except native.CollectiveError as error:
        member.abort(str(error))
        pipe.send(str(error))


def test_a_killed_peer_is_felt_by_all_whose_neighbors_abort() -> None:
    world = Processes(4, survivor)
    try:
        assert [pipe.recv() for pipe in world.pipes] == ["started"] * 4
        os.kill(world.processes[2].pid or 0, signal.SIGKILL)
        for rank in (0, 1, 3):
            assert world.pipes[rank].poll(PATIENCE_S), f"rank {rank} still blocked"
            assert "closed" in (text := world.pipes[rank].recv()) or "reset" in text
            assert world.pipes[rank].poll(PATIENCE_S)
            assert world.pipes[rank].recv() == "closed"
    finally:
        world.end()


def aborted_from_outside(member: Any, rank: int, pipe: Connection) -> None:
    # The watch thread of a worker: told by the driver that a peer has frozen.
    watch = threading.Thread(target=lambda: (pipe.recv(), member.abort("a peer is frozen")), daemon=True)
    watch.start()
    survivor(member, rank, pipe)


def test_a_frozen_peer_blocks_until_the_others_are_told() -> None:
    world = Processes(3, aborted_from_outside)
    try:
        assert [pipe.recv() for pipe in world.pipes] == ["started"] * 3
        os.kill(world.processes[1].pid or 0, signal.SIGSTOP)
        assert not world.pipes[0].poll(0.3), "nothing tells a survivor of a frozen peer but us"
        for rank in (0, 2):
            with contextlib.suppress(BrokenPipeError):  # the first one's end has ended it
                world.pipes[rank].send("abort")
        for rank in (0, 2):
            assert world.pipes[rank].poll(PATIENCE_S), f"rank {rank} still blocked"
            world.pipes[rank].recv()
            assert world.pipes[rank].poll(PATIENCE_S)
            assert world.pipes[rank].recv() == "closed"
    finally:
        world.end()


def resources() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def test_200_rounds_leave_nothing_behind() -> None:
    def body(member: Any, rank: int) -> None:
        data = np.ones(1000, np.float32)
        member.allreduce("global", data, "float32", "sum", NEVER_S)
        assert data[0] == 2

    for _ in range(10):
        assert not in_threads(2, body)
    gc.collect()
    before, memory = resources(), psutil.Process().memory_info().rss
    for _ in range(200):
        assert not in_threads(2, body)
    gc.collect()
    while any(now > then for now, then in zip(resources(), before, strict=True)):
        time.sleep(0.01)  # a thread that was joined takes a moment to go
    assert psutil.Process().memory_info().rss - memory < 8 << 20


def test_rounds_that_end_in_an_abort_leave_nothing_behind() -> None:
    def body(member: Any, rank: int) -> None:
        if rank == 0:
            member.abort("on purpose")
        member.allreduce("global", np.ones(1 << 18, np.float32), "float32", "sum", NEVER_S)

    in_threads(2, body)
    before = resources()
    for _ in range(30):
        assert set(in_threads(2, body)) == {0, 1}
    while any(now > then for now, then in zip(resources(), before, strict=True)):
        time.sleep(0.01)  # a thread that was joined takes a moment to go


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("", id="interpreter exit without close"),
        pytest.param("import os; pid = os.fork(); os._exit(0) if pid == 0 else os.waitpid(pid, 0)", id="forked child"),
        pytest.param(
            "import os\npid = os.fork()\nif pid == 0:\n    del members, member\n    os._exit(0)\n"
            "assert os.waitpid(pid, 0)[1] == 0",
            id="forked child that drops the context",
        ),
    ],
)
def test_a_process_ends_well_with_contexts_open(script: str) -> None:
    program = f"""
import threading
from elastic_driver.worker.engine.native_loader import load
native = load()
members = [native.ContextGroup([("global", [0, 1], rank)], host="127.0.0.1") for rank in range(2)]
blobs = [member.prepare() for member in members]
threads = [threading.Thread(target=member.connect, args=(blobs, {NEVER_S})) for member in members]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
member = members[0]
{script}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
