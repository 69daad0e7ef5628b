"""ElasticDriver: the loop of one job, from its start to its end.

Owns the order in which a job starts and ends, and passes the core's commands to the parts that carry them out. What
happens becomes events of the core (:mod:`elastic_driver.driver.stepper`) elsewhere: of hosts in
:mod:`~elastic_driver.driver.host_events`, of processes in :mod:`~elastic_driver.driver.worker_events`, of people in
:mod:`~elastic_driver.driver.interrupts`. Everything runs on one asyncio loop; nothing else touches the state, so there
are no locks. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

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
from elastic_driver.driver.agent_requests import AgentRequests
from elastic_driver.driver.agents import AgentSide
from elastic_driver.driver.books import Books
from elastic_driver.driver.chief import ChiefKeeper
from elastic_driver.driver.claim import Claim
from elastic_driver.driver.discovery_loop import DiscoveryLoop
from elastic_driver.driver.durable_folder import newest_commit
from elastic_driver.driver.ending import JobEnd
from elastic_driver.driver.health import Health
from elastic_driver.driver.interrupts import Interrupts
from elastic_driver.driver.page import Page
from elastic_driver.driver.policy import starts_again
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.samples import Samples
from elastic_driver.driver.servers import ServerList
from elastic_driver.driver.standings import Standings
from elastic_driver.driver.standstills import DriverStandstills
from elastic_driver.driver.status import JobStatus
from elastic_driver.driver.status_line import StatusLine
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.takeover import Takeover
from elastic_driver.driver.worker_events import WorkerEvents
from elastic_driver.errors import SettingsError
from elastic_driver.launch import output_files
from elastic_driver.launch.fleet.warming import Warming
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.rendezvous.job_files import Posting
from elastic_driver.rendezvous.messages import Notice
from elastic_driver.rendezvous.server.kept_socket import KeptSocket
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.settings.settings import Settings
from elastic_driver.system import parent
from elastic_driver.system.job_clock import JobClock
from elastic_driver.words import Backend, ExitCode

# Connections of one worker to the driver: its agent's, and it may be the only worker of its host.
_CONNECTIONS_EACH = 1
# How long the end of the workers may take beyond their grace period, and how long for the rest after that: a few
# seconds for processes that the kernel holds, and for output. If it takes longer something is wrong here, and the guard
# ends them.
_END_S = 30.0
_SOCKET = "driver.sock"


@dataclass(kw_only=True, eq=False)
class ElasticDriver:
    """Runs one job to its end. Constructed by :func:`elastic_driver.driver.build.build`.

    Attributes:
        settings: the user's settings.
        job: where the driver is; without a URL until its server listens.
        clock: the job's time.
        chronicle: reports events to the user and the event log.
        stepper: has the state.
        books: stores the counters; None for a job without a journal.
        end: the end of the job.
        interrupts: end the job from outside.
        agents: start workers, and speak for them.
        discovery: finds the hosts.
        discovery_loop: reports them to the core.
        workers: the workers' processes.
        warming: lets hosts import the workers' modules.
        worker_events: reports what happens to the workers.
        standings: account for the running workers.
        chief: the script, if it is the chief of servers; None if it is the workers'.
        servers: the list that the chief follows; None without a chief.
        server: serves agents, operators and pages.
        rounds: answers requests of workers, and of operators that drain them.
        status: the status of the job.
        requests: answers requests of workers that agents pass on.
        page: serves browsers; None for none.
        health: finds silent, hanging and slow workers.
        standstills: those of this process.
        status_line: describes the condition of the job.
        samples: samples the condition of the job.
        takeover: takes over a job from another driver; None for a new job.
        claim: claims the job against drivers of other machines; None if none of them can take over.
        found_nothing: whether nothing was left of the job to take over.
    """

    settings: Settings
    job: JobAddress
    clock: JobClock
    chronicle: Chronicle
    stepper: Stepper
    books: Books | None
    end: JobEnd
    interrupts: Interrupts
    agents: AgentSide
    discovery: Hosts
    discovery_loop: DiscoveryLoop
    workers: Workers
    warming: Warming
    worker_events: WorkerEvents
    standings: Standings
    chief: ChiefKeeper | None
    servers: ServerList | None
    server: RendezvousServer
    rounds: Rounds
    status: JobStatus
    requests: AgentRequests
    page: Page | None
    health: Health
    standstills: DriverStandstills
    status_line: StatusLine
    samples: Samples
    takeover: Takeover | None
    claim: Claim | None
    found_nothing: bool = field(default=False, init=False)
    _told_of_flags: bool = field(default=False, init=False)  # of flags that have no effect on these workers

    async def run(self) -> int:
        """Run the job and end everything that it started. Blocks until then.

        Returns:
            The exit code of ``elasticrun``.

        Raises:
            SettingsError: the rendezvous port is not available, or too few files may be open.
        """
        asyncio.get_running_loop().set_exception_handler(self.end.failed_on_loop)
        try:
            await self._run()
        except SettingsError:
            raise
        except Exception as error:
            self.end.crash(error)
        return (await self.end.wait()).exit_code

    async def _run(self) -> None:
        # A failing step of the cleanup does not prevent the others.
        async with contextlib.AsyncExitStack() as way_out:
            try:
                await self._run_until(way_out)
            except SettingsError:
                if self.takeover is not None:
                    self.let_go()
                raise
            except Exception as error:
                # Before the cleanup, which ends everything that is not left to another driver.
                self.end.crash(error)

    async def _run_until(self, way_out: contextlib.AsyncExitStack) -> None:
        """Run until the end, except for the cleanup."""
        tasks = self.agents.tasks
        way_out.enter_context(self.interrupts.handled())
        # With a journal, it exists before anything can connect.
        self.stepper.begin()
        await self.stepper.settled()
        if self.takeover is not None:
            await self.takeover.begin()
        folder = self.agents.ways.folder
        socket = KeptSocket(self.server.listeners, _SOCKET, say=self.chronicle.warning, folder=folder)
        way_out.callback(socket.close)
        way_out.push_async_callback(self.server.close)
        way_out.push_async_callback(self._close_agents)
        way_out.push_async_callback(self._close_chief)
        way_out.push_async_callback(self._end_tasks)
        await self._listen(socket, way_out)
        posting = await self._post(socket.path, way_out)
        tasks.start(socket.keep(partial(self._stay_found, socket, posting)))
        tasks.start(self.clock.keep(self.standstills.stood_still))
        if self.books is not None:
            tasks.start(self.books.keep())
        discovering = tasks.start(self.discovery_loop.run(self.job))
        tasks.start(self.status_line.run())
        tasks.start(self.samples.run())
        tasks.start(self.health.watch_over())
        self.stepper.set_timer()
        if self.takeover is not None:
            self._go_on(self.takeover)
        end = await self.end.wait()
        discovering.cancel()
        if not self.end.is_abandoned:
            await self._finish(end)
        if self.end.is_abandoned:
            end = await self.end.wait()
            if end.exit_code == ExitCode.OTHER_DRIVER:
                self.chronicle.ended(end.exit_code, end.message)

    # --- the start -------------------------------------------------------------------------------------------------

    async def _listen(self, socket: KeptSocket, way_out: contextlib.AsyncExitStack) -> None:
        """Listen for processes of this machine, and for all others that are expected."""
        settings, ways = self.settings, self.agents.ways
        files = (settings.output_filename is not None) + settings.logs.keeps_files
        self.server.connections.make_room(
            settings.num_proc,
            settings.most_workers,
            connections_each=_CONNECTIONS_EACH,
            descriptors_each=output_files.DESCRIPTORS_EACH * files,
        )
        await self.server.start_local(socket.listen())
        await ways.begin(self.server.listeners, socket.path)
        self.job = replace(self.job, url=ways.here)
        if self.claim is not None:
            way_out.callback(self.claim.close)
            self.claim.begin(ways.urls, await ways.certificate.make())
        if self.page is not None:
            way_out.callback(self.page.close)
            await self.page.listen(self.server.listeners, settings.page_address)

    async def _post(self, socket: Path, way_out: contextlib.AsyncExitStack) -> Posting | None:
        """Publish where the job is: to the user, and in the job's file."""
        job = self.job
        page = ""
        if self.page is not None and sys.stderr is not None and sys.stderr.isatty() and not self.settings.quiet:
            page = await self.page.link()
        posting = Posting.post(
            job.job_id,
            socket,
            self.settings.command,
            meets_at=self.agents.meets_at,
            journal=self.settings.journal_folder,
            parent=parent.name_of_parent(),
        )
        if posting is not None:
            way_out.callback(self._take_down, posting)
        # A reader of this may connect to the job at once.
        self.chronicle.started(self.agents.ways.url, job.job_id, again=self.takeover is not None)
        if page:
            # Only on a terminal, and bypassing the chronicle: it must not be logged.
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), f"elasticrun: page: {page}\n".encode())
        if self.settings.accept_agents:
            self._tell_how_to_join()
        return posting

    def _take_down(self, posting: Posting) -> None:
        """Remove the job's file, unless the job continues without this driver and is found there by its journal."""
        if not self.end.is_abandoned or self.settings.journal_folder is None:
            posting.remove()

    def _stay_found(self, socket: KeptSocket, posting: Posting | None) -> None:
        """Restore the socket and the job's file, which somebody may have removed."""
        self.agents.ways.moved(socket.path)
        self.job = replace(self.job, url=self.agents.ways.here)
        if posting is not None:
            posting.renew(socket.path)

    def _tell_how_to_join(self) -> None:
        if self.agents.invitation:
            self.chronicle.remark(self.agents.invitation)
            return
        file = self.settings.join_token_file
        # An agent that has not been welcomed yet does not know of a journal, and would not wait for another driver.
        patience = f" --agent-timeout {self.settings.driver_timeout_s:g}" if self.settings.has_journal else ""
        for url in self.agents.urls[:1]:
            command = f"elasticrun join --driver {url} --slots N --join-token-file {file or 'FILE'}{patience}"
            if not file:
                self.chronicle.remark(
                    f"to write the join token to a file: elasticrun jobs --write-join-token FILE {self.job.job_id}"
                )
            self.chronicle.remark(f"to add a host, run there: {command}")

    def _go_on(self, takeover: Takeover) -> None:
        """Continue a job that another driver had before."""
        self.standings.look(self.stepper.state)
        if self.stepper.state.round is not None and starts_again(self.settings):
            self.warming.warm_up()
        takeover.listens()
        if self.stepper.state.end is not None:
            self._end_job(self.stepper.state.end)

    def end_in_vain(self, exit_code: int) -> None:
        """End a job of which nothing is left; the caller of this driver may begin another."""
        self.found_nothing = True
        end = EndJob(exit_code, "its driver died, and none of its agents has reconnected")
        self.stepper.abandon(end)
        self._end_job(end)

    def abandon(self, why: str, *, is_sure: bool = True) -> None:
        """End at once, and leave everything alone: another driver has the job, or may have it."""
        self.end.abandon(why, is_sure=is_sure)
        self.let_go()

    def hand_over(self, why: str) -> None:
        """End at once, and leave everything alone: another driver is to take over the job."""
        self.end.hand_over(why)
        self.let_go()

    def let_go(self) -> None:
        """Release all agents and workers for another driver, without notifying them."""
        self.agents.admission.abandon()
        self.agents.fleet.abandon()
        self.workers.abandon()

    # --- commands ---------------------------------------------------------------------------------------------------

    def carry_out(self, commands: Sequence[Command], now: float) -> None:
        """Carry out the commands of a step, and report what has happened to the job."""
        self.health.note_step(now)
        # Report what has happened before its consequences.
        for command in commands:
            if isinstance(command, ReportDying | ReportExit):
                self.worker_events.report(command)
        self.chronicle.workers_stopped([command for command in commands if isinstance(command, StopWorker)])
        for command in commands:
            self._carry_out(command)
        if self.servers is not None:
            self.servers.look()
        self.standings.look(self.stepper.state)
        self.status_line.after_step(now, has_commands=bool(commands))

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                state = self.stepper.state
                restarted = state.policy.on_change.restarts
                self.workers.start(command, self.job, state.round_id, state.resets, restarted=restarted)
            case StartChief():
                assert self.chief is not None
                self.chief.start(command, self.job)
            case StopChief():
                assert self.chief is not None
                self.chronicle.chief_stopped(command.reason)
                self.chief.stop(command)
            case StopWorker():
                self.workers.stop(command.worker, command.ending)
            case KillWorker():
                self.workers.kill(command)
            case GiveUpHost():
                self.agents.fleet.give_up(command.hostname, command.reason)
            case DismissWorker():
                self.chronicle.worker_dismissed(command.worker, command.reason)
                self.rounds.dismiss(command.worker, command.reason)
            case PublishRound():
                self._publish(command)
            case SetNotice():
                self.chronicle.notice(command)
                notice = Notice(command.version, command.round_id, command.kind, command.reason)
                self.rounds.notify(notice)
                self.requests.notify(notice)
            case ReportResumed():
                self.chronicle.round_resumed(command)
            case ReportDying() | ReportExit():
                pass  # reported in carry_out
            case Report():
                self.chronicle.report(command)
            case EndJob():
                self._end_job(command)

    def _end_job(self, command: EndJob) -> None:
        if self.end.is_known:
            return
        remark = self.discovery.remark() if command.exit_code == ExitCode.TOO_FEW_SLOTS else ""
        self.end.decided(replace(command, message="; ".join(filter(None, (command.message, remark)))))
        failure = self.stepper.state.first_failure
        if command.exit_code and failure is not None:
            self.chronicle.first_failure(failure)

    def _publish(self, command: PublishRound) -> None:
        """Fence off the past, and let the members continue."""
        self.worker_events.round_begins()
        if command.backend is not None and not self._told_of_flags:  # None: no worker has called init() yet
            self._told_of_flags = True
            self._warn_of_flags(command.backend)
        self.requests.begin_round(command.round_id)
        for member in command.placed:
            self.workers.label(member.worker, str(member.slot.rank))
        formed = self.stepper.state.round
        assert formed is not None
        hosts = sorted({member.worker.hostname for member in command.placed})
        self.rounds.publish(formed, command.placed, self.agents.addresses.of(hosts))
        pids = {worker: one.pid for worker, one in self.workers.living.items()}
        self.chronicle.round_formed(command, pids, self.clock() - self.stepper.state.reset_began)
        if starts_again(self.settings):
            self.warming.warm_up()

    def _warn_of_flags(self, backend: Backend) -> None:
        """Warn of flags without effect on the workers, as soon as the workers' library is known."""
        if backend is not Backend.HOROVOD:
            if self.settings.of_horovod_alone:
                flags = ", ".join(self.settings.of_horovod_alone)
                self.chronicle.warning(f"no effect here: {flags} (supported only by Horovod's own library)")
            return
        asked = {"--hang-timeout": self.settings.hang_timeout_s, "--port-range": self.settings.port_range}
        for flag in (flag for flag, value in asked.items() if value):
            self.chronicle.warning(f"{flag} has no effect here: the workers run Horovod's own library")

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _finish(self, end: EndJob) -> None:
        """Stop what is left, then close the log. The workers' last output comes before the driver's."""
        limit_s = self.settings.grace_s + _END_S
        self.standstills.book(at_once=True)
        self.requests.notify(self.rounds.job_over(end.message))
        self.agents.fleet.job_over(end.exit_code, end.message, preempted=self.interrupts.preempted)
        if self.chief is not None:  # it uses the others
            await self.chief.end(limit_s)
        await self.workers.stop_all(limit_s)
        if self.end.is_abandoned:
            return
        self.stepper.catch_up()
        folder = self.settings.durable_dir
        found = newest_commit(folder)
        if found is not None:
            self.chronicle.found_on_disk(str(folder), found.newest, found.damaged)
        self.samples.last()
        self.chronicle.ended(end.exit_code, end.message)

    async def _end_tasks(self) -> None:
        self.stepper.close()
        await self.agents.tasks.end()

    async def _close_chief(self) -> None:
        if self.chief is not None:
            await self._close(self.chief.close(), "of the chief have ended; the guard will kill the rest")

    async def _close_agents(self) -> None:
        await self._close(self.agents.fleet.close(), "of the job have ended; the guard will kill the rest")
        self.agents.admission.close()

    async def _close(self, closing: Awaitable[None], what: str) -> None:
        """Wait for a part to close, with a time limit."""
        try:
            async with asyncio.timeout(self.settings.grace_s + _END_S):
                await closing
        except TimeoutError:
            self.chronicle.warning(f"cannot verify that all processes {what}")
