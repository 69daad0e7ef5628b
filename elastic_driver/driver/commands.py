"""The core's commands: each goes to whoever carries it out.

Owns what is said of flags that do nothing for the workers that came. Decides nothing, and keeps nothing of the job: the
state is the stepper's, processes are :mod:`elastic_driver.driver.workers`'s, answers are those of
:mod:`elastic_driver.driver.rounds` and :mod:`elastic_driver.driver.spokesman`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic_driver.core.events import (
    Command,
    DismissWorker,
    EndJob,
    GiveUpHost,
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
    StopWorker,
)
from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.discovery.source import Hosts
from elastic_driver.driver.agents import AgentSide
from elastic_driver.driver.chief import ChiefKeeper
from elastic_driver.driver.ending import JobEnd
from elastic_driver.driver.health import Health
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.servers import ServerList
from elastic_driver.driver.spokesman import Spokesman
from elastic_driver.driver.standings import Standings
from elastic_driver.driver.status_line import StatusLine
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.worker_events import WorkerEvents
from elastic_driver.driver.workers import Workers
from elastic_driver.rendezvous.messages import Notice
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.settings.settings import Settings
from elastic_driver.words import Backend, ExitCode, OnChange


class Commands:
    """See above. Used on the event loop only.

    Args:
        settings: what the user asked for.
        job: where the driver is; its URL is known once :meth:`begin` was called.
        stepper: has the state.
        chronicle: tells the user what is done.
        clock: the job's time, seconds.
        agents: of the hosts.
        workers: start and stop processes.
        worker_events: report their ends.
        chief: likewise of the chief; None where there is none.
        servers: that the chief follows; None where there is no chief.
        server: has the keys of the present round.
        rounds: answer what workers ask.
        spokesman: tells all agents what is new.
        discovery: knows why there are too few slots.
        health: watches over the workers.
        standings: keep accounts of who runs.
        status_line: says where the job stands.
        end: of the job.
        warms: whether workers will be started again, and are forked from a process that has imported their modules.
    """

    def __init__(
        self,
        settings: Settings,
        job: JobAddress,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        clock: Callable[[], float],
        agents: AgentSide,
        workers: Workers,
        worker_events: WorkerEvents,
        chief: ChiefKeeper | None,
        servers: ServerList | None,
        server: RendezvousServer,
        rounds: Rounds,
        spokesman: Spokesman,
        discovery: Hosts,
        health: Health,
        standings: Standings,
        status_line: StatusLine,
        end: JobEnd,
        warms: bool,
    ) -> None:
        self._settings = settings
        self._job = job
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._agents = agents
        self._workers = workers
        self._worker_events = worker_events
        self._chief = chief
        self._servers = servers
        self._server = server
        self._rounds = rounds
        self._spokesman = spokesman
        self._discovery = discovery
        self._health = health
        self._standings = standings
        self._status_line = status_line
        self._end = end
        self._warms = warms
        self._told_of_flags = False

    def begin(self, url: str) -> JobAddress:
        """The driver's server listens at this URL; there are no commands before. Returns where the driver is."""
        self._job = replace(self._job, url=url)
        return self._job

    def carry_out(self, commands: Sequence[Command], now: float) -> None:
        """Does what a step of the core says, and tells of what has become of the job."""
        self._health.note_step(commands, now)
        # What has happened is told before what comes of it.
        for command in commands:
            if isinstance(command, ReportDying | ReportExit):
                self._worker_events.report(command)
        self._chronicle.workers_stopped([command for command in commands if isinstance(command, StopWorker)])
        for command in commands:
            self._carry_out(command)
        if self._servers is not None:
            self._servers.look()
        self._standings.look(self._stepper.state)
        self._status_line.after_step(now, has_commands=bool(commands))

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                state = self._stepper.state
                restarted = state.policy.on_change is OnChange.RESTART
                self._workers.start(command, self._job, state.round_id, state.resets, restarted=restarted)
            case StartChief():
                assert self._chief is not None
                self._chief.start(command, self._job)
            case StopChief():
                assert self._chief is not None
                self._chronicle.chief_stopped(command.reason)
                self._chief.stop(command)
            case StopWorker():
                self._workers.stop(command.worker, command.ending)
            case KillWorker():
                self._workers.kill(command)
            case GiveUpHost():
                self._agents.fleet.give_up(command.hostname, command.reason)
            case DismissWorker():
                self._chronicle.worker_dismissed(command.worker, command.reason)
                self._rounds.dismiss(command.worker, command.reason)
            case PublishRound():
                self._publish(command)
            case SetNotice():
                self._chronicle.notice(command)
                notice = Notice(command.version, command.round_id, command.kind, command.reason)
                self._rounds.notify(notice)
                self._spokesman.notify(notice)
            case ReportResumed():
                self._chronicle.round_resumed(command)
            case ReportDying() | ReportExit():
                pass  # see carry_out
            case Report():
                self._chronicle.report(command)
            case EndJob():
                self._end_job(command)

    def _end_job(self, command: EndJob) -> None:
        if self._end.is_known:
            return
        remark = self._discovery.remark() if command.exit_code == ExitCode.TOO_FEW_SLOTS else ""
        self._end.decided(replace(command, message="; ".join(filter(None, (command.message, remark)))))
        failure = self._stepper.state.first_failure
        if command.exit_code and failure is not None:
            self._chronicle.first_failure(failure)

    def _publish(self, command: PublishRound) -> None:
        """Fences the past, and has the members go on."""
        self._worker_events.round_begins()
        if command.backend is not None and not self._told_of_flags:  # None: nobody has called init() yet
            self._told_of_flags = True
            self._warn_of_flags(command.backend)
        self._server.begin_round(command.round_id)
        self._spokesman.begin_round(command.round_id)
        for one in command.placed:
            self._workers.label(one.worker, str(one.slot.rank))
        hosts = sorted({one.worker.hostname for one in command.placed})
        self._rounds.publish(command, self._agents.launcher.addresses(hosts))
        pids = {worker: process.pid for worker, process in self._workers.living.items()}
        self._chronicle.round_formed(command, pids, self._clock() - self._stepper.state.reset_began)
        if self._warms:
            self._agents.launcher.warm_up()

    def _warn_of_flags(self, backend: Backend) -> None:
        """Tells what was asked for that the workers know nothing of, as soon as it is known whose they are."""
        if backend is not Backend.HOROVOD:
            if self._settings.of_horovod_alone:
                flags = ", ".join(self._settings.of_horovod_alone)
                self._chronicle.warning(f"no effect here: {flags}; only Horovod's own library has that")
            return
        asked = {"--hang-timeout": self._settings.hang_timeout_s, "--port-range": self._settings.port_range}
        for flag in (flag for flag, value in asked.items() if value):
            self._chronicle.warning(f"{flag} does nothing here: the workers run Horovod's own library")
