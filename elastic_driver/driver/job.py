"""One job from its settings to its end: what a driver is made of, put together on this process's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import socket
from collections.abc import Iterator
from hashlib import sha256

import uvloop

from elastic_driver.core.heartbeats import interval_s
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.discovery.caller import CallerDiscovery
from elastic_driver.discovery.script import ScriptDiscovery
from elastic_driver.discovery.source import FixedHosts, HostDiscovery
from elastic_driver.driver.agents import AgentSide, Ways
from elastic_driver.driver.durable_folder import FolderLock, durable_env
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.errors import SettingsError, shortage
from elastic_driver.launch.dial.command import BootstrapOn, CommandDialler, RshDialler
from elastic_driver.launch.dial.dialler import Dialler
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.launch.error_files import ENV_ERROR_FILE
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.door import Door
from elastic_driver.launch.fleet.fleet import Fleet, Reach
from elastic_driver.launch.fleet.launcher import AgentLauncher
from elastic_driver.launch.fleet.network_check import NetworkCheck
from elastic_driver.launch.fleet.reception import Reception, Terms
from elastic_driver.launch.local.locality import is_local_host
from elastic_driver.launch.output_files import OutputFiles
from elastic_driver.rendezvous.certificate import Certificate, server_context
from elastic_driver.rendezvous.credentials import join_key
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT, ENV_HOST_TIMEOUT, ENV_PORTS
from elastic_driver.rendezvous.routes import Routes
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.console import Console
from elastic_driver.report.event_log import EventLog
from elastic_driver.report.narrator import Narrator
from elastic_driver.settings.join_token import read_join_token
from elastic_driver.settings.machines import STDIN, remote_environment
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import RESTART, Settings
from elastic_driver.system.interfaces import choose_address, host_addresses, listening_addresses
from elastic_driver.system.job_clock import MOST_S, JobClock
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.system.tasks import Tasks
from elastic_driver.system.threads import started_pool
from elastic_driver.words import OnChange

# For what blocks: looking names up, which may hang for seconds.
_THREADS = 8


def run_job(settings: Settings, *, routes: Routes | None = None, early: EarlyAgent | None = None) -> int:
    """Runs a job on this process's own event loop, talking to its terminal. Blocks until the job has ended.

    Args:
        settings: what the user asked for.
        routes: what workers may ask beside what their dialect has.
        early: a process that may become this machine's agent; it is ended where it is not needed.

    Returns:
        The exit code of ``elasticrun``.

    Raises:
        SettingsError: a program or a folder that the settings name cannot be used, the port or the event log cannot be
            had, a fixed host is not this machine, or the machine lacks what a driver needs.
    """
    try:
        return _run_job(settings, routes or {}, LocalDialler(early=early))
    except (OSError, MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        raise SettingsError(f"cannot start the driver: {reason}") from error
    finally:
        if early is not None:
            early.dismiss()


def _run_job(settings: Settings, routes: Routes, local: LocalDialler) -> int:
    suspicions = preflight(settings)
    job_id = secrets.token_hex(8)
    with (
        FolderLock.take(settings.durable_dir, job_id),
        Console(log_level=settings.log_level, verbose=settings.verbose, event_log=settings.event_log) as console,
        _logging_to(console),
        EventLog(settings.event_log, on_warning=console.warning) as event_log,
        OutputFiles(
            console,
            folder=settings.output_filename,
            width=len(str((settings.max_num_proc or settings.num_proc) - 1)),
        ) as outputs,
    ):
        for suspicion in suspicions:
            console.warning(suspicion)
        chronicle = Chronicle(event_log, Narrator(console))
        heard_s = interval_s(settings.heartbeat_timeout_s, settings.hang_timeout_s)
        clock = JobClock(most_s=min(MOST_S, heard_s or MOST_S))
        agents = _agents_of(settings, job_id, clock, outputs, chronicle, heard_s, local)
        discovery = FleetDiscovery(_discovery_of(settings, job_id, clock), agents.fleet, on_settled=local.settled)
        dialect = OurDialect(
            os.environ,
            exported={
                **settings.passed_env,
                ENV_HEARTBEAT: f"{heard_s:g}",
                ENV_HOST_TIMEOUT: f"{settings.host_timeout_s:g}",
                **({} if settings.port_range is None else {ENV_PORTS: "{}-{}".format(*settings.port_range)}),
                **durable_env(settings),
                **settings.worker_env,
            },
            horovod_shim=settings.horovod_shim,
            more_routes=routes,
            on_change=OnChange.RESTART if settings.on_change == RESTART else OnChange.IN_PLACE,
        )
        driver = ElasticDriver(
            settings,
            discovery=discovery,
            launcher=agents.launcher,
            chronicle=chronicle,
            dialect=dialect,
            job_id=job_id,
            clock=clock,
            on_round=agents.launcher.warm_up if settings.elastic else None,
            agents=agents,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_default_executor(started_pool(_THREADS, "elasticrun"))
            code = runner.run(driver.run())
        if code and os.environ.get(ENV_ERROR_FILE):
            driver.pass_on_error(os.environ[ENV_ERROR_FILE])  # this job is itself the worker of another launcher
        return code


def _agents_of(
    settings: Settings,
    job_id: str,
    clock: JobClock,
    outputs: OutputFiles,
    chronicle: Chronicle,
    heard_s: float,
    local: LocalDialler,
) -> AgentSide:
    """All that has agents come and do what is to be done. To be made on the event loop's thread, before it runs."""
    token = ""
    if settings.accept_agents:
        token = secrets.token_hex(32) if settings.join_token_file is None else read_join_token(settings.join_token_file)
    door = Door(clock, join_key=join_key(token) if token else None)
    certificate = Certificate.new() if settings.tls else None
    fingerprint = "" if certificate is None else certificate.fingerprint
    tasks = Tasks()
    ways = Ways(
        settings.rendezvous_address,
        addresses=lambda: listening_addresses(host_addresses(), words=settings.network_interfaces),
        ssl=None if certificate is None else server_context(certificate),
        is_wide=settings.accept_agents,
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
        ),
        local=local,
        remote=_remote_dialler(settings),
        is_local=is_local_host,
        address=lambda facts, route: choose_address(
            facts.hello.addresses, route=route, words=settings.network_interfaces, host=facts.host
        ),
        tasks=tasks,
        check=NetworkCheck(settings.port_range, tasks) if settings.check_network else None,
    )
    launcher = AgentLauncher(
        fleet,
        outputs,
        on_warm=chronicle.warmed,
        warn=chronicle.warning,
        # What -x gives is among a worker's variables already, below what flags and the driver set.
        abroad=lambda env: {**settings.passed_env, **remote_environment(env)},
        ports=settings.port_range,
    )
    mask = os.umask(0)
    os.umask(mask)
    terms = Terms(
        job_id=job_id,
        poll_s=heard_s,
        cwd=os.getcwd(),
        umask=mask,
        warm=settings.warm_starts,
        # They will be started again and again, and mostly several on a host.
        warm_first=settings.elastic and settings.on_change == RESTART,
        preload=settings.preload,
        prefix_timestamp=settings.prefix_timestamp,
        agent_timeout_s=settings.agent_timeout_s,
    )
    return AgentSide(door, Reception(door, terms, fleet), fleet, launcher, ways, tasks, fingerprint, token)


def _remote_dialler(settings: Settings) -> Dialler:
    """What starts agents on other machines."""
    python = settings.remote_python or ""
    if settings.rsh_agent is not None:
        return RshDialler(shlex.join(settings.rsh_agent), python=python)
    if settings.launcher_command is not None:
        bootstrap_on: BootstrapOn = "stdin" if settings.launcher_bootstrap == STDIN else "command"
        return CommandDialler(settings.launcher_command, python=python, bootstrap_on=bootstrap_on)
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
    """What tells the hosts: the script, the caller's object, or the list."""
    if settings.discovery_script is not None:
        return ScriptDiscovery(
            settings.discovery_script,
            settings.slots_per_host,
            settings.discovery_timeout_s,
            job_id=job_id,
            call_later=clock.call_later,
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
