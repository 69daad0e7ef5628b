"""One round of this process: its place, its engine, and the thread that watches the driver.

Owns the engine's life (choice, connection, abort, teardown) and the counters and facts of the round. Only this module
assigns its attributes. Does not know how a round is joined (runtime.py), nor the purpose of operations.

Time limits: HOROVOD_GLOO_TIMEOUT_SECONDS bounds only the building of contexts. A collective's clock starts when this
rank calls it, so that limit would end healthy jobs whose peers compute for longer; and the driver reports a dead peer
within milliseconds anyhow. Collectives get ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from elastic_driver.errors import HorovodInternalError, RendezvousError, in_words, with_path
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import DiskReport, RoundAssignment
from elastic_driver.worker.engine.choice import ConnectableEngine, Limits, make_engine
from elastic_driver.worker.engine.gate import WriteGate
from elastic_driver.worker.engine.protocol import Engine, Operation, Result
from elastic_driver.worker.engine.seal import Seal
from elastic_driver.worker.rounds.advice import advice
from elastic_driver.worker.rounds.ending import end_process
from elastic_driver.worker.rounds.meeting import RoundClient, RoundMeeting
from elastic_driver.worker.rounds.patience import Patience
from elastic_driver.worker.rounds.watch import Watch
from elastic_driver.worker.settings import worker_settings

_log = logging.getLogger("elastic_driver.worker")


# How far the driver's report of a death may lag behind the error of the connection that died with it: milliseconds, or
# tenths of a second on a busy machine. An error of the user's own ends the worker this much later.
_WORD_S = 2.0
# Between two checks of the connections meanwhile.
_LOOK_S = 0.02
# Seconds between two checks for a broken round, while this thread waits for others of this process.
_PATIENCE_S = 0.1
# How long operations in flight may take to end in a broken round. They take milliseconds; a longer one is stuck, and
# may write at any time.
QUIESCE_S = 5.0
_LEFT = "this rank has left the round"
_STUCK_EXIT_CODE = 70  # EX_SOFTWARE, like the driver's own internal errors


@dataclass(frozen=True, slots=True)
class TimelineSettings:
    """Settings of HOROVOD_TIMELINE and HOROVOD_TIMELINE_MARK_CYCLES: the file, if any, and whether to mark cycles."""

    path: str = ""
    mark_cycles: bool = False


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """The facts that a member shares when it enters a round.

    Attributes:
        local_size: members on its host.
        devices: facts about its devices, by the name of their lane (devices.py).
    """

    local_size: int
    devices: dict[str, Any]


class RoundCompanion(Protocol):
    """An object that lives as long as a round, beside its engine: a framework's process group."""

    def abort(self, reason: str) -> None:
        """End blocked calls, because the round is broken. Any thread may call it; never blocks."""

    def quiesce(self, limit_s: float) -> None:
        """After abort(): block until it no longer writes to any tensor, as far as that can be seen."""

    def is_cut(self) -> bool:
        """Return whether it has lost a member."""

    def close(self) -> None:
        """Close it in the training thread: all members have left the round, or it is broken."""

    def free(self) -> None:
        """Free resources that take time, in a thread of its own."""

    def abandon(self) -> None:
        """In a forked child: leave the parent's resources untouched, now and when this object is deleted."""


