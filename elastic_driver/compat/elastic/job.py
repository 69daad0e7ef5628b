"""A job whose workers are threads. Its core runs on an event loop of its own, in a thread of its own.

Owns the loop, and the polling of the discovery object. Decides nothing: as in every other job, the core decides which
workers start, which are members, which hosts are blacklisted, and when the job is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from elastic_driver.compat.elastic.threads import CreateWorker, ThreadKeeper, ThreadWorker, slot_info
from elastic_driver.compat.runner.hosts import SlotInfo
from elastic_driver.core.events import (
    Command,
    DiscoveryFailed,
    DismissWorker,
    EndJob,
    Event,
    GiveUpHost,
    HostsDiscovered,
    KillWorker,
    PublishRound,
    Report,
    ReportDying,
    ReportExit,
    ReportResumed,
    SetNotice,
    StartChief,
    StartWorker,
    StopChief,
    StopRequested,
    StopWorker,
    WorkerExited,
    WorkerRunning,
)
from elastic_driver.core.membership import Policy
from elastic_driver.core.state import JobPhase, State
from elastic_driver.discovery.caller import Finder, hosts_of
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous.messages import NextRoundRequest, Notice, RoundAssignment
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import Vitals
from elastic_driver.words import Backend, ExitCode, ReadyCause

# Horovod's constant.
DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
_log = logging.getLogger("elastic_driver.horovod")

Slot = tuple[str, int]
"""Horovod's name for a worker: its host, and the local rank that it was started with."""


class _Unwatched:
    """No liveness checks: the workers are threads of this process."""

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True, leaving: bool = False) -> None:
        pass

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        pass


