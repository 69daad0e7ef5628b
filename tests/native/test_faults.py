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

# An abort takes milliseconds (benchmarks/contexts.py prints how many); the tests only tell it from a time limit.
SOON_S = 5.0


def test_abort_ends_a_blocked_collective_with_its_reason() -> None:
    entered = threading.Event()
    took: dict[int, float] = {}
    told: dict[int, str] = {}
    members: dict[int, Any] = {}

    def body(member: Any, rank: int) -> None:
        members[rank] = member
        member.barrier("global", 20.0)
        if rank == 0:
            entered.wait()  # rank 1 is in its collective, or just before: either must end
            began = time.monotonic()
            members[1].abort("the driver said so")
            took[0] = time.monotonic() - began
            return
        entered.set()
        try:
            member.allreduce("global", np.zeros(1 << 20, np.float32), "float32", "sum", 60.0)
        except native.CollectiveError as error:
            told[rank] = str(error)

    began = time.monotonic()
    errors = in_threads(2, body)
    assert not errors
    assert told == {1: "the driver said so"}
    assert time.monotonic() - began < SOON_S


def test_after_an_abort_everything_is_refused() -> None:
    def body(member: Any, rank: int) -> None:
        member.barrier("global", 20.0)
        member.abort("first")
        member.abort("second")
        for _ in range(2):
            with pytest.raises(native.AbortedError, match=r"^first$"):
                member.barrier("global", 20.0)

    assert not in_threads(2, body)


def test_abort_before_and_during_connect() -> None:
    member = native.ContextGroup(groups_of(1, 2), host="127.0.0.1")
    other = native.ContextGroup(groups_of(0, 2), host="127.0.0.1")
    blobs = [other.prepare(), member.prepare()]
    # Of two, one connects and one listens; the listener waits for a peer that never comes.
    failures = []

    def connect(one: Any) -> None:
        try:
            one.connect(blobs, 60.0)
        except native.AbortedError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=connect, args=(one,)) for one in (member,)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    member.abort("gone")
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < SOON_S
    member.close()
    other.abort("gone before")
    with pytest.raises(native.AbortedError, match="gone before"):
        other.connect(blobs, 60.0)
    other.close()


def test_a_peer_that_never_comes_is_named_in_time() -> None:
    members = [native.ContextGroup(groups_of(rank, 3), host="127.0.0.1") for rank in range(3)]
    blobs = [member.prepare() for member in members]
    members[2].close()
    failed = []

    def connect(rank: int) -> None:
        began = time.monotonic()
        # Or rank 0, which has given up because of rank 2.
        with pytest.raises(native.CollectiveError, match="rank 2" if rank == 0 else "rank 0|rank 2"):
            members[rank].connect(blobs, 0.5)
        failed.append(time.monotonic() - began)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 2
    assert max(failed) < SOON_S
    for member in members:
        member.close()


def test_a_collective_ends_at_its_time_limit() -> None:
    def body(member: Any, rank: int) -> None:
        if rank == 0:
            member.barrier("global", 20.0)
            with pytest.raises(native.CollectiveTimeout, match=r"did not end within 0\.3"):
                member.allreduce("global", np.zeros(10, np.float32), "float32", "sum", 0.3)
        else:
            member.barrier("global", 20.0)

    assert not in_threads(2, body)


def test_two_threads_in_one_group_are_refused() -> None:
    told = []

    def body(member: Any, rank: int) -> None:
        member.barrier("global", 20.0)
        if rank == 1:
            return
        blocked = threading.Thread(target=lambda: refused(member))
        blocked.start()
        while not told:  # one of the two is in, the other is told
            refused(member)
        member.abort("enough")
        blocked.join()

    def refused(member: Any) -> None:
        try:
            member.allreduce("global", np.zeros(10, np.float32), "float32", "sum", 1.0)
        except native.CollectiveError as error:
            if "another thread" in str(error):
                told.append(str(error))

    in_threads(2, body)
    assert told


def survivor(member: Any, rank: int, pipe: Connection) -> None:
    data = np.ones(1 << 20, np.float32)
    pipe.send("started")
    try:
        while True:
            member.allreduce("global", data, "float32", "max", 30.0)
    except native.CollectiveError as error:
        member.abort(str(error))
        pipe.send(str(error))


def test_a_killed_peer_is_felt_by_all_whose_neighbours_abort() -> None:
    world = Processes(4, survivor)
    try:
        assert [pipe.recv() for pipe in world.pipes] == ["started"] * 4
        began = time.monotonic()
        os.kill(world.processes[2].pid or 0, signal.SIGKILL)
        for rank in (0, 1, 3):
            assert world.pipes[rank].poll(SOON_S), f"rank {rank} still blocked"
            assert "closed" in (text := world.pipes[rank].recv()) or "reset" in text
            assert world.pipes[rank].poll(SOON_S)
            assert world.pipes[rank].recv() == "closed"
        assert time.monotonic() - began < SOON_S
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
            assert world.pipes[rank].poll(SOON_S), f"rank {rank} still blocked"
            world.pipes[rank].recv()
            assert world.pipes[rank].poll(SOON_S)
            assert world.pipes[rank].recv() == "closed"
    finally:
        world.end()


def resources() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def test_200_rounds_leave_nothing_behind() -> None:
    def body(member: Any, rank: int) -> None:
        data = np.ones(1000, np.float32)
        member.allreduce("global", data, "float32", "sum", 20.0)
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
        member.allreduce("global", np.ones(1 << 18, np.float32), "float32", "sum", 20.0)

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
threads = [threading.Thread(target=member.connect, args=(blobs, 20.0)) for member in members]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
member = members[0]
{script}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
