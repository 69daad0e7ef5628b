"""Joining and leaving rounds.

Owns the process's one ``Runtime``, its rendezvous client, and what fork and exit do to it and to the current round
(current.py). A process not started by elasticrun (without ELASTIC_DRIVER_RENDEZVOUS in its environment) is a rank of a
job started by mpirun or srun (worker/launched/), or a job of one: rank 0 of size 1, no network.

A process that is started while a round runs joins late: ``init()`` returns at once, with the place that the driver has
planned, and the round is joined at the first collective or at the entry of ``elastic.run``. So the members keep
training while it builds its model, and not only during its imports.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

from elastic_driver.errors import (
    ForkedProcessError,
    HorovodInternalError,
    RendezvousClosedError,
    RendezvousError,
    SettingsError,
    StaleRoundError,
)
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.environment import NCCL
from elastic_driver.rendezvous.messages import (
    DiskReport,
    JobOver,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    PublishReply,
    PublishRequest,
    Removed,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.system.tether import tie_this_process
from elastic_driver.words import Backend, ReadyCause
from elastic_driver.worker.engine.choice import Limits, usable_backends
from elastic_driver.worker.launched import across
from elastic_driver.worker.launched.launcher import Launch, launch_of
from elastic_driver.worker.rounds import canary, devices, leaving, stacks, vitals
from elastic_driver.worker.rounds import process_sets as sets
from elastic_driver.worker.rounds.advice import advice
from elastic_driver.worker.rounds.context import QUIESCE_S, Context, TimelineSettings
from elastic_driver.worker.rounds.current import CurrentRound, current_round
from elastic_driver.worker.rounds.meeting import RoundClient
from elastic_driver.worker.rounds.watch import poll_s
from elastic_driver.worker.settings import (
    WorkerSettings,
    read_worker_settings,
    use_worker_settings,
    worker_settings,
)

if TYPE_CHECKING:
    from elastic_driver.worker.launched.job import LaunchedJob

_log = logging.getLogger("elastic_driver.worker")

# How long a leaving process waits for its peers to finish the same last collective. They finish within milliseconds of
# each other; a rank that leaves alone is held up for this long at most.
LINGER_S = 2.0
# Teardown of contexts at exit: measured in tens of milliseconds. The interpreter must never hang in it.
_JOIN_S = 5.0


class DriverClient(RoundClient, Protocol):
    """The part of a rendezvous client that this module uses."""

    def next_round(self, request: NextRoundRequest, *, poll_s: float = ...) -> NextRoundReply:
        """Report READY, again every ``poll_s``, and block until the driver answers."""

    def say_goodbye(self, request: WatchRequest) -> None:
        """Report that this process will send nothing more."""

    def running(self, report: RunningReport) -> None:
        """Report that this process trains."""

    def leave(self, request: LeaveRequest) -> None:
        """Report that this process was asked to leave."""

    def status(self) -> dict[str, Any]:
        """Return the job's state as the driver sees it."""

    def publish(self, request: PublishRequest) -> PublishReply:
        """Ask whether a commit may be written to disk."""

    def close(self) -> None:
        """End every call."""

    def call(self) -> bytes:
        """Return the call that this worker has to run, pickled by the caller of ``elastic_driver.run``."""

    def post_outcome(self, outcome: bytes) -> None:
        """Send the outcome of the call, pickled."""


def _connect(url: str, credential: Credential) -> DriverClient:
    from elastic_driver.rendezvous.client import RendezvousClient
    from elastic_driver.worker.launched.client import JobClient
    from elastic_driver.worker.rounds.owner import owner

    make = JobClient if worker_settings().launched else RendezvousClient
    return make(url, credential, patience_s=worker_settings().patience_s, owner=owner())


def _no_disk() -> None:
    """Report no commits on disk."""


