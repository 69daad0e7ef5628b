"""Engines on hosts of their own, between which packets vanish: who is accused by whom, and who is not."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.engine.native import EngineSettings, NativeEngine
from tests.native.conftest import native
from tests.native.engines import SEAL, Kind, Operation, allreduce
from tests.support.network.namespaces import NamespaceHost, Namespaces

pytestmark = pytest.mark.machines

LIMIT_S = 2.0
PATIENCE_S = 150.0


class HeldMeeting:
    """A rank's meeting, which says where rank 0 is only when the test lets it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        raise AssertionError("the engine needs no exchange of all ranks")

    def share(self, scope: str, value: bytes | None) -> bytes:
        if value is not None:
            self._pipe.send(("where", value))
        return bytes(self._pipe.recv())


class Ranks:
    """A process for each rank, on the hosts named, in a loop of orders.

    Args:
        hosts: the rank's hosts.
        connect: whether they are connected at once.
    """

    def __init__(self, hosts: Sequence[NamespaceHost], *, connect: bool = True) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(len(hosts)):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(rank, hosts, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.where = self.hear(0)[1]
        if connect:
            self.connect()

    def connect(self) -> None:
        """Tells all where rank 0 is; blocks until they are connected."""
        for pipe in self.pipes:
            pipe.send(self.where)
        assert [self.hear(rank) for rank in range(len(self.pipes))] == [("connected",)] * len(self.pipes)

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def order(self, *words: Any) -> None:
        for pipe in self.pipes:
            pipe.send(words)

    def ends(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of each rank what it failed with, and whom it accuses."""
        ends = []
        for rank in range(len(self.pipes)):
            while (heard := self.hear(rank))[0] != "failed":
                assert heard == ("goes",), heard
            ends.append(heard[1:])
        return ends

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return int(pid)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _serve(rank: int, hosts: Sequence[NamespaceHost], pipe: Connection) -> None:
    hosts[rank].enter()
    settings = EngineSettings(machine=hosts[rank].name, host_timeout_s=LIMIT_S)
    engine = NativeEngine(rank, len(hosts), hosts[rank].ipv4, timeout_s=PATIENCE_S, settings=settings, seal=SEAL)
    try:
        engine.connect(HeldMeeting(pipe), timeout_s=PATIENCE_S)
        pipe.send(("connected",))
        while True:
            word, count = pipe.recv()
            array = np.ones(count, np.float32)
            if word == "once":
                allreduce(engine, array)
                pipe.send(("done", float(array[-1])))
            while word == "on":
                allreduce(engine, array)
                # Not to one that reads of another rank first: this one would hold up all.
                if select.select([], [pipe], [], 0)[1]:
                    pipe.send(("goes",))
            if word == "barrier":
                engine.submit(Operation(Kind.BARRIER)).result()
                pipe.send(("done", 0.0))
    except HorovodInternalError as error:
        pipe.send(("failed", str(error), error.unreachable))
    engine.close()
    pipe.close()


@contextlib.contextmanager
def made(count: int) -> Iterator[Namespaces]:
    with Namespaces(count) as hosts:
        yield hosts


@contextlib.contextmanager
def running(hosts: Sequence[NamespaceHost], *, connect: bool = True) -> Iterator[Ranks]:
    ranks = Ranks(hosts, connect=connect)
    try:
        yield ranks
    finally:
        ranks.end()


SILENT = r"rank {} \({}\) has acknowledged nothing to rank {} \({}\) for \d+\.\d s"


def accuses(text: str, rank: int, other: int, hosts: Namespaces) -> bool:
    far, own = re.escape(hosts[other].ipv4), re.escape(hosts[rank].ipv4)
    return re.search(SILENT.format(other, far, rank, own), text) is not None


@pytest.mark.parametrize("count", [16, 1 << 18])
def test_both_ends_of_a_cut_are_named_and_third_ranks_accuse_nobody(count: int) -> None:
    with made(3) as hosts, running(list(hosts)) as ranks:
        ranks.order("on", count)
        for rank in range(3):
            assert ranks.hear(rank) == ("goes",)
        hosts[1].cut_from(hosts[2])
        ends = ranks.ends()
    assert [accused for _, accused in ends] == [(), (2,), (1,)], ends
    assert accuses(ends[1][0], 1, 2, hosts) or accuses(ends[2][0], 2, 1, hosts), ends
    assert ends[1][0].startswith("rank 1 cannot finish allreduce: ")


def test_a_cut_from_rank_0_is_seen_by_those_that_wait_for_others() -> None:
    """No collective is under way: rank 2 has not come to it yet."""
    with made(3) as hosts, running(list(hosts)) as ranks:
        hosts[0].cut_from(hosts[1])
        for rank in (0, 1):
            ranks.pipes[rank].send(("once", 4))
        ends = [ranks.hear(rank) for rank in (0, 1)]
        assert [end[0] for end in ends] == ["failed", "failed"], ends
        assert accuses(ends[0][1], 0, 1, hosts) or accuses(ends[1][1], 1, 0, hosts), ends
        assert [end[2] for end in ends] == [(1,), (0,)], ends
        # It learns of it when it comes.
        ranks.pipes[2].send(("once", 4))
        assert ranks.hear(2)[2] == ()


def test_a_cut_while_nobody_waits_costs_nothing() -> None:
    with made(2) as hosts, running(list(hosts)) as ranks:
        hosts[0].cut_from(hosts[1])
        time.sleep(2 * LIMIT_S)
        hosts[0].heal_with(hosts[1])
        time.sleep(2 * LIMIT_S)  # until each has been asked again whether it is there
        ranks.order("once", 1 << 16)
        assert [ranks.hear(rank) for rank in range(2)] == [("done", 2.0)] * 2


def _until_stopped(pid: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("word", "count"), [("once", 1 << 24), ("barrier", 1)])
def test_who_is_stopped_is_not_accused(word: str, count: int) -> None:
    """Its kernel answers, also when it has no room for more of what it does not read."""
    with made(3) as hosts, running(list(hosts)) as ranks:
        if word == "once":
            # In the middle of one that takes a while.
            ranks.order("on", count)
            for rank in range(3):
                assert ranks.hear(rank) == ("goes",)
            os.kill(ranks.pid(1), signal.SIGSTOP)
        else:
            os.kill(ranks.pid(1), signal.SIGSTOP)
            for rank in (0, 2):
                ranks.pipes[rank].send((word, count))
        _until_stopped(ranks.pid(1))
        time.sleep(5 * LIMIT_S)
        for rank in (0, 2):
            while ranks.pipes[rank].poll():
                assert ranks.hear(rank) == ("goes",)
        os.kill(ranks.pid(1), signal.SIGCONT)
        if word == "once":
            for rank in range(3):
                assert [ranks.hear(rank) for _ in range(2)] == [("goes",)] * 2
        else:
            ranks.pipes[1].send((word, count))
            assert [ranks.hear(rank) for rank in range(3)] == [("done", 0.0)] * 3


def test_who_was_stopped_itself_accuses_nobody() -> None:
    with made(2) as hosts, running(list(hosts)) as ranks:
        ranks.order("on", 1 << 16)
        for rank in range(2):
            assert ranks.hear(rank) == ("goes",)
        for rank in range(2):
            os.kill(ranks.pid(rank), signal.SIGSTOP)
            _until_stopped(ranks.pid(rank))
        time.sleep(3 * LIMIT_S)
        for rank in range(2):
            os.kill(ranks.pid(rank), signal.SIGCONT)
        for rank in range(2):
            while ranks.pipes[rank].poll():
                assert ranks.hear(rank) == ("goes",)
            assert [ranks.hear(rank) for _ in range(2)] == [("goes",)] * 2


def test_an_allreduce_over_a_slow_network_is_waited_for() -> None:
    """It takes several times the limit."""
    with made(2) as hosts:
        for host in hosts:
            limit = ("rate", "16mbit", "burst", "64kb", "latency", "400ms")
            made_slow = host.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit])
            if made_slow.returncode:
                pytest.skip(f"no slow networks here: {made_slow.stderr}")
        with running(list(hosts)) as ranks:
            began = time.monotonic()
            ranks.order("once", 4 << 20)
            assert [ranks.hear(rank) for rank in range(2)] == [("done", 2.0)] * 2
            assert time.monotonic() - began > 3 * LIMIT_S


def _vanish(hosts: Namespaces) -> str:
    hosts[0].cut_from(hosts[2])
    return "acknowledged nothing"


def _has_no_route(hosts: Namespaces) -> str:
    hosts[2].run(["ip", "route", "add", "unreachable", hosts[0].ipv4], check=True)
    return "No route to host"


def _has_a_hole(hosts: Namespaces) -> str:
    hosts[2].run(["ip", "route", "add", "blackhole", hosts[0].ipv4], check=True)
    return "Invalid argument"


@pytest.mark.parametrize("cut", [_vanish, _has_no_route, _has_a_hole])
def test_rank_0_cannot_be_reached_when_the_round_is_built(cut: Callable[[Namespaces], str]) -> None:
    with made(3) as hosts, running(list(hosts), connect=False) as ranks:
        text = cut(hosts)
        for pipe in ranks.pipes:
            pipe.send(ranks.where)
        failed = ranks.hear(2)
        assert failed[0] == "failed"
        assert failed[2] == (0,), failed
        assert text in failed[1]
        assert failed[1].startswith("rank 2 cannot connect to its peers: ")
        assert hosts[0].ipv4 in failed[1]
        for rank in (0, 1):
            assert not ranks.pipes[rank].poll(), "they wait for it; the driver tells them"


def test_two_that_cannot_reach_each_other_when_the_round_is_built() -> None:
    with made(3) as hosts, running(list(hosts), connect=False) as ranks:
        hosts[1].cut_from(hosts[2])
        for pipe in ranks.pipes:
            pipe.send(ranks.where)
        # One of the two dials; the other, and rank 0, hear of it from the driver.
        pipe = multiprocessing.connection.wait(ranks.pipes[1:], PATIENCE_S)[0]
        rank = ranks.pipes.index(pipe)  # type: ignore[arg-type]
        failed = ranks.hear(rank)
        assert failed[0] == "failed", failed
        assert failed[2] == (3 - rank,), failed
        assert accuses(failed[1], rank, 3 - rank, hosts), failed


def test_rank_0_is_there_and_lets_nobody_in() -> None:
    """Its kernel takes connections while it stands still."""
    with made(2) as hosts, running(list(hosts), connect=False) as ranks:
        os.kill(ranks.pid(0), signal.SIGSTOP)
        _until_stopped(ranks.pid(0))
        ranks.pipes[1].send(ranks.where)
        time.sleep(4 * LIMIT_S)
        assert not ranks.pipes[1].poll()
        os.kill(ranks.pid(0), signal.SIGCONT)
        ranks.pipes[0].send(ranks.where)
        assert [ranks.hear(rank) for rank in range(2)] == [("connected",)] * 2


def test_a_host_that_vanishes_while_the_ranks_tell_each_other_of_themselves() -> None:
    """After it has shaken hands with rank 0, which waits for its word."""
    with made(2) as hosts:
        processes, pipes = [], []
        for rank in range(2):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("fork").Process(target=_meet, args=(rank, hosts, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            where = pipes[0].recv()
            for pipe in pipes:
                pipe.send(where)
            assert [pipe.recv() for pipe in pipes] == ["met"] * 2
            hosts[1].cut()
            for rank in range(2):
                pipes[rank].send("go on")
            told = [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    assert [accused for _, accused in told] == [[1], [0]], told
    assert all(accuses(told[rank][0], rank, 1 - rank, hosts) for rank in range(2)), told


def _meet(rank: int, hosts: Namespaces, pipe: Connection) -> None:
    hosts[rank].enter()
    settings = EngineSettings(machine=hosts[rank].name, host_timeout_s=LIMIT_S)
    made = NativeEngine(rank, 2, hosts[rank].ipv4, timeout_s=PATIENCE_S, settings=settings, seal=SEAL)
    engine = made._native
    where = engine.prepare(hosts[rank].ipv4)
    if rank == 0:
        pipe.send(where)
    engine.connect(pipe.recv(), PATIENCE_S)
    pipe.send("met")
    pipe.recv()
    contexts = native.ContextGroup([("global", [0, 1], rank)], host=hosts[rank].ipv4)
    try:
        engine.connect_contexts(contexts, PATIENCE_S)
    except native.UnreachableError as error:
        pipe.send((str(error), engine.unreachable))
    made.close()


def test_the_helper_of_these_tests_lets_other_hosts_through() -> None:
    with made(3) as hosts:

        def reaches(one: int, other: int) -> bool:
            listener = hosts[other].popen(
                [
                    "python3",
                    "-c",
                    "import socket; s = socket.create_server(('', 4711)); print(1, flush=True); s.accept()",
                ],
                stdout=subprocess.PIPE,
            )
            assert listener.stdout.readline() == b"1\n"
            dial = f"import socket; socket.create_connection(('{hosts[other].ipv4}', 4711), 3)"
            found = hosts[one].run(["python3", "-c", dial]).returncode == 0
            listener.kill()
            listener.wait()
            return found

        hosts[1].cut_from(hosts[2])
        assert [reaches(1, 2), reaches(0, 2)] == [False, True]
        hosts[1].heal_with(hosts[2])
        assert reaches(1, 2)
