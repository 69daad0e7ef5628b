"""One job from its settings to its end: what a driver is made of, put together on this process's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shlex
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import cast

from elastic_driver.dialects.dialect import Dialect
from elastic_driver.dialects.ours import OurDialect, inheritable
from elastic_driver.dialects.servers import ServerDialect, missing_script, server_command
from elastic_driver.dialects.torchrun import HANDLED_SIGNALS, VISIBLE_DEVICES, TorchrunJob
from elastic_driver.discovery.caller import CallerDiscovery
from elastic_driver.discovery.script import ScriptDiscovery
from elastic_driver.discovery.source import FixedHosts, HostDiscovery, TimedDiscovery
from elastic_driver.driver.agents import AgentSide, Ways
from elastic_driver.driver.chief import ChiefSide
from elastic_driver.driver.durable_folder import FolderLock, durable_env
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.driver.trainer_status import TrainerStatus, Way, standing_of
from elastic_driver.errors import SettingsError, shortage
from elastic_driver.health.heartbeats import interval_s
from elastic_driver.launch.dial.command import BootstrapOn, CommandDialler, RshDialler
from elastic_driver.launch.dial.dialler import Dialler
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.launch.error_files import ENV_ERROR_FILE
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.door import Door
from elastic_driver.launch.fleet.fleet import Fleet, Reach
from elastic_driver.launch.fleet.launcher import LOOPBACK, AgentLauncher
from elastic_driver.launch.fleet.link import AgentFacts
from elastic_driver.launch.fleet.network_check import NetworkCheck
from elastic_driver.launch.fleet.reception import Reception, Terms
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.launcher import OutputSink
from elastic_driver.launch.local.launcher import LocalLauncher
from elastic_driver.launch.local.locality import addresses_of, is_local_host
from elastic_driver.launch.output_files import OutputFiles
from elastic_driver.launch.processes.binding import ENV_BINDING
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.launch.warm.inits import calls_init
from elastic_driver.rendezvous.certificate import Certificate, server_context
from elastic_driver.rendezvous.credentials import join_key
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT, ENV_HOST_TIMEOUT, ENV_PORTS
from elastic_driver.rendezvous.routes import Routes
from elastic_driver.rendezvous.token_file import new_token
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.console import Console
from elastic_driver.report.event_hook import EventHook
from elastic_driver.report.event_log import EventLog
from elastic_driver.report.instant import Instant
from elastic_driver.report.narrator import Narrator
from elastic_driver.report.page.tails import Tails
from elastic_driver.report.tally import Tally
from elastic_driver.settings.join_token import read_join_token
from elastic_driver.settings.logs import Logs
from elastic_driver.settings.machines import NO_LAUNCHER, node_environment, remote_environment
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.pods import AUTO_NAMES, DNS, HOSTNAME, KUBERNETES, POD
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import AUTO_ON_CHANGE, RESTART, Settings
from elastic_driver.system.interfaces import choose_address, host_addresses, listening_addresses
from elastic_driver.system.job_clock import MOST_S, JobClock
from elastic_driver.system.loops import new_loop
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.system.safe_files import open_folder_inside
from elastic_driver.system.tasks import Tasks
from elastic_driver.system.threads import started_pool
from elastic_driver.words import OnChange

# A file's name has 255 bytes in most file systems.
_MOST_NAME = 200
# For what blocks: looking names up, which may hang for seconds.
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Gathering:
    """What a driver knows of a job of nodes beside its settings: its own machine is one of them.

    Attributes:
        listener: a socket that listens on loopback, on the port where the nodes meet.
        token: with which they prove themselves.
        host: this node's name.
        node_rank: its place among them; -1 where that is found by itself.
        address: under which the others reach it; "" to find it.
        only_here: whether all of them are on this machine.
        alike: what they have to be started with alike.
        invitation: how they are started, in words.
        torchrun: what workers are told of the job.
    """

    listener: socket.socket
    token: str = field(repr=False)
    host: str
    node_rank: int
    address: str
    only_here: bool
    alike: Mapping[str, str]
    invitation: str
    torchrun: TorchrunJob


def run_job(
    settings: Settings,
    *,
    routes: Routes | None = None,
    early: EarlyAgent | None = None,
    gathering: Gathering | None = None,
) -> int:
    """Runs a job on this process's own event loop, talking to its terminal. Blocks until the job has ended.

    Args:
        settings: what the user asked for.
        routes: what workers may ask beside what their dialect has.
        early: a process that may become this machine's agent; it is ended where it is not needed.
        gathering: of a job of nodes; None for all others.

    Returns:
        The exit code of ``elasticrun``.

    Raises:
        SettingsError: a program or a folder that the settings name cannot be used, the port or the event log cannot be
            had, a fixed host is not this machine, or the machine lacks what a driver needs.
    """
    try:
        return _run_job(settings, routes or {}, LocalDialler(early=early), gathering)
    except (OSError, MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        raise SettingsError(f"cannot start the driver: {reason}") from error
    finally:
        if early is not None:
            early.dismiss()


def _run_job(settings: Settings, routes: Routes, local: LocalDialler, gathering: Gathering | None) -> int:
    if settings.num_parameter_servers and routes:
        raise SettingsError("--parameter-servers is for a script that is the chief: a function has workers of its own")
    suspicions = preflight(settings)
    job_id = secrets.token_hex(8)
    logs = _rank_logs(settings, job_id)
    instant = Instant()
    with (
        FolderLock.take(settings.durable_dir, job_id),
        Console(
            log_level=settings.log_level,
            verbose=settings.verbose,
            quiet=settings.quiet,
            event_log=settings.event_log,
        ) as console,
        _logging_to(console),
        EventLog(settings.event_log, on_warning=console.warning, instant=instant) as event_log,
        EventHook(
            settings.event_hook or "",
            job_id=job_id,
            on_warning=console.warning,
            on_detail=console.detail,
            instant=instant,
        ) as event_hook,
        contextlib.closing(
            StandardInput(
                settings.stdin_rank,
                console,
                shows=(lambda worker, stream: True) if logs is None else logs.is_shown,
                only_here=settings.stdin is None,
            )
        ) as stdin,
        OutputFiles(
            console,
            folder=settings.output_filename,
            width=len(str((settings.max_num_proc or settings.num_proc) - 1)),
            logs=logs,
            is_shown=stdin.is_shown,
        ) as outputs,
    ):
        for suspicion in suspicions:
            console.warning(suspicion)
        for remark in settings.remarks:
            console.line(remark)
        if logs is not None and logs.keeps_files:
            console.line(f"output of the workers is kept in {logs.folder}")
        tally = Tally()
        chronicle = Chronicle(event_log, event_hook, Narrator(console), tally, instant=instant)
        sink = Tails(outputs)
        heard_s = interval_s(settings.heartbeat_timeout_s, settings.hang_timeout_s)
        clock = JobClock(most_s=min(MOST_S, heard_s or MOST_S))
        on_change = first_kind(settings)
        agents = _agents_of(settings, job_id, clock, sink, chronicle, heard_s, local, gathering, on_change, stdin)
        source = _discovery_of(settings, job_id, clock)
        if not isinstance(source, FixedHosts):
            source = TimedDiscovery(source, lambda took_s, failed: chronicle.discovery_ran(took_s, failed=failed))
        discovery = FleetDiscovery(
            source,
            agents.fleet,
            on_settled=local.settled,
            # Where nobody lists any, all are used that join.
            only_listed=settings.launcher == NO_LAUNCHER and settings.hosts != (),
        )
        exported = {
            **settings.passed_env,
            ENV_HEARTBEAT: f"{heard_s:g}",
            ENV_HOST_TIMEOUT: f"{settings.host_timeout_s:g}",
            **({} if settings.port_range is None else {ENV_PORTS: "{}-{}".format(*settings.port_range)}),
            **durable_env(settings),
            **({} if settings.numa_binding is None else {ENV_BINDING: settings.numa_binding}),
            **settings.worker_env,
        }
        chief: ChiefSide | None = None
        dialect: Dialect
        if settings.num_parameter_servers:
            servers = dialect = ServerDialect(inheritable(os.environ), exported=exported)
            chief = _chief_of(settings, job_id, servers, agents.launcher, sink, chronicle)
        else:
            dialect = OurDialect(
                # Nodes have their own, see _agents_of.
                os.environ if gathering is None else {},
                exported=exported,
                horovod_shim=settings.horovod_shim,
                horovod_protocol=settings.horovod_protocol,
                more_routes=routes,
                on_change=on_change,
                torchrun=_torchrun_job(settings, job_id, gathering),
                tells_as_horovod=settings.is_horovods,
            )
        driver = ElasticDriver(
            settings,
            discovery=discovery,
            launcher=agents.launcher,
            chronicle=chronicle,
            dialect=dialect,
            job_id=job_id,
            clock=clock,
            on_round=agents.launcher.warm_up if _starts_again(settings) else None,
            preparer=agents.launcher if _starts_again(settings) and settings.warm_starts else None,
            agents=agents,
            chief=chief,
            tally=tally,
            output=sink.of,
        )
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.get_loop().set_default_executor(started_pool(_THREADS, "elasticrun"))
            code = runner.run(_run(driver, chronicle))
        if code and os.environ.get(ENV_ERROR_FILE):
            driver.pass_on_error(os.environ[ENV_ERROR_FILE])  # this job is itself the worker of another launcher
        return code


async def _run(driver: ElasticDriver, chronicle: Chronicle) -> int:
    """Runs it to its end, and has Kubeflow Trainer told how far it is, where that wants to know."""
    trainer: TrainerStatus | None = None
    code: int | None = None
    try:
        if (way := Way.of(os.environ)) is not None:
            trainer = TrainerStatus(way, lambda: standing_of(driver.rounds.status()), chronicle.warning)
    except SettingsError as error:
        chronicle.warning(str(error))
    try:
        code = await driver.run()
    finally:
        if trainer is not None:
            await trainer.close(code)
    return code


def first_kind(settings: Settings) -> OnChange:
    """What the job's workers are at first. Those that may be either are restarted until one of them says otherwise."""
    if settings.num_parameter_servers:
        return OnChange.NO_ROUNDS
    if settings.on_change != AUTO_ON_CHANGE:
        return OnChange(settings.on_change)
    return OnChange.IN_PLACE if calls_init(settings.command, Path.cwd()) else OnChange.RESTART