class Runtime:
    """The process as a member of the job. The training thread calls all methods except ask_to_leave()."""

    def __init__(self, current: CurrentRound) -> None:
        self._current = current
        self._client: DriverClient | None = None
        self._worker: WorkerId | None = None
        self._backends: tuple[Backend, ...] = ()
        self._after_round = 0
        self._retired: list[Context] = []
        self._left_by_exception = False
        self._begins_another = False  # a training has ended, and no report of another was sent since
        self._disk: Callable[[], DiskReport | None] = _no_disk
        self._timeline = TimelineSettings()
        self._launched: LaunchedJob | None = None
        self._is_through_mpi = False
        self._has_said_fixed = False
        self._is_forked = False  # forked from a process that is, or was, a worker

    @property
    def is_launched(self) -> bool:
        """Whether this is a rank of a job started by mpirun or srun, whose ranks never change."""
        return self._launched is not None

    @property
    def is_through_mpi(self) -> bool:
        """Whether an MPI launcher started this job, or a communicator was given."""
        return self._is_through_mpi

    def say_if_fixed(self) -> None:
        """Print once that this job's ranks never change, where users might expect otherwise."""
        if self._launched is None or self._has_said_fixed or self._launched.slot.rank != 0:
            return
        self._has_said_fixed = True
        by = self._launched.launch.launcher if self._launched.launch is not None else "MPI"
        print(
            f"elastic_driver: this job was started by {by}, so its ranks are fixed: if one is lost, elastic.run "
            "raises HorovodInternalError (elasticrun would continue without it)",
            file=sys.stderr,
            flush=True,
        )

    def note_exception(self, *, raised: bool) -> None:
        """Record whether an exception ended the training function: then exit does not wait for peers."""
        self._left_by_exception = raised

    def init(self, comm: object = None) -> None:
        """Join the job. Blocks until there is a round for this process. Does nothing if it is in one.

        Args:
            comm: as in the function :func:`init`.
        """
        if self._current.initialized:
            return
        self._refuse_in_a_child()
        # Now, not when a round is joined: programs set variables for this call only.
        settings = read_worker_settings()
        if settings.warm:
            # It has no place in the job: it would begin a training of its own and overwrite the job's files.
            raise SettingsError(
                "this process was to be held at its start, but its Python did not import the sitecustomize that "
                "holds it; use --no-preload"
            )
        self._timeline = TimelineSettings(settings.timeline, settings.timeline_mark_cycles)
        _install_exit()
        vitals.begin(settings.vitals)
        if settings.restarted:
            # It was started as a worker to be restarted, and is none from here on. Process groups made later, by
            # anyone, read these variables.
            os.environ.update(NCCL)
        if settings.rendezvous:
            _refuse_comm(comm)
            tie_this_process()
            leaving.install(self.ask_to_leave)
        else:
            self._meet(settings, comm)
        if not self._after_round and settings.planned is not None:
            self._current.plan(settings.planned, self._join_outside_of_run)
            return
        cause = ReadyCause.REINIT if self._after_round else ReadyCause.START
        self._join_round(cause, commits=0, detail="")

    def _refuse_in_a_child(self) -> None:
        """Refuse init() in a forked process: with its parent's credentials it would take the parent's place in the job.

        Without a driver and a launcher there is no such place, and the process becomes a job of one.
        """
        if self._is_forked and (read_worker_settings().rendezvous or launch_of(os.environ) is not None):
            self._current.refuse_if_forked()
            raise ForkedProcessError(
                "cannot init in a process that was forked from a worker: it would take the worker's place in the "
                "job; rank() and size() work without init()"
            )
        self._current.drop_inherited()

    def _meet(self, settings: WorkerSettings, comm: object) -> None:
        """Find the other ranks of a job without a driver, and use the settings they agree on."""
        launch = launch_of(os.environ)
        if self._launched is None:
            self._launched, self._is_through_mpi = _launched_job(settings, launch, comm)
        if self._launched is not None:
            self._worker = self._launched.worker
            use_worker_settings(self._launched.adapt(settings))

    def join_late(self) -> bool:
        """Join a round now if init() has deferred it.

        Returns:
            Whether this process has another place than init() announced.
        """
        planned = self._current.drop_plan()
        if planned is None:
            return False
        self._join_round(ReadyCause.START, commits=0, detail="")
        return self._current.context.slot != planned

    def _join_outside_of_run(self) -> None:
        self._refuse_outside_of_run()
        self.join_late()

    def _refuse_outside_of_run(self) -> None:
        """Check before joining, where a failure disturbs no other rank: the others would wait for a member in
        their sync.
        """
        client = self._new_client()
        try:
            workers = client.status().get("workers", ())
        finally:
            client.close()
        if any(worker.get("running") for worker in workers):
            raise RuntimeError(
                "a collective operation was called outside of elastic.run, in a worker that joins a running job: "
                "the other workers will never take part in it. Move it into the training function; values that "
                "all ranks must start with belong in the state, which is synced"
            )

    def ask_to_leave(self, name: str) -> bool:
        """Ask the driver to remove this process from the job at the next commit, because of a signal of this name.

        Called in a thread of its own: blocks until the driver has answered, which may be stopped.

        Returns:
            False if the process has to end at once instead: it has left the job, there was no round yet, or the driver
            is stopping it.
        """
        if not self._current.initialized and self._client is None:
            return False
        worker = self._worker or self._own_id()
        client = self._new_client()
        try:
            client.leave(LeaveRequest(worker, name))
        except RendezvousError:
            return False
        finally:
            client.close()
        return True

    def shutdown(self, *, exiting: bool = False) -> None:
        """Leave the round and free everything. ``init()`` may follow, unless the process is ending."""
        self._current.drop_plan()
        self._current.drop_inherited()
        sets.forget_all()
        context = self._current.joined
        if context is None:
            if exiting and self._launched is not None:
                self._launched.close(wait_for_others=False)
            return
        if not self._left_by_exception:
            context.linger(LINGER_S)
        try:
            if not exiting:
                self._current.deliver(context)
        finally:
            self._end(context, exiting=exiting)

    def _end(self, context: Context, *, exiting: bool) -> None:
        if not exiting:
            self.break_round("the library was shut down in this process")
        self._current.leave()
        vitals.enter_round(0, -1)
        self._retire(context)
        for retired in self._retired:
            if not retired.join(_JOIN_S):
                _log.warning("elastic_driver: round %d: its threads did not end in time", retired.assignment.round_id)
        self._retired.clear()
        if self._client is not None:
            if self._worker is not None:
                # The process may run for hours without the library, and other exit handlers take time: it must not be
                # mistaken for a frozen one.
                round_id = context.assignment.round_id
                disk = self._disk()
                goodbye = WatchRequest(self._worker, round_id, 0, leaving=not exiting, exiting=exiting, disk=disk)
                with contextlib.suppress(RendezvousError):
                    self._client.say_goodbye(goodbye)
            self._client.close()
            self._client = None
        if exiting and self._launched is not None:
            self._launched.close(wait_for_others=not self._left_by_exception)

    def reset(self, cause: ReadyCause, *, commits: int, detail: str, where: str = "", raised: bool = False) -> None:
        """Leave the current round and join the next.

        Args:
            cause: the cause.
            commits: of the state at its restore point.
            detail: the reason in words.
            where, raised: origin of an error, as in NextRoundRequest.

        Raises:
            SystemExit: the driver no longer has a place for this process, or the job is over.
        """
        if cause is ReadyCause.INTERNAL_ERROR:
            self.break_round(detail)
        self._join_round(cause, commits=commits, detail=detail, where=where, raised=raised)

    def break_round(self, reason: str) -> None:
        """End the current round for this process. Blocks until no operation of it writes to memory any more.

        Ends the process if that takes longer than 5 s.
        """
        self._current.context.abort(reason)
        self._quiesce(self._current.context)

    def settle_round(self) -> None:
        """Complete the operations in flight in the current round, with all members; no result is written after that.

        Raises:
            HorovodInternalError: an operation cannot be completed.
            Exception: a result cannot be written.
        """
        context = self._current.context
        context.settle()
        self._current.deliver(context)
        context.end_writing()

    @staticmethod
    def _quiesce(context: Context) -> None:
        context.quiesce()
        if not devices.quiesce(QUIESCE_S):
            context.end_process()

    def note_end_of_training(self) -> None:
        """Record that this process's next training is another one, with its own commits."""
        self._begins_another = True

    def report_running(self, commits: int) -> None:
        """Report to the driver that this process trains.

        Raises:
            HorovodInternalError: the round has passed.
        """
        context = self._current.context
        context.note_restore_point()
        if self._client is None or self._worker is None:
            return
        round_id = context.assignment.round_id
        try:
            self._client.running(RunningReport(self._worker, round_id, commits, self._begins_another))
            self._begins_another = False
        except StaleRoundError as error:
            raise HorovodInternalError(f"the driver continued without this worker: {error}") from error

    def report_disk(self, report: Callable[[], DiskReport | None]) -> None:
        """Set the function that gives the report on commits on disk; it may be called in any thread."""
        self._disk = report

    def abandon(self) -> None:
        """After fork, in the child: forget all but the numbers, without touching the parent's sockets and threads."""
        is_forked = self._is_forked or self._after_round > 0 or self._current.initialized or self._launched is not None
        is_through_mpi = self._is_through_mpi
        for context in self._retired:
            context.abandon()
        self._current.abandon()
        if self._launched is not None:
            self._launched.abandon()
        self.__init__(self._current)  # type: ignore[misc]
        self._is_forked, self._is_through_mpi = is_forked, is_through_mpi

    def _retire(self, context: Context) -> None:
        context.close()
        self._retired.append(context)

    def _join_round(
        self, cause: ReadyCause, *, commits: int, detail: str, where: str = "", raised: bool = False
    ) -> None:
        limits = Limits.of(worker_settings())
        while True:
            assignment = self._ask(cause, commits=commits, detail=detail, where=where, raised=raised)
            old = self._current.leave()
            if old is not None:
                # Only now: all members have left it (the driver has answered), so closing connections cannot disturb a
                # peer in its last collective. The old communication thread does the work meanwhile.
                self._retire(old)
            self._retired = [retired for retired in self._retired if not retired.join(0)]
            context = self._open(assignment, limits)
            self._after_round = assignment.round_id
            self._current.enter(context)
            try:
                context.open()
                sets.enter_round(context)
                vitals.enter_round(assignment.round_id, assignment.slot.rank)
                advice().enter_round(self._advised_rank(assignment), may_change=worker_settings().may_change)
                break
            except HorovodInternalError as error:
                if self._launched is not None:
                    self._current.leave()
                    self._retire(context)
                    raise
                _log.info("elastic_driver: round %d: %s", assignment.round_id, error)
                cause, detail, where, raised = ReadyCause.INTERNAL_ERROR, str(error), "", False
                self.break_round(detail)
            except BaseException:
                self._current.leave()
                self._retire(context)
                raise
        self._current.tell_of_change()

    def _advised_rank(self, assignment: RoundAssignment) -> int:
        """Return the rank for Advice.enter_round. Without a driver for the ranks, no change can occur."""
        return -1 if self._worker is None or self._launched is not None else assignment.slot.rank

    def _open(self, assignment: RoundAssignment, limits: Limits) -> Context:
        # A client of its own: closing it ends the waits of the round's threads, and nothing else.
        client = None if self._worker is None else self._new_client()
        return Context(
            assignment,
            worker=self._worker,
            address=assignment.address,
            limits=limits,
            client=client,
            timeline=self._timeline,
            disk=lambda: self._disk(),  # may be set later
            leave_listeners=self._current.leave_listeners,
        )

    def _say(self, text: str) -> None:
        print(f"elastic_driver: worker {self._worker} {text}", file=sys.stderr, flush=True)

    def _own_id(self) -> WorkerId:
        credential = worker_settings().credential
        assert credential is not None
        assert credential.identity.worker is not None
        return credential.identity.worker

    def _new_client(self) -> DriverClient:
        settings = worker_settings()
        assert settings.credential is not None  # every process with a driver has one
        return _connect(settings.rendezvous, settings.credential)

    def _ask(self, cause: ReadyCause, *, commits: int, detail: str, where: str, raised: bool) -> RoundAssignment:
        if not worker_settings().rendezvous:
            return RoundAssignment(
                round_id=self._after_round + 1,
                slot=SlotInfo(0, 1, 0, 1, 0, 1),
                sync=True,
                commits=commits,
                backend=Backend.NATIVE,
            )
        if self._worker is None:
            self._worker = self._own_id()
        if self._client is None:
            self._client = self._new_client()
            self._backends = usable_backends()
        old = self._current.joined
        request = NextRoundRequest(
            worker=self._worker,
            after_round=self._after_round,
            commits=commits,
            cause=cause,
            detail=detail[:2000],
            backends=self._backends,
            pid=os.getpid(),
            thread=canary.thread_id(),
            steps=old.steps if old is not None else 0,
            where=where[:2000],
            raised=raised,
            unreachable=old.unreachable if old is not None and cause is ReadyCause.INTERNAL_ERROR else (),
            uncommitted_s=old.uncommitted_s if old is not None and cause is ReadyCause.INTERNAL_ERROR else 0.0,
        )
        try:
            reply = self._client.next_round(request, poll_s=poll_s())
        except RendezvousClosedError as error:
            if self._launched is not None:
                raise
            self._say(f"ends: {error}")
            reply = JobOver(str(error))
        match reply:
            case RoundAssignment():
                return reply if self._launched is None else self._launched.place(reply)
            case Removed():
                self._say(f"has no slot in the next round ({reply.reason}); it exits with code 0")
            case JobOver():
                # The driver itself reports why the job is over, once for all workers.
                _log.info("elastic_driver: worker %s ends: the job is over (%s)", self._worker, reply.reason)
        self.note_exception(raised=True)
        raise SystemExit(0)


