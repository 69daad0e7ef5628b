"""ElasticDriver: one job, from its start to its end.

Owns the order in which a job starts and ends. What happens becomes events of the core
(:mod:`elastic_driver.driver.stepper`): what hosts do in :mod:`~elastic_driver.driver.host_events`, what processes do in
:mod:`~elastic_driver.driver.worker_events`, what people do in :mod:`~elastic_driver.driver.interrupts`. Its commands go
to who carries them out in :mod:`~elastic_driver.driver.commands`. Everything runs on one asyncio loop; nobody else
touches the state, so there are no locks. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable
from dataclasses import dataclass

from elastic_driver.core.events import EndJob
from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.driver.agents import AgentSide, url_of
from elastic_driver.driver.chief import ChiefKeeper
from elastic_driver.driver.commands import Commands
from elastic_driver.driver.discovery_loop import DiscoveryLoop
from elastic_driver.driver.durable_folder import newest_commit
from elastic_driver.driver.ending import JobEnd
from elastic_driver.driver.health import Health
from elastic_driver.driver.interrupts import Interrupts
from elastic_driver.driver.page import Page
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.spokesman import Spokesman
from elastic_driver.driver.standstills import DriverStandstills
from elastic_driver.driver.status_line import StatusLine
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.supervision import Supervisor
from elastic_driver.driver.worker_events import WorkerEvents
from elastic_driver.driver.workers import Workers
from elastic_driver.errors import SettingsError
from elastic_driver.launch import output_files
from elastic_driver.rendezvous.job_files import Posting
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import JobClock

# Of a worker, at the driver: it speaks through its agent, and may be its host's only one.
_CONNECTIONS_EACH = 1
# What ending the workers may take beyond their grace, and what is left after that: a few seconds for processes that the
# kernel holds, and for output. Where it takes longer something is wrong here, and the guard ends them.
_END_S = 30.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ElasticDriver:
    """Runs one job to its end. Made whole by :func:`elastic_driver.driver.build.build`.

    Attributes:
        settings: what the user asked for.
        clock: the job's time.
        chronicle: tells the user, and the event log, what happens.
        stepper: has the state.
        commands: of the core, as they are carried out.
        end: of the job.
        interrupts: end the job from outside.
        agents: start workers, and speak for them.
        discovery: has the core hear of hosts.
        workers: their processes.
        worker_events: what becomes of them.
        chief: the script, where it is the chief of servers; None where it is the workers'.
        server: of agents, operators and pages.
        rounds: answer what workers, and those who drain them, ask.
        spokesman: speaks to them through their agents.
        page: for browsers; None for none.
        supervisor: finds who is frozen.
        health: finds who hangs, and who is slow.
        standstills: of this process.
        status_line: says where the job stands.
    """

    settings: Settings
    clock: JobClock
    chronicle: Chronicle
    stepper: Stepper
    commands: Commands
    end: JobEnd
    interrupts: Interrupts
    agents: AgentSide
    discovery: DiscoveryLoop
    workers: Workers
    worker_events: WorkerEvents
    chief: ChiefKeeper | None
    server: RendezvousServer
    rounds: Rounds
    spokesman: Spokesman
    page: Page | None
    supervisor: Supervisor
    health: Health
    standstills: DriverStandstills
    status_line: StatusLine

    async def run(self) -> int:
        """Runs the job and ends everything it started. Blocks until then.

        Returns:
            The exit code of ``elasticrun``.

        Raises:
            SettingsError: the rendezvous port cannot be had, or too few files may be open.
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
        tasks = self.agents.tasks
        # One step of the way out that fails does not keep the others from being done.
        async with contextlib.AsyncExitStack() as way_out:
            way_out.enter_context(self.interrupts.handled())
            way_out.push_async_callback(self.server.close)
            way_out.push_async_callback(self._close_agents)
            way_out.push_async_callback(self._close_chief)
            way_out.push_async_callback(self._end_tasks)
            job = await self._listen(way_out)
            self._post(job, way_out)
            tasks.start(self.clock.keep(self.standstills.stood_still))
            discovering = tasks.start(self.discovery.run(job))
            tasks.start(self.status_line.run())
            tasks.start(self.supervisor.watch_over())
            tasks.start(self.health.watch_over())
            self.stepper.set_timer()
            end = await self.end.wait()
            discovering.cancel()
            await self._finish(end)

    # --- the start -------------------------------------------------------------------------------------------------

    async def _listen(self, way_out: contextlib.AsyncExitStack) -> JobAddress:
        """Listens for agents, operators and browsers. Returns where that is."""
        settings, agents = self.settings, self.agents
        files = (settings.output_filename is not None) + settings.logs.keeps_files
        port = await self.server.start(
            settings.rendezvous_address,
            settings.driver_ports,
            workers=settings.num_proc,
            at_most=settings.most_workers,
            connections_each=_CONNECTIONS_EACH,
            descriptors_each=output_files.DESCRIPTORS_EACH * files,
            listener=agents.listener,
        )
        job = self.commands.begin(url_of(settings.rendezvous_address, port))
        await agents.ways.begin(self.server, port)
        if self.page is not None:
            way_out.callback(self.page.close)
            await self.page.listen(self.server, job.url, settings.page_address)
        return job

    def _post(self, job: JobAddress, way_out: contextlib.AsyncExitStack) -> None:
        """Says where the job is: to the user, and in the job's file."""
        self.chronicle.started(job.url, job.job_id)
        if self.page is not None and sys.stderr is not None and sys.stderr.isatty() and not self.settings.quiet:
            # On a terminal only, and past the chronicle: no log is to have it.
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), f"elasticrun: page: {self.page.link()}\n".encode())
        token = self.agents.join_token
        posting = Posting.post(job.job_id, job.url, job.key, self.settings.command, join_token=token)
        if token:
            self._tell_how_to_join(job.job_id)
        if posting is not None:
            way_out.callback(posting.remove)

    def _tell_how_to_join(self, job_id: str) -> None:
        if self.agents.invitation:
            self.chronicle.remark(self.agents.invitation)
            return
        file = self.settings.join_token_file
        for url in self.agents.urls[:1]:
            command = f"elasticrun join --driver {url} --slots N --join-token-file {file or 'FILE'}"
            if not file:
                self.chronicle.remark(f"the join token is written by: elasticrun jobs --write-join-token FILE {job_id}")
            self.chronicle.remark(f"hosts join with: {command}")

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _finish(self, end: EndJob) -> None:
        """Stops what is left, then closes the book. The workers' last words come before ours."""
        limit_s = self.settings.grace_s + _END_S
        self.standstills.book(at_once=True)
        self.spokesman.notify(self.rounds.job_over(end.message))
        self.agents.fleet.job_over(end.exit_code, end.message, preempted=self.interrupts.preempted)
        if self.chief is not None:  # it uses the others
            await self.chief.end(limit_s)
        await self.workers.stop_all(limit_s)
        self.stepper.catch_up()
        folder = self.settings.durable_dir
        found = newest_commit(folder)
        if found is not None:
            self.chronicle.found_on_disc(str(folder), found.newest, found.damaged)
        self.chronicle.ended(end.exit_code, end.message)

    async def _end_tasks(self) -> None:
        self.stepper.close()
        await self.agents.tasks.end()

    async def _close_chief(self) -> None:
        if self.chief is not None:
            await self._close(self.chief.close(), "of the chief have ended; the guard has to")

    async def _close_agents(self) -> None:
        await self._close(self.agents.launcher.close(), "of the job have ended; they are left to the guard")
        self.agents.reception.close()

    async def _close(self, closing: Awaitable[None], what: str) -> None:
        """Waits for it, but not for ever."""
        try:
            async with asyncio.timeout(self.settings.grace_s + _END_S):
                await closing
        except TimeoutError:
            self.chronicle.warning(f"cannot see that all processes {what}")