def _chief_of(
    settings: Settings,
    job_id: str,
    servers: ServerDialect,
    launcher: AgentLauncher,
    outputs: OutputSink,
    chronicle: Chronicle,
) -> ChiefSide:
    """What the chief is started with. Its processes are no agent's: the driver has marks of its own for them.

    Raises:
        SettingsError: its script is not there.
    """
    script = missing_script(settings.command, Path.cwd())
    if script:
        raise SettingsError(f"cannot run the chief: there is no file {script!r} in {Path.cwd()}")
    hosts = settings.hosts
    fixed_here = not settings.accept_agents and hosts is not None and all(is_local_host(host.name) for host in hosts)
    return ChiefSide(
        LocalLauncher(
            outputs,
            prefix_timestamp=settings.prefix_timestamp,
            mark=f"{job_id}-{secrets.token_hex(4)}",
            warn=chronicle.warning,
        ),
        servers.environment_of_chief,
        server_command(settings.command),
        # What a server is called once it is called for good: other hosts may come that have to reach it.
        lambda name: LOOPBACK if fixed_here else launcher.address_for_all(name),
        settings.port_range,
    )


def _starts_again(settings: Settings) -> bool:
    """Whether workers may be started in the course of the job: hosts come, or failures are forgiven in their place."""
    return settings.elastic or bool(settings.reset_limit)