_runtime = Runtime(current_round())
_exit_pid = 0


def runtime() -> Runtime:
    """Return the process's one Runtime."""
    return _runtime


def _install_exit() -> None:
    global _exit_pid
    if _exit_pid == 0:
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_runtime.abandon)
    _exit_pid = os.getpid()
    stacks.print_at_the_end()


def _at_exit() -> None:
    if os.getpid() != _exit_pid:
        return
    if getattr(sys, "last_value", None) is not None:
        _runtime.note_exception(raised=True)
    with contextlib.suppress(Exception):
        _runtime.shutdown(exiting=True)


def _launched_job(settings: WorkerSettings, launch: Launch | None, comm: object) -> tuple[LaunchedJob | None, bool]:
    """Return this process's job without a driver, or None if it is alone; and whether MPI is involved.

    Raises:
        SettingsError: comm cannot be used by this process, or the ranks cannot meet.
    """
    if launch is None and comm is None:
        return None, False
    from elastic_driver.worker.launched.job import meet, meet_in  # late: most workers have a driver

    if across.is_communicator(comm):
        return meet_in(comm, launch, settings), True
    ranks = _ranks_in(comm)
    if launch is None:
        if ranks not in (None, (0,)):
            raise SettingsError(f"cannot init with comm={comm!r}: this process was started alone (no mpirun, no srun)")
        return None, False
    return meet(launch, ranks, settings), launch.is_mpi


