"""Worlds of engines: threads of this process, or forked processes, with an exchange that needs no driver."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy.typing as npt

from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.native import EngineSettings, NativeEngine
from elastic_driver.worker.engine.protocol import Kind, Operation, TensorSpec
from elastic_driver.worker.engine.seal import Seal

from .limits import NEVER_S, PATIENCE_S

_kept: list[Any] = []


class Meeting:
    """What the rendezvous server's exchange does, in memory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, bytes]] = {}

    def exchange(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        with self._changed:
            values = self._values.setdefault(scope, {})
            values[key] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(values) == count, PATIENCE_S):
                raise TimeoutError(f"{scope}: {sorted(values)} of {count}")
            return [values[each] for each in range(count)]

    __call__ = exchange

    def share(self, scope: str, value: bytes | None) -> bytes:
        with self._changed:
            if value is not None:
                self._values[scope] = {0: value}
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: scope in self._values, PATIENCE_S):
                raise TimeoutError(f"{scope}: nobody shares it")
            return self._values[scope][0]


class After:
    """A meeting, and what a rank does when it knows where rank 0 listens."""

    def __init__(self, meeting: Meeting, then: Callable[[bytes], None]) -> None:
        self._meeting, self._then = meeting, then

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        return self._meeting.exchange(scope, key=key, count=count, value=value)

    def share(self, scope: str, value: bytes | None) -> bytes:
        found = self._meeting.share(scope, value)
        self._then(found)
        return found


class PipeMeeting:
    """In a forked process: what rank 0 shares goes through the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        raise AssertionError("the engine needs no exchange of all ranks")

    def share(self, scope: str, value: bytes | None) -> bytes:
        if value is None:
            return bytes(self._pipe.recv())
        self._pipe.send(value)
        return value


SEAL = Seal(b"the ranks' key of a test", 1)


def make_engine(rank: int, size: int, machine: str = "", seal: Seal = SEAL, **settings: Any) -> NativeEngine:
    options = EngineSettings(machine=machine, **settings)
    return NativeEngine(rank, size, "127.0.0.1", timeout_s=NEVER_S, settings=options, seal=seal)


@contextlib.contextmanager
def engines(size: int, machines: str = "", **settings: Any) -> Iterator[list[NativeEngine]]:
    """An engine for each rank, all of this process. ``machines``: a letter for each rank, the same on one machine."""
    meeting = Meeting()
    made = [make_engine(rank, size, machines[rank : rank + 1], **settings) for rank in range(size)]
    try:
        errors = each_rank(made, lambda engine, rank: engine.connect(meeting, timeout_s=NEVER_S))
        assert not errors, errors
        yield made
    finally:
        for engine in made:
            engine.close()
        _kept.clear()


def each_rank(made: list[NativeEngine], body: Callable[[NativeEngine, int], None]) -> dict[int, BaseException]:
    """Runs body(engine, rank) on a thread for each rank. Returns what they raised."""
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            body(made[rank], rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def together(made: list[NativeEngine], body: Callable[[NativeEngine, int], None]) -> None:
    """Like each_rank; the first error is the test's, and ends the other ranks."""
    failures: list[BaseException] = []

    def run(engine: NativeEngine, rank: int) -> None:
        try:
            body(engine, rank)
        except BaseException as error:
            failures.append(error)
            for each in made:
                each.abort(f"rank {rank} failed: {error}")

    each_rank(made, run)
    for error in failures:
        raise error


class EngineProcesses:
    """A forked process for each rank. ``body(engine, rank, pipe to the test)`` runs connected."""

    def __init__(self, size: int, body: Callable[[NativeEngine, int, Connection], None], machines: str = "") -> None:
        fork = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=self._main, args=(rank, size, theirs, body, machines), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        where = self.pipes[0].recv()
        for pipe in self.pipes[1:]:
            pipe.send(where)

    @staticmethod
    def _main(rank: int, size: int, pipe: Connection, body: Any, machines: str) -> None:
        engine = make_engine(rank, size, machines[rank : rank + 1])
        engine.connect(PipeMeeting(pipe), timeout_s=NEVER_S)
        body(engine, rank, pipe)
        engine.close()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def spec(array: npt.NDArray[Any], output: npt.NDArray[Any] | None = None) -> TensorSpec:
    """An array as an operation's tensor; in place without an output. Must be contiguous. Kept until the world ends."""
    assert array.flags.c_contiguous
    target = array if output is None else output
    _kept.append((array, target))
    return TensorSpec(array.ctypes.data, array.nbytes, array.dtype.name, array.shape, target.ctypes.data)


def port_of(where: bytes) -> int:
    """Of what rank 0 publishes: its host as a text, and the port in groups of seven bits."""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(where[1 + where[0] :]))


def allreduce(engine: NativeEngine, array: npt.NDArray[Any], name: str = "", **options: Any) -> None:
    """In place."""
    engine.submit(Operation(Kind.ALLREDUCE, (spec(array),), name=name, **options)).result()


def barrier(engine: NativeEngine, process_set: int = 0) -> None:
    engine.submit(Operation(Kind.BARRIER, process_set=process_set)).result()


__all__ = [
    "NEVER_S",
    "PATIENCE_S",
    "After",
    "EngineProcesses",
    "Kind",
    "Meeting",
    "Operation",
    "PipeMeeting",
    "ReduceOp",
    "allreduce",
    "barrier",
    "each_rank",
    "engines",
    "make_engine",
    "port_of",
    "spec",
    "together",
]
