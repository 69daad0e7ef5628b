"""The native module's engine behind the Engine protocol: shared memory inside a machine, Gloo between machines."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_driver.errors import DuplicateNameError, HorovodInternalError, MismatchError
from elastic_driver.system.safe_files import open_named
from elastic_driver.worker.engine import native_loader
from elastic_driver.worker.engine.byte_collectives import gather
from elastic_driver.worker.engine.collectives import Exchange, Meeting, ReduceOp
from elastic_driver.worker.engine.protocol import GLOBAL_SET, Handle, Kind, Operation, Result
from elastic_driver.worker.engine.seal import NO_SEAL, Seal
from elastic_driver.worker.settings import DEFAULTS, WorkerSettings, worker_settings

_log = logging.getLogger("elastic_driver.worker")

ENGINE_SCOPE = "engine"
_RUNNER_END_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine's settings.

    Attributes:
        fusion_bytes: most bytes of small tensors that run together; 0 keeps all apart.
        stall_warn_s: when to report that some ranks wait for others; 0 never.
        stall_fail_s: when such a stall fails the round; 0 never.
        shared_memory: whether ranks of one machine share memory.
        direct_reads: whether large tensors are read in place, in the peers' private memory.
        machine: ranks with different ones share no memory, as if they were on different machines.
        ports: the lowest and the highest port to listen on; 0 and 0 for any.
        host_timeout_s: how long a peer's machine may be silent while it is waited for; 0 for no limit.
    """

    fusion_bytes: int = DEFAULTS.fusion_bytes
    stall_warn_s: float = DEFAULTS.stall_warn_s
    stall_fail_s: float = 0.0
    shared_memory: bool = True
    direct_reads: bool = True
    machine: str = ""
    ports: tuple[int, int] = (0, 0)
    host_timeout_s: float = 0.0

    @classmethod
    def of(cls, settings: WorkerSettings) -> EngineSettings:
        """Return the engine's part of a worker's settings."""
        is_checked = not settings.stall_check_disable
        return cls(
            fusion_bytes=settings.fusion_bytes,
            stall_warn_s=settings.stall_warn_s if is_checked else 0.0,
            stall_fail_s=settings.stall_fail_s if is_checked else 0.0,
            shared_memory=settings.shared_memory != "off",
            direct_reads=settings.shared_memory == "on",
            machine=settings.machine,
            ports=settings.port_range or (0, 0),
            host_timeout_s=settings.host_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """An operation on a device's memory that all members have to run now.

    Attributes:
        keep: of the operation; None if this process has not submitted it, because it has joined.
        native: argument for ``conclude``.
        kind, reduce_op, root, prescale, postscale, process_set: as in Operation.
        tensors: their dtypes and shapes.
        sizes: of all members and tensors, for kinds whose sizes may differ: rows, or splits.
    """

    keep: Any
    native: Any
    kind: Kind
    reduce_op: ReduceOp
    root: int
    prescale: float
    postscale: float
    process_set: int
    tensors: list[tuple[str, tuple[int, ...]]]
    sizes: list[int]


class NativeHandle:
    """A Handle of the native engine."""

    def __init__(self, native: Any, engine: NativeEngine, deed: str) -> None:
        self._native = native
        self._engine = engine
        self._deed = deed  # "finish allreduce 'x'": for error messages
        self._result: Result | None = None

    def done(self) -> bool:
        """Return whether the operation is done."""
        return bool(self._native.done())

    def result(self) -> Result:
        """Block until the operation is done, and return its result."""
        result = self._result
        if result is None:
            with self._engine.failures(self._deed):
                self._native.wait()
            # Several threads may be here at once: each makes its own result, over the same memory.
            result = Result(last_joined=self._native.last_joined)
            for memory, rows, received in self._native.outputs():
                result.arrays.append(memory)
                result.rows.append(rows)
                result.received.append(received)
            self._result = result
        return result


class _Leaving:
    """The Handle of leaving. Its second step starts when a caller finds the first one done."""

    def __init__(self, native: Any, engine: NativeEngine) -> None:
        self._native, self._engine = native, engine
        self._steps = [NativeHandle(native.leave(0), engine, "leave the round")]

    def _last(self) -> NativeHandle:
        if len(self._steps) == 1:
            with self._engine.failures("leave the round"):
                self._steps.append(NativeHandle(self._native.leave(1), self._engine, "leave the round"))
        return self._steps[1]

    def done(self) -> bool:
        """Return whether both steps are done."""
        if not self._steps[0].done():
            return False
        try:
            self._steps[0].result()
            return self._last().done()
        except HorovodInternalError:
            return True

    def result(self) -> Result:
        """Block until both steps are done."""
        self._steps[0].result()
        return self._last().result()


class NativeEngine:
    """Collectives of one round over ``elastic_driver._native.Engine``.

    Raises:
        ImportError: the module cannot be loaded.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        timeout_s: float,
        settings: EngineSettings | None = None,
        seal: Seal = NO_SEAL,
    ) -> None:
        self._module: Any = native_loader.load()
        self._rank, self._size, self._address = rank, size, address
        self._timeout_s = timeout_s
        self._seal = seal
        settings = settings or EngineSettings.of(worker_settings())
        self._ports = settings.ports
        self._host_timeout_s = settings.host_timeout_s
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()  # guards the three below
        self._contexts: dict[int, Any] = {}
        self._aborted = ""
        self._members: dict[int, tuple[int, ...]] = {}  # also of removed sets: numbers are not reused
        self._native: Any = None
        self.device_runner: Any = None  # runs operations on devices (torch/device/lane.py)
        with self.failures("create its engine"):
            self._native = self._module.Engine(
                rank,
                size,
                fusion_bytes=settings.fusion_bytes,
                stall_warn_s=settings.stall_warn_s,
                stall_fail_s=settings.stall_fail_s,
                timeout_s=timeout_s,
                shared_memory=settings.shared_memory,
                direct_reads=settings.direct_reads,
                machine=settings.machine,
                key=seal.key,
                purpose=seal.purpose("control link"),
                host_timeout_s=settings.host_timeout_s,
            )

    @contextlib.contextmanager
    def failures(self, deed: str) -> Iterator[None]:
        """Convert the native module's errors to this package's."""
        try:
            yield
        except self._module.MismatchError as error:
            raise MismatchError(str(error)) from None
        except self._module.DuplicateNameError as error:
            raise DuplicateNameError(str(error)) from None
        except self._module.CollectiveError as error:
            text = f"rank {self._rank} cannot {deed}: {error}"
            raise HorovodInternalError(text, unreachable=self.unreachable()) from error

    def connect(self, exchange: Meeting, *, timeout_s: float) -> None:
        """Connect to the peers. Blocks until all are connected or the time limit has passed.

        Raises:
            HorovodInternalError: a peer is gone, the time limit has passed, or the round was aborted.
        """
        self._exchange = exchange
        with self.failures("connect to its peers"):
            where = self._native.prepare(self._address, self._ports)
            # Only rank 0's address goes through the driver, the others through rank 0 (docs/decisions/0013).
            where = exchange.share(ENGINE_SCOPE, where if self._rank == 0 else None)
            self._native.connect(where, timeout_s)
            if self._rank == 0 and self._native.unshared:
                _log.warning(
                    "elastic_driver: ranks on one machine communicate over the network: %s", self._native.unshared
                )
        self._add(GLOBAL_SET, range(self._size), timeout_s=timeout_s)
        with self.failures("start its engine"):
            self._native.start()

    def _add(self, number: int, ranks: Sequence[int], *, timeout_s: float) -> None:
        with self._lock:
            self._members[number] = tuple(ranks)
        contexts = self._make_contexts(number, list(ranks), timeout_s=timeout_s)
        with self.failures("add a process set"):
            self._native.add_process_set(number, list(ranks), contexts)

    def _make_contexts(self, number: int, ranks: list[int], *, timeout_s: float) -> Any:
        """Make Gloo contexts for a set that spans machines; return None if it does not, or this rank is not a
        member.
        """
        members = set(ranks)
        parts = [[rank for rank in machine if rank in members] for machine in self._native.machines]
        parts = [[rank for rank in ranks if rank in part] for part in map(set, parts) if part]
        if len(parts) == 1:
            return None
        if self._rank not in members:
            self._gather(number, b"")
            return None
        machine = next(part for part in parts if self._rank in part)
        place = machine.index(self._rank)
        groups = [("global", ranks, ranks.index(self._rank))]
        if place < min(len(part) for part in parts):
            cross = [part[place] for part in parts]
            groups.append(("cross", cross, cross.index(self._rank)))
        with self.failures("connect to its peers"):
            contexts = self._module.ContextGroup(
                groups,
                host=self._address,
                key=self._seal.key,
                purpose=self._seal.purpose(f"process set {number}"),
                ports=self._ports,
                host_timeout_s=self._host_timeout_s,
            )
            with self._lock:
                self._contexts[number] = contexts
                aborted = self._aborted
            if aborted:
                contexts.abort(aborted)
            if number == GLOBAL_SET:
                self._native.connect_contexts(contexts, timeout_s)
            else:
                contexts.connect(self._gather(number, contexts.prepare()), timeout_s)
        return contexts

    def _gather(self, number: int, address: bytes) -> list[bytes]:
        """Return each rank's address for a set that is added while the engine runs; all ranks call it alike."""
        data = np.frombuffer(address, np.uint8).copy()
        return [part.tobytes() for part in gather(self, data, f"process_set.{number}.addresses")]

    def submit(self, operation: Operation) -> NativeHandle:
        """Submit an operation."""
        title = f"{operation.kind.name.lower()}{f' {operation.name!r}' if operation.name else ''}"
        with self.failures(title):
            return NativeHandle(self._native.submit(operation), self, f"finish {title}")

    def next_turn(self, timeout_s: float) -> Turn | None:
        """Return the next operation on a device's memory, for the caller to run; None if there is none within that
        time.

        Raises:
            HorovodInternalError: the round is broken or over.
        """
        with self.failures("continue"):
            turn: tuple[Any, ...] | None = self._native.next_turn(timeout_s)
        if turn is None:
            return None
        keep, native, kind, reduction, *rest = turn
        return Turn(keep, native, Kind(kind), ReduceOp(reduction), *rest)

    def members(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a process set, whether this one has used it or not. Raises KeyError."""
        with self._lock:
            return self._members[number]

    def links(self) -> tuple[Exchange, str, float]:
        """Return what others need to connect to the same peers: the exchange, this address, a collective's time
        limit.
        """
        assert self._exchange is not None
        return self._exchange, self._address, self._timeout_s

    def attach(self, runner: Any) -> None:
        """Set the runner of operations on devices: it is aborted and joined with the engine."""
        with self._lock:
            self.device_runner = runner
            aborted = self._aborted
        if aborted:
            runner.abort(aborted)

    def conclude(self, turn: Turn, error: str) -> None:
        """Mark an operation as run; ``error`` is its failure, which ends the round for this process."""
        self._native.conclude(turn.native, error)

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """Add a process set, and wait until all ranks have."""
        self._add(number, ranks, timeout_s=self._timeout_s)
        self._meet(number)

    def remove_process_set(self, number: int) -> None:
        """Remove a process set, after its operations."""
        with self.failures("remove a process set"):
            NativeHandle(self._native.remove_process_set(number), self, "remove a process set").result()
            # Operations already agreed on may still be running on a device.
            self._native.settle(number)
        with self._lock:
            contexts = self._contexts.pop(number, None)
            runner = self.device_runner
        if contexts is not None:
            contexts.close()
        if runner is not None:
            runner.forget(number)

    def _meet(self, number: int) -> None:
        self.submit(Operation(Kind.BARRIER, name=f"elastic_driver.process_set.{number}", own=True)).result()

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory shared with the peers, or private memory if there is none."""
        memory: npt.NDArray[np.uint8] | None = self._native.allocate(nbytes)
        return np.zeros(nbytes, np.uint8) if memory is None else memory

    def progress(self) -> tuple[int, bool]:
        """Return how many operations are finished, and whether others are in flight."""
        return tuple(self._native.progress())

    def carries_out(self) -> bool:
        """Return whether this process is running an operation that all members have submitted."""
        return bool(self._native.carries_out)

    def own_finished(self) -> int:
        """Return how many of this process's own operations are over."""
        return int(self._native.own_finished)

    def unreachable(self) -> tuple[int, ...]:
        """Return ranks that could not be reached."""
        with self._lock:
            contexts = list(self._contexts.values())
        found = {rank for native in (self._native, *contexts) if native for rank in native.unreachable}
        return tuple(sorted(found))

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Start a trace. A cycle is a pass of the engine's thread."""
        descriptor = open_named(Path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            # The file that was checked, whatever has its name by now.
            self._native.start_timeline(f"/proc/self/fd/{descriptor}", mark_cycles)
        finally:
            os.close(descriptor)

    def stop_timeline(self) -> None:
        """Complete the trace."""
        self._native.stop_timeline()

    def leave(self) -> Handle:
        """Start leaving the round."""
        with self.failures("leave the round"):
            return _Leaving(self._native, self)

    def quiesce(self, limit_s: float) -> bool:
        """Wait until no operation touches memory. The device lane waits for devices by the round's gate."""
        return bool(self._native.quiesce(limit_s))

    def abort(self, reason: str) -> None:
        """Make every operation, in flight or later, fail."""
        with self._lock:
            self._aborted = self._aborted or reason
            contexts = list(self._contexts.values())
            runner = self.device_runner
        for context in contexts:
            context.abort(reason)
        self._native.abort(reason)
        if runner is not None:
            runner.abort(reason)

    def close(self) -> None:
        """Free all resources."""
        with self._lock:
            self._aborted = self._aborted or "closed"
            runner = self.device_runner
        if runner is not None:
            self._native.abort("closed")
            runner.abort("closed")
            runner.join(_RUNNER_END_S)
        self._native.close()
        with self._lock:
            contexts, self._contexts = list(self._contexts.values()), {}
        for context in contexts:
            context.close()

    def abandon(self) -> None:
        """Do nothing: the native module recognizes a forked process."""