class ThreadJob:
    """A job whose workers are threads. Its methods may be called by any thread but the loop's.

    Args:
        discovery: lists the hosts; queried in a thread of its own.
        policy: the limits; ``num_proc`` is replaced at the start.
        on_round: called with the places of a new round, before they are published to workers. Called on the loop.
        on_over: called on the loop when the job is over, before its workers have ended.

    Attributes:
        changed: notified after every change of the properties.
        places: worker -> place in the current round.
        results: worker -> its Horovod name, and the exit code and time that its function returned.
        end: how the job ended; None before.
    """

    def __init__(
        self,
        discovery: Finder,
        policy: Policy,
        *,
        on_round: Callable[[list[SlotInfo]], object],
        on_over: Callable[[], object],
    ) -> None:
        self._discovery = discovery
        # For the core, a job whose workers report no commits makes no progress, and these workers cannot report them.
        self._policy = replace(policy, setbacks_limit=sys.maxsize, pause_range_s=(0.0, 0.0))
        self._on_round, self._on_over = on_round, on_over
        self.changed = threading.Condition()
        self.places: dict[WorkerId, SlotInfo] = {}
        self.results: dict[WorkerId, tuple[Slot, tuple[int, float]]] = {}
        self.end: EndJob | None = None
        self._hosts: tuple[Host, ...] | None = None
        self._workers_by_slot: dict[Slot, WorkerId] = {}
        self._slots: dict[WorkerId, SlotInfo] = {}  # the places that they were started with
        self._rounds_seen: dict[WorkerId, int] = {}
        self._gone: set[WorkerId] = set()  # ended for the core; their functions may not have returned yet
        self._asking: set[Future[int]] = set()  # of waiting READY workers; guarded by ``changed``, as is the next
        self._is_closed = False
        self._over = threading.Event()  # ends the polling
        self._clock = JobClock()
        self._tasks = Tasks()
        self._stepper: Stepper | None = None
        self._workers: ThreadKeeper | None = None
        self._rounds: Rounds | None = None
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[EndJob] = self._loop.create_future()
        # Daemons, since a program may drop a driver without stopping it. They end with the job: the loop's after all
        # workers have ended, discovery's once the current call of its object has returned.
        self._thread = threading.Thread(target=self._run, name="elastic-driver-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._discover, name="elastic-driver-discovery", daemon=True).start()

    # --- for other threads -----------------------------------------------------------------------------------------

    @property
    def state(self) -> State | None:
        """The core's state; None before the start."""
        return None if self._stepper is None else self._stepper.state

    @property
    def waits(self) -> bool:
        """Whether the job is waiting for slots, or was not started."""
        state = self.state
        return self.end is None and (state is None or state.phase is JobPhase.WAITING)

    @property
    def has_begun(self) -> bool:
        """Whether the job has ever started a worker."""
        return bool(self._slots)

    @property
    def usable_hosts(self) -> tuple[Host, ...]:
        """The listed hosts that are not blacklisted, in rank order."""
        state = self.state
        if state is None:
            return self._hosts or ()
        return tuple(host for host in state.hosts if not state.blacklist.is_blacklisted(host.name))

    def start(self, num_proc: int, create: CreateWorker) -> None:
        """Start workers once there are so many slots. Does not wait for that."""
        self._call(self._start, num_proc, create)

    def stop(self, reason: str) -> None:
        """End the job, by setting the workers' events. Does not wait for their ends."""
        self._call(self._stop, reason)

    def ready(self, slot: Slot) -> int:
        """Report a worker as READY. Blocks until its round is formed. Returns the round's number; 0 without a place."""
        answer: Future[int] = Future()
        with self.changed:
            if self._is_closed:
                return 0
            self._asking.add(answer)
        self._call(self._take_question, slot, answer)
        try:
            return answer.result()
        finally:
            with self.changed:
                self._asking.discard(answer)

    def slot_of(self, slot: Slot) -> SlotInfo | None:
        """Return a worker's current place, or the planned one before its first round; None without one."""
        worker = self._workers_by_slot.get(slot)
        if worker is None:
            return None
        return self._slots.get(worker) if not self._rounds_seen.get(worker) else self.places.get(worker)

    def join(self) -> None:
        """Block until the job is over and all workers' functions have returned."""
        self._thread.join()

    def _call(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop. Does nothing if the job is over."""
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:
            return

    # --- discovery's thread ----------------------------------------------------------------------------------------

    def _discover(self) -> None:
        while not self._over.is_set():
            event: HostsDiscovered | DiscoveryFailed
            try:
                event = HostsDiscovered(hosts_of(self._discovery.find_available_hosts_and_slots()))
            except DiscoveryError as error:
                event = DiscoveryFailed(str(error))
            except BaseException as error:  # as in Horovod since 0.25: it is queried again after any exception
                event = DiscoveryFailed(f"the discovery object raised {error!r}")
            self._call(self._discovered, event)
            self._over.wait(DISCOVER_HOSTS_FREQUENCY_SECS)

    # --- on the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda loop, context: self._failed(context.get("exception")))
        try:
            self._loop.run_until_complete(self._live())
        finally:
            with self.changed:
                self._is_closed = True
                for answer in self._asking:  # their requests arrived too late
                    if not answer.done():
                        answer.set_result(0)
            self._loop.close()
            with self.changed:
                self.changed.notify_all()

    async def _live(self) -> None:
        keeps = self._loop.create_task(self._clock.keep(lambda stood_s: None))
        end = await self._ended
        self._over.set()
        try:
            self._on_over()
        except Exception:
            _log.exception("cannot stop the rendezvous")
        if self._workers is not None and self._rounds is not None:
            self._rounds.job_over(end.message)
            await self._workers.end()
        if self._stepper is not None:
            self._stepper.catch_up()
            self._stepper.close()
        keeps.cancel()
        await self._tasks.end()

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _discovered(self, event: HostsDiscovered | DiscoveryFailed) -> None:
        if self._stepper is not None:
            self._post(event)
        elif isinstance(event, HostsDiscovered):
            self._hosts = event.hosts
        elif self._hosts is None:
            self._finish(EndJob(ExitCode.BAD_USAGE, event.message))  # as the core does
        self._tell()

    def _post(self, event: Event) -> None:
        if self._stepper is not None:
            self._stepper.post(event)

    def _start(self, num_proc: int, create: CreateWorker) -> None:
        if self.end is not None:
            return
        policy = replace(self._policy, num_proc=num_proc)
        stepper = Stepper(policy, clock=self._clock, carry_out=self._carry_out_all, on_error=self._failed)
        self._workers = ThreadKeeper(create, on_return=self._function_returned, on_exit=self._exited)
        self._rounds = Rounds(
            stepper,
            heartbeats=_Unwatched(),
            progress=Progress(),
            clock=self._clock,
            on_disk=lambda report: None,
            end=lambda: "",
        )
        self._stepper = stepper
        stepper.set_timer()
        if self._hosts is not None:
            stepper.post(HostsDiscovered(self._hosts))

    def _stop(self, reason: str) -> None:
        self._finish(EndJob(ExitCode.SUCCESS, reason))
        self._post(StopRequested(signal.SIGTERM, reason))

    def _finish(self, end: EndJob) -> None:
        if self.end is None:
            self.end = end
            if self._workers is not None:
                self._workers.job_ends()
            self._ended.set_result(end)
            self._tell()

    def _failed(self, error: BaseException | None) -> None:
        _log.error("internal error of the driver", exc_info=error)
        if self._stepper is not None and error is not None:
            self._stepper.fail(error)
        self._finish(EndJob(ExitCode.INTERNAL_ERROR, f"internal error of the driver: {error!r}"))

    def _take_question(self, slot: Slot, answer: Future[int]) -> None:
        self._tasks.start(self._answer(slot, answer))

    async def _answer(self, slot: Slot, answer: Future[int]) -> None:
        round_id = 0
        try:
            round_id = await self._ready(slot)
        finally:
            if not answer.done():
                answer.set_result(round_id)

    async def _ready(self, slot: Slot) -> int:
        worker = self._workers_by_slot.get(slot)
        thread = None if worker is None or self._workers is None else self._workers.living.get(worker)
        if worker is None or thread is None or self._rounds is None or self._stepper is None:
            return 0
        after = self._rounds_seen.get(worker, 0)
        cause = ReadyCause.HOSTS_UPDATED if after else ReadyCause.START
        request = NextRoundRequest(worker, after, 0, cause, "", (Backend.NATIVE,), os.getpid())
        reply = asyncio.ensure_future(self._rounds.next_round(request))
        # The report may come from a thread other than the worker's, so the worker may end meanwhile. A worker that was
        # asked to end checks its event after this has returned.
        await asyncio.wait((reply, thread.over), return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            reply.cancel()
            return 0
        if reply.cancelled():
            return 0
        assignment = reply.result()
        if not isinstance(assignment, RoundAssignment):
            return 0
        self._stepper.report(WorkerRunning(worker, assignment.round_id, 0))
        return assignment.round_id

    def _carry_out_all(self, commands: Sequence[Command], now: float) -> None:
        for command in commands:
            self._carry_out(command)
        self._tell()

    def _carry_out(self, command: Command) -> None:
        assert self._workers is not None
        assert self._rounds is not None
        assert self._stepper is not None
        match command:
            case StartChief() | StopChief():
                raise AssertionError("jobs of this kind have no chief")
            case StartWorker():
                slot = slot_info(command.worker, command.planned)
                self._slots[command.worker] = slot
                self._workers_by_slot[slot.hostname, slot.local_rank] = command.worker
                self._workers.start(command.worker, slot)
            case StopWorker() | KillWorker():
                self._workers.stop(command.worker)
            case DismissWorker():
                self._rounds.dismiss(command.worker, command.reason)
            case PublishRound():
                self.places = {member.worker: slot_info(member.worker, member.slot) for member in command.placed}
                self._on_round(list(self.places.values()))
                self._rounds_seen |= dict.fromkeys(self.places, command.round_id)
                formed = self._stepper.state.round
                assert formed is not None
                nowhere = dict.fromkeys((worker.hostname for worker in formed.members), "")  # they share a process
                self._rounds.publish(formed, command.placed, nowhere)
                _log.info("round %d: %d workers; %s", command.round_id, len(self.places), command.cause)
            case SetNotice():
                self._rounds.notify(Notice(command.version, command.round_id, command.kind, command.reason))
            case Report():
                _log.log(logging.WARNING if command.warning else logging.INFO, "%s", command.text)
            case ReportResumed() | ReportDying() | ReportExit() | GiveUpHost():
                pass
            case EndJob():
                self._finish(command)

    # --- the workers' threads --------------------------------------------------------------------------------------

    def _function_returned(self, worker: WorkerId, slot: SlotInfo, code: int, at: float) -> None:
        """Store a worker's results. If it succeeded without ever being READY, report it as READY first.

        Then it has no work to do: as in Horovod, the job is over once all other workers are READY or have ended.
        """
        key = (slot.hostname, slot.local_rank)
        if code == 0 and not self._rounds_seen.get(worker) and self.ready(key):
            self._call(self._stop, f"worker {worker} exited with code 0 before it was ready")
        self.results[worker] = key, (code, at or time.time())

    def _exited(self, worker: WorkerId, thread: ThreadWorker, code: int) -> None:
        """Report the end of a worker whose function has returned. Called on the loop."""
        assert self._workers is not None
        if worker in self._gone:
            return
        has_failed = bool(code) and not thread.was_stopped
        others = list(self._workers.living.items()) if has_failed and not self._rounds_seen.get(worker) else []
        for other, its_thread in others:
            if other.hostname == worker.hostname and not self._rounds_seen.get(other):
                # As in Horovod, its host is blacklisted with all workers there that have not trained yet. The core
                # would let them finish, but a thread may wait for its event forever: they are reported as ended.
                its_thread.stop()
                self._has_gone(other, code)
        self._has_gone(worker, code)

    def _has_gone(self, worker: WorkerId, code: int) -> None:
        assert self._rounds is not None
        assert self._stepper is not None
        self._gone.add(worker)
        self._rounds.gone(worker)
        self._stepper.report(WorkerExited(worker, code, str(ExitStatus(code)), random.random()))
