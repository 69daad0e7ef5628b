"""ElasticDriver: the one loop that owns the job.

Discovery, processes, HTTP requests, signals and timers become events of the membership core; its commands become I/O.
Everything here runs on one asyncio loop; nobody else touches the state, so there are no locks. It decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from elastic_driver.assignment import members_by_host, members_by_local_rank
from elastic_driver.chronicle import Chronicle
from elastic_driver.discovery import HostDiscovery
from elastic_driver.durable_folder import durable_env
from elastic_driver.errors import (
    DiscoveryError,
    LaunchError,
    RendezvousClosedError,
    StaleRoundError,
)
from elastic_driver.events import (
    Command,
    DiscoveryFailed,
    DismissWorker,
    DrainRequested,
    EndJob,
    Event,
    ExitCode,
    HostsDiscovered,
    PublishRound,
    Report,
    ReportResumed,
    SetNotice,
    StartWorker,
    StopRequested,
    StopWorker,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerReady,
    WorkerRunning,
    WorkersReported,
)
from elastic_driver.heartbeats import Heartbeats
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.job_files import Posting
from elastic_driver.job_state import JobPhase, WorkerPhase, in_phase, is_drained, record_of
from elastic_driver.launch import CommandNotFoundError, ExitStatus, Launcher, WorkerProcess
from elastic_driver.membership import Policy, explain, new_state, next_deadline, step
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.rendezvous.messages import (
    ENV_HEARTBEAT,
    DrainHostRequest,
    JobOver,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    NoticeKind,
    Removed,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.server import RendezvousServer
from elastic_driver.settings import Settings
from elastic_driver.supervision import Supervisor
from elastic_driver.worker_env import JobAddress, inheritable, worker_env

# How many events are kept for the report of an internal error.
_HISTORY = 1000
# The status line counts seconds; twice as often, so that it skips none.
_TICK_S = 0.5


def policy_of(settings: Settings) -> Policy:
    """The core's limits, from the settings."""
    return Policy(
        num_proc=settings.num_proc,
        min_num_proc=settings.min_num_proc,
        max_num_proc=settings.max_num_proc,
        elastic_timeout_s=settings.elastic_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        reset_limit=settings.reset_limit,
        reset_window_s=settings.reset_window_s,
        cooldown_range_s=settings.cooldown_range_s,
        durable=settings.durable_dir is not None,
        num_standby=settings.num_standby,
    )


