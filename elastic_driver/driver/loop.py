"""ElasticDriver: the loop of one job, from its start to its end.

Owns the life of the job and its way out, and the net for errors that nobody expected. What happens becomes events of
the core (:mod:`elastic_driver.driver.stepper`), and its commands go to who carries them out: of processes to
:mod:`elastic_driver.driver.workers`, of answers to :mod:`elastic_driver.driver.rounds`. Everything runs on one asyncio
loop; nobody else touches the state, so there are no locks. It decides nothing.

An error that nobody expected ends the job, wherever on the loop it comes up: in a task, a timer, a callback. Then
nothing is decided any more, and what runs is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

from elastic_driver.core.events import (
    ChiefExited,
    Command,
    DiscoveryFailed,
    DismissWorker,
    DrainRequested,
    EndJob,
    GiveUpHost,
    HostHeard,
    HostsDiscovered,
    HostSilent,
    HostsUnusable,
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
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerSpared,
    WorkerStarted,
)
from elastic_driver.core.membership import Policy
from elastic_driver.core.standing import Doing, standing_of
from elastic_driver.core.state import (
    LAST_CALL_S,
    LAST_MOMENT_S,
    ChiefPhase,
    JobPhase,
    parameter_servers,
    serving_workers,
)
from elastic_driver.dialects.dialect import Dialect, JobAddress
from elastic_driver.discovery.source import Hosts
from elastic_driver.driver.agents import AgentSide, url_of
from elastic_driver.driver.chief import ChiefKeeper, ChiefSide
from elastic_driver.driver.durable_folder import newest_commit
from elastic_driver.driver.health import Health
from elastic_driver.driver.page import Page
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.servers import ServerList
from elastic_driver.driver.spokesman import Spokesman
from elastic_driver.driver.stacks import Stacks
from elastic_driver.driver.standings import Standings
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.workers import Workers
from elastic_driver.errors import (
    DiscoveryError,
    LaunchError,
    SettingsError,
    shortage,
)
from elastic_driver.health.last_words import last_words
from elastic_driver.health.watch import Rules
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch import output_files
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.error_files import pass_on, raised_in
from elastic_driver.launch.fleet.link import AgentFacts
from elastic_driver.launch.fleet.network_check import Checked
from elastic_driver.launch.launcher import PASSED_ON, CommandNotFoundError, ExitStatus, Launcher, WorkerProcess
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.rendezvous.job_files import Posting
from elastic_driver.rendezvous.messages import (
    DiscReport,
    Notice,
)
from elastic_driver.rendezvous.routes import DRIVER_ROUTES, OPERATOR, WORKER, Route, RouteRequest
from elastic_driver.rendezvous.server.server import CONNECTIONS_EACH, RendezvousServer
from elastic_driver.rendezvous.server.store_route import StoreRoute
from elastic_driver.rendezvous.server.values import Values
from elastic_driver.rendezvous.server.web import Probed
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.happenings import LinkMeasured, NetworkChecked
from elastic_driver.report.metrics import PATH, MetricsPage
from elastic_driver.report.stacks_text import stacks_text
from elastic_driver.report.status_line import figures
from elastic_driver.report.tally import Tally
from elastic_driver.settings.operator_token import read_operator_key
from elastic_driver.settings.settings import AUTO_ON_CHANGE, Settings
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.system.tasks import Tasks
from elastic_driver.version import __version__
from elastic_driver.words import Backend, ExitCode, NoticeKind, OnChange, Sizing

# A start imports PyTorch, and a step may be long: how much more usual it is to wait for these than for other things.
_START_PATIENCE, _COMMIT_PATIENCE = 3.0, 12.0
# The status line counts seconds; twice as often, so that it skips none.
_TICK_S = 0.5
# Looks at workers come about once a second: when those of the time after a standstill are there, and when they will not
# come any more.
_FIRST_LOOKS_S, _NO_LOOKS_S = 1.5, 4.0
# Of a worker that speaks through its agent: it may be its host's only one.
_CONNECTIONS_THROUGH_AGENTS = 1
_MOST_ERROR_FILES = 100
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What ending the workers may take beyond their grace, and what is left after that: a few seconds for processes that the
# kernel holds, and for output. Where it takes longer something is wrong here, and the guard ends them.
_END_S = 30.0


def policy_of(settings: Settings, on_change: OnChange = OnChange.IN_PLACE) -> Policy:
    """The core's limits, from the settings.

    Args:
        settings: what the user asked for.
        on_change: what the workers are at first.
    """
    is_open = settings.on_change == AUTO_ON_CHANGE
    # Where hosts join by themselves, a job that has put one out would wait for another.
    retries = settings.reset_limit is not None or settings.accept_agents
    # A command that fails at once would otherwise be tried for minutes, though nobody has asked for that; or hosts
    # would be waited for that cannot come.
    is_fixed = settings.discovery_script is None and settings.discovery_socket is None and not settings.accept_agents
    asks_for_tries = settings.reset_limit is not None or settings.cooldown_range_s is not None
    said = None if settings.nodes is None else settings.nodes.conf.get("last_call_timeout")
    return Policy(
        num_proc=settings.num_proc,
        min_num_proc=settings.min_num_proc,
        max_num_proc=settings.max_num_proc,
        elastic_timeout_s=settings.elastic_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        reset_limit=settings.reset_limit,
        reset_window_s=settings.reset_window_s,
        cooldown_range_s=settings.cooldown_range_s,
        durable=settings.durable_dir is not None,
        num_standby=settings.num_standby,
        num_proc_multiple=settings.num_proc_multiple,
        ranks_per_host_multiple=settings.ranks_per_host_multiple,
        protect=settings.protect,
        on_change=on_change,
        becomes_in_place=is_open and on_change is OnChange.RESTART,
        must_init=not is_open,
        retries_starts=retries,
        blames_hosts=settings.blames_hosts or not retries,
        last_call_s=LAST_CALL_S if said is None else float(said),
        ends_at_start=not asks_for_tries and (is_fixed or settings.sizing is not Sizing.NP),
        sizing=settings.sizing,
        num_parameter_servers=settings.num_parameter_servers,
        restart_chief=settings.restart_chief,
        fixed_hosts=is_fixed and settings.hosts is not None,
    )


class Preparer(Protocol):
    """Has hosts import what workers import, before any runs there."""

    def prepare(self, hostname: str, sample: Callable[[], tuple[Sequence[str], Mapping[str, str]]]) -> bool:
        """Has a host do so where nobody has run yet. Harmless when repeated.

        Args:
            hostname: the host.
            sample: gives the command and the environment of a worker there.

        Returns:
            Whether it still does so.
        """


class ElasticDriver:
    """Runs one job to its end.

    Args:
        settings: what the user asked for.
        discovery: tells the hosts there are.
        launcher: starts processes.
        chronicle: tells the user, and the event log, what happens.
        dialect: of the workers.
        clock: the job's time.
        on_round: called whenever a round has formed.
        preparer: has hosts that come import what workers import; None where none do.
        agents: through whom workers speak; None where they ask the driver's own server.
        chief: what the script is started with, where it is the chief of servers; None where it is the workers'.
        tally: counts what scrapers are told; None for no ``/metrics``.
        output: the last lines of a worker's output, by its key; None for one that is not known.

    Attributes:
        rounds: answers what workers, and those who drain them, ask the rendezvous server.
        health: how the workers are: what agents see of them, who hangs, and who is slow.
        stacks: takes their stacks.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        discovery: Hosts,
        launcher: Launcher,
        chronicle: Chronicle,
        dialect: Dialect,
        job_id: str,
        clock: JobClock | None = None,
        on_round: Callable[[], None] | None = None,
        preparer: Preparer | None = None,
        agents: AgentSide | None = None,
        chief: ChiefSide | None = None,
        tally: Tally | None = None,
        output: Callable[[str], Sequence[str] | None] = lambda worker: None,
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._launcher = launcher
        self._chronicle = chronicle
        self._preempted = False  # whether it was SIGTERM that ended the job, and nobody's order
        self._told_own_end = self._told_of_flags = self._told_of_metrics = False
        self._standings = Standings(chronicle)
        self._clock = clock or JobClock()
        self._on_round = on_round
        self._preparer = preparer
        self._stepper = Stepper(
            policy_of(settings, dialect.on_change),
            clock=self._clock,
            carry_out=self._carry_out_all,
            on_error=self._crash,
        )
        self._agents = agents
        self._tasks = agents.tasks if agents is not None else Tasks()
        self._workers = Workers(
            launcher,
            dialect,
            command=settings.command if chief is None else chief.server_command,
            grace_s=settings.grace_s,
            drain_s=settings.drain_timeout_s,
            tasks=self._tasks,
            listener=self,
        )
        self._chief: ChiefKeeper | None = None
        self._servers: ServerList | None = None
        if chief is not None:
            self._chief = ChiefKeeper(
                chief, command=settings.command, grace_s=settings.grace_s, tasks=self._tasks, listener=self
            )
            self._servers = ServerList(
                self._stepper,
                clock=self._clock,
                call_later=self._clock.call_later,
                address_of=chief.address_of,
                on_answer=chronicle.server_answers,
            )
        # Not booked yet: for how long, when it went on, and the round that trained; 0 for none.
        self._standstills: list[tuple[float, float, int]] = []
        rules = Rules(
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            hang_timeout_s=settings.hang_timeout_s,
            hang_action=settings.hang_action,
            straggler_action=settings.straggler_action,
        )
        self.health = Health(
            self._stepper,
            rules,
            chronicle=chronicle,
            clock=self._clock,
            tasks=self._tasks,
            is_of_the_job=(lambda address: False) if agents is None else agents.fleet.has_address,
            unheard=(lambda least_s: {}) if agents is None else agents.fleet.unheard,
            works_for_s=(lambda hostname: math.inf) if agents is None else agents.fleet.works_for_s,
            lost_s=lambda: self._clock.lost_s,
        )
        self.rounds = Rounds(
            self._stepper,
            processes=self._workers,
            heartbeats=self.health,
            clock=self._clock,
            on_disc=self._take_disc_report,
            on_notice=self._notify,
            end=self._end_for_operator,
            about=self._about,
            booked=self._booked,
            remark=self._remark,
            stall=lambda: self.health.stall,
            table=self.health.table,
        )
        token_file = settings.operator_token_file
        key = JobKey.new(b"" if token_file is None else read_operator_key(token_file))
        # Torch Stores of workers: the keys of a whole job, which its rounds do not end.
        store = StoreRoute(Values(secrets.randbits(63) | 1), call_later=self._clock.call_later)
        routes = {**dialect.routes, **self.rounds.routes, "store": Route({b"POST": WORKER}, store.answer)}
        self.stacks = Stacks(
            lambda: self._workers.living,
            host_of=(lambda hostname: None) if agents is None else agents.fleet.link_of,
        )
        self.health.stacks = self._stack_of
        own = {**DRIVER_ROUTES, "stacks": Route({b"GET": OPERATOR}, self._answer_stacks)}
        if self._servers is not None:
            routes |= self._servers.routes_of_workers
            own = {**own, **self._servers.routes_of_chief}
        self._page: Page | None = None
        if settings.page:
            self._page = Page(
                job_id,
                stepper=self._stepper,
                rounds=self.rounds,
                chronicle=chronicle,
                clock=self._clock,
                output=output,
                stacks=self._stacks_text,
            )
            own = {**own, **self._page.routes}
        self._server = RendezvousServer(
            self.rounds,
            routes={} if agents is not None else routes,
            key=key,
            on_error=self._crash,
            on_full=chronicle.warning,
            call_later=self._clock.call_later,
            keys=None if agents is None else agents.door.key_of,
            on_agent=None if agents is None else agents.reception.take_over,
            own=own,
            web=None if self._page is None else self._page.web,
        )
        if tally is not None:
            metrics = MetricsPage(
                tally, self.rounds.status, self._server.reader_header, __version__, failed=self._metrics_failed
            )
            if self._page is None:
                self._server.web = metrics
            else:
                self._page.site.more[PATH] = metrics.answer
        self._server.web = Probed(self._server.web)
        self._spokesman: Spokesman | None = None
        if agents is not None:
            fleet = agents.fleet
            self._spokesman = Spokesman(
                self.rounds,
                self._server.store,
                routes,
                tasks=self._tasks,
                links=fleet.links,
                host_of=fleet.link_of,
                stacks=self.stacks,
            )
            fleet.serve(self, agents.launcher, self._spokesman)
        self._job = JobAddress("", key, job_id, name_of_this_process())
        self._ends: dict[WorkerId, tuple[WorkerProcess, ExitStatus]] = {}  # until they are told
        self._error_files: dict[WorkerId, tuple[str, int | None]] = {}  # of workers that failed, and their exit codes
        self._ended: asyncio.Future[EndJob] | None = None
        self._phase = self._stepper.state.phase  # as of the last look

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
            numbers = dict.fromkeys((*_ENDING, *(signal.Signals[name] for name in self._settings.more_signals)))
            for number in [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]:
                loop.add_signal_handler(number, self._interrupted, number)
                way_out.callback(loop.remove_signal_handler, number)
            for number in [number for number in PASSED_ON if number not in numbers]:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, self._pass_on, number)
                    way_out.callback(loop.remove_signal_handler, number)
            way_out.push_async_callback(self._server.close)
            way_out.push_async_callback(self._close_launcher)
            way_out.push_async_callback(self._close_chief)
            way_out.push_async_callback(self._end_tasks)
            address = self._settings.rendezvous_address
            port = await self._server.start(
                address,
                self._settings.driver_ports,
                workers=self._settings.num_proc,
                at_most=self._settings.most_workers,
                connections_each=CONNECTIONS_EACH if self._agents is None else _CONNECTIONS_THROUGH_AGENTS,
                descriptors_each=self._launcher.descriptors_each
                + output_files.DESCRIPTORS_EACH
                * ((self._settings.output_filename is not None) + self._settings.logs.keeps_files),
                listener=None if self._agents is None else self._agents.listener,
            )
            self._job = replace(self._job, url=url_of(address, port))
            if self._agents is not None:
                await self._agents.ways.begin(self._server, port)
            if self._page is not None:
                way_out.callback(self._page.close)
                await self._page.listen(self._server, self._job.url, self._settings.page_address)
            self._chronicle.started(self._job.url, self._job.job_id)
            if self._page is not None and sys.stderr is not None and sys.stderr.isatty() and not self._settings.quiet:
                self._show_link(self._page.link())
            token = "" if self._agents is None else self._agents.join_token
            posting = Posting.post(
                self._job.job_id, self._job.url, self._job.key, self._settings.command, join_token=token
            )
            if token:
                self._tell_how_to_join()
            if posting is not None:
                way_out.callback(posting.remove)
            self._tasks.start(self._clock.keep(self._stood_still))
            discovering = self._tasks.start(self._discover())
            self._tasks.start(self._tick())
            self._tasks.start(self.health.watch_over())
            self._stepper.set_timer()
            end = await self._ended
            discovering.cancel()
            await self._finish(end)

    def _about(self) -> dict[str, object]:
        """What ``GET /v1/status`` says of the job beside its state."""
        urls = [] if self._agents is None else self._agents.urls
        about: dict[str, object] = {"job_id": self._job.job_id, "command": list(self._settings.command), "urls": urls}
        about |= self.health.status()
        booked = self._chronicle.goodput.job()
        if booked is not None:
            about["goodput"] = {"seconds": _rounded(booked.seconds), "share": round(booked.share, 6)}
        return about

    def _booked(self, worker: WorkerId) -> dict[str, float] | None:
        """What a worker's time has gone into so far."""
        booked = self._chronicle.goodput.worker(worker)
        return None if booked is None else _rounded(booked.seconds)

    async def _answer_stacks(self, request: RouteRequest) -> tuple[int, bytes]:
        """Answers ``GET /v1/stacks``."""
        return 200, json.dumps(await self._take_stacks()).encode()

    async def _stack_of(self, worker: WorkerId) -> str | None:
        dump = (await self.stacks.take_all([worker])).get(worker)
        return dump.text or None if dump is not None else None

    async def _stacks_text(self) -> str:
        return stacks_text(await self._take_stacks())

    async def _take_stacks(self) -> dict[str, Any]:
        dumps = await self.stacks.take_all()
        records = {record.worker: record for record in self._stepper.state.workers}
        found = []
        for worker, dump in dumps.items():
            record, vitals = records.get(worker), self.health.table.of(worker)
            found.append(
                {
                    "worker": worker.key,
                    "rank": record.rank if record is not None and record.round_id else None,
                    "host": worker.hostname,
                    **asdict(dump),
                    "waits_s": None if vitals is None else round(vitals.waits_s, 3),
                    "steps": None if vitals is None else vitals.steps,
                }
            )
        return {"stacks": found, "waiting": self.health.table.waiting(self._clock())}

    def _tell_how_to_join(self) -> None:
        assert self._agents is not None
        if self._agents.invitation:
            self._chronicle.remark(self._agents.invitation)
            return
        file = self._settings.join_token_file
        for url in self._agents.urls[:1]:
            command = f"elasticrun join --driver {url} --slots N --join-token-file {file or 'FILE'}"
            if not file:
                self._chronicle.remark(
                    f"the join token is written by: elasticrun jobs --write-join-token FILE {self._job.job_id}"
                )
            self._chronicle.remark(f"hosts join with: {command}")

    def _show_link(self, link: str) -> None:
        """On a terminal only, and past the chronicle: no log is to have it."""
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"elasticrun: page: {link}\n".encode())

    async def _end_tasks(self) -> None:
        self._stepper.close()
        await self._tasks.end()

    async def _close_chief(self) -> None:
        if self._chief is not None:
            try:
                async with asyncio.timeout(self._settings.grace_s + _END_S):
                    await self._chief.close()
            except TimeoutError:
                self._chronicle.warning("cannot see that all processes of the chief have ended; the guard has to")

    async def _close_launcher(self) -> None:
        try:
            async with asyncio.timeout(self._settings.grace_s + _END_S):
                await self._launcher.close()
        except TimeoutError:
            self._chronicle.warning("cannot see that all processes of the job have ended; they are left to the guard")
        if self._agents is not None:
            self._agents.reception.close()

    def _stood_still(self, stood_s: float) -> None:
        self._book_standstills(at_once=True)
        self._standstills.append((stood_s, time.monotonic(), self._round_that_trains()))
        self._chronicle.warning(
            f"the driver stood still for {stood_s:.0f} s: it was stopped or starved, or a disc that it writes to hung; "
            "no time limit ran meanwhile"
        )

    def _book_standstills(self, *, at_once: bool) -> None:
        """Books how long this process stood still, once the workers have said what they did meanwhile."""
        while self._standstills:
            stood_s, went_on_at, round_id = self._standstills[0]
            ended_s = time.monotonic() - went_on_at
            trained = round_id > 0 and self._round_that_trains() == round_id and self._went_on(round_id)
            # What came meanwhile is read first, and may be old.
            if not at_once and ended_s < (_FIRST_LOOKS_S if trained else _NO_LOOKS_S):
                return
            del self._standstills[0]
            self._chronicle.stood_still(stood_s, ended_s=ended_s, trained=trained)

    def _went_on(self, round_id: int) -> bool:
        """Whether the workers are known to have gone on in a round while the driver stood still."""
        return bool(self.health.table.went_on(round_id, lost_s=self._clock.lost_s))

    def _round_that_trains(self) -> int:
        """Its number; 0 for none."""
        state = self._stepper.state
        return state.round_id if standing_of(state).doing is Doing.TRAINING else 0

    async def _finish(self, end: EndJob) -> None:
        """Stops what is left, then closes the book. The workers' last words come before ours."""
        self._book_standstills(at_once=True)
        self.rounds.job_over(end.message)
        if self._agents is not None:
            self._agents.fleet.job_over(end.exit_code, end.message, preempted=self._preempted)
        if self._chief is not None:  # it uses the others
            await self._chief.end(self._settings.grace_s + _END_S)
        await self._workers.stop_all(self._settings.grace_s + _END_S)
        self._stepper.catch_up()
        folder = self._settings.durable_dir
        found = newest_commit(folder)
        if found is not None:
            self._chronicle.found_on_disc(str(folder), found.newest, found.damaged)
        self._chronicle.ended(end.exit_code, end.message)

    def _take_disc_report(self, report: DiscReport) -> None:
        if report.drivers and report.written >= 0:
            self.health.commit_found()
        self._chronicle.on_disc(report)

    def _pass_on(self, number: signal.Signals) -> None:
        which = "" if number == signal.SIGQUIT else " that handle it"
        self._chronicle.remark(f"{number.name}: passed on to the workers{which}")
        self._launcher.pass_on(number)

    def _interrupted(self, number: signal.Signals) -> None:
        name = number.name
        if self._stepper.is_over:
            if self._workers.living or self._chief is not None:  # else the job's end is told already
                self._chronicle.warning(f"{name} again: killing all workers now")
            self._launcher.kill()
            if self._chief is not None:
                self._chief.kill()
            return
        self._chronicle.warning(f"{name}: stopping all workers (again to kill them at once)")
        self._preempted = number == signal.SIGTERM
        if self._settings.is_torchruns:
            self._workers.end_by(number)
        self._stepper.post(StopRequested(number, name))

    def _end_for_operator(self) -> str:
        """As SIGTERM does, but that a second one changes nothing. Returns what is being done, in words."""
        if self._stepper.is_over:
            return "it is ending already"
        number = len(self._workers.living)
        self._chronicle.warning("elasticrun end: stopping all workers")
        self._stepper.post(StopRequested(signal.SIGTERM, "elasticrun end"))
        grace = f"SIGTERM, and SIGKILL after {self._settings.grace_s:g} s (--grace-time)"
        return f"it ends now; {number} worker{'' if number == 1 else 's'} get{'s' if number == 1 else ''} {grace}"

    async def _discover(self) -> None:
        last: tuple[tuple[Host, ...], frozenset[str], frozenset[str]] | None = None
        fails = False  # as the core has it
        known: dict[str, float] = {}  # hosts that are about to go, and when, as the core has heard it
        while True:
            try:
                hosts = await self._discovery.find_hosts()
            except DiscoveryError as error:
                fails = True
                self._stepper.post(DiscoveryFailed(str(error)))
            except Exception as error:
                reason = shortage(error)
                if not reason:
                    raise
                fails = True
                self._stepper.post(DiscoveryFailed(f"cannot look for hosts: {reason}"))
            else:
                departures, down = self._discovery.departures(), self._discovery.down()
                answered = not fails or self._discovery.answers()
                now = self._clock()
                going = {
                    each.hostname: now + (math.inf if each.within_s is None else each.within_s) for each in departures
                }
                # As the core has it: a countdown that is told again is no news.
                sooner = any(by < known.get(name, math.inf) - LAST_MOMENT_S for name, by in going.items())
                is_back = fails and answered
                if last is None or hosts != last[0] or is_back:
                    self._chronicle.hosts(hosts)
                found = hosts, down, self._preparing(hosts)
                if found != last or is_back or going.keys() != known.keys() or sooner:
                    self._stepper.post(HostsDiscovered(hosts, departures, down, answered, found[2]))
                    known = going
                last, fails = found, not answered
            await self._discovery.wait_change(self._settings.discovery_interval_s)

    def _preparing(self, hosts: Sequence[Host]) -> frozenset[str]:
        """Of these, those where nobody has run yet, and which import now what restarted workers import."""
        preparer = self._preparer
        if preparer is None or self._on_change is not OnChange.RESTART or not self._stepper.state.round_id:
            return frozenset()
        sample = self._workers.sample
        return frozenset(host.name for host in hosts if preparer.prepare(host.name, partial(sample, host, self._job)))

    @property
    def _on_change(self) -> OnChange:
        """What a change means for the workers as they are now."""
        return self._stepper.state.policy.on_change

    # --- commands out ----------------------------------------------------------------------------------------------

    def _carry_out_all(self, commands: Sequence[Command], now: float) -> None:
        """Does what a step of the core says, and tells of what has become of the job."""
        self.health.note_step(now)
        # What has happened is told before what comes of it.
        for command in commands:
            if isinstance(command, ReportDying | ReportExit):
                self._tell_end(command)
        self._chronicle.workers_stopped([command for command in commands if isinstance(command, StopWorker)])
        for command in commands:
            self._carry_out(command)
        if self._servers is not None:
            self._servers.look()
        self._standings.look(self._stepper.state)
        self._note_wait(now)
        before, self._phase = self._phase, self._stepper.state.phase
        if self._chronicle.live and (before is not self._phase or commands):
            self._chronicle.status(self.rounds.explained(), self._figures())

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                state, restarted = self._stepper.state, self._on_change is OnChange.RESTART
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
                if self._agents is not None:
                    self._agents.fleet.give_up(command.hostname, command.reason)
            case DismissWorker():
                self._chronicle.worker_dismissed(command.worker, command.reason)
                self.rounds.dismiss(command.worker, command.reason)
            case PublishRound():
                self._publish(command)
            case SetNotice():
                self._chronicle.notice(command)
                self.rounds.notify(Notice(command.version, command.round_id, command.kind, command.reason))
            case ReportResumed():
                self._chronicle.round_resumed(command)
            case ReportDying() | ReportExit():
                pass  # see _carry_out_all
            case Report():
                self._chronicle.report(command)
            case EndJob():
                if self._ended is not None and not self._ended.done():
                    remark = self._discovery.remark() if command.exit_code == ExitCode.TOO_FEW_SLOTS else ""
                    command = replace(command, message="; ".join(filter(None, (command.message, remark))))
                    self._no_more()
                    self._ended.set_result(command)
                    failure = self._stepper.state.first_failure
                    if command.exit_code and failure is not None:
                        self._chronicle.first_failure(failure)

    def _tell_end(self, command: ReportDying | ReportExit) -> None:
        match command:
            case ReportDying():
                process = self._workers.living.get(command.worker) or self._ends[command.worker][0]
                self._chronicle.worker_dying(command.worker, process, command.how)
            case ReportExit():
                process, status = self._ends.pop(command.worker)
                self._chronicle.worker_exited(command.worker, process, status, expected=command.expected)
                self._standings.exited(command.worker)

    def _publish(self, command: PublishRound) -> None:
        """Fences the past, and has the members go on."""
        self._error_files.clear()  # the first failure is asked for, of those since the last round
        if command.backend is not None and not self._told_of_flags:  # None: nobody has called init() yet
            self._told_of_flags = True
            self._warn_of_flags(command.backend)
        self._server.begin_round(command.round_id)
        if self._spokesman is not None:
            self._spokesman.begin_round(command.round_id)
        for one in command.placed:
            self._workers.label(one.worker, str(one.slot.rank))
        self.rounds.publish(command, self._launcher.addresses(sorted({one.worker.hostname for one in command.placed})))
        pids = {worker: process.pid for worker, process in self._workers.living.items()}
        self._chronicle.round_formed(command, pids, self._clock() - self._stepper.state.reset_began)
        if self._on_round is not None:
            self._on_round()

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

    def _notify(self, notice: Notice) -> None:
        if self._spokesman is not None:
            self._spokesman.notify(notice)

    def _no_more(self) -> None:
        """The job is over: nobody is started."""
        self._workers.job_ends()

    # --- what is told of waits -------------------------------------------------------------------------------------

    def _note_wait(self, now: float) -> None:
        """Whether there is something that a user who sees no status line wants to be told of again."""
        state = self._stepper.state
        what, patience = "", 1.0
        match state.phase:
            case JobPhase.WAITING | JobPhase.RESETTING:
                what = state.phase.value
            case JobPhase.STARTING:
                what, patience = state.phase.value, _START_PATIENCE
            case JobPhase.RUNNING if self.health.stall:
                what = "stall"
            case JobPhase.RUNNING if state.discovery.outage is not None:
                what = "discovery"
            case JobPhase.RUNNING if state.notice_kind is NoticeKind.HOSTS_UPDATED:
                what, patience = "commit", _COMMIT_PATIENCE
        self._chronicle.waits(now, what, patience=patience)

    def _remark(self) -> str:
        """Who may hang, what discovery does, and which hosts are not ready."""
        waits = self._stepper.state.phase in (JobPhase.WAITING, JobPhase.RESETTING, JobPhase.RUNNING)
        return "; ".join(filter(None, (self.health.remark(), self._discovery.remark() if waits else "")))

    def _figures(self) -> tuple[str, ...]:
        """What the status line has behind its sentence."""
        state = self._stepper.state
        if state.phase is not JobPhase.RUNNING:
            return ()
        return figures(
            steps_per_s=self.health.table.steps_per_s(self._clock()),
            steps=self.health.table.steps,
            commits=self.rounds.newest_commit(),
            suspected=self.health.suspected,
        )

    async def _tick(self) -> None:
        """Keeps the clock and the countdowns of the status line going; without one, tells of what takes long."""
        while self._ended is not None and not self._ended.done():
            now = self._clock()
            self._note_wait(now)
            self._book_standstills(at_once=False)
            due = self._chronicle.look(now)
            if due or self._chronicle.live:
                text = self.rounds.explained()
                if due:
                    self._chronicle.still_waiting(text, now)
                else:
                    self._chronicle.status(text, self._figures())
            await asyncio.sleep(_TICK_S)

    # --- the net for errors ----------------------------------------------------------------------------------------

    def _crash(self, error: BaseException) -> None:
        """An error of ours: the events that led to it are the bug report, and the job ends.

        For the core it is over at once: of what comes from now on nothing follows. One that comes up while the job ends
        anyhow is told, and changes nothing.
        """
        assert self._ended is not None
        end = self._stepper.fail(error)
        self._no_more()
        is_first = not self._ended.done()
        if is_first:
            # The core may have ended the job in the step that failed: that end is not the one.
            failed = EndJob(ExitCode.INTERNAL_ERROR, f"internal error of the driver: {error!r}")
            self._ended.set_result(end or failed)
        try:
            if is_first:
                self._chronicle.internal_error(error, list(self._stepper.history))
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

    def _metrics_failed(self, error: Exception) -> None:
        """They are of no account to the job, and asked for each few seconds: it is told once."""
        if not self._told_of_metrics:
            self._told_of_metrics = True
            self._chronicle.warning(f"the metrics cannot be told, and the job goes on: {type(error).__name__}: {error}")

    # --- hosts (FleetListener) -------------------------------------------------------------------------------------

    def agent_came(self, facts: AgentFacts) -> None:
        """A host has an agent."""
        slots, nodes = facts.hello.slots, self._settings.nodes
        self._chronicle.host_ready(facts.host, facts.peer, slots if facts.joined else 0)
        if facts.joined and facts.hello.alike and nodes is not None and slots != nodes.nproc_per_node:
            least, most = nodes.least * nodes.nproc_per_node, nodes.most * nodes.nproc_per_node
            self._chronicle.warning(
                f"node {facts.host} has --nproc-per-node {slots}, and the driver's {nodes.nproc_per_node}: what "
                f"--nnodes says is counted in workers, and the job has {least}{'' if most == least else f' to {most}'}"
            )

    def agent_lost(self, facts: AgentFacts, why: str) -> None:
        """A host's agent is lost, and its workers with it."""
        if not self._stepper.is_over:
            self._chronicle.host_lost(facts.host, why)

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """A host that is wanted has no agent yet."""
        self._chronicle.host_unready(host, failure.reason, permanent=failure.permanent)

    def warn(self, text: str) -> None:
        """Something that the user has to know of a host."""
        self._chronicle.warning(text)

    def node_refused(self, why: str) -> None:
        """A node has come that cannot be one of the job's."""
        self._chronicle.warning(f"a node is refused: {why}")

    def network_checked(self, report: Checked) -> None:
        """The network between hosts was checked."""
        links = [LinkMeasured(hosts, each.rtt_s, each.speed or 0.0) for hosts, each in report.links.items()]
        self._chronicle.network_checked(
            NetworkChecked(report.admitted, report.barred, report.unheard, links, report.slow, report.took_s)
        )

    def is_left_out(self, host: str) -> bool:
        """Whether a host gets no workers for a while."""
        return host in self._stepper.state.cuts.out

    def host_silent(self, host: str, silent_s: float, *, sure: bool) -> None:
        """Nothing is heard of a host."""
        self._stepper.report_host(HostSilent(host, silent_s, sure))

    def host_heard(self, host: str) -> None:
        """A host is heard again."""
        self._stepper.report_host(HostHeard(host))

    def host_leaves(self, host: str, why: str, within_s: float | None) -> None:
        """A host is to be drained: its agent says so."""
        self._stepper.post(DrainRequested(host, None, why, within_s=within_s))

    def own_machine_leaves(self, why: str, within_s: float) -> None:
        """The machine that this process runs on goes away."""
        if not self._told_own_end:
            self._told_own_end = True
            folder = self._settings.durable_dir
            after = "nothing keeps its progress (--durable-dir)"
            if folder is not None:
                after = f"started again it goes on from the last commit in {folder}"
            elif self._stepper.state.policy.on_change is not OnChange.IN_PLACE:
                after = "started again it goes on from its script's checkpoint"
            text = f"the driver's own machine goes away in {within_s:.3g} s ({why}): the job ends with it, on all hosts"
            self._chronicle.warning(f"{text}; {after}")

    def no_host_can_be_used(self, reasons: str) -> None:
        """Nobody need wait for hosts that come up by themselves."""
        if not self._settings.accept_agents:
            self._stepper.post(HostsUnusable(reasons))

    def failed(self, error: BaseException) -> None:
        """An error of our own, while an agent was listened to."""
        self._crash(error)

    # --- the chief (ChiefListener) ---------------------------------------------------------------------------------

    def chief_started(self, number: int, pid: int) -> None:
        """Its process runs."""
        state = self._stepper.state
        self._chronicle.chief_started(number, pid, len(parameter_servers(state)), len(serving_workers(state)))

    def chief_exited(self, event: ChiefExited, pid: int | None) -> None:
        """Its process has ended, or there was none."""
        chief = self._stepper.state.chief
        expected = self._stepper.is_over or (chief is not None and chief.phase is ChiefPhase.STOPPING)
        if pid is not None and event.returncode is not None:
            self._chronicle.chief_exited(event.number, pid, event.returncode, event.how, expected=expected)
        self._stepper.post(event)

    # --- processes (ProcessListener of the workers) ----------------------------------------------------------------

    def started(self, worker: WorkerId, process: WorkerProcess) -> None:
        """A process runs."""
        self._chronicle.worker_started(worker, process.pid)
        self._standings.started(worker)
        if self._on_change is not OnChange.IN_PLACE:  # else a start alone is no news
            self._stepper.report(WorkerStarted(worker))

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """A process could not be started."""
        bad_command = isinstance(error, CommandNotFoundError)
        self._stepper.post(WorkerNotStarted(worker, str(error), random.random(), bad_command))
        self._standings.exited(worker)
        self._chronicle.worker_not_started(worker)
        self.health.gone(worker)
        self.rounds.gone(worker)  # it may have been there for a moment, and have asked

    def dying(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus | str) -> None:
        """The others need not wait until the system has freed all of a dead worker's memory."""
        returncode, starved = (None, False) if isinstance(status, str) else (status.returncode, status.out_of_memory)
        self._keep_error_file(worker, process, returncode)
        error, where = _last_words(process)
        self._stepper.report(WorkerDying(worker, returncode, str(status), random.random(), error, where, starved))

    def exited(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus) -> None:
        """A process has ended."""
        self._ends[worker] = process, status
        self.rounds.gone(worker)
        self.health.gone(worker)
        error, where = _last_words(process) if status.returncode else ("", "")
        if status.returncode:
            self._keep_error_file(worker, process, status.returncode)
        draw, how = random.random(), str(status)
        lost, starved = status.host_lost, status.out_of_memory
        self._stepper.report(WorkerExited(worker, status.returncode, how, draw, error, where, lost, starved))

    def killed(self, order: KillWorker) -> None:
        """A process is being ended."""
        if order.hangs:
            self._chronicle.worker_hung(order.worker, order.reason)
        else:
            self._chronicle.worker_stopped(order.worker, f"it {order.reason}")

    def _keep_error_file(self, worker: WorkerId, process: WorkerProcess, returncode: int | None) -> None:
        # A joiner's failure ends no job. Hosts of always new names may fail as long as it waits for slots.
        state = self._stepper.state
        if state.round_id and not state.is_member(worker):
            return
        if worker in self._error_files or len(self._error_files) < _MOST_ERROR_FILES:
            self._error_files[worker] = process.error_file, returncode

    def pass_on_error(self, path: str) -> None:
        """Writes the failure of the worker that failed first, if one did, into this process's own error file."""
        failure = self._stepper.state.first_failure
        if failure is not None:
            text, returncode = self._error_files.get(failure.worker, ("", None))
            pass_on(path, text, str(failure), ExitCode.USER_CODE_FAILED if returncode is None else returncode)

    def spared(self, order: KillWorker) -> None:
        """A process is not ended: nothing is left of it but what has run it."""
        if order.exits:
            self._stepper.report(WorkerSpared(order.worker))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {category: round(spent_s, 3) for category, spent_s in seconds.items()}


def _last_words(process: WorkerProcess) -> tuple[str, str]:
    """What it said of its end, and where that was: its error file says it best."""
    raised = raised_in(process.error_file)
    if raised is None:
        return last_words(process.last_lines)
    return raised.error, last_words(raised.callstack)[1]
