"""Aborts, dead and frozen peers, rubbish on the port, and what an engine leaves behind."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from elastic_driver.errors import DuplicateNameError, HorovodInternalError
from elastic_driver.worker.engine.protocol import TensorSpec

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import (
    NEVER_S,
    PATIENCE_S,
    After,
    EngineProcesses,
    Kind,
    Meeting,
    Operation,
    PipeMeeting,
    allreduce,
    barrier,
    each_rank,
    engines,
    make_engine,
    port_of,
    spec,
    together,
)

# Aborts take milliseconds (benchmarks/engine.py prints how many). The tests tell them from a time limit by ending.
GREETING = struct.pack("<I", 0xE1A57002)
ANSWER_BYTES = 48  # a nonce and a MAC


@pytest.mark.parametrize("machines", ["", "aab"])
def test_abort_ends_what_waits_for_others(machines: str) -> None:
    with engines(3, machines=machines) as made:
        waiting = [made[1].submit(Operation(Kind.ALLREDUCE, (spec(np.ones(3)),), name=f"n{i}")) for i in range(5)]
        made[1].abort("the driver said so")
        for handle in waiting:
            with pytest.raises(HorovodInternalError, match="the driver said so"):
                handle.result()
        with pytest.raises(HorovodInternalError, match="the driver said so"):
            barrier(made[1])
        # The others learn of it by themselves.
        for other in (0, 2):
            with pytest.raises(HorovodInternalError):
                barrier(made[other])


def test_a_name_stays_taken_until_its_operation_is_over() -> None:
    with engines(2) as made:
        on_device = Operation(Kind.BARRIER, name="grad", device=1)
        handles = [engine.submit(on_device) for engine in made]
        turn = made[0].next_turn(PATIENCE_S)
        assert turn is not None
        # Taken by whoever runs it, and not concluded.
        with pytest.raises(DuplicateNameError, match="under way"):
            made[0].submit(on_device)
        made[0].conclude(turn, "")
        handles[0].result()
        again = made[0].submit(on_device)
        made[0].abort("enough")
        for handle in (again, handles[1]):
            with pytest.raises(HorovodInternalError):
                handle.result()


def test_a_turn_that_nobody_concludes_fails_with_the_round() -> None:
    with engines(2) as made:
        handles = [engine.submit(Operation(Kind.BARRIER, name="grad", device=1)) for engine in made]
        assert made[0].next_turn(PATIENCE_S) is not None
        made[0].abort("enough")
        for handle in handles:
            with pytest.raises(HorovodInternalError):
                handle.result()


@pytest.mark.parametrize("machines", ["", "ab"])
def test_want_of_memory_is_a_memory_error_where_it_is_and_ends_the_round_elsewhere(machines: str) -> None:
    rows = 1 << 47  # more than a process has addresses for

    def body(engine: Any, rank: int) -> None:
        behind = engine.submit(Operation(Kind.BARRIER, name=f"only rank {rank}"))
        mine = np.zeros(4, np.uint8)
        splits = (((0, 4),), ((4, rows),))[rank]
        # To itself, so that nobody touches what is not there.
        sent = TensorSpec(mine.ctypes.data, 4, "uint8", (sum(splits[0]),))
        handle = engine.submit(Operation(Kind.ALLTOALL, (sent,), name="rows", splits=splits))
        wanted = HorovodInternalError if rank == 0 else MemoryError
        said = None if rank == 0 else "rank 1 cannot alltoall 'rows': there is no memory for it"
        # Whatever this rank looks at first.
        for failing in (behind, handle):
            with pytest.raises(wanted, match=said):
                failing.result()
        with pytest.raises(wanted, match=said):
            barrier(engine)

    with engines(2, machines=machines) as made:
        together(made, body)


@contextlib.contextmanager
def full_stderr() -> Iterator[int]:
    """Standard error is a pipe that takes nothing more; its reading end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    kept = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(reader)