class ElasticDriver:
    """Runs one job to its end.

    Args:
        settings: what the user asked for.
        discovery: tells the hosts there are.
        launcher: starts processes.
        chronicle: tells the user, and the event log, what happens.
        environ: what workers inherit.
        clock: seconds that never go back.
        on_round: called whenever a round has formed.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        discovery: HostDiscovery,
        launcher: Launcher,
        chronicle: Chronicle,
        environ: Mapping[str, str],
        job_id: str,
        clock: Callable[[], float] = time.monotonic,
        on_round: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._launcher = launcher
        self._chronicle = chronicle
        self._environ = inheritable(environ)
        self._clock = clock
        self._on_round = on_round
        self._state = new_state(policy_of(settings), clock())
        self._history: deque[tuple[float, Event]] = deque(maxlen=_HISTORY)
        key = JobKey.new()
        self._server = RendezvousServer(self, key=key, on_error=self._crash, on_full=chronicle.warning)
        self._job = JobAddress("", key, job_id, settings.rendezvous_address)
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._starting: set[WorkerId] = set()
        self._stop_when_started: set[WorkerId] = set()
        self._parked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self._watching: dict[WorkerId, asyncio.Future[Notice]] = {}
        self._placed: dict[WorkerId, RoundAssignment] = {}
        heartbeats = Heartbeats(settings.heartbeat_timeout_s, settings.hang_timeout_s, now=clock())
        self._supervisor = Supervisor(heartbeats, chronicle, self._processes, clock)
        self._failing: set[WorkerId] = set()  # those that were dying before they were stopped
        self._undone: dict[str, int] = {}  # how often a host's drain was undone: the limit is that of the last drain
        self._notice = Notice(0, 0, NoticeKind.NONE, "")
        self._ended: asyncio.Future[EndJob] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reports: list[WorkerReady | WorkerRunning | WorkerDying | WorkerExited] = []
        self._reporting: asyncio.Handle | None = None
        self._busy_until = 0.0

    # --- the job's life --------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Runs the job and ends everything it started. Blocks until then.

        Returns:
            The exit code of ``elasticrun``.

        Raises:
            SettingsError: the rendezvous port cannot be had, or too few files may be open.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        address = self._settings.rendezvous_address
        port = await self._server.start(
            address,
            self._settings.rendezvous_port,
            workers=self._settings.num_proc,
            at_most=self._settings.most_workers,
            descriptors_each=self._launcher.descriptors_each,
        )
        host = f"[{address}]" if ":" in address else address
        self._job = replace(self._job, url=f"http://{host}:{port}")
        self._chronicle.started(self._job.url, self._job.job_id)
        posting = Posting.post(self._job.job_id, self._job.url, self._job.key, self._settings.command)
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in handled:
            loop.add_signal_handler(number, self._interrupted, number)
        discovering = loop.create_task(self._discover())
        if self._chronicle.live:
            self._spawn(self._tick())
        self._spawn(self._supervisor.watch_over())
        self._set_timer()
        try:
            end = await self._ended
            discovering.cancel()
            await self._finish(end)
            return end.exit_code
        finally:
            if posting is not None:
                posting.remove()
            discovering.cancel()
            for timer in (self._timer, self._reporting):
                if timer is not None:
                    timer.cancel()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(discovering, *self._tasks, return_exceptions=True)
            await self._launcher.close()
            await self._server.close()
            for number in handled:
                loop.remove_signal_handler(number)

    async def _finish(self, end: EndJob) -> None:
        """Stops what is left, then closes the book. The workers' last words come before ours."""
        self._notice = Notice(self._notice.version + 1, self._state.round_id, NoticeKind.JOB_OVER, end.message)
        self._answer_watchers()
        for future in self._parked.values():
            if not future.done():
                future.set_result(JobOver(end.message))
        while self._starting or self._processes:
            stops = [process.stop(self._settings.grace_s) for process in self._processes.values()]
            await asyncio.gather(*stops, return_exceptions=True)
            if self._starting:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            else:
                break
        self._chronicle.ended(end.exit_code, end.message)

    def _interrupted(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._state.phase is JobPhase.ENDED:
            self._chronicle.warning(f"{name} again: killing all workers now")
            self._launcher.kill()
            return
        self._chronicle.warning(f"{name}: stopping all workers (again to kill them at once)")
        self._post(StopRequested(number, name))

    async def _discover(self) -> None:
        last: tuple[Host, ...] | None = None
        while True:
            try:
                hosts = await self._discovery.find_hosts()
            except DiscoveryError as error:
                last = None
                self._post(DiscoveryFailed(str(error)))
            except Exception as error:
                self._crash(error)
                return
            else:
                if hosts != last:
                    self._chronicle.hosts(hosts)
                    self._post(HostsDiscovered(hosts))
                last = hosts
            await asyncio.sleep(self._settings.discovery_interval_s)

    # --- events in, commands out -----------------------------------------------------------------------------------

    def _take_report(self, report: WorkerReady | WorkerRunning | WorkerDying | WorkerExited) -> None:
        """Feeds a worker's report, or its end, to the core, together with others that come at about the same time.

        A step costs about as much as the job has workers. When thousands report at once, a step for each would be what
        they wait for; so after a step the loop has as much time for other things as the step took.
        """
        self._reports.append(report)
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            rest_s = self._busy_until - time.perf_counter()
            post = self._post_reports
            self._reporting = loop.call_later(rest_s, post) if rest_s > 0 else loop.call_soon(post)

    def _post_reports(self) -> None:
        """Feeds the reports that have come so far."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        reports, self._reports = tuple(self._reports), []
        if reports:
            began = time.perf_counter()
            self._step(reports[0] if len(reports) == 1 else WorkersReported(reports))
            now = time.perf_counter()
            self._busy_until = now + (now - began)

    def _post(self, event: Event) -> None:
        """Feeds one event to the core, after the reports before it. Never blocks."""
        self._post_reports()
        self._step(event)

    def _step(self, event: Event) -> None:
        """Feeds one event to the core and carries out what it says."""
        now = self._clock()
        self._history.append((now, event))
        before = self._state.phase
        try:
            self._state, commands = step(self._state, event, now)
            for command in commands:
                self._carry_out(command)
        except Exception as error:
            self._crash(error)
            return
        self._set_timer()
        if before is not self._state.phase or commands:
            self._chronicle.status(explain(self._state, now))

    async def _tick(self) -> None:
        """Keeps the clock and the countdowns of the status line going."""
        while self._ended is not None and not self._ended.done():
            self._chronicle.status(explain(self._state, self._clock()))
            await asyncio.sleep(_TICK_S)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = next_deadline(self._state)
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._post, TimerExpired())

    def _crash(self, error: BaseException) -> None:
        """An error of ours: the events that led to it are the bug report, and the job ends."""
        if self._ended is None or self._ended.done():
            return
        self._chronicle.internal_error(error, list(self._history))
        self._ended.set_result(EndJob(ExitCode.INTERNAL_ERROR, f"internal error of the driver: {error!r}"))

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                self._starting.add(command.worker)
                self._spawn(self._start(command))
            case StopWorker():
                self._stop(command)
            case DismissWorker():
                self._chronicle.worker_dismissed(command.worker, command.reason)
                self._supervisor.forget(command.worker)
                self._reply(command.worker, Removed(command.reason))
            case PublishRound():
                self._publish(command)
            case SetNotice():
                self._notice = Notice(command.version, command.round_id, command.kind, command.reason)
                self._chronicle.notice(command)
                self._answer_watchers()
            case ReportResumed():
                self._chronicle.round_resumed(command)
            case Report():
                self._chronicle.report(command)
            case EndJob():
                if self._ended is not None and not self._ended.done():
                    self._supervisor.job_ends()
                    self._ended.set_result(command)
                    failure = self._state.first_failure
                    if command.exit_code and failure is not None:
                        self._chronicle.first_failure(failure)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- processes -------------------------------------------------------------------------------------------------

    async def _start(self, command: StartWorker) -> None:
        worker, planned = command.worker, command.planned
        env = worker_env(
            self._environ,
            job=self._job,
            exported={
                ENV_HEARTBEAT: f"{self._supervisor.interval_s:g}",
                **durable_env(self._settings),
                **self._settings.worker_env,
            },
            worker=worker,
            planned=planned,
            round_id=self._state.round_id,
            cores=len(os.sched_getaffinity(0)),
            horovod_shim=self._settings.horovod_shim,
        )
        try:
            process = await self._launcher.start(
                worker,
                self._settings.command,
                env,
                label="standby" if command.standby else str(planned.rank),
                rank_at_launch=planned.rank,
            )
        except LaunchError as error:
            self._starting.discard(worker)
            bad_command = isinstance(error, CommandNotFoundError)
            self._post(WorkerNotStarted(worker, str(error), random.random(), bad_command))
            return
        self._starting.discard(worker)
        self._processes[worker] = process
        self._chronicle.worker_started(worker, process.pid)
        process.exited.add_done_callback(lambda future: self._exited(worker, future))
        process.dying.add_done_callback(lambda future: self._dying(worker, future))
        if worker in self._stop_when_started or self._state.phase is JobPhase.ENDED:
            self._stop_when_started.discard(worker)
            await process.stop(self._settings.grace_s)

    def _dying(self, worker: WorkerId, future: asyncio.Future[str]) -> None:
        """The others need not wait until the system has freed all of a dead worker's memory."""
        if future.cancelled():
            return
        record, process = record_of(self._state, worker), self._processes.get(worker)
        gone = record is None or process is None or record.phase is WorkerPhase.LEAVING
        if gone or process is None or self._state.phase is JobPhase.ENDED:
            return
        how = self._supervisor.why_killed(worker) or future.result()
        self._failing.add(worker)
        self._chronicle.worker_dying(worker, process, how)
        self._take_report(WorkerDying(worker, how, random.random()))

    def _exited(self, worker: WorkerId, future: asyncio.Future[ExitStatus]) -> None:
        if future.cancelled():
            return
        status = future.result()
        process = self._processes.pop(worker)
        record = record_of(self._state, worker)
        expected = record is None or record.phase is WorkerPhase.LEAVING or self._state.phase is JobPhase.ENDED
        if worker in self._failing:
            self._failing.discard(worker)
            expected = False
        self._chronicle.worker_exited(worker, process, status, expected=expected)
        self._parked.pop(worker, None)
        self._watching.pop(worker, None)
        self._placed.pop(worker, None)
        self._spawn(self._drain(process))
        how = self._supervisor.why_killed(worker) or str(status)
        self._supervisor.gone(worker)
        self._take_report(WorkerExited(worker, status.returncode, how, random.random()))

    async def _drain(self, process: WorkerProcess) -> None:
        await process.wait()

    def _stop(self, command: StopWorker) -> None:
        self._chronicle.worker_stopped(command.worker, command.reason)
        process = self._processes.get(command.worker)
        if process is not None:
            self._spawn(self._stop_process(process))
        elif command.worker in self._starting:
            self._stop_when_started.add(command.worker)

    async def _stop_process(self, process: WorkerProcess) -> None:
        await process.stop(self._settings.grace_s)

    # --- rounds (RoundHandler of the rendezvous server) ------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY: parks it until its round is formed, or answers at once what is known."""
        future: asyncio.Future[NextRoundReply] = asyncio.get_running_loop().create_future()
        worker = request.worker
        if self._state.phase is JobPhase.ENDED:
            future.set_result(JobOver("the job has ended"))
            return future
        record = record_of(self._state, worker)
        if record is None or record.phase is WorkerPhase.LEAVING:
            future.set_result(Removed(f"worker {worker} has no place in the job any more"))
            return future
        assignment = self._placed.get(worker)
        if record.phase is WorkerPhase.MEMBER and assignment is not None and request.after_round < record.round_id:
            # Its answer was lost on the way: the same again.
            future.set_result(assignment)
            return future
        older = self._parked.get(worker)
        if older is not None and not older.done():
            older.cancel()
        self._parked[worker] = future
        process = self._processes.get(worker)
        if process is not None:
            process.watch_threads(request.pid, request.thread)
        # It asks again as often as a member watches.
        self._supervisor.heard(worker, pid=request.pid)
        self._take_report(
            WorkerReady(
                worker,
                request.after_round,
                request.commits,
                request.cause,
                request.detail,
                request.backends,
            )
        )
        return future

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """A member asks for the next notice of its round.

        Raises:
            StaleRoundError: the round has passed.
            RendezvousClosedError: the worker is none of this job any more.
        """
        if request.round_id != self._notice.round_id:
            raise StaleRoundError(request.round_id, self._notice.round_id)
        if record_of(self._state, request.worker) is None:
            raise RendezvousClosedError(f"worker {request.worker} is none of this job's living workers")
        self._supervisor.heard(request.worker, request.progress, waiting=request.waiting)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Notice] = loop.create_future()
        if request.leaving or request.exiting:
            self._supervisor.forget(request.worker)
            if request.exiting:
                limit_s = self._settings.start_timeout_s
                why = f"did not end within {limit_s:g} s of its exit (--start-timeout)"
                self._supervisor.end_unless_gone(
                    request.worker, limit_s, why, with_stacks=True, while_=self._supervisor.has_its_process
                )
            future.set_result(self._notice)
            return future
        if self._notice.version > request.version:
            future.set_result(self._notice)
            return future
        older = self._watching.get(request.worker)
        if older is not None and not older.done():
            older.cancel()
        self._watching[request.worker] = future
        return future

    def running(self, report: RunningReport) -> None:
        """A member trains."""
        self._take_report(WorkerRunning(report.worker, report.round_id, report.commits))

    def leave(self, request: LeaveRequest) -> None:
        """A worker was told by a signal to leave: its place is drained.

        Raises:
            RendezvousClosedError: it is being stopped, or there was no round yet: it is to end at once.
        """
        self._post_reports()
        record = record_of(self._state, request.worker)
        if record is None or self._state.phase is JobPhase.ENDED or not self._state.round_id or record.stopped:
            raise RendezvousClosedError(f"worker {request.worker} is to end at once")
        worker = request.worker
        self._drain_place(worker.hostname, worker.slot, f"it was sent {request.signal}")

    def drain(self, request: DrainHostRequest) -> str:
        """A host's workers are to leave at their next commit; or the host may be used again."""
        name = request.hostname
        listed = [host.name for host in self._state.hosts]
        if name not in listed:
            return f"there is no host {name} in the job; its hosts: {', '.join(listed) or 'none'}"
        if request.undo:
            self._undone[name] = self._undone.get(name, 0) + 1
            self._post(DrainRequested(name, None, "by elasticrun drain --undo", undo=True))
            return f"host {name} may be used again"
        self._drain_place(name, None, "by elasticrun drain")
        return f"host {name} is drained: its workers leave at their next commit"

    def _drain_place(self, hostname: str, slot: int | None, why: str) -> None:
        self._post(DrainRequested(hostname, slot, why))
        limit_s, undone = self._settings.drain_timeout_s, self._undone.get(hostname, 0)

        def is_late(worker: WorkerId) -> bool:
            return self._undone.get(hostname, 0) == undone and self._is_to_leave(worker)

        for record in self._state.workers:
            if record.worker.hostname == hostname and slot in (None, record.worker.slot):
                reason = f"did not leave within {limit_s:g} s (--drain-timeout)"
                self._supervisor.end_unless_gone(record.worker, limit_s, reason, while_=is_late)

    def _is_to_leave(self, worker: WorkerId) -> bool:
        """Whether a worker in a drained place has not begun to leave."""
        record = record_of(self._state, worker)
        if record is None or record.phase is WorkerPhase.LEAVING:
            return False
        return is_drained(self._state, worker.hostname, worker.slot)

    def status(self) -> dict[str, object]:
        """The job as JSON, for ``GET /v1/status``."""
        self._post_reports()
        state = self._state
        return {
            "explain": explain(state, self._clock()),
            "phase": state.phase,
            "round_id": state.round_id,
            "commits": state.commits,
            "resets": state.resets,
            "hosts": [{"name": host.name, "slots": host.slots} for host in state.hosts],
            "blacklisted": [h.name for h in state.hosts if state.blacklist.is_blacklisted(h.name)],
            "workers": [
                {
                    "worker": record.worker.key,
                    "phase": record.phase,
                    "rank": record.rank if record.round_id else None,
                    "round_id": record.round_id,
                    "running": record.running,
                    "commits": record.commits,
                    "pid": self._processes[record.worker].pid if record.worker in self._processes else None,
                }
                for record in state.workers
            ],
        }

    def _publish(self, command: PublishRound) -> None:
        self._server.begin_round(command.round_id)
        # Who stands by goes on to be watched.
        self._supervisor.forget_all(but=[one.worker for one in in_phase(self._state, WorkerPhase.READY)])
        by_host, by_local_rank = members_by_host(command.placed), members_by_local_rank(command.placed)
        self._placed = {
            one.worker: RoundAssignment(
                round_id=command.round_id,
                slot=one.slot,
                local_members=by_host[one.worker.hostname],
                cross_members=by_local_rank[one.slot.local_rank],
                sync=command.sync,
                commits=command.commits,
                backend=command.backend,
                cause=command.cause,
            )
            for one in command.placed
        }
        now = self._clock()
        for one in command.placed:
            # From now on: who is frozen since it was READY never watches its round.
            self._supervisor.heard(one.worker)
            process = self._processes.get(one.worker)
            if process is not None:
                process.label = str(one.slot.rank)
            self._reply(one.worker, self._placed[one.worker])
        pids = {worker: process.pid for worker, process in self._processes.items()}
        self._chronicle.round_formed(command, pids, now - self._state.reset_began)
        if self._on_round is not None:
            self._on_round()

    def _reply(self, worker: WorkerId, reply: NextRoundReply) -> None:
        future = self._parked.pop(worker, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _answer_watchers(self) -> None:
        watching, self._watching = self._watching, {}
        for future in watching.values():
            if not future.done():
                future.set_result(self._notice)