def _rank_logs(settings: Settings, job_id: str) -> RankLogs | None:
    """What divides the workers' output as torchrun's options have it; None where they say nothing of that.

    Raises:
        SettingsError: there can be no folder for it.
    """
    if settings.logs == Logs():
        return None
    nodes = settings.nodes or Nodes()
    # The name becomes a folder's, whatever is in it.
    name = re.sub(r"[^A-Za-z0-9._=@+-]", "_", nodes.run_id).lstrip(".")[:_MOST_NAME] or job_id
    folder = settings.logs.folder
    if settings.logs.keeps_files:
        try:
            folder = Path(tempfile.mkdtemp(prefix="elasticrun_")) if folder is None else folder
            os.close(open_folder_inside(folder, name))
        except OSError as error:
            raise SettingsError(
                f"cannot use the folder {folder or tempfile.gettempdir()} (--log-dir): {error.strerror}"
            ) from error
    hosts = settings.hosts or ()
    return RankLogs(
        settings.logs,
        folder=folder or Path(),
        name=name,
        role=nodes.role,
        with_hosts=len(hosts) != 1 or settings.accept_agents,
    )


def _torchrun_job(settings: Settings, job_id: str, gathering: Gathering | None) -> TorchrunJob:
    nodes = settings.nodes or Nodes()
    told = TorchrunJob(nodes.run_id or job_id, role=nodes.role) if gathering is None else gathering.torchrun
    return replace(
        told,
        max_restarts=settings.reset_limit,
        virtual_local_rank=settings.virtual_local_rank,
        signals=settings.more_signals or HANDLED_SIGNALS,
        macros=gathering is not None or settings.nodes is not None or settings.on_change == RESTART,
    )