def test_warnings_hold_nobody_up_when_nobody_reads_standard_error() -> None:
    with engines(2, stall_warn_s=0.01) as made, full_stderr() as reader:
        late = made[0].submit(Operation(Kind.ALLREDUCE, (spec(np.ones(3)),), name="late"))
        began = time.monotonic()
        while time.monotonic() - began < 0.2:  # the warning falls due meanwhile, again and again
            together(made, lambda engine, rank: barrier(engine))
            assert made[0].progress()[1]
        assert os.get_blocking(2)
        said = b""
        while b"stalled: rank 1 has not submitted" not in said:
            said += os.read(reader, 65536)
        allreduce(made[1], np.ones(3), name="late")
        late.result()


def test_a_closed_engine_refuses() -> None:
    with engines(2) as made:
        made[0].close()
        made[0].close()
        with pytest.raises(HorovodInternalError, match="closed"):
            barrier(made[0])
        made[0].abort("late")


def loop(engine: Any, rank: int, pipe: Connection, *, count: int) -> None:
    """Allreduces until they fail; tells the test when it goes, and how it ends."""
    array = np.ones(count, np.float32)
    step = 0
    try:
        while True:
            array[:] = 1
            allreduce(engine, array, name="step")
            assert array[0] == array[-1]
            step += 1
            if step == 3:
                pipe.send("goes")
    except HorovodInternalError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("count", [1000, 1 << 22])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("machines", ["", "aabb"])
def test_a_killed_rank_frees_the_others(count: int, victim: int, machines: str) -> None:
    def body(engine: Any, rank: int, pipe: Connection) -> None:
        loop(engine, rank, pipe, count=count)

    world = EngineProcesses(4, body, machines)
    try:
        for pipe in world.pipes:
            assert pipe.recv() == "goes"
        world.processes[victim].kill()
        for rank, pipe in enumerate(world.pipes):
            if rank != victim:
                assert "rank" in pipe.recv()
    finally:
        world.end()


def test_an_abort_frees_who_waits_for_a_frozen_rank() -> None:
    def body(engine: Any, rank: int, pipe: Connection) -> None:
        def abort() -> None:
            pipe.recv()
            engine.abort("rank 1 is frozen")

        threading.Thread(target=abort, daemon=True).start()
        loop(engine, rank, pipe, count=1 << 22)

    world = EngineProcesses(3, body)
    try:
        for pipe in world.pipes:
            assert pipe.recv() == "goes"
        os.kill(world.processes[1].pid, signal.SIGSTOP)
        # In the middle of a collective: none of the others can end this one.
        for rank in (0, 2):
            assert not world.pipes[rank].poll(0.2)
        for rank in (0, 2):
            with contextlib.suppress(BrokenPipeError):  # the first one's end has ended it
                world.pipes[rank].send("abort")
        for rank in (0, 2):
            # Its own abort, or that of the other, which was quicker.
            assert world.pipes[rank].recv().endswith(("rank 1 is frozen", "has closed its connection"))
    finally:
        world.end()


def connect_all(
    made: list[Any], then: Callable[[int, bytes], None], *, timeout_s: float = NEVER_S
) -> dict[int, BaseException]:
    """Connects the engines of all ranks; each calls then(rank, where) when it knows where rank 0 listens."""
    meeting = Meeting()

    def body(engine: Any, rank: int) -> None:
        engine.connect(After(meeting, lambda where: then(rank, where)), timeout_s=timeout_s)

    try:
        return each_rank(made, body)
    finally:
        for engine in made:
            engine.close()


def test_a_peer_that_never_comes_is_named() -> None:
    def then(rank: int, where: bytes) -> None:
        if rank == 2:
            raise HorovodInternalError("rank 2 stops here")

    errors = connect_all([make_engine(rank, 3) for rank in range(3)], then, timeout_s=0.5)
    assert str(errors[0]).endswith("cannot connect in time to rank 2")
    assert isinstance(errors[1], HorovodInternalError)


HANDSHAKE_BYTES = ANSWER_BYTES + 1  # which rank 0 sends


def heard_from(port: int) -> int:
    """How many bytes have come from there to the connection that this process has dialled."""
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and one.raddr.port == port:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as dialled:
                facts = dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                return int(struct.unpack_from("<Q", facts, 128)[0])  # tcpi_bytes_received
    return 0