class Context:
    """One round of this process, from its assignment to its teardown.

    Main thread: ``open``, ``engine``, ``close``, ``join``. The watch thread calls ``on_*``. Any of them may call
    ``abort``.
    """

    def __init__(
        self,
        assignment: RoundAssignment,
        *,
        worker: WorkerId | None,
        address: str,
        limits: Limits,
        client: RoundClient | None,
        timeline: TimelineSettings = TimelineSettings(),
        disk: Callable[[], DiskReport | None] = lambda: None,
        leave_listeners: Collection[Callable[[], None]] = (),
    ) -> None:
        self.assignment = assignment
        self.slot = assignment.slot
        self.limits = limits
        self._disk = disk
        self._members: Sequence[MemberFacts] = ()
        self._joins = 0
        self._finished_before: int | None = None  # operations before the restore point; None without a training
        self._restore_point_at: float | None = None  # seconds of time.monotonic(); None: no training
        self.seal = Seal(worker_settings().ranks_key, assignment.round_id)
        self._calls: dict[tuple[int, str], int] = {}
        self._address = address
        self._client = client
        self._timeline = timeline
        self.writing = WriteGate()  # entered to copy a result to its caller's memory
        # Entered for operations that form one for their caller: half of them would not be a valid state.
        self.wholes = WriteGate()
        self._lock = threading.Lock()  # guards _broken, _engine, _closing, _companions
        self._broken = ""
        self._broke = threading.Event()  # wakes threads that wait for the driver's report
        self._companions: list[RoundCompanion] = []
        self._engine: ConnectableEngine | None = None
        self._closing = False
        self._hosts_updated = False
        self._update_reason = ""
        self._leave_listeners = leave_listeners
        self._ready: Future[None] = Future()
        self._watch = Watch(client, worker, assignment.round_id, self) if client is not None and worker else None
        # Daemons for the watch thread's reason. The first ends when the engine is connected or has failed; the second
        # frees it.
        number = assignment.round_id
        self._opener = threading.Thread(target=self._connect, name=f"elastic-open-{number}", daemon=True)
        self._closer = threading.Thread(target=self._teardown, name=f"elastic-close-{number}", daemon=True)

    def open(self) -> None:
        """Start the engine and connect to the peers. Blocks until done.

        Raises:
            HorovodInternalError: a peer is gone, the driver ended the round, or the time limit has passed.
        """
        if self._watch is not None:
            self._watch.start()
        if self.slot.size == 1:
            self._connect()
        else:
            self._opener.start()
        self._ready.result()
        self._begin_timeline()

    def _begin_timeline(self) -> None:
        """Start the trace, as Horovod does on rank 0 only. Later rounds do not overwrite the first one's file."""
        path = self._timeline.path
        if not path or self.slot.rank != 0:
            return
        if os.path.exists(path) and self.assignment.round_id > 1:
            path += f".{self.assignment.round_id}"
        try:
            self.engine.start_timeline(path, mark_cycles=self._timeline.mark_cycles)
        except OSError as error:  # as in Horovod: no reason to end the training, least of all in a later round
            _log.warning(
                "elastic_driver: cannot write the timeline requested by HOROVOD_TIMELINE: %s", with_path(error)
            )

    @property
    def engine(self) -> Engine:
        """The round's engine.

        Raises:
            HorovodInternalError: there is none, because the round is broken or over.
        """
        engine = self._engine
        if engine is None:
            raise self._error()
        return engine

    @property
    def address(self) -> str:
        """Address of this machine, on which the worker listens for the others."""
        return self._address

    @property
    def meeting(self) -> RoundMeeting:
        """Exchange of values between members outside of collectives; only in rounds of several members."""
        return RoundMeeting(self._client, self.assignment.round_id, self.limits.build_s)

    @property
    def hosts_updated(self) -> bool:
        """Whether members have to leave at the next commit, by the driver's last notice."""
        return self._hosts_updated

    @property
    def update_reason(self) -> str:
        """The reason in the last notice."""
        return self._update_reason

    @property
    def homogeneous(self) -> bool:
        """Whether all hosts have the same number of members; known once the round is entered."""
        return len({member.local_size for member in self._members}) <= 1

    @property
    def devices(self) -> list[dict[str, Any]]:
        """Each member's device facts, by rank; empty before the round is entered."""
        return [member.devices for member in self._members]

    def note_members(self, members: Sequence[MemberFacts]) -> None:
        """Store the facts that the members exchanged when they entered the round, by rank."""
        self._members = tuple(members)

    @property
    def joins(self) -> int:
        """How many times all ranks have joined (``hvd.join``)."""
        return self._joins

    def note_join(self) -> None:
        """Count that all ranks have joined."""
        self._joins += 1

    @property
    def steps(self) -> int:
        """Operations finished since the restore point, which a broken round loses. 0 before there is one."""
        return 0 if self._finished_before is None else max(0, self.progress()[0] - self._finished_before)

    @property
    def uncommitted_s(self) -> float:
        """Seconds since the restore point; 0 before there is one."""
        return 0.0 if self._restore_point_at is None else time.monotonic() - self._restore_point_at

    def note_restore_point(self) -> None:
        """Note the restore point. Operations after it are lost if the round breaks; the driver gets their number."""
        self._finished_before = self.progress()[0]
        self._restore_point_at = time.monotonic()

    @property
    def unreachable(self) -> tuple[int, ...]:
        """Ranks that this one could not reach, or whose machines have stopped acknowledging."""
        engine = self._engine
        return () if engine is None else engine.unreachable()

    def check(self) -> None:
        """Raise HorovodInternalError if the round is broken."""
        if self._broken:
            raise self._error()

    def run(self, operation: Operation) -> Result:
        """Run an operation. Blocks until it is done; signals are handled meanwhile.

        Raises:
            HorovodInternalError: a peer is gone, or the round is broken or over.
            MismatchError: the ranks did not submit the same.
            DuplicateNameError: an operation of this name is in flight.
            ValueError: the operation is invalid.
        """
        self.check()
        return self.engine.submit(operation).result()

    def calls_of(self, process_set: int, label: str) -> int:
        """Return how many calls have succeeded, counted alike on all members: after a join they are refused on all."""
        return self._calls.get((process_set, label), 0)

    def note_call(self, process_set: int, label: str) -> None:
        """Count a call that has succeeded."""
        self._calls[process_set, label] = self.calls_of(process_set, label) + 1

    def on_hosts_updated(self, *, leave: bool, reason: str) -> None:
        """Watch thread: react to a new notice."""
        self._update_reason = reason
        self._hosts_updated = leave
        if leave:
            for listener in list(self._leave_listeners):
                try:
                    listener()
                except Exception:
                    _log.exception("round %d: a listener for host updates failed", self.assignment.round_id)

    def disk(self) -> DiskReport | None:
        """Watch thread: return the report on commits on disk."""
        return self._disk()

    def look(self) -> None:
        """Watch thread: check whether to advise the user about forgotten calls."""
        advice().look(self.progress()[0])

    def progress(self) -> tuple[int, bool]:
        """Watch thread: return the operations finished, and whether one waits for other members; connecting counts as
        waiting.
        """
        engine = self._engine
        if engine is None or not self._ready.done():
            return 0, True
        return engine.progress()

    def on_abort(self, reason: str) -> None:
        """Watch thread: react to the driver ending the round."""
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """End the round for this process: blocked, queued and later operations fail.

        The first reason stays. Peers that wait for this process notice by their closed connections.
        """
        # Repeated on each call: a signal handler may have raised in the middle of the first one.
        with self._lock:
            self._broken = self._broken or reason or "aborted"
            engine, companions = self._engine, list(self._companions)
        self._broke.set()
        if engine is not None:
            engine.abort(self._broken)
        for companion in companions:
            companion.abort(self._broken)
        # A build in progress uses no memory of the caller's, so the caller need not wait for its end.
        with contextlib.suppress(InvalidStateError):
            self._ready.set_exception(self._error())

    def attach(self, companion: RoundCompanion) -> None:
        """End this object with the round; at once if that is already broken."""
        with self._lock:
            self._companions.append(companion)
            broken = self._broken
        if broken:
            companion.abort(broken)

    def detach(self, companion: RoundCompanion) -> None:
        """Forget an object that ends by itself."""
        with self._lock, contextlib.suppress(ValueError):
            self._companions.remove(companion)

    def accounts_for(self, error: BaseException) -> bool:
        """Return whether a companion's error that left the training function is due to the round being broken.

        Of a lost peer frameworks raise a plain RuntimeError, as a user's own code may. So the round decides: it is
        broken, or a companion has lost a connection; a report in flight is waited for, for a moment.
        """
        with self._lock:
            companions = list(self._companions)
        if not companions or not _is_of_runtime(error):
            return False
        deadline = time.monotonic() + _WORD_S
        while not self._broken and not any(companion.is_cut() for companion in companions):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._broke.wait(min(_LOOK_S, left_s))
        return True

    def settle(self) -> None:
        """Complete this process's operations in flight, with the members, as all leave the round; reject later ones.

        Raises:
            HorovodInternalError: one cannot be completed: a peer is lost, or has left without submitting it.
        """
        self.check()
        self.wholes.shut(_LEFT)
        while not self.wholes.wait(_PATIENCE_S):
            self.check()
        self.engine.leave().result()

    def linger(self, timeout_s: float) -> None:
        """Like ``settle``, for a process that leaves whatever its peers do, so that no peer's connection closes in a
        call.

        Operations submitted by all members are completed, however long that takes. For a peer that has not submitted
        one, or does not leave, this waits until none of this process's operations has finished for ``timeout_s``.
        """
        if self._broken:
            return
        with contextlib.suppress(Exception):  # the peers may be gone for good: that is not a failure of this process
            engine, handle = self.engine, None
            self.wholes.shut(_LEFT)
            patience = Patience(timeout_s, self.limits.collective_s, time.monotonic())
            while True:
                if handle is None and self.wholes.wait(0.0):
                    handle = engine.leave()
                if handle is not None and handle.done():
                    return
                # In this order: an operation no longer carried out has been counted.
                carries_out = engine.carries_out()
                if patience.is_over(time.monotonic(), finished=engine.own_finished(), carries_out=carries_out):
                    return
                time.sleep(0.0005)  # a handle has no timed wait

    def quiesce(self) -> None:
        """After abort(): block until no operation of the round writes to this process's memory any more.

        Ends the process if that fails: continuing would mean training on overwritten parameters.
        """
        with self._lock:
            engine, companions = self._engine, list(self._companions)
        if engine is not None and not engine.quiesce(QUIESCE_S):
            self.end_process()
        for companion in companions:
            companion.quiesce(QUIESCE_S)
        self.end_writing()

    def end_writing(self) -> None:
        """Stop threads from copying results to their callers' memory, and wait for those that do (as in quiesce())."""
        self.writing.shut(self._broken or "the round is over")
        if not self.writing.wait(QUIESCE_S):
            self.end_process()

    def end_process(self) -> NoReturn:
        """End the process, because an operation of this round may still write to its memory."""
        end_process(
            f"elastic_driver: an operation of round {self.assignment.round_id} did not end within {QUIESCE_S:g} s "
            "of the round's end; ending this process, because that operation could overwrite its parameters at "
            "any time",
            _STUCK_EXIT_CODE,
        )

    def close(self) -> None:
        """Start the teardown, which a thread finishes. Returns at once. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if not self._ready.done():
            self.abort("the library was shut down in this process")
        if self._watch is not None:
            self._watch.stop()
        with self._lock:
            self._broken = self._broken or "the round is over in this process"
            companions = list(self._companions)
        for companion in companions:
            companion.close()
        try:
            self._closer.start()
        except RuntimeError:  # no thread can be started while the interpreter exits
            self._teardown()

    def _teardown(self) -> None:
        if self._opener.ident is not None:
            self._opener.join()
        with self._lock:
            engine, self._engine = self._engine, None  # frees what it holds, since this object may live on
            companions, self._companions = self._companions, []
        for companion in companions:
            companion.free()
        if engine is not None:
            try:
                engine.close()
            except Exception:
                _log.exception("round %d: the teardown of its engine failed", self.assignment.round_id)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after close(); return True if they have ended."""
        done = True
        if self._watch is not None:
            done = self._watch.join(timeout_s)
        if self._closer.ident is not None:
            self._closer.join(timeout_s)
            done = done and not self._closer.is_alive()
        return done

    def abandon(self) -> None:
        """In a forked child: leave the parent's resources untouched, now and when this object is deleted."""
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        if self._engine is not None:
            self._engine.abandon()
        for companion in self._companions:
            companion.abandon()

    def _error(self) -> HorovodInternalError:
        return HorovodInternalError(f"cannot continue: {self._broken}")

    def _connect(self) -> None:
        try:
            engine = make_engine(self.assignment, self._address, self.limits, self.seal)
            with self._lock:
                self._engine = engine
                broken = self._broken
            if broken:
                engine.abort(broken)
            engine.connect(self.meeting, timeout_s=self.limits.build_s)
        except (HorovodInternalError, RendezvousError, OSError) as error:
            self.abort(f"cannot connect to the peers: {in_words(error)}")
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                self._ready.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self._ready.set_result(None)


def _is_of_runtime(error: BaseException | None) -> bool:
    """Return whether the error, or a cause of it, is a RuntimeError: frameworks wrap their own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RuntimeError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
