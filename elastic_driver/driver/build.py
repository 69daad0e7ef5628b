"""Construction of a job's driver: all of its parts, and their connections.

Owns nothing. Two circles are closed here, and nowhere else: steps of the core lead back to the sources of events, and
workers that have ended are forgotten by the parts that answer them. :mod:`elastic_driver.driver.job` provides the
settings of a job, and decides what its hosts and workers are.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from elastic_driver.core.events import Command
from elastic_driver.dialects.dialect import Dialect, JobAddress
from elastic_driver.discovery.source import Hosts
from elastic_driver.driver.agent_requests import AgentRequests
from elastic_driver.driver.agents import AgentSide
from elastic_driver.driver.books import Books, go_on
from elastic_driver.driver.chief import AgentsChief, ChiefKeeper, ChiefSide, OwnChief, TakeoverListener
from elastic_driver.driver.claim import Claim, Lock
from elastic_driver.driver.discovery_loop import DiscoveryLoop
from elastic_driver.driver.ending import JobEnd
from elastic_driver.driver.health import Health
from elastic_driver.driver.host_events import HostEvents
from elastic_driver.driver.interrupts import Interrupts
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.driver.page import Page
from elastic_driver.driver.policy import policy_of, starts_again
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.samples import Samples
from elastic_driver.driver.servers import ServerList
from elastic_driver.driver.stacks import StackReports, Stacks
from elastic_driver.driver.standings import Standings
from elastic_driver.driver.standstills import DriverStandstills
from elastic_driver.driver.status import JobStatus, place_of
from elastic_driver.driver.status_line import StatusLine
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.takeover import Limits, Parts, Takeover
from elastic_driver.driver.tokens import Tokens
from elastic_driver.driver.worker_events import WorkerEvents
from elastic_driver.driver.write_ahead import WriteAhead
from elastic_driver.health.figures import FigureBook
from elastic_driver.health.watch import Rules
from elastic_driver.hosts import WorkerId
from elastic_driver.journal.entries import JobFacts
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded
from elastic_driver.launch.fleet.chief import WorkersWithChief
from elastic_driver.launch.fleet.meetings import Meetings
from elastic_driver.launch.fleet.warming import Warming
from elastic_driver.launch.fleet.workers import WorkerContext
from elastic_driver.rendezvous.credentials import Identity, Role, reader_header
from elastic_driver.rendezvous.messages import DiskReport
from elastic_driver.rendezvous.routes import WORKER, Route, Routes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.rendezvous.server.store_route import StoreRoute
from elastic_driver.rendezvous.server.values import Values
from elastic_driver.rendezvous.server.web import Probed
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.metrics import PATH, MetricsPage
from elastic_driver.reporting.page.curves import Curves
from elastic_driver.reporting.tally import Tally
from elastic_driver.settings.settings import Settings
from elastic_driver.system import parent
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.version import __version__
from elastic_driver.words import ExitCode


def build(
    settings: Settings,
    *,
    discovery: Hosts,
    chronicle: Chronicle,
    dialect: Dialect,
    job: JobFacts,
    agents: AgentSide,
    tally: Tally,
    clock: JobClock | None = None,
    chief: ChiefSide | None = None,
    output: Callable[[str], Sequence[str] | None] = lambda worker: None,
    routes: Routes = (),
    journal: Journal | None = None,
    before: Recorded | None = None,
    lock: Lock | None = None,
    code_in_vain: int = ExitCode.INTERNAL_ERROR,
) -> ElasticDriver:
    """Create the driver of one job. It does nothing before it is run.

    Args:
        settings: the user's settings.
        discovery: finds the hosts.
        chronicle: reports events to the user and the event log.
        dialect: the dialect of the workers.
        job: the constant facts of the job.
        agents: the agents, which start workers and speak for them.
        tally: holds the counters for scrapers.
        clock: the job's time.
        chief: the chief's start, if the script is the chief of servers; None if it is that of the workers.
        output: returns the last lines of a worker's output, by its key; None for an unknown worker.
        routes: routes for workers in addition to the standard ones.
        journal: where steps are written before they are made; None for nowhere.
        before: the job as its previous driver has left it; None for a new job.
        lock: the lock for which drivers of other machines wait; None if none of them can take over.
        code_in_vain: the exit code if nothing is left of the previous driver's job.
    """
    clock = clock or JobClock()
    fleet, tasks = agents.fleet, agents.tasks
    key, job_id = job.job_key, job.job_id
    reader = reader_header(key.of(Identity(Role.READER)))

    def carry_out(commands: Sequence[Command], now: float) -> None:
        driver.carry_out(commands, now)

    def crash(error: BaseException) -> None:
        end.crash(error)

    def abandon(why: str) -> None:
        driver.abandon(why)

    def abandon_unsure(why: str) -> None:
        driver.abandon(why, is_sure=False)

    def hand_over(why: str) -> None:
        driver.hand_over(why)

    def leave() -> bool:
        is_there = journal is not None and (before is not None or journal.is_on_disk)
        if journal is None or not is_there or not parent.leave_to_another():
            return False
        journal.give_up()  # the next driver need not know that this one lets go of its agents
        driver.let_go()
        return True

    def forget(worker: WorkerId) -> None:
        rounds.gone(worker)
        if page is not None and (last := health.table.entry(worker, clock())) is not None:
            page.seen_last(worker, last)
        health.gone(worker)

    def on_disk(report: DiskReport) -> None:
        if report.drivers and report.written >= 0:
            health.commit_found()
        chronicle.on_disk(report)

    ahead: WriteAhead | None = None
    if journal is not None:
        ahead = WriteAhead(
            journal,
            settings.driver_timeout_s,
            clock.call_later,
            chronicle.warning,
            on_held=abandon,
            # If another driver may have the job by then, this one does not end it.
            on_too_late=None if lock is None else abandon_unsure,
        )
        fleet.keepings = (*fleet.keepings, ahead.keeping)
    stepper = Stepper(
        policy_of(settings, dialect.on_change),
        clock=clock,
        carry_out=carry_out,
        on_error=crash,
        ahead=ahead,
        state=None if before is None else before.state,
    )
    standings = Standings(chronicle)
    worker_events = WorkerEvents(stepper, chronicle=chronicle, standings=standings, forget=forget)
    keeper, servers = (None, None) if chief is None else _chief_of(chief, settings, stepper, clock, chronicle, journal)
    listener: TakeoverListener = worker_events
    if isinstance(keeper, AgentsChief):
        keeper.others, listener = worker_events, keeper
    meetings = Meetings(fleet, agents.addresses, settings.port_range)
    warming = Warming(fleet, variables=agents.variables, on_warm=chronicle.warmed, on_prepared=fleet.changes.report)
    workers = WorkersWithChief(
        WorkerContext(
            fleet,
            agents.addresses,
            meetings,
            warming,
            agents.variables,
            agents.sink,
            agents.stdin,
            tasks,
        ),
        dialect,
        command=settings.command if chief is None else chief.server_command,
        grace_s=settings.grace_s,
        drain_s=settings.drain_timeout_s,
        listener=listener,
    )
    if isinstance(keeper, AgentsChief):
        keeper.workers = workers
    stacks = Stacks(lambda: list(workers.living), host_of=fleet.link_of)
    health = Health(
        stepper,
        Rules(
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            hang_timeout_s=settings.hang_timeout_s,
            hang_action=settings.hang_action,
            straggler_action=settings.straggler_action,
        ),
        chronicle=chronicle,
        clock=clock,
        tasks=tasks,
        stacks=stacks.take_one,
        is_of_the_job=fleet.has_address,
        unheard=fleet.unheard,
        works_for_s=fleet.works_for_s,
        lost_s=lambda: clock.lost_s,
    )
    books: Books | None = None
    if journal is not None:
        books = Books(
            journal, clock, tally, chronicle, health.table, health.watch.drains, heard=lambda: stepper.made_at
        )
    if before is not None:
        go_on(before, tally, chronicle, health.table, health.watch.drains)
    end = JobEnd(stepper, chronicle=chronicle, workers=workers, leave=leave)
    interrupts = Interrupts(settings, stepper, chronicle=chronicle, workers=workers, chief=keeper, hand_over=hand_over)
    progress = Progress()
    rounds = Rounds(stepper, heartbeats=health, progress=progress, clock=clock, on_disk=on_disk, end=interrupts.end)
    figures = FigureBook(lambda worker: place_of(stepper.state, worker), chronicle.warning)
    status = JobStatus(
        settings.command,
        job_id,
        stepper,
        clock=clock,
        processes=workers,
        agents=agents,
        health=health,
        figures=figures,
        progress=progress,
        goodput=chronicle.goodput,
        discovery=discovery,
    )
    standstills = DriverStandstills(stepper, chronicle=chronicle, clock=clock, table=health.table)
    status_line = StatusLine(
        stepper,
        chronicle=chronicle,
        clock=clock,
        status=status,
        health=health,
        standstills=standstills,
    )
    reports = StackReports(stacks, stepper, health.table, clock)
    metrics = MetricsPage(
        tally,
        status.document,
        reader,
        __version__,
        warn=chronicle.warning,
    )
    page: Page | None = None
    curves = Curves() if settings.page else None
    samples = Samples(stepper, health=health, figures=figures, chronicle=chronicle, clock=clock, curves=curves)
    if curves is not None:
        page = Page(
            job_id,
            stepper=stepper,
            rounds=rounds,
            status=status,
            chronicle=chronicle,
            clock=clock,
            curves=curves,
            output=output,
            stacks=reports.text,
            more={PATH: metrics.answer},
            open_loopback=agents.ways.open_loopback,
        )
    tokens = Tokens(key, agents, has_chief=servers is not None)
    table: list[Route] = [
        *(*routes, *rounds.routes, *status.routes, *reports.routes, *tokens.routes),
        _store_route(clock),
    ]
    if servers is not None:
        table += servers.routes
    if page is not None:
        table += page.routes
    server = RendezvousServer(
        # Workers send requests to their agents.
        [route for route in table if route.roles != WORKER],
        key_of=tokens.key_of,
        admits=tokens.admits,
        agents=agents.admission.take_over,
        on_error=crash,
        on_full=chronicle.warning,
        web=Probed(metrics if page is None else page.web),
        reader=reader,
        certificate=agents.ways.certificate,
    )
    requests = AgentRequests(
        rounds,
        table,
        figures=figures,
        tasks=tasks,
        links=fleet.links,
        host_of=fleet.link_of,
    )
    host_events = HostEvents(settings, stepper, chronicle=chronicle, on_error=crash, on_lost=abandon)
    claim: Claim | None = None
    if lock is not None:
        assert journal is not None, "it is the journal's"
        claim = Claim(
            lock,
            journal.epoch,
            journal.driver,
            settings.driver_timeout_s,
            fleet=fleet,
            chronicle=chronicle,
            call_later=clock.call_later,
            on_lost=abandon_unsure,
        )
    parts = (requests, meetings, warming, stacks)
    fleet.serve(host_events, workers, *(parts if claim is None else (*parts, claim)))
    takeover: Takeover | None = None
    if before is not None:
        assert journal is not None, "what there was before is read from it"
        takeover = Takeover(
            Parts(stepper, fleet, agents.addresses, workers, meetings, warming, listener, rounds, requests, chronicle),
            [kept for kept in before.facts.agents.values() if not kept.given_up],
            Limits(
                settings.agent_timeout_s,
                # Agents of a driver in doubt may have learned of the doubt as late as at its end.
                settings.driver_timeout_s + (settings.agent_timeout_s if settings.has_etcd else 0.0),
            ),
            epoch=journal.epoch,
            away_s=before.away_s,
            carry_out=carry_out,
            clock=clock,
            on_nobody=lambda: driver.end_in_vain(code_in_vain),
        )
    driver = ElasticDriver(
        settings=settings,
        job=JobAddress("", key, job_id, name_of_this_process()),
        clock=clock,
        chronicle=chronicle,
        stepper=stepper,
        books=books,
        end=end,
        interrupts=interrupts,
        agents=agents,
        discovery=discovery,
        discovery_loop=DiscoveryLoop(
            discovery,
            settings.discovery_interval_s,
            stepper,
            chronicle=chronicle,
            clock=clock,
            workers=workers,
            preparer=warming if starts_again(settings) and settings.warm_starts else None,
        ),
        workers=workers,
        warming=warming,
        worker_events=worker_events,
        standings=standings,
        chief=keeper,
        servers=servers,
        server=server,
        rounds=rounds,
        status=status,
        requests=requests,
        page=page,
        health=health,
        standstills=standstills,
        status_line=status_line,
        samples=samples,
        takeover=takeover,
        claim=claim,
    )
    return driver


def _chief_of(
    chief: ChiefSide,
    settings: Settings,
    stepper: Stepper,
    clock: JobClock,
    chronicle: Chronicle,
    journal: Journal | None,
) -> tuple[ChiefKeeper, ServerList]:
    """Create the chief's keeper, and the list of servers that it follows."""
    kind = OwnChief if journal is None else AgentsChief
    keeper = kind(chief, command=settings.command, grace_s=settings.grace_s, stepper=stepper, chronicle=chronicle)
    servers = ServerList(
        stepper,
        clock=clock,
        call_later=clock.call_later,
        address_of=chief.address_of,
        on_answer=chronicle.server_answers,
        epoch=0 if journal is None else journal.epoch,
    )
    return keeper, servers


def _store_route(clock: JobClock) -> Route:
    """Create the route to the workers' torch Stores: keys of the whole job, which outlive its rounds."""
    store = StoreRoute(Values(secrets.randbits(63) | 1), call_later=clock.call_later)
    return Route("POST", "store", WORKER, store.answer)
