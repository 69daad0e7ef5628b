"""One round as this process sees it: its place, its collectives, and the two threads that serve them.

Owns the communication thread ("elastic-comm"), which runs all collectives in the order they were submitted, so that
gradient buckets and calls of the main thread cannot interleave differently on two ranks; and the watch thread.
Does not know how a round is joined (runtime.py).

Time limits: HOROVOD_GLOO_TIMEOUT_SECONDS bounds the building of contexts only. A collective's clock starts when this
rank calls it, so the same limit there would end healthy jobs whose peers compute longer than that; and a dead peer
is announced by the driver within milliseconds anyhow. Collectives get ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from elastic_driver.errors import HorovodInternalError, RendezvousError, SettingsError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import Backend, RoundAssignment
from elastic_driver.worker.collectives import CROSS, GLOBAL, LOCAL, Collectives, Group, SoloCollectives, Task
from elastic_driver.worker.watch import Watch, WatchClient

_log = logging.getLogger("elastic_driver.worker")

DEFAULT_BUILD_TIMEOUT_S = 30.0  # Horovod's HOROVOD_GLOO_TIMEOUT_SECONDS
DEFAULT_COLLECTIVE_TIMEOUT_S = 1800.0  # torch.distributed's default for a process group

Work: TypeAlias = Future[Any]


class RoundClient(WatchClient, Protocol):
    """What a context needs of a rendezvous client; two threads use it at once."""

    def exchange(
        self, round_id: int, scope: str, key: int, count: int, value: bytes, *, timeout_s: float
    ) -> list[bytes]:
        """Puts a value, waits for all, returns all in order of their keys."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds."""

    build_s: float = DEFAULT_BUILD_TIMEOUT_S
    collective_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Limits:
        """Reads HOROVOD_GLOO_TIMEOUT_SECONDS and ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S.

        Raises:
            SettingsError: one of them is not a number above 0.
        """

        def read(name: str, default: float) -> float:
            text = environ.get(name, "")
            if not text:
                return default
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if not 0 < value < 1e7:
                raise SettingsError(f"cannot use {name}={text!r}: it must be a number of seconds above 0")
            return value

        return cls(
            read("HOROVOD_GLOO_TIMEOUT_SECONDS", DEFAULT_BUILD_TIMEOUT_S),
            read("ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S", DEFAULT_COLLECTIVE_TIMEOUT_S),
        )


def make_collectives(assignment: RoundAssignment, groups: tuple[Group, ...], address: str) -> Collectives:
    """A backend's collectives, not yet connected.

    Raises:
        HorovodInternalError: the backend that the driver chose cannot be loaded here.
    """
    if assignment.slot.size == 1:
        return SoloCollectives()
    try:
        match assignment.backend:
            case Backend.NATIVE:
                from elastic_driver.worker.native_backend import NativeCollectives

                return NativeCollectives(groups, address)
            case Backend.TORCH:
                from elastic_driver.worker.torch_backend import TorchCollectives

                return TorchCollectives(groups, address)
    except ImportError as error:
        raise HorovodInternalError(f"cannot load the {assignment.backend} backend: {error}") from error


def groups_of(assignment: RoundAssignment) -> tuple[tuple[Group, ...], dict[str, str]]:
    """The groups to build, and which of them serves each of the three names ("" where this process is alone).

    A group with the members of another is that other: fewer connections, and no member can think otherwise.
    """
    slot = assignment.slot
    everyone = Group(GLOBAL, tuple(range(slot.size)), slot.rank)
    groups = [everyone]
    serves = {GLOBAL: GLOBAL}
    for group in (
        Group(LOCAL, assignment.local_members, slot.local_rank),
        Group(CROSS, assignment.cross_members, slot.cross_rank),
    ):
        if len(group.members) == 1:
            serves[group.name] = ""
        elif group.members == everyone.members:
            serves[group.name] = GLOBAL
        else:
            serves[group.name] = group.name
            groups.append(group)
    return tuple(groups), serves


