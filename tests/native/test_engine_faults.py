"""Aborts, dead and frozen peers, rubbish on the port, and what an engine leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from elastic_driver.errors import HorovodInternalError

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import (
    EngineProcesses,
    Kind,
    Meeting,
    Operation,
    allreduce,
    barrier,
    each_rank,
    engines,
    make_engine,
    spec,
    together,
)

# Aborts take milliseconds (benchmarks/engine.py prints how many); the tests only tell them from a time limit.
SOON_S = 5.0


@pytest.mark.parametrize("machines", ["", "aab"])
def test_abort_ends_what_waits_for_others(machines: str) -> None:
    with engines(3, machines=machines) as made:
        waiting = [made[1].submit(Operation(Kind.ALLREDUCE, (spec(np.ones(3)),), name=f"n{i}")) for i in range(5)]
        began = time.monotonic()
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
        assert time.monotonic() - began < SOON_S


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
        began = time.monotonic()
        for rank, pipe in enumerate(world.pipes):
            if rank != victim:
                assert "rank" in pipe.recv()
        assert time.monotonic() - began < SOON_S
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
        began = time.monotonic()
        for rank in (0, 2):
            world.pipes[rank].send("abort")
        for rank in (0, 2):
            # Its own abort, or that of the other, which was quicker.
            assert world.pipes[rank].recv().endswith(("rank 1 is frozen", "has closed its connection"))
        assert time.monotonic() - began < SOON_S
    finally:
        world.end()


def test_a_peer_that_never_comes_is_named() -> None:
    meeting = Meeting()
    made = [make_engine(rank, 3) for rank in range(3)]
    blobs: dict[int, bytes] = {}

    def body(engine: Any, rank: int) -> None:
        def exchange(scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
            answer = meeting.exchange(scope, key=key, count=count, value=value)
            if rank == 2:
                raise HorovodInternalError("rank 2 stops here")
            blobs[rank] = value
            return answer

        engine.connect(exchange, timeout_s=0.5)

    errors = each_rank(made, body)
    assert str(errors[0]).endswith("cannot connect in time to ranks 2")
    assert isinstance(errors[1], HorovodInternalError)
    for engine in made:
        engine.close()


def test_an_abort_ends_connecting() -> None:
    meeting = Meeting()
    made = [make_engine(rank, 2) for rank in range(2)]
    asked = threading.Event()

    def body(engine: Any, rank: int) -> None:
        def exchange(scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
            answer = meeting.exchange(scope, key=key, count=count, value=value)
            if rank == 1:
                asked.wait()
                raise HorovodInternalError("not this one")
            asked.set()
            return answer

        engine.connect(exchange, timeout_s=60.0)

    began = time.monotonic()
    threading.Thread(target=lambda: (asked.wait(), made[0].abort("enough"))).start()
    errors = each_rank(made, body)
    assert "enough" in str(errors[0])
    assert time.monotonic() - began < SOON_S
    for engine in made:
        engine.close()


def listening() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def test_strangers_on_the_port_are_sent_away() -> None:
    before = listening()
    meeting = Meeting()
    made = [make_engine(rank, 2) for rank in range(2)]
    strangers: list[socket.socket] = []

    def body(engine: Any, rank: int) -> None:
        def exchange(scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
            answer = meeting.exchange(scope, key=key, count=count, value=value)
            if rank == 1:
                for port in listening() - before:
                    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000):
                        stranger = socket.create_connection(("127.0.0.1", port))
                        stranger.sendall(said)
                        strangers.append(stranger)
            return answer

        engine.connect(exchange, timeout_s=30.0)
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


def test_five_hundred_resets_leave_nothing() -> None:
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
    for i in range(500):
        world(kill=i % 3 == 0)
    assert left_behind() == before
    assert psutil.Process().memory_info().rss - memory < 30 << 20


def test_a_killed_world_leaves_no_shared_memory() -> None:
    def body(engine: Any, rank: int, pipe: Connection) -> None:
        engine.allocate(1 << 20)
        loop(engine, rank, pipe, count=1 << 20)

    before = set(os.listdir("/dev/shm"))
    world = EngineProcesses(2, body)
    for pipe in world.pipes:
        assert pipe.recv() == "goes"
    world.end()
    assert set(os.listdir("/dev/shm")) <= before


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


def test_a_signal_ends_a_wait() -> None:
    program = """
import os, signal, threading, time
import numpy as np
from tests.native.engines import *
with engines(2) as made:
    handle = made[0].submit(Operation(Kind.BARRIER))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        handle.result()
    except KeyboardInterrupt:
        print("interrupted")
"""
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=60)
    assert ran.stdout == "interrupted\n", ran.stderr