def _ranks_in(comm: object) -> tuple[int, ...] | None:
    """Return a list of ranks; None for all.

    Raises:
        SettingsError: it is not a list of ranks.
    """
    if comm is None:
        return None
    try:
        ranks = tuple(map(index, comm))  # type: ignore[call-overload]
    except TypeError:
        raise SettingsError(
            f"cannot init with comm of type {type(comm).__name__}: expected an mpi4py communicator, or ranks"
        ) from None
    return ranks or None


def _refuse_comm(comm: object) -> None:
    """Reject comm: under a driver the ranks cannot be chosen."""
    if comm is not None and (across.is_communicator(comm) or _ranks_in(comm) is not None):
        raise SettingsError(
            "cannot init with comm: the job consists of all processes that elasticrun started; for some of them "
            "use process sets, or start the job with mpirun"
        )


def init(comm: object = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Join the job. Blocks until there is a round with this process in it.

    Args:
        comm: in a job started by mpirun or srun: the ranks that form the job, as a communicator of mpi4py or a list of
            ranks; each of them calls init() with the same, the others with one of theirs, or not at all. None or an
            empty list: all. Under elasticrun the job is always all processes.
        process_sets: initial process sets, the same on all ranks. Unlike those of ``add_process_set`` they may name
            ranks that do not exist yet. "dynamic" is accepted for Horovod's sake: sets can always be added.

    Raises:
        ForkedProcessError: this process was forked from a worker of a job, whose place it would take.
        SettingsError: comm was given and cannot be used, the environment is not one of elasticrun's, or the ranks
            started by mpirun or srun cannot meet.
        ValueError: a process set is given twice.
        RendezvousError: the driver, or rank 0, cannot be reached; or a required rank is missing, or has ended.
        HorovodInternalError: the ranks started by mpirun or srun cannot connect.
        SystemExit: the driver has no place for this process, or the job is over.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'cannot init with process_sets={process_sets!r}: give a list of ProcessSet, or "dynamic"')
    if not current_round().initialized:
        sets.expect([] if process_sets is None or isinstance(process_sets, str) else process_sets)
    _runtime.init(comm)


def shutdown() -> None:
    """Leave the job and free the library's resources. Does nothing before ``init()``."""
    _runtime.shutdown()


def new_client() -> DriverClient:
    """Make a client of the driver for requests outside of rounds. Only in a process with a driver."""
    return runtime()._new_client()