class Context:
    """One round of this process, from its assignment to its teardown.

    Main thread: ``open``, ``submit`` and waiting on what it returns, ``close``, ``join``. The communication thread runs
    the tasks. The watch thread calls ``on_*``. ``abort`` may come from any of them.
    """

    def __init__(
        self,
        assignment: RoundAssignment,
        *,
        worker: WorkerId | None,
        address: str,
        limits: Limits,
        client: RoundClient | None,
    ) -> None:
        self.assignment = assignment
        self.slot = assignment.slot
        self.limits = limits
        self._address = address
        self._client = client
        self._groups, self.serves = groups_of(assignment)
        self._lock = threading.Lock()  # guards _broken, _collectives, _pending
        self._broken = ""
        self._collectives: Collectives | None = None
        self._pending = 0
        self._hosts_updated = False
        self.update_reason = ""
        self._tasks: queue.SimpleQueue[tuple[Task, Work] | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._watch = Watch(client, worker, assignment.round_id, self) if client is not None and worker else None
        self._comm: threading.Thread | None = None
        if self.slot.size > 1:
            # A daemon for the watch thread's reason. Submitted tasks wake it; close() ends it, after its teardown.
            self._comm = threading.Thread(
                target=self._communicate, name=f"elastic-comm-{assignment.round_id}", daemon=True
            )

    def open(self) -> None:
        """Starts the threads and connects to the peers. Blocks until that is done.

        Raises:
            HorovodInternalError: it cannot be done: a peer is gone, the driver ended the round, the time is up.
        """
        if self._watch is not None:
            self._watch.start()
        if self._comm is None:
            self._collectives = SoloCollectives()
            return
        self._comm.start()
        self._ready.result()

    @property
    def broken(self) -> str:
        """Why no collective can succeed any more in this round; "" when they can."""
        return self._broken

    @property
    def hosts_updated(self) -> bool:
        """The driver's notice as this process knows it: members are to leave at the next commit."""
        return self._hosts_updated

    def check(self) -> None:
        """Raises HorovodInternalError when the round is broken."""
        if self._broken:
            raise self._error()

    def submit(self, task: Task) -> Work:
        """Queues a task for the communication thread. Never raises: the future carries the failure."""
        work: Work = Future()
        with self._lock:
            broken = self._broken
            if not broken:
                self._pending += 1
                if self._comm is not None:
                    self._tasks.put((task, work))  # inside the lock: nothing is queued behind close()'s end mark
        if broken:
            work.set_exception(self._error())
        elif self._comm is None:
            assert self._collectives is not None
            self._run_task(task, work, self._collectives)
        return work

    def run(self, task: Task) -> Any:
        """Runs a task on the communication thread. Blocks until it is done; signals are handled meanwhile.

        Raises:
            HorovodInternalError: the collective failed.
        """
        return self.submit(task).result()

    def on_hosts_updated(self, *, leave: bool, reason: str) -> None:
        """Watch thread: the notice's level changed."""
        self.update_reason = reason
        self._hosts_updated = leave

    def on_abort(self, reason: str) -> None:
        """Watch thread: the driver ended the round."""
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """Ends the round for this process: what blocks fails, what is queued fails, what comes later fails.

        The first reason stays. Peers that wait for this process learn of it by their closed connections.
        """
        with self._lock:
            if self._broken:
                return
            self._broken = reason or "aborted"
            collectives = self._collectives
        if collectives is not None:
            collectives.abort(self._broken)
        # A build in progress owns no memory of the caller's, so that the caller need not wait for its end.
        with contextlib.suppress(InvalidStateError):
            self._ready.set_exception(self._error())

    def linger(self, timeout_s: float) -> None:
        """Waits a while until the peers are also done, so that none sees a connection close under its last call."""
        if self._comm is None or self._broken:
            return
        with contextlib.suppress(Exception):  # the peers may be gone for good: that is no failure of this process
            self.submit(lambda collectives: collectives.barrier(GLOBAL, timeout_s=timeout_s)).result(timeout_s + 1)

    def close(self) -> None:
        """Begins the teardown, which the communication thread finishes. Returns at once."""
        with self._lock:
            unfinished = self._pending > 0 or not self._ready.done()
        if unfinished and self._comm is not None:
            self.abort("the library was shut down in this process")
        if self._watch is not None:
            self._watch.stop()
        with self._lock:
            self._broken = self._broken or "the round is over in this process"
            self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads after close(); True when they have ended."""
        done = True
        if self._watch is not None:
            done = self._watch.join(timeout_s)
        if self._comm is not None:
            self._comm.join(timeout_s)
            done = done and not self._comm.is_alive()
        return done

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is touched, now or when this object goes."""
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        if self._collectives is not None:
            self._collectives.abandon()

    def _error(self) -> HorovodInternalError:
        return HorovodInternalError(f"cannot go on in round {self.assignment.round_id}: {self._broken}")

    def _exchange(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        assert self._client is not None
        return self._client.exchange(self.assignment.round_id, scope, key, count, value, timeout_s=self.limits.build_s)

    def _build(self) -> Collectives:
        collectives = make_collectives(self.assignment, self._groups, self._address)
        with self._lock:
            self._collectives = collectives
            broken = self._broken
        if broken:
            collectives.abort(broken)
        collectives.connect(self._exchange, timeout_s=self.limits.build_s)
        return collectives

    def _communicate(self) -> None:
        try:
            collectives = self._build()
        except (HorovodInternalError, RendezvousError, OSError) as error:
            self.abort(f"cannot connect to the peers: {error}")
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                self._ready.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self._ready.set_result(None)
            while (item := self._tasks.get()) is not None:
                self._run_task(*item, collectives)
                del item  # or the last buffers would live until the next task
        if self._collectives is not None:
            try:
                self._collectives.close()
            except Exception:
                _log.exception("round %d: the teardown of its contexts failed", self.assignment.round_id)
        # Whatever was queued before the end mark of a context that never stood, or behind it.
        while True:
            try:
                item = self._tasks.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].set_exception(self._error())

    def _run_task(self, task: Task, work: Work, collectives: Collectives) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            if self._broken:
                raise self._error()
            result = task(collectives)
        except HorovodInternalError as error:
            # At the first error, before anything else: closing our own connections is what tells the ranks that
            # are no neighbours of the dead one.
            self.abort(str(error))
            failure = error
        except BaseException as error:
            failure = error
        with self._lock:
            self._pending -= 1
        if failure is None:
            work.set_result(result)
        else:
            work.set_exception(failure)
            failure = None  # its traceback holds this frame, and the frame would hold it


def usable_backends() -> tuple[Backend, ...]:
    """What this process can use, best first."""
    import importlib.util
    import sys

    backends = []
    try:
        from elastic_driver import native_loader

        native_loader.load()
        backends.append(Backend.NATIVE)
    except ImportError as error:
        _log.debug("the native backend cannot be used: %s", error)
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        backends.append(Backend.TORCH)
    forced = os.environ.get("ELASTIC_DRIVER_BACKEND", "")
    if forced:
        backends = [backend for backend in backends if backend == forced]
    return tuple(backends)