def _abroad(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """Which of a worker's variables go to other machines."""
    kept = {VISIBLE_DEVICES: env[VISIBLE_DEVICES]} if settings.virtual_local_rank else {}
    # What -x gives is among a worker's variables already, below what flags and the driver set.
    return {**settings.passed_env, **remote_environment(env), **kept}


def _agents_of(
    settings: Settings,
    job_id: str,
    clock: JobClock,
    outputs: OutputSink,
    chronicle: Chronicle,
    heard_s: float,
    local: LocalDialler,
    gathering: Gathering | None,
    on_change: OnChange,
    stdin: StandardInput,
) -> AgentSide:
    """All that has agents come and do what is to be done. To be made on the event loop's thread, before it runs."""
    own = inheritable(os.environ)
    token = ""
    if gathering is not None:
        token = gathering.token
    elif settings.accept_agents:
        token = new_token() if settings.join_token_file is None else read_join_token(settings.join_token_file)
    door = Door(clock, join_key=join_key(token) if token else None)
    certificate = Certificate.new() if settings.tls else None
    fingerprint = "" if certificate is None else certificate.fingerprint
    tasks = Tasks()
    ways = Ways(
        settings.rendezvous_address,
        addresses=lambda: listening_addresses(host_addresses(), words=settings.network_interfaces),
        ssl=None if certificate is None else server_context(certificate),
        is_wide=settings.accept_agents and (gathering is None or not gathering.only_here),
        ports=settings.driver_ports,
    )
    fleet = Fleet(
        door=door,
        reach=Reach(
            ways.to,
            agent_timeout_s=settings.agent_timeout_s,
            host_timeout_s=settings.host_timeout_s,
            fingerprint=fingerprint,
            job=_name_of_job(settings),
            owner=name_of_this_process(),
            host="" if gathering is None else gathering.host,
            node_rank=-1 if gathering is None else gathering.node_rank,
        ),
        local=local,
        remote=_remote_dialler(settings),
        is_local=_is_this_pod if _pod_names(settings) in (POD, HOSTNAME) else is_local_host,
        addresses_of=addresses_of,
        address=_addresses_of(settings, gathering),
        tasks=tasks,
        check=NetworkCheck(settings.port_range, tasks) if settings.check_network else None,
    )
    launcher = AgentLauncher(
        fleet,
        outputs,
        on_warm=chronicle.warmed,
        warn=chronicle.warning,
        abroad=dict if gathering is not None else lambda env: _abroad(settings, env),
        here=dict if gathering is None else lambda env: node_environment(own, env),
        ports=settings.port_range,
        stdin=stdin,
    )
    mask = os.umask(0)
    os.umask(mask)
    terms = Terms(
        job_id=job_id,
        poll_s=heard_s,
        cwd=os.getcwd(),
        umask=mask,
        # TensorFlow has threads once it is imported: what is forked of it would hang.
        warm=settings.warm_starts and not settings.num_parameter_servers,
        # They will be started again and again, and mostly several on a host.
        warm_first=_starts_again(settings) and on_change is OnChange.RESTART,
        preload=settings.preload,
        prefix_timestamp=settings.prefix_timestamp,
        agent_timeout_s=settings.agent_timeout_s,
        alike=None if gathering is None else gathering.alike,
        spot_notices=settings.spot_notices or "",
    )
    return AgentSide(
        door,
        Reception(door, terms, fleet),
        fleet,
        launcher,
        ways,
        tasks,
        fingerprint,
        token,
        listener=None if gathering is None else gathering.listener,
        invitation="" if gathering is None else gathering.invitation,
    )


def _addresses_of(settings: Settings, gathering: Gathering | None) -> Callable[[AgentFacts, str], str]:
    """Where a host's workers listen when the job has several: of its agent, and its address by route."""

    def address(facts: AgentFacts, route: str) -> str:
        if gathering is not None and gathering.only_here:
            return LOOPBACK
        if gathering is not None and facts.local:
            route = gathering.address or route
        return choose_address(facts.hello.addresses, route=route, words=settings.network_interfaces, host=facts.host)

    return address


def _pod_names(settings: Settings) -> str:
    """Which of a pod's names is its host's; "" where hosts are no pods."""
    if settings.discovery != KUBERNETES:
        return ""
    if settings.pod_names != AUTO_NAMES:
        return settings.pod_names
    if settings.launcher == NO_LAUNCHER:
        return HOSTNAME  # under which elasticrun join has its host join
    return DNS if settings.rsh_agent is None and settings.launcher_command is None else POD


def _is_this_pod(name: str) -> bool:
    """Whether a pod's name is that of the pod that the driver runs in. No name server knows it."""
    return name.lower() == socket.gethostname().lower()


def _remote_dialler(settings: Settings) -> Dialler | None:
    """What starts agents on other machines; None where they come by themselves."""
    if settings.launcher == NO_LAUNCHER:
        return None
    python = settings.remote_python or ""
    bootstrap_on = cast("BootstrapOn | None", settings.launcher_bootstrap)
    if settings.rsh_agent is not None:
        return RshDialler(shlex.join(settings.rsh_agent), python=python, bootstrap_on=bootstrap_on)
    if settings.launcher_command is not None:
        return CommandDialler(settings.launcher_command, python=python, bootstrap_on=bootstrap_on or "stdin")
    return SshDialler(
        port=settings.ssh_port,
        identity_file=settings.ssh_identity_file or "",
        connect_timeout_s=settings.ssh_connect_timeout_s,
        python=python,
    )


def _name_of_job(settings: Settings) -> str:
    """What this job has in common with the one that it follows, on each host, when its driver is started anew."""
    durable = str(settings.durable_dir or "")
    return sha256("\0".join((os.getcwd(), durable, *settings.command)).encode()).hexdigest()[:32]


def _discovery_of(settings: Settings, job_id: str, clock: JobClock) -> HostDiscovery:
    """What tells the hosts: the script, the caller's object, the pods, or the list."""
    if settings.discovery == KUBERNETES:
        # Late: the client's package takes a while to load, and need not be there for other jobs.
        from elastic_driver.discovery.kubernetes.pods import Reading
        from elastic_driver.discovery.kubernetes.source import KubernetesDiscovery

        return KubernetesDiscovery(
            settings.pod_selector,
            settings.pod_namespace,
            Reading(
                _pod_names(settings),
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


@contextlib.contextmanager
def _logging_to(console: Console) -> Iterator[None]:
    """Warnings that the package logs (an output file that cannot be written, a guard that died) reach the user."""

    class ToConsole(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.warning(record.getMessage())

    logger, handler = logging.getLogger("elastic_driver"), ToConsole(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
