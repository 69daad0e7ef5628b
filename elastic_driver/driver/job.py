"""One job from its settings to its end: what a driver is made of, put together on this process's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Iterator

import uvloop

from elastic_driver.core.heartbeats import interval_s
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.discovery.script import ScriptDiscovery
from elastic_driver.discovery.source import FixedHosts, HostDiscovery
from elastic_driver.driver.durable_folder import FolderLock, durable_env
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.errors import DiscoveryError, SettingsError, shortage
from elastic_driver.launch.local.launcher import LocalLauncher
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.console import Console
from elastic_driver.report.event_log import EventLog
from elastic_driver.report.narrator import Narrator
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import MOST_S, JobClock


def run_job(settings: Settings) -> int:
    """Runs a job on this process's own event loop, talking to its terminal. Blocks until the job has ended.

    Returns:
        The exit code of ``elasticrun``.

    Raises:
        SettingsError: a program or a folder that the settings name cannot be used, the port or the event log cannot be
            had, a fixed host is not this machine, or the machine lacks what a driver needs.
    """
    try:
        return _run_job(settings)
    except (OSError, MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        raise SettingsError(f"cannot start the driver: {reason}") from error


def _run_job(settings: Settings) -> int:
    suspicions = preflight(settings)
    job_id = secrets.token_hex(8)
    if settings.hosts is not None:
        try:
            LocalLauncher.check_hosts(settings.hosts)
        except DiscoveryError as error:
            raise SettingsError(str(error)) from error
    with (
        FolderLock.take(settings.durable_dir, job_id),
        Console(log_level=settings.log_level, verbose=settings.verbose, event_log=settings.event_log) as console,
        _logging_to(console),
        EventLog(settings.event_log, on_warning=console.warning) as event_log,
    ):
        for suspicion in suspicions:
            console.warning(suspicion)
        chronicle = Chronicle(event_log, Narrator(console))
        heard_s = interval_s(settings.heartbeat_timeout_s, settings.hang_timeout_s)
        clock = JobClock(most_s=min(MOST_S, heard_s or MOST_S))
        launcher = LocalLauncher(
            console,
            output_dir=settings.output_filename,
            prefix_timestamp=settings.prefix_timestamp,
            job_id=job_id,
            width=len(str((settings.max_num_proc or settings.num_proc) - 1)),
            warm=settings.warm_starts,
            preload=settings.preload,
            on_warm=chronicle.warmed,
        )
        discovery: HostDiscovery = (
            ScriptDiscovery(
                settings.discovery_script,
                settings.slots_per_host,
                settings.discovery_timeout_s,
                check=launcher.check_hosts,
                job_id=job_id,
                call_later=clock.call_later,
            )
            if settings.discovery_script is not None
            else FixedHosts(settings.hosts or ())
        )
        dialect = OurDialect(
            os.environ,
            exported={ENV_HEARTBEAT: f"{heard_s:g}", **durable_env(settings), **settings.worker_env},
            horovod_shim=settings.horovod_shim,
        )
        driver = ElasticDriver(
            settings,
            discovery=discovery,
            launcher=launcher,
            chronicle=chronicle,
            dialect=dialect,
            job_id=job_id,
            clock=clock,
            on_round=launcher.warm_up if settings.elastic else None,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(driver.run())


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
