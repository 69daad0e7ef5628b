"""One job from its settings to its end: creates the driver's parts, and runs them on this process's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastic_driver.dialects.dialect import Dialect
from elastic_driver.dialects.ours import OurDialect, inheritable
from elastic_driver.dialects.servers import ServerDialect, missing_script, server_command
from elastic_driver.dialects.torchrun import HANDLED_SIGNALS, TorchrunJob
from elastic_driver.discovery.caller import CallerDiscovery
from elastic_driver.discovery.script import ScriptDiscovery
from elastic_driver.discovery.source import FixedHosts, HostDiscovery, TimedDiscovery
from elastic_driver.driver.agent_side import NodeJob, agents_of, pod_names
from elastic_driver.driver.build import build
from elastic_driver.driver.chief import ChiefSide
from elastic_driver.driver.durable_folder import FolderLock, durable_env
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.driver.other_python import check_python
from elastic_driver.driver.recording import Recording, Resumed, close, enter, has_journal, recording
from elastic_driver.driver.trainer_status import ReportTarget, TrainerStatus, standing_of
from elastic_driver.errors import SettingsError, TakeoverError, in_words, shortage
from elastic_driver.health.heartbeats import interval_s
from elastic_driver.journal.entries import JobFacts
from elastic_driver.journal.file import has_job
from elastic_driver.journal.held import HeldJournal
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.launch.error_files import ENV_ERROR_FILE
from elastic_driver.launch.fleet.addresses import LOOPBACK, Addresses
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.kept import NOTHING
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.local.keeper import ProcessKeeper
from elastic_driver.launch.local.locality import is_local_host
from elastic_driver.launch.output_files import NO_SCREEN, OutputFiles
from elastic_driver.launch.processes.binding import ENV_BINDING
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.launch.warm.program import Program
from elastic_driver.launch.words import OutputSink
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT, ENV_HOST_TIMEOUT, ENV_MAY_CHANGE, ENV_PORTS
from elastic_driver.rendezvous.routes import Routes
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.console import Console
from elastic_driver.reporting.event_hook import EventHook
from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.history import History
from elastic_driver.reporting.instant import Instant
from elastic_driver.reporting.narrator import Narrator
from elastic_driver.reporting.page.tails import Tails
from elastic_driver.reporting.tally import Tally
from elastic_driver.settings.logs import Logs
from elastic_driver.settings.machines import NO_LAUNCHER
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.pods import KUBERNETES
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import AUTO_ON_CHANGE, RESTART, Settings
from elastic_driver.system.job_clock import MOST_S, JobClock
from elastic_driver.system.keeping import Keeping
from elastic_driver.system.leash import Leash
from elastic_driver.system.logged import warnings_told
from elastic_driver.system.loops import new_loop
from elastic_driver.system.safe_files import open_folder_inside
from elastic_driver.system.threads import started_pool
from elastic_driver.words import NO_BARS, ExitCode, OnChange, may_be_shown

# File names are limited to 255 bytes in most file systems.
_MOST_NAME = 200
# Threads for blocking calls: name lookups, which may hang for seconds.
_THREADS = 8


def run_job(
    settings: Settings,
    *,
    routes: Routes = (),
    early: EarlyAgent | None = None,
    node_job: NodeJob | None = None,
    resumed: Resumed | None = None,
) -> int:
    """Run a job on this process's own event loop, using its terminal. Blocks until the job has ended.

    Args:
        settings: the user's settings.
        routes: routes for workers in addition to the standard ones.
        early: a process that may become this machine's agent; it is ended if it is not needed.
        node_job: for a job of nodes; None for all others.
        resumed: the job to resume; None if a new one may be begun as well.

    Returns:
        The exit code of ``elasticrun``.

    Raises:
        SettingsError: a program or a folder that the settings name cannot be used, the port or the event log is not
            available, a fixed host is not this machine, or the machine lacks what a driver needs.
        TakeoverError: an existing job cannot be taken over, for whatever reason.
    """
    try:
        local = LocalDialler(
            early=early,
            outlives=settings.has_journal,
            # In such a job this machine is like all others, and workers inherit the same variables as there.
            environ=inheritable(os.environ) if settings.has_etcd else None,
        )
        done = _run_job(settings, routes, local, node_job, resumed)
        while not isinstance(done, int):
            done = _run_job(settings, routes, local, node_job, None, done)
        return done
    except (OSError, MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        if settings.journal_folder is not None and has_job(settings.journal_folder):
            raise TakeoverError(f"cannot take over the job in {settings.journal_folder}: {reason}") from error
        raise SettingsError(f"cannot start the driver: {reason}") from error
    finally:
        if early is not None:
            early.dismiss()


def _run_job(
    given: Settings,
    routes: Routes,
    local: LocalDialler,
    node_job: NodeJob | None,
    resumed: Resumed | None,
    held: HeldJournal | None = None,
) -> int | HeldJournal:
    """Run the job. Return its journal if nothing was left of a job to take over, and another is to be begun there."""
    if given.num_parameter_servers and routes:
        raise SettingsError(
            "--parameter-servers requires a script, which runs as the chief: it is not available for a function"
        )
    # The settings given now do not count for a job that is taken over.
    suspicions = None if has_journal(given) else _checked(given, routes)
    with (
        Console(
            log_level=given.log_level,
            verbose=given.verbose,
            quiet=given.quiet,
            progress_rank=given.progress_rank,
            event_log=given.event_log,
            keeping=Keeping() if given.has_journal else None,
        ) as console,
        warnings_told(console.warning),
        recording(given, secrets.token_hex(8), console, resumed=resumed, held=held) as recorded,
    ):
        if recorded.over is not None:
            return recorded.over
        try:
            if recorded.before is not None and node_job is None:  # nodes have folders of their own
                _check_is_no_nodes(recorded.job)
                enter(recorded.job)
            if suspicions is None:
                suspicions = _checked(recorded.job.settings, routes, runs_already=recorded.before is not None)
            for suspicion in suspicions:
                console.warning(suspicion)
            return _run_recorded(recorded, routes, local, node_job, console)
        except Exception as error:
            if recorded.before is None:
                if isinstance(error, SettingsError) or not shortage(error):
                    raise
                raise SettingsError(f"cannot start the driver: {shortage(error)}") from error
            is_ours = not isinstance(error, SettingsError) and not shortage(error)
            why = f"internal error: {error!r}" if is_ours else in_words(error)
            left = f"its workers keep running, and wait {recorded.job.settings.driver_timeout_s:g} s for a driver"
            raise TakeoverError(f"cannot take over job {recorded.job.job_id}: {why}; {left}") from error


def _run_recorded(
    recorded: Recording, routes: Routes, local: LocalDialler, node_job: NodeJob | None, console: Console
) -> int | HeldJournal:
    job, journal, before = recorded.job, recorded.journal, recorded.before
    settings, job_id = job.settings, job.job_id
    on_change = first_kind(settings) if before is None else before.state.policy.on_change
    logs = _rank_logs(settings, job_id)
    instant = Instant(before_s=0.0 if before is None else before.at_s)
    if journal is not None:
        journal.at_s = instant.since_start_s
    in_files = None if journal is None else Keeping()
    leash = None if node_job is None else node_job.leash
    with (
        FolderLock.take(settings.durable_dir, job_id, shares=recorded.lock is not None),
        EventLog(settings.event_log, on_warning=console.warning, instant=instant) as event_log,
        EventHook(
            settings.event_hook or "",
            job_id=job_id,
            on_warning=console.warning,
            on_detail=console.detail,
            instant=instant,
        ) as event_hook,
        _history_of(job, console, instant) as history,
        contextlib.closing(
            StandardInput(
                settings.stdin_rank,
                console,
                shows=(lambda worker, stream: True) if logs is None else logs.is_shown,
                only_here=settings.stdin is None,
            )
        ) as stdin,
        OutputFiles(
            console if leash is None else NO_SCREEN,
            folder=settings.output_filename,
            width=len(str((settings.max_num_proc or settings.num_proc) - 1)),
            logs=logs,
            keeping=in_files,
            is_shown=stdin.is_shown,
        ) as outputs,
    ):
        console.is_copy = lambda: outputs.has_all
        for remark in settings.remarks:
            console.line(remark)
        if logs is not None and logs.keeps_files:
            console.line(f"the workers' output is kept in {logs.folder}")
        tally = Tally()
        chronicle = Chronicle(event_log, event_hook, Narrator(console), tally, instant=instant)
        sink = Tails(outputs)
        heard_s = interval_s(settings.heartbeat_timeout_s, settings.hang_timeout_s)
        clock = JobClock(most_s=min(MOST_S, heard_s or MOST_S), begins=None if before is None else before.clock)
        bars = console.bars_shown if leash is None else NO_BARS
        agents = agents_of(recorded, clock, sink, chronicle, heard_s, local, node_job, on_change, stdin, bars)
        agents.fleet.keepings = tuple(filter(None, (console.keeping, in_files)))
        source = _discovery_of(settings, job_id, clock)
        if not isinstance(source, FixedHosts):
            source = TimedDiscovery(source, lambda took_s, failed: chronicle.discovery_ran(took_s, failed=failed))
        discovery = FleetDiscovery(
            source,
            agents.fleet,
            on_settled=local.settled,
            # If no hosts are listed, all that join are used.
            only_listed=settings.launcher == NO_LAUNCHER and settings.hosts != (),
            keeper=journal or NOTHING,
            machines=() if before is None else before.facts.machines.values(),
            goes_on=before is not None,
        )
        exported = {
            **settings.passed_env,
            ENV_HEARTBEAT: f"{heard_s:g}",
            ENV_HOST_TIMEOUT: f"{settings.host_timeout_s:g}",
            ENV_MAY_CHANGE: str(int(settings.elastic)),
            **({} if settings.port_range is None else {ENV_PORTS: "{}-{}".format(*settings.port_range)}),
            **durable_env(settings),
            **({} if settings.numa_binding is None else {ENV_BINDING: settings.numa_binding}),
            **settings.worker_env,
        }
        chief: ChiefSide | None = None
        dialect: Dialect
        if settings.num_parameter_servers:
            servers = dialect = ServerDialect(job.environment, exported=exported)
            chief = _chief_of(settings, job_id, servers, agents.addresses, sink, chronicle, bars)
        else:
            dialect = OurDialect(
                # Nodes have their own, see agents_of.
                job.environment if node_job is None else {},
                exported=exported,
                horovod_shim=settings.horovod_shim,
                horovod_protocol=settings.horovod_protocol,
                on_change=on_change,
                torchrun=_torchrun_job(settings, job_id, node_job),
                tells_as_horovod=settings.is_horovods,
            )
        driver = build(
            settings,
            discovery=discovery,
            chronicle=chronicle,
            dialect=dialect,
            job=job,
            agents=agents,
            tally=tally,
            clock=clock,
            chief=chief,
            output=sink.of,
            routes=routes,
            journal=journal,
            before=before,
            lock=recorded.lock,
            code_in_vain=recorded.code_in_vain,
        )
        if history is not None:
            _keep(history, driver, chronicle)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.get_loop().set_default_executor(started_pool(_THREADS, "elasticrun"))
            code = runner.run(_run(driver, chronicle, leash))
        is_closed, begins = False, driver.found_nothing and recorded.begins
        if journal is not None and not driver.end.is_abandoned:
            is_closed = close(journal, code, console, found_nothing=driver.found_nothing)
        if begins and not is_closed:
            # The existing job would be taken over in vain again and again.
            console.error(
                f"nothing is left of job {job_id}, and no new job is started because the journal could not be closed"
            )
        elif begins:
            console.line(f"nothing is left of job {job_id}: starting a new job")
            assert recorded.held is not None, "it has a journal"
            return recorded.held.handed_on()
        elif driver.found_nothing and code == ExitCode.INTERNAL_ERROR:
            console.error(f"nothing is left of job {job_id}: run the same command to start it again")
        if code and os.environ.get(ENV_ERROR_FILE):
            # This job is itself the worker of another launcher.
            driver.worker_events.pass_on_error(os.environ[ENV_ERROR_FILE])
        if history is not None:
            history.close()
            if way_back := history.told():
                console.line(way_back)
        return code


def _history_of(job: JobFacts, console: Console, instant: Instant) -> contextlib.AbstractContextManager[History | None]:
    """Return the history that records the job, if it is wanted."""
    settings = job.settings
    if not settings.history:
        return contextlib.nullcontext()
    return History(
        job.job_id,
        settings.command,
        journal="" if settings.journal is None else str(settings.journal),
        on_warning=console.warning,
        on_detail=console.detail,
        instant=instant,
    )


def _keep(history: History, driver: ElasticDriver, chronicle: Chronicle) -> None:
    """Record the job from now on. The history is the last listener, after the page."""
    if driver.page is not None:
        history.page = driver.page.recorded
        driver.page.is_kept = lambda: history.is_kept
    chronicle.also(history)


async def _run(driver: ElasticDriver, chronicle: Chronicle, leash: Leash | None) -> int:
    """Run the job to its end, and report its progress to Kubeflow Trainer, if that wants it."""
    loop = asyncio.get_running_loop()

    def leave() -> None:
        if not driver.stepper.is_over:  # otherwise it is ending the job, which takes a moment
            driver.hand_over("its node is leaving")

    def let_go() -> None:
        with contextlib.suppress(RuntimeError):  # the job has ended, and the loop with it
            loop.call_soon_threadsafe(leave)

    trainer: TrainerStatus | None = None
    code: int | None = None
    try:
        if (way := ReportTarget.of(os.environ)) is not None:
            trainer = TrainerStatus(way, lambda: standing_of(driver.status.document()), chronicle.warning)
    except SettingsError as error:
        chronicle.warning(str(error))
    try:
        with contextlib.nullcontext() if leash is None else leash.taken_by(let_go):
            code = await driver.run()
    finally:
        if trainer is not None:
            await trainer.close(code)
    return code


def _check_is_no_nodes(job: JobFacts) -> None:
    """Raise SettingsError if the job has nodes, which would accept no driver but one of them."""
    if job.settings.nodes_at_endpoint is not None:
        raise SettingsError("its nodes share an endpoint: start one of the nodes again, with its own command")


def _checked(settings: Settings, routes: Routes, *, runs_already: bool = False) -> Sequence[str]:
    """Check whether this machine can run such a job, as preflight does. Return warnings."""
    suspicions = preflight(settings, runs_already=runs_already)
    check_recorded(settings, routes)
    if runs_already or routes:
        return suspicions
    return [*suspicions, *check_python(settings), *_of_lonely_workers(settings)]


def _of_lonely_workers(settings: Settings) -> Sequence[str]:
    """Warn if several workers run a script written for one, in case its distributed setup was forgotten."""
    number = settings.num_proc
    if number == 1 or settings.num_parameter_servers or settings.mpi is not None:
        return ()
    script = Program(settings.command, Path.cwd()).trains_alone()
    if not script:
        return ()
    return (
        f"{script} does not initialize any distributed training: each of the {number} workers trains its own model. "
        "To train one model together, call elastic_driver.init() (docs/first-script.md) or "
        "torch.distributed.init_process_group() in it; to train in one process, run it with -np 1",
    )


def check_recorded(settings: Settings, routes: Routes) -> None:
    """Raise SettingsError if the job cannot have a journal."""
    if not settings.has_journal:
        return
    if routes:
        raise SettingsError(
            "--journal is not supported by elastic_driver.run(): the program that calls it is part of the job"
        )


def first_kind(settings: Settings) -> OnChange:
    """Return the first kind of the job's workers. If it is open they are restarted until one of them shows its kind."""
    if settings.num_parameter_servers:
        return OnChange.NO_ROUNDS
    if settings.on_change != AUTO_ON_CHANGE:
        return OnChange(settings.on_change)
    return OnChange.IN_PLACE if Program(settings.command, Path.cwd()).calls_init() else OnChange.RESTART


