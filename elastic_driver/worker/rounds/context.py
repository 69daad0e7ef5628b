"""One round as this process sees it: its place, its engine, and the thread that watches the driver.

Owns the engine's life: which one it is, its connecting, its end by force and its teardown; and what is counted and
known of the round while it lasts. Nobody else assigns its attributes. Does not know how a round is joined (runtime.py),
nor what operations are for.

Time limits: HOROVOD_GLOO_TIMEOUT_SECONDS bounds the building of contexts only. A collective's clock starts when this
rank calls it, so the same limit there would end healthy jobs whose peers compute longer than that; and a dead peer
is announced by the driver within milliseconds anyhow. Collectives get ELASTIC_DRIVER_COLLECTIVE_TIMEOUT_S.
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
from elastic_driver.rendezvous.messages import DiscReport, RoundAssignment
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


# How long the driver's word on a death may be behind an error of the connection that died with it: it comes in
# milliseconds, on a busy machine in tenths of a second. An error of the user's own ends the worker this much later.
_WORD_S = 2.0
# Between two looks at the connections meanwhile.
_LOOK_S = 0.02
# Seconds between two checks for a broken round, while this thread waits for others of this process.
_PATIENCE_S = 0.1
# How long what is under way in a broken round may take to end. It takes milliseconds; whatever takes longer is stuck,
# and may write at any time.
QUIESCE_S = 5.0
_LEFT = "this rank has left the round"
_STUCK_EXIT_CODE = 70  # EX_SOFTWARE, as the driver's own internal errors


@dataclass(frozen=True, slots=True)
class TimelineSettings:
    """What HOROVOD_TIMELINE and HOROVOD_TIMELINE_MARK_CYCLES say: a file, if any, and whether cycles are marked."""

    path: str = ""
    mark_cycles: bool = False


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """What a member says of itself when it enters a round.

    Attributes:
        local_size: members on its host.
        devices: of its devices, by the name that their lane is registered with (devices.py).
    """

    local_size: int
    devices: dict[str, Any]


class Companion(Protocol):
    """What lives as long as a round, beside its engine: a process group of a framework's."""

    def abort(self, reason: str) -> None:
        """Any thread: the round is broken. Ends what is blocked; never blocks."""

    def quiesce(self, limit_s: float) -> None:
        """After abort(): blocks until it writes into nobody's tensors any more, as far as that can be seen."""

    def is_cut(self) -> bool:
        """Whether it has lost a member."""

    def close(self) -> None:
        """The thread that trains: the round is over, and all members have left it, or it is broken."""

    def free(self) -> None:
        """Frees what takes a while. In a thread of its own."""

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is touched, now or when this object goes."""


class Context:
    """One round of this process, from its assignment to its teardown.

    Main thread: ``open``, ``engine``, ``close``, ``join``. The watch thread calls ``on_*``. ``abort`` may come from any
    of them.
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
        disc: Callable[[], DiscReport | None] = lambda: None,
        leave_listeners: Collection[Callable[[], None]] = (),
    ) -> None:
        self.assignment = assignment
        self.slot = assignment.slot
        self.limits = limits
        self._disc = disc
        self._members: Sequence[MemberFacts] = ()
        self._joins = 0
        self._finished_before: int | None = None  # operations before the restore point; None: no training
        self._restore_point_at: float | None = None  # seconds of time.monotonic(); None: no training
        self.seal = Seal(worker_settings().ranks_key, assignment.round_id)
        self._calls: dict[tuple[int, str], int] = {}
        self._address = address
        self._client = client
        self._timeline = timeline
        self.writing = WriteGate()  # entered by whoever copies a result to where its caller wants it
        # Entered for what is several operations, and one for its caller: half of it would be no state at all.
        self.wholes = WriteGate()
        self._lock = threading.Lock()  # guards _broken, _engine, _closing, _companions
        self._broken = ""
        self._broke = threading.Event()  # wakes who waits for the driver's word
        self._companions: list[Companion] = []
        self._engine: ConnectableEngine | None = None
        self._closing = False
        self._hosts_updated = False
        self._update_reason = ""
        self._leave_listeners = leave_listeners
        self._ready: Future[None] = Future()
        self._watch = Watch(client, worker, assignment.round_id, self) if client is not None and worker else None
        # Daemons for the watch thread's reason. The first ends when the engine stands or cannot; the second frees it.
        number = assignment.round_id
        self._opener = threading.Thread(target=self._connect, name=f"elastic-open-{number}", daemon=True)
        self._closer = threading.Thread(target=self._teardown, name=f"elastic-close-{number}", daemon=True)

    def open(self) -> None:
        """Starts the engine and connects to the peers. Blocks until that is done.

        Raises:
            HorovodInternalError: it cannot be done: a peer is gone, the driver ended the round, the time is up.
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
        """Horovod's rule: the trace is rank 0's. Later rounds do not overwrite the first one's."""
        path = self._timeline.path
        if not path or self.slot.rank != 0:
            return
        if os.path.exists(path) and self.assignment.round_id > 1:
            path += f".{self.assignment.round_id}"
        try:
            self.engine.start_timeline(path, mark_cycles=self._timeline.mark_cycles)
        except OSError as error:  # as in Horovod: no reason to end the training, in a later round least of all
            _log.warning("elastic_driver: cannot write the timeline of HOROVOD_TIMELINE: %s", with_path(error))

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
        """Of this machine, on which the worker listens for the others."""
        return self._address

    @property
    def meeting(self) -> RoundMeeting:
        """How the members tell each other what no collective can carry; only where there are several."""
        return RoundMeeting(self._client, self.assignment.round_id, self.limits.build_s)

    @property
    def hosts_updated(self) -> bool:
        """The driver's notice as this process knows it: members are to leave at the next commit."""
        return self._hosts_updated

    @property
    def update_reason(self) -> str:
        """Why members are to leave, or no longer are: as the last notice says it."""
        return self._update_reason

    @property
    def homogeneous(self) -> bool:
        """Whether all hosts have as many members; known once the round is entered."""
        return len({member.local_size for member in self._members}) <= 1

    @property
    def devices(self) -> list[dict[str, Any]]:
        """What each member says of its devices, by rank; empty before the round is entered."""
        return [member.devices for member in self._members]

    def note_members(self, members: Sequence[MemberFacts]) -> None:
        """Takes what the members have told each other when they entered the round, by rank."""
        self._members = tuple(members)

    @property
    def joins(self) -> int:
        """How often all ranks have joined (``hvd.join``)."""
        return self._joins

    def note_join(self) -> None:
        """All ranks have joined."""
        self._joins += 1

    @property
    def steps(self) -> int:
        """Operations finished since the restore point: what is lost when the round breaks. 0 before there is one."""
        return 0 if self._finished_before is None else max(0, self.progress()[0] - self._finished_before)

    @property
    def uncommitted_s(self) -> float:
        """How long ago the restore point was; 0 before there is one."""
        return 0.0 if self._restore_point_at is None else time.monotonic() - self._restore_point_at

    def note_restore_point(self) -> None:
        """What is finished from here on is lost when the round breaks; the driver is told how much that was."""
        self._finished_before = self.progress()[0]
        self._restore_point_at = time.monotonic()

    @property
    def unreachable(self) -> tuple[int, ...]:
        """Ranks that this one could not reach, or of whose machines nothing was heard any more."""
        engine = self._engine
        return () if engine is None else engine.unreachable()

    def check(self) -> None:
        """Raises HorovodInternalError when the round is broken."""
        if self._broken:
            raise self._error()

    def run(self, operation: Operation) -> Result:
        """Carries an operation out. Blocks until it is done; signals are handled meanwhile.

        Raises:
            HorovodInternalError: a peer is gone, or the round is broken or over.
            MismatchError: the ranks did not submit the same.
            DuplicateNameError: an operation of this name is under way.
            ValueError: the operation itself cannot be.
        """
        self.check()
        return self.engine.submit(operation).result()

    def calls_of(self, process_set: int, label: str) -> int:
        """How often something succeeded, as all members count it: while one has joined it is refused to all."""
        return self._calls.get((process_set, label), 0)

    def note_call(self, process_set: int, label: str) -> None:
        """It has succeeded once more."""
        self._calls[process_set, label] = self.calls_of(process_set, label) + 1

    def on_hosts_updated(self, *, leave: bool, reason: str) -> None:
        """Watch thread: the notice's level changed."""
        self._update_reason = reason
        self._hosts_updated = leave
        if leave:
            for listener in list(self._leave_listeners):
                try:
                    listener()
                except Exception:
                    _log.exception("round %d: a listener to host updates failed", self.assignment.round_id)

    def disc(self) -> DiscReport | None:
        """Watch thread: what the driver is to know of commits on disc."""
        return self._disc()

    def look(self) -> None:
        """Watch thread: the user may have to be told of something that the script has forgotten."""
        advice().look(self.progress()[0])

    def progress(self) -> tuple[int, bool]:
        """Watch thread: operations finished so far, and whether one waits for other members; connecting is waiting."""
        engine = self._engine
        if engine is None or not self._ready.done():
            return 0, True
        return engine.progress()

    def on_abort(self, reason: str) -> None:
        """Watch thread: the driver ended the round."""
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """Ends the round for this process: what blocks fails, what is queued fails, what comes later fails.

        The first reason stays. Peers that wait for this process learn of it by their closed connections.
        """
        # Again each time: a signal's handler may have raised when it was done first.
        with self._lock:
            self._broken = self._broken or reason or "aborted"
            engine, companions = self._engine, list(self._companions)
        self._broke.set()
        if engine is not None:
            engine.abort(self._broken)
        for companion in companions:
            companion.abort(self._broken)
        # A build in progress owns no memory of the caller's, so that the caller need not wait for its end.
        with contextlib.suppress(InvalidStateError):
            self._ready.set_exception(self._error())

    def attach(self, companion: Companion) -> None:
        """Has something end with the round. When that is broken already, it ends now."""
        with self._lock:
            self._companions.append(companion)
            broken = self._broken
        if broken:
            companion.abort(broken)

    def detach(self, companion: Companion) -> None:
        """It ends by itself."""
        with self._lock, contextlib.suppress(ValueError):
            self._companions.remove(companion)

    def accounts_for(self, error: BaseException) -> bool:
        """Whether an error of a companion's that has left the training function comes of the round's being broken.

        A framework says nothing but RuntimeError of a lost peer, as a user's own code may. So the round decides: it is
        broken, or a connection of a companion's is lost; what is on its way is waited for, for a moment.
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
        """Completes what this process has under way, with the members, as all leave the round; refuses what comes.

        Raises:
            HorovodInternalError: something cannot be completed: a peer is lost, or has left without submitting it.
        """
        self.check()
        self.wholes.shut(_LEFT)
        while not self.wholes.wait(_PATIENCE_S):
            self.check()
        self.engine.leave().result()

    def linger(self, timeout_s: float) -> None:
        """As ``settle``, for a process that goes whatever its peers do; so that none sees a connection close under it.

        What all members have submitted is completed, however long that takes. A peer that has not submitted something,
        or does not leave, is waited for until nothing of this process's has been done for as long as ``timeout_s``.
        """
        if self._broken:
            return
        with contextlib.suppress(Exception):  # the peers may be gone for good: that is no failure of this process
            engine, handle = self.engine, None
            self.wholes.shut(_LEFT)
            patience = Patience(timeout_s, self.limits.collective_s, time.monotonic())
            while True:
                if handle is None and self.wholes.wait(0.0):
                    handle = engine.leave()
                if handle is not None and handle.done():
                    return
                # In this order: what is no longer carried out has been counted.
                carries_out = engine.carries_out()
                if patience.is_over(time.monotonic(), finished=engine.own_finished(), carries_out=carries_out):
                    return
                time.sleep(0.0005)  # a handle has no wait with a limit

    def quiesce(self) -> None:
        """After abort(): blocks until nothing of the round writes into this process's memory any more.

        Ends the process where that does not come to pass: to go on would be to train on overwritten parameters.
        """
        with self._lock:
            engine, companions = self._engine, list(self._companions)
        if engine is not None and not engine.quiesce(QUIESCE_S):
            self.end_process()
        for companion in companions:
            companion.quiesce(QUIESCE_S)
        self.end_writing()

    def end_writing(self) -> None:
        """Lets no thread copy results to where they were asked for any more; waits for who does. See quiesce()."""
        self.writing.shut(self._broken or "the round is over")
        if not self.writing.wait(QUIESCE_S):
            self.end_process()

    def end_process(self) -> NoReturn:
        """Ends it, because something of this round cannot be kept from its memory."""
        end_process(
            f"elastic_driver: an operation of round {self.assignment.round_id} did not end within {QUIESCE_S:g} s of "
            "the round's end; this process ends, as that operation could overwrite its parameters at any time",
            _STUCK_EXIT_CODE,
        )

    def close(self) -> None:
        """Begins the teardown, which a thread finishes. Returns at once. Idempotent."""
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
        except RuntimeError:  # no thread can be started any more while the interpreter ends
            self._teardown()

    def _teardown(self) -> None:
        if self._opener.ident is not None:
            self._opener.join()
        with self._lock:
            engine, self._engine = self._engine, None  # what it holds goes with it, and this object may live on
            companions, self._companions = self._companions, []
        for companion in companions:
            companion.free()
        if engine is not None:
            try:
                engine.close()
            except Exception:
                _log.exception("round %d: the teardown of its engine failed", self.assignment.round_id)

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads after close(); True when they have ended."""
        done = True
        if self._watch is not None:
            done = self._watch.join(timeout_s)
        if self._closer.ident is not None:
            self._closer.join(timeout_s)
            done = done and not self._closer.is_alive()
        return done

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is touched, now or when this object goes."""
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        if self._engine is not None:
            self._engine.abandon()
        for companion in self._companions:
            companion.abandon()

    def _error(self) -> HorovodInternalError:
        return HorovodInternalError(f"cannot go on: {self._broken}")

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
    """Whether it, or what it came of, is a RuntimeError: frameworks wrap their own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RuntimeError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