def test_an_abort_ends_connecting() -> None:
    """Of rank 0, which has a part of the others already; they do not wait for their time limits either."""
    made = [make_engine(rank, 3) for rank in range(3)]
    gone = threading.Event()

    def then(rank: int, where: bytes) -> None:
        if rank == 2:
            assert gone.wait(PATIENCE_S)
            raise HorovodInternalError("not this one")
        if rank == 1:
            threading.Thread(target=end, args=(port_of(where),)).start()

    def end(port: int) -> None:
        until(lambda: heard_from(port) >= HANDSHAKE_BYTES)
        made[0].abort("enough")
        gone.set()

    errors = connect_all(made, then)
    assert "enough" in str(errors[0])
    assert "rank 0 has closed its connection" in str(errors[1])


def test_an_abort_before_connecting_ends_it() -> None:
    made = [make_engine(rank, 2) for rank in range(2)]

    def then(rank: int, where: bytes) -> None:
        made[rank].abort("the round is over")

    errors = connect_all(made, then)
    assert sorted(errors) == [0, 1]
    assert all("the round is over" in str(error) for error in errors.values())


@pytest.mark.parametrize("accepted", [False, True])
def test_rank_0_dies_while_the_others_connect(accepted: bool) -> None:
    """Killed before it lets anybody in, or while it waits for the last one."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def rank_0() -> None:
        class Hold(PipeMeeting):
            def share(self, scope: str, value: bytes | None) -> bytes:
                found = super().share(scope, value)
                if not accepted:
                    time.sleep(NEVER_S)
                return found

        make_engine(0, 3).connect(Hold(theirs), timeout_s=NEVER_S)

    process = fork.Process(target=rank_0, daemon=True)
    process.start()
    where = ours.recv()
    engine = make_engine(1, 3)
    meeting = Meeting()
    meeting.share("engine", where)
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            engine.connect(meeting, timeout_s=NEVER_S)
        except HorovodInternalError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    until(lambda: any(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process().net_connections("tcp")))
    process.kill()
    thread.join()
    assert "rank 0" in str(errors[0])
    assert "closed its connection" in str(errors[0]) or "Connection refused" in str(errors[0])
    process.join()
    # And who comes later finds nobody.
    late = make_engine(2, 3)
    with pytest.raises(HorovodInternalError, match="cannot connect to rank 0"):
        late.connect(meeting, timeout_s=NEVER_S)
    for one in (engine, late):
        one.close()


def test_a_rank_that_is_lost_between_the_engine_and_its_contexts() -> None:
    """Between machines there is a second step, through the connections of the first."""
    made = [make_engine(rank, 3, "aab"[rank]) for rank in range(3)]
    meeting = Meeting()

    def body(engine: Any, rank: int) -> None:
        native = engine._native
        native.connect(meeting.share("engine", native.prepare("127.0.0.1") if rank == 0 else None), NEVER_S)
        assert native.machines == [[0, 1], [2]]
        if rank == 2:
            native.close()
            return
        contexts = engine._module.ContextGroup([("global", [0, 1, 2], rank)], host="127.0.0.1")
        with engine.failures("connect"):
            native.connect_contexts(contexts, NEVER_S)

    errors = each_rank(made, body)
    assert "rank 2 has closed its connection" in str(errors[0])
    assert "rank 0 has closed its connection" in str(errors[1])
    for engine in made:
        engine.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listening() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def test_strangers_on_the_port_are_sent_away() -> None:
    before = listening()
    meeting = Meeting()
    made = [make_engine(rank, 2) for rank in range(2)]
    strangers: list[socket.socket] = []

    def body(engine: Any, rank: int) -> None:
        def then(where: bytes) -> None:
            if rank == 1:
                # The last two come before rank 1 and say that they are it: the first cannot prove it, though it says
                # again what rank 0 has just proven itself with; the other is cut off.
                hello = GREETING + struct.pack("<i", 1) + hashlib.sha256(b"").digest()[:8] + b"n" * 16
                for port in listening() - before:
                    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, hello, hello[:-1]):
                        stranger = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
                        stranger.sendall(said)
                        strangers.append(stranger)
                answer = strangers[3].recv(ANSWER_BYTES, socket.MSG_WAITALL)
                assert len(answer) == ANSWER_BYTES
                strangers[3].sendall(answer[16:])
                assert strangers[3].recv(1) == b""

        engine.connect(After(meeting, then), timeout_s=NEVER_S)
        array = np.ones(3)
        allreduce(engine, array)
        assert array.tolist() == [2, 2, 2]

    together(made, body)
    assert strangers
    for stranger in strangers:
        stranger.close()
    for engine in made:
        engine.close()


def left_behind() -> tuple[int, int, int]:
    gc.collect()
    me = psutil.Process()
    maps = Path("/proc/self/maps").read_text().count("memfd:elastic_driver")
    return me.num_fds(), me.num_threads(), maps


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.release)])
def test_hundreds_of_resets_leave_nothing(count: int) -> None:
    def world(*, kill: bool) -> None:
        with engines(2) as made:

            def body(engine: Any, rank: int) -> None:
                memory = engine.allocate(1 << 20).view(np.float32)
                allreduce(engine, memory, name="grad")
                allreduce(engine, np.ones(5000, np.float32))
                if kill:
                    engine.abort("a fault")

            together(made, body)

    for i in range(20):
        world(kill=i % 2 == 0)
    before, memory = left_behind(), psutil.Process().memory_info().rss
    for i in range(count):
        world(kill=i % 3 == 0)
    # A thread that was joined takes a moment to go.
    until(lambda: all(now <= then for now, then in zip(left_behind(), before, strict=True)))
    assert psutil.Process().memory_info().rss - memory < 30 << 20


def in_dev_shm(pid: int) -> set[str]:
    """Of what a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {"/dev/shm/" + line.partition(" /dev/shm/")[2] for line in lines if " /dev/shm/" in line}