def _chief_of(
    settings: Settings,
    job_id: str,
    servers: ServerDialect,
    addresses: Addresses,
    outputs: OutputSink,
    chronicle: Chronicle,
    bars: str,
) -> ChiefSide:
    """Return what the chief's start needs. Its processes belong to no agent: the driver marks them itself.

    Raises:
        SettingsError: its script does not exist.
    """
    script = missing_script(settings.command, Path.cwd())
    if script:
        raise SettingsError(f"cannot run the chief: no file {script!r} in {Path.cwd()}")
    hosts = settings.hosts
    fixed_here = not settings.accept_agents and hosts is not None and all(is_local_host(host.name) for host in hosts)
    return ChiefSide(
        lambda listener: ProcessKeeper(
            outputs,
            listener,
            prefix_timestamp=settings.prefix_timestamp,
            mark=f"{job_id}-{secrets.token_hex(4)}",
            warn=chronicle.warning,
            is_watched=lambda label: may_be_shown(label, bars),
        ),
        servers.environment_of_chief,
        server_command(settings.command),
        # A server's address is fixed once it is known: other hosts that have to reach it may come later.
        lambda name: LOOPBACK if fixed_here else addresses.for_all(name),
        settings.port_range,
    )


def _rank_logs(settings: Settings, job_id: str) -> RankLogs | None:
    """Return what splits the workers' output by torchrun's options; None if they do not concern output.

    Raises:
        SettingsError: its folder cannot be created.
    """
    if settings.logs == Logs():
        return None
    nodes = settings.nodes or Nodes()
    # The name becomes a folder's, whatever it contains.
    name = re.sub(r"[^A-Za-z0-9._=@+-]", "_", nodes.run_id).lstrip(".")[:_MOST_NAME] or job_id
    folder = settings.logs.folder
    if settings.logs.keeps_files:
        if folder is None and settings.journal_folder is not None:
            folder = settings.journal_folder / "logs"  # where a later driver continues them
        try:
            if folder is None:
                folder = Path(tempfile.mkdtemp(prefix="elasticrun_"))
            elif settings.logs.folder is None:
                folder.mkdir(mode=0o700, exist_ok=True)
            os.close(open_folder_inside(folder, name))
        except OSError as error:
            raise SettingsError(
                f"cannot use the folder {folder or tempfile.gettempdir()} (--log-dir): {in_words(error)}"
            ) from error
    hosts = settings.hosts or ()
    return RankLogs(
        settings.logs,
        folder=folder or Path(),
        name=name,
        role=nodes.role,
        with_hosts=len(hosts) != 1 or settings.accept_agents,
    )


