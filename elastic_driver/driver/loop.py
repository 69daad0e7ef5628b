"""ElasticDriver: the one loop that owns the job.

Discovery, processes, HTTP requests, signals and timers become events of the membership core; its commands become I/O.
Everything here runs on one asyncio loop; nobody else touches the state, so there are no locks. It decides nothing.

An error that nobody expected ends the job, wherever on the loop it comes up: in a task, a timer, a callback. Then
nothing is decided any more, and what runs is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from elastic_driver.core.assignment import members_by_host, members_by_local_rank
from elastic_driver.core.events import (
    Command,
    DiscoveryFailed,
    DismissWorker,
    DrainRequested,
    EndJob,
    Event,
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
from elastic_driver.core.heartbeats import Heartbeats
from elastic_driver.core.membership import Policy, explain, new_state, next_deadline, step
from elastic_driver.core.past import why_impossible
from elastic_driver.core.placement import is_drained, usable_slots
from elastic_driver.core.setbacks import fault_of, last_words
from elastic_driver.core.state import JobPhase, WorkerPhase, in_phase, record_of
from elastic_driver.dialects.ours import JobAddress, inheritable, worker_env
from elastic_driver.discovery.source import HostDiscovery
from elastic_driver.driver.durable_folder import durable_env, newest_commit
from elastic_driver.driver.supervision import Supervisor
from elastic_driver.errors import (
    DiscoveryError,
    LaunchError,
    RendezvousClosedError,
    RendezvousProtocolError,
    SettingsError,
    StaleRoundError,
    shortage,
)
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch.launcher import CommandNotFoundError, ExitStatus, Launcher, WorkerProcess
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT
from elastic_driver.rendezvous.job_files import Posting
from elastic_driver.rendezvous.messages import (
    DrainHostRequest,
    JobOver,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    Removed,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.system.tasks import start_task
from elastic_driver.words import ExitCode, NoticeKind

# How many events are kept for the report of an internal error.
_HISTORY = 1000
# A start imports PyTorch, and a step may be long: how much more usual it is to wait for these than for other things.
_START_PATIENCE, _COMMIT_PATIENCE = 3.0, 12.0
# The status line counts seconds; twice as often, so that it skips none.
_TICK_S = 0.5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What ending the workers may take beyond their grace, and what is left after that: a few seconds for processes that the
# kernel holds, and for output. Where it takes longer something is wrong here, and the guard ends them.
_END_S = 30.0


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
        clock: the job's time.
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
        clock: JobClock | None = None,
        on_round: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._launcher = launcher
        self._chronicle = chronicle
        self._environ = inheritable(environ)
        self._clock = clock or JobClock()
        self._on_round = on_round
        self._state = new_state(policy_of(settings), self._clock())
        self._history: deque[tuple[float, Event]] = deque(maxlen=_HISTORY)
        key = JobKey.new()
        self._server = RendezvousServer(
            self, key=key, on_error=self._crash, on_full=chronicle.warning, call_later=self._clock.call_later
        )
        self._job = JobAddress("", key, job_id, settings.rendezvous_address, name_of_this_process())
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._starting: dict[WorkerId, asyncio.Task[None]] = {}
        self._stop_when_started: set[WorkerId] = set()
        self._parked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self._watching: dict[WorkerId, asyncio.Future[Notice]] = {}
        self._placed: dict[WorkerId, RoundAssignment] = {}
        heartbeats = Heartbeats(settings.heartbeat_timeout_s, settings.hang_timeout_s)
        self._supervisor = Supervisor(heartbeats, chronicle, self._processes, self._clock)
        self._failing: set[WorkerId] = set()  # those that were dying before they were stopped
        self._drains: dict[str, object] = {}  # one for each host that is drained, another when it is drained anew
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
        loop.set_exception_handler(self._failed_on_loop)
        try:
            await self._run(loop)
        except SettingsError:
            raise
        except Exception as error:
            self._crash(error)
        return self._ended.result().exit_code

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._ended is not None
        # One step of the way out that fails does not keep the others from being done.
        async with contextlib.AsyncExitStack() as way_out:
            # What was ignored at the start stays so, for the workers too: nohup, and a shell's background jobs.
            for number in [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]:
                loop.add_signal_handler(number, self._interrupted, number)
                way_out.callback(loop.remove_signal_handler, number)
            way_out.push_async_callback(self._server.close)
            way_out.push_async_callback(self._close_launcher)
            way_out.push_async_callback(self._end_tasks)
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
            if posting is not None:
                way_out.callback(posting.remove)
            self._spawn(self._clock.keep(self._stood_still))
            discovering = self._spawn(self._discover())
            self._spawn(self._tick())
            self._spawn(self._supervisor.watch_over())
            self._set_timer()
            end = await self._ended
            discovering.cancel()
            await self._finish(end)

    async def _end_tasks(self) -> None:
        for timer in (self._timer, self._reporting):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close_launcher(self) -> None:
        try:
            async with asyncio.timeout(self._settings.grace_s + _END_S):
                await self._launcher.close()
        except TimeoutError:
            self._chronicle.warning("cannot see that all processes of the job have ended; they are left to the guard")

    def _stood_still(self, stood_s: float) -> None:
        self._chronicle.stood_still(stood_s)
        self._chronicle.warning(
            f"the driver stood still for {stood_s:.0f} s: it was stopped or starved, or a disc that it writes to hung; "
            "no time limit ran meanwhile"
        )

    async def _finish(self, end: EndJob) -> None:
        """Stops what is left, then closes the book. The workers' last words come before ours."""
        self._notice = Notice(self._notice.version + 1, self._state.round_id, NoticeKind.JOB_OVER, end.message)
        self._answer_watchers()
        for future in self._parked.values():
            if not future.done():
                future.set_result(JobOver(end.message))
        # Who is being started is stopped by its task, as soon as its process is there.
        work = [self._spawn(self._stop_process(process)) for process in self._processes.values()]
        work += self._starting.values()
        if work:
            await asyncio.wait(work, timeout=self._settings.grace_s + _END_S)
        folder = self._settings.durable_dir
        newest = newest_commit(folder)
        if newest is not None:
            self._chronicle.found_on_disc(str(folder), newest)
        self._chronicle.ended(end.exit_code, end.message)

    def _interrupted(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._is_over:
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
                last = None
                reason = shortage(error)
                if not reason:
                    raise
                self._post(DiscoveryFailed(f"cannot look for hosts: {reason}"))
            else:
                if hosts != last:
                    self._chronicle.hosts(hosts)
                    listed = {host.name for host in hosts}
                    self._drains = {name: drain for name, drain in self._drains.items() if name in listed}
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
        try:
            now = self._clock()
            self._history.append((now, event))
            before = self._state.phase
            self._state, commands = step(self._state, event, now)
            self._chronicle.workers_stopped([one for one in commands if isinstance(one, StopWorker)])
            for command in commands:
                self._carry_out(command)
            self._set_timer()
            self._note_wait(now)
            if self._chronicle.live and (before is not self._state.phase or commands):
                self._chronicle.status(self._explained(now))
        except Exception as error:
            self._crash(error)

    def _note_wait(self, now: float) -> None:
        """Whether there is something that a user who sees no status line wants to be told of again."""
        state = self._state
        what, patience = "", 1.0
        match state.phase:
            case JobPhase.WAITING | JobPhase.RESETTING:
                what = state.phase.value
            case JobPhase.STARTING:
                what, patience = state.phase.value, _START_PATIENCE
            case JobPhase.RUNNING if state.discovery.outage is not None:
                what = "discovery"
            case JobPhase.RUNNING if state.notice_kind is NoticeKind.HOSTS_UPDATED:
                what, patience = "commit", _COMMIT_PATIENCE
        self._chronicle.waits(now, what, patience=patience)

    def _explained(self, now: float) -> str:
        """Why the job stands where it stands, and what discovery does if that is what it waits for."""
        said = explain(self._state, now)
        waits = self._state.phase in (JobPhase.WAITING, JobPhase.RESETTING)
        return "; ".join(filter(None, (said, self._discovery.remark() if waits else "")))

    async def _tick(self) -> None:
        """Keeps the clock and the countdowns of the status line going; without one, tells of what takes long."""
        self._note_wait(self._clock())
        while self._ended is not None and not self._ended.done():
            now = self._clock()
            due = self._chronicle.look(now)
            if due or self._chronicle.live:
                text = self._explained(now)
                if due:
                    self._chronicle.still_waiting(text, now)
                else:
                    self._chronicle.status(text)
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
        """An error of ours: the events that led to it are the bug report, and the job ends.

        For the core it is over at once: of what comes from now on nothing follows. One that comes up while the job ends
        anyhow is told, and changes nothing.
        """
        assert self._ended is not None
        self._state = replace(self._state, ended=True)
        self._supervisor.job_ends()
        is_first = not self._ended.done()
        if is_first:
            self._ended.set_result(EndJob(ExitCode.INTERNAL_ERROR, f"internal error of the driver: {error!r}"))
        try:
            if is_first:
                self._chronicle.internal_error(error, list(self._history))
            else:
                self._chronicle.warning(f"internal error of the driver while the job ended: {error!r}")
        except Exception:  # it may be the chronicle that fails
            traceback.print_exception(error, file=sys.stderr)

    def _failed_on_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler: the last net, for what timers, callbacks and tasks have raised."""
        error = context.get("exception")
        if error is None or "transport" in context or "protocol" in context or "socket" in context:
            # Of one connection or pipe, which the loop closes: a peer must not be able to end the job.
            try:
                self._chronicle.warning(f"{context.get('message', 'error')}: {error!r}")
                return
            except Exception as failed:
                error = failed
        self._crash(error)

    @property
    def _is_over(self) -> bool:
        """Whether nothing is decided any more."""
        return self._state.phase is JobPhase.ENDED

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                self._starting[command.worker] = self._spawn(self._start(command))
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
                    remark = self._discovery.remark() if command.exit_code == ExitCode.TOO_FEW_SLOTS else ""
                    command = replace(command, message="; ".join(filter(None, (command.message, remark))))
                    self._supervisor.job_ends()
                    self._ended.set_result(command)
                    failure = self._state.first_failure
                    if command.exit_code and failure is not None:
                        self._chronicle.first_failure(failure)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that ends with the job. What it raises ends the job."""
        task = start_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- processes -------------------------------------------------------------------------------------------------

    async def _start(self, command: StartWorker) -> None:
        worker = command.worker
        try:
            if self._is_over:
                return
            process = await self._launch(command)
        except LaunchError as error:
            bad_command = isinstance(error, CommandNotFoundError)
            self._post(WorkerNotStarted(worker, str(error), random.random(), bad_command))
            return
        finally:
            del self._starting[worker]
        self._processes[worker] = process
        process.exited.add_done_callback(lambda future: self._exited(worker, future))
        process.dying.add_done_callback(lambda future: self._dying(worker, future))
        self._chronicle.worker_started(worker, process.pid)
        if worker in self._stop_when_started or self._is_over:
            self._stop_when_started.discard(worker)
            await process.stop(self._settings.grace_s)

    async def _launch(self, command: StartWorker) -> WorkerProcess:
        """Starts the worker's process. Raises LaunchError when that cannot be done on its host."""
        env = worker_env(
            self._environ,
            job=self._job,
            exported={
                ENV_HEARTBEAT: f"{self._supervisor.interval_s:g}",
                **durable_env(self._settings),
                **self._settings.worker_env,
            },
            worker=command.worker,
            planned=command.planned,
            round_id=self._state.round_id,
            cores=len(os.sched_getaffinity(0)),
            horovod_shim=self._settings.horovod_shim,
        )
        return await self._launcher.start(
            command.worker,
            self._settings.command,
            env,
            label="standby" if command.standby else str(command.planned.rank),
            rank_at_launch=command.planned.rank,
        )

    def _dying(self, worker: WorkerId, future: asyncio.Future[ExitStatus | str]) -> None:
        """The others need not wait until the system has freed all of a dead worker's memory."""
        if future.cancelled():
            return
        record, process = record_of(self._state, worker), self._processes.get(worker)
        gone = record is None or process is None or record.phase is WorkerPhase.LEAVING
        if gone or process is None or self._is_over:
            return
        status = future.result()
        how = self._supervisor.why_killed(worker) or str(status)
        fault = self._supervisor.fault(worker) or fault_of(None if isinstance(status, str) else status.returncode)
        self._failing.add(worker)
        self._chronicle.worker_dying(worker, process, how)
        error, where = last_words(process.last_lines)
        self._take_report(WorkerDying(worker, how, random.random(), fault, error, where))

    def _exited(self, worker: WorkerId, future: asyncio.Future[ExitStatus]) -> None:
        if future.cancelled():
            return
        status = future.result()
        process = self._processes.pop(worker)
        record = record_of(self._state, worker)
        expected = record is None or record.phase is WorkerPhase.LEAVING or self._is_over
        if worker in self._failing:
            self._failing.discard(worker)
            expected = False
        self._chronicle.worker_exited(worker, process, status, expected=expected)
        self._parked.pop(worker, None)
        self._watching.pop(worker, None)
        self._placed.pop(worker, None)
        self._spawn(self._drain(process))
        how, fault = self._supervisor.why_killed(worker) or str(status), self._supervisor.fault(worker)
        self._supervisor.gone(worker)
        error, where = last_words(process.last_lines) if status.returncode else ("", "")
        self._take_report(WorkerExited(worker, status.returncode, how, random.random(), fault, error, where))

    async def _drain(self, process: WorkerProcess) -> None:
        await process.wait()

    def _stop(self, command: StopWorker) -> None:
        process = self._processes.get(command.worker)
        if process is not None:
            self._spawn(self._stop_process(process))
        elif command.worker in self._starting:
            self._stop_when_started.add(command.worker)

    async def _stop_process(self, process: WorkerProcess) -> None:
        await process.stop(self._settings.grace_s)

    # --- rounds (RoundHandler of the rendezvous server) ------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY: parks it until its round is formed, or answers at once what is known.

        Raises:
            RendezvousProtocolError: it speaks of a round that it cannot know.
        """
        future: asyncio.Future[NextRoundReply] = asyncio.get_running_loop().create_future()
        worker = request.worker
        if self._is_over:
            future.set_result(JobOver("the job has ended"))
            return future
        record = record_of(self._state, worker)
        if record is None or record.phase is WorkerPhase.LEAVING:
            future.set_result(Removed("it is being stopped" if record else "the job does not know it"))
            return future
        assignment = self._placed.get(worker)
        if record.phase is WorkerPhase.MEMBER and assignment is not None and request.after_round < record.round_id:
            # Its answer was lost on the way: the same again.
            future.set_result(assignment)
            return future
        event = WorkerReady(
            worker,
            request.after_round,
            request.commits,
            request.cause,
            request.detail,
            request.backends,
            request.steps,
            request.where,
            request.raised,
        )
        self._check(event)
        older = self._parked.get(worker)
        if older is not None and not older.done():
            older.cancel()
        self._parked[worker] = future
        process = self._processes.get(worker)
        if process is not None:
            process.watch_threads(request.pid, request.thread)
        # It asks again as often as a member watches.
        self._supervisor.heard(worker, pid=request.pid)
        self._take_report(event)
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
        if request.disc is not None:
            self._chronicle.on_disc(request.disc)
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
        """A member trains.

        Raises:
            RendezvousProtocolError: nobody started it, or it speaks of a round that it cannot know.
        """
        event = WorkerRunning(report.worker, report.round_id, report.commits, report.another)
        self._check(event)
        self._take_report(event)

    def _check(self, event: WorkerReady | WorkerRunning) -> None:
        """Refuses what the core would not take: a peer must not be able to end the job."""
        why = "" if self._is_over else why_impossible(self._state, event)
        if why:
            raise RendezvousProtocolError(f"cannot take this report: {why}")

    def leave(self, request: LeaveRequest) -> None:
        """A worker was told by a signal to leave: its place is drained.

        Raises:
            RendezvousClosedError: it is being stopped, or there was no round yet: it is to end at once.
        """
        self._post_reports()
        record = record_of(self._state, request.worker)
        if record is None or self._is_over or not self._state.round_id or record.stopped:
            raise RendezvousClosedError(f"worker {request.worker} is to end at once")
        worker = request.worker
        self._drain_place(worker.hostname, worker.slot, f"it was sent {request.signal}")
        short = self._what_is_short()
        if short:
            self._chronicle.warning(
                f"worker {worker} is drained{short}; elasticrun drain --undo {worker.hostname} gives its place back"
            )

    def drain(self, request: DrainHostRequest) -> str:
        """A host's workers are to leave at their next commit; or the host may be used again."""
        name = request.hostname
        listed = [host.name for host in self._state.hosts]
        if name not in listed:
            return f"there is no host {name} in the job; its hosts: {', '.join(listed) or 'none'}"
        if request.undo:
            was_drained = any(hostname == name for hostname, _ in self._state.drained)
            self._drains.pop(name, None)
            self._post(DrainRequested(name, None, "by elasticrun drain --undo", undo=True))
            return f"host {name} may be used again" if was_drained else f"host {name} was not drained"
        already = "already " if (name, None) in self._state.drained else ""
        self._drain_place(name, None, "by elasticrun drain")
        living = any(record.worker.hostname == name for record in self._state.workers)
        said = f"host {name} is {already}drained" + (": its workers leave at their next commit" if living else "")
        return said + self._what_is_short()

    def _what_is_short(self) -> str:
        """For who drains a host: that the rest does not suffice, and what comes of it."""
        slots, policy = usable_slots(self._state), self._state.policy
        if slots >= policy.min_num_proc:
            return ""
        return (
            f"; that leaves {slots} slot{'' if slots == 1 else 's'} of the {policy.min_num_proc} that the job needs "
            f"(--min-np): it waits for others, and ends after {policy.elastic_timeout_s:g} s (--elastic-timeout)"
        )

    def _drain_place(self, hostname: str, slot: int | None, why: str) -> None:
        self._post(DrainRequested(hostname, slot, why))
        limit_s, this = self._settings.drain_timeout_s, self._drains.setdefault(hostname, object())

        def is_late(worker: WorkerId) -> bool:
            return self._drains.get(hostname) is this and self._is_to_leave(worker)

        for record in self._state.workers:
            if record.worker.hostname == hostname and slot in (None, record.worker.slot):
                reason = f"did not leave within {limit_s:g} s (--drain-timeout)"
                self._supervisor.end_unless_gone(record.worker, limit_s, reason, while_=is_late)

    def _is_to_leave(self, worker: WorkerId) -> bool:
        """Whether a worker in a drained place still trains. Who is READY waits for the others, and for slots."""
        record = record_of(self._state, worker)
        if record is None or record.phase in (WorkerPhase.LEAVING, WorkerPhase.READY):
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
            "drained": sorted({name for name, _ in state.drained}),
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