def test_a_killed_world_leaves_no_shared_memory() -> None:
    def body(engine: Any, rank: int, pipe: Connection) -> None:
        engine.allocate(1 << 20)
        loop(engine, rank, pipe, count=1 << 20)

    own = in_dev_shm(os.getpid())
    world = EngineProcesses(2, body)
    for pipe in world.pipes:
        assert pipe.recv() == "goes"
    theirs = set.union(*(in_dev_shm(process.pid) for process in world.processes)) - own
    world.end()
    assert [path for path in theirs if os.path.exists(path)] == []


def test_a_forked_child_leaves_the_engine_alone() -> None:
    with engines(2) as made:
        together(made, lambda engine, rank: barrier(engine))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    barrier(made[0])
                except HorovodInternalError as error:
                    code = 0 if "forked" in str(error) else 2
                made[0].abort("a child")
                made[0].close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        together(made, lambda engine, rank: barrier(engine))


def holds_only(memory: Any, value: int) -> bool:
    return bool((memory == value).all())


def overwrite(memory: Any) -> None:
    """What a data loader's process may do to gradients, and a process of its own to what that sees."""
    assert holds_only(memory, 1)
    pid = os.fork()
    if pid == 0:
        memory[:] = 3
        os._exit(0 if holds_only(memory, 3) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert holds_only(memory, 1)
    memory[::2] = 0
    gc.collect()
    assert holds_only(memory[::2], 0)
    assert holds_only(memory[1::2], 1)
    # Where the parent's neighbors are, there is nothing; and no core dump has any of it.
    maps = Path("/proc/self/smaps").read_text().split("memfd:elastic_driver")[1:]
    assert all("dd" in one.split("VmFlags:", 1)[1].splitlines()[0].split() for one in maps)


@pytest.mark.parametrize("way", ["fork", "multiprocessing"])
def test_a_forked_child_has_a_copy_of_shared_memory(way: str) -> None:
    with engines(2) as made:
        memory = [engine.allocate(3 << 20).view(np.float32) for engine in made]
        for one in memory:
            one[:] = 1
        if way == "fork":
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    overwrite(memory[0])
                    overwrite(memory[1])
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        else:
            child = multiprocessing.get_context("fork").Process(target=overwrite, args=(memory[0],))
            child.start()
            child.join()
            assert child.exitcode == 0
        assert all(holds_only(one, 1) for one in memory)
        together(made, lambda engine, rank: allreduce(engine, memory[rank]))
        assert all(holds_only(one, 2) for one in memory)


def test_a_child_that_writes_all_the_while_disturbs_no_collective() -> None:
    """Its copies are its own also while the parent's engine works on what they are copies of."""
    with engines(2) as made:
        memory = [engine.allocate(4 << 20).view(np.float32) for engine in made]

        def write() -> None:
            while True:
                for one in memory:
                    one[:] = 7

        child = multiprocessing.get_context("fork").Process(target=write, daemon=True)
        child.start()
        try:
            for _ in range(30):
                for one in memory:
                    one[:] = 1
                together(made, lambda engine, rank: allreduce(engine, memory[rank]))
                assert all(holds_only(one, 2) for one in memory)
        finally:
            child.kill()
            child.join()


def test_a_forked_child_lets_go_of_an_engine_with_a_timeline(tmp_path: Path) -> None:
    """The thread that writes the timeline waits in the parent, and never comes back from that in the child."""
    program = f"""
import os, signal
from elastic_driver.worker.engine import native_loader
native = native_loader.load()
engine = native.Engine(0, 1, fusion_bytes=1, stall_warn_s=0, stall_fail_s=0, timeout_s=10, shared_memory=True,
                       direct_reads=True)
engine.connect(engine.prepare("127.0.0.1"), 10)
engine.add_process_set(0, [0], None)
engine.start()
engine.start_timeline({str(tmp_path / "trace.json")!r}, False)
for _ in range(20):  # most of the time it waits
    pid = os.fork()
    if pid == 0:
        signal.alarm(150)
        del engine
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), end=" ")
engine.close()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["0"] * 20, ran.stdout + ran.stderr


def test_a_signal_ends_a_wait() -> None:
    program = """
import os, signal, sys, threading, time
import numpy as np
from tests.native.engines import *
with engines(2) as made:
    handle = made[0].submit(Operation(Kind.BARRIER))
    def interrupt():
        while sys._current_frames()[threading.main_thread().ident].f_code is not type(handle).result.__code__:
            time.sleep(0.01)
        time.sleep(0.3)  # from there to its wait: it ends either way
        os.kill(os.getpid(), signal.SIGINT)
    try:
        threading.Thread(target=interrupt).start()
        handle.result()
    except KeyboardInterrupt:
        print("interrupted")
"""
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert ran.stdout == "interrupted\n", ran.stderr


LARGE = 1 << 25  # float32 elements: a pass over them takes tens of milliseconds


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({}, Kind.ALLREDUCE, id="direct, allreduce"),
        pytest.param({}, Kind.BROADCAST, id="direct, broadcast", marks=pytest.mark.release),
        pytest.param({"direct_reads": False}, Kind.ALLREDUCE, id="staged, allreduce", marks=pytest.mark.release),
        pytest.param({"direct_reads": False}, Kind.BROADCAST, id="staged, broadcast", marks=pytest.mark.release),
        pytest.param({"machines": "ab"}, Kind.ALLREDUCE, id="apart, allreduce", marks=pytest.mark.release),
        pytest.param({"machines": "ab"}, Kind.BROADCAST, id="apart, broadcast"),
    ],
)
def test_an_abort_ends_work_on_large_tensors(kind: Kind, options: dict[str, Any]) -> None:
    """A collective that has begun to write leaves the rest of the output as it was."""
    # The abort may come too late to find anything unwritten, but not each time.
    for _ in range(50):
        if unwritten_after_an_abort(kind, options) > 0:
            return
    raise AssertionError("the engine's thread wrote all of the output after each abort")


def unwritten_after_an_abort(kind: Kind, options: dict[str, Any]) -> int:
    arrays = [np.zeros(LARGE, np.float32), np.ones(LARGE, np.float32)]
    before = arrays[0].copy()  # with its pages mapped
    output = np.zeros_like(before)
    output[:] = 0
    with engines(2, **options) as made:
        first = Operation(kind, (spec(arrays[0], output),), name="large", root=1, prescale=1.0, postscale=3.0)
        second = Operation(kind, (spec(arrays[1]),), name="large", root=1, prescale=1.0, postscale=3.0)
        handles = [made[0].submit(first), made[1].submit(second)]
        samples = output[:: LARGE // 256]
        while not samples.any() and not handles[0].done():
            pass
        made[0].abort("in the middle")
        made[0].close()  # joins its thread
        left = output.copy()
        made[1].close()
        # Nobody writes once the thread has ended, whatever the others do.
        np.testing.assert_array_equal(output, left)
        np.testing.assert_array_equal(arrays[0], before)
    return int((left == 0).sum())