def _torchrun_job(settings: Settings, job_id: str, node_job: NodeJob | None) -> TorchrunJob:
    nodes = settings.nodes or Nodes()
    told = TorchrunJob(nodes.run_id or job_id, role=nodes.role) if node_job is None else node_job.torchrun
    return replace(
        told,
        max_restarts=settings.reset_limit,
        virtual_local_rank=settings.virtual_local_rank,
        signals=settings.more_signals or HANDLED_SIGNALS,
        macros=node_job is not None or settings.nodes is not None or settings.on_change == RESTART,
    )


def _discovery_of(settings: Settings, job_id: str, clock: JobClock) -> HostDiscovery:
    """Return the source of hosts: the script, the caller's object, the pods, or the list."""
    if settings.discovery == KUBERNETES:
        # Imported late: the client's package takes a while to load, and other jobs may lack it.
        from elastic_driver.discovery.kubernetes.pods import Reading
        from elastic_driver.discovery.kubernetes.source import KubernetesDiscovery

        return KubernetesDiscovery(
            settings.pod_selector,
            settings.pod_namespace,
            Reading(
                pod_names(settings),
                settings.slots_from,
                settings.slots_per_host,
                settings.rack_from,
                settings.departure_taints,
            ),
            settings.discovery_timeout_s,
            call_later=clock.call_later,
        )
    if settings.discovery_script is not None:
        return ScriptDiscovery(
            settings.discovery_script,
            settings.slots_per_host,
            settings.discovery_timeout_s,
            job_id=job_id,
            call_later=clock.call_later,
            orders_hosts=settings.orders_hosts,
        )
    if settings.discovery_socket is not None:
        return CallerDiscovery(
            socket.socket(fileno=settings.discovery_socket),
            settings.discovery_timeout_s,
            call_later=clock.call_later,
        )
    return FixedHosts(settings.hosts or ())
