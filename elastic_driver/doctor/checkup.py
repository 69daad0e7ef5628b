"""Runs a checkup: a job of one worker a host, on the hosts and over the connections of a real job's settings.

Owns the settings of such a job, its time limit, and the redirection of its output meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_driver.discovery.script import ScriptDiscovery
from elastic_driver.doctor.attendance import Attendance
from elastic_driver.doctor.facts import HostFacts
from elastic_driver.doctor.seen import Seen
from elastic_driver.driver.job import run_job
from elastic_driver.errors import DiscoveryError, SettingsError
from elastic_driver.hosts import Host
from elastic_driver.launch.warm.preload import is_python
from elastic_driver.settings.logs import Logs
from elastic_driver.settings.machines import NO_LAUNCHER
from elastic_driver.settings.settings import IN_PLACE, NO_STDIN, Settings
from elastic_driver.words import ExitCode

_WORKER = ("-m", "elastic_driver.doctor.worker")
# The least time for a worker to start, however short the limit for hosts: a Python on a slow disk, PyTorch's import.
# A round waits for it that long; then the other workers meet without it.
_LEAST_START_S = 30.0
# A worker that is frozen, or in a collective for this long, is given up. A swapping host is silent for some time.
_HEARTBEAT_S = 30.0
# On top of the time for hosts and their workers to start: for one that hangs, the last allreduces, and the job's end.
_SLACK_S = _HEARTBEAT_S + 15.0
# How much later the job would end by itself, with a message meant for the users of a job.
_END_S = 60.0
_GRACE_S = 2.0
# Between two checks whether any host is left.
_LOOK_S = 0.5
# Of the output, with an error of our own.
_LINES = 60
_INTERRUPTED = (129, 130, 131)


@dataclass(frozen=True, slots=True)
class Checkup:
    """The result of a checkup.

    Attributes:
        hosts: the hosts that were checked, in their order.
        facts: the reports of their workers, by host.
        seen: the events of these hosts.
        said: the last lines that the job printed, if an error of our own has ended it; else "".
    """

    hosts: Sequence[str]
    facts: Mapping[str, HostFacts]
    seen: Seen
    said: str


def check_up(given: Settings, limit_s: float) -> Checkup:
    """Check all hosts. Blocks until the check, and every process started for it, has ended.

    Args:
        given: settings of the job for which these hosts are meant. Its command is not run.
        limit_s: how long to wait for hosts, seconds.

    Raises:
        SettingsError: these hosts cannot be checked in this way.
        KeyboardInterrupt: it was interrupted.
    """
    hosts = _hosts_of(given)
    names = [host.name for host in hosts]
    with tempfile.TemporaryDirectory(prefix="elastic-driver-doctor-") as folder:
        events, output = Path(folder, "events.jsonl"), Path(folder, "output")
        attendance = Attendance(names, _folders_of(given), events, limit_s)
        settings = _settings_of(given, hosts, events, limit_s)
        with (
            _output_in(output),
            _time_limit(settings.elastic_timeout_s - _END_S, attendance.expects_no_more_hosts) as timer,
        ):
            code = run_job(settings, routes=attendance.routes)
        attendance.look()
        attendance.close()
        said = output.read_text(errors="replace").splitlines()
    if timer.is_over:
        attendance.seen.message = "given up: no other host left to wait for"
    if code in _INTERRUPTED or (code == 128 + signal.SIGTERM and not timer.is_over):
        raise KeyboardInterrupt
    return Checkup(
        names, attendance.facts, attendance.seen, "\n".join(said[-_LINES:]) if code == ExitCode.INTERNAL_ERROR else ""
    )


def _hosts_of(given: Settings) -> tuple[Host, ...]:
    """Return the hosts to check, with one slot each."""
    if given.launcher == NO_LAUNCHER or given.discovery:
        raise SettingsError(
            "elasticrun doctor starts an agent on each host itself: name them by -H, --hostfile or "
            "--host-discovery-script, without --launcher none and --discovery"
        )
    if given.nodes is not None and given.nodes.endpoint:
        raise SettingsError("elasticrun doctor needs one command that starts all nodes: name the other nodes with -H")
    if given.mpi is not None:
        raise SettingsError("elasticrun doctor starts agents itself and does not support mpirun: drop --mpi")
    hosts = given.hosts
    if given.discovery_script is not None:
        script = ScriptDiscovery(
            given.discovery_script,
            given.slots_per_host or 1,
            given.discovery_timeout_s,
            job_id=secrets.token_hex(8),
            orders_hosts=given.orders_hosts,
        )
        try:
            hosts = asyncio.run(script.find_hosts())
        except DiscoveryError as error:
            raise SettingsError(str(error)) from error
    found = tuple(replace(host, slots=1) for host in hosts or () if host.slots)
    if not found:
        raise SettingsError("no host to check: the list of hosts is empty")
    return found


def _folders_of(given: Settings) -> dict[str, str]:
    """Return the folders to which the job writes on its hosts, by flag. Journal and event log are the driver's."""
    folders = {
        "--durable-dir": given.durable_dir,
        "--journal": given.journal_folder,
        "--output-filename": given.output_filename,
    }
    return {flag: str(folder) for flag, folder in folders.items() if folder is not None}


def _settings_of(given: Settings, hosts: tuple[Host, ...], events: Path, limit_s: float) -> Settings:
    """Return settings with the given job's connections to its hosts, and nothing else of it."""
    start_s = max(limit_s, _LEAST_START_S)
    return Settings(
        command=_command(given),
        num_proc=1,
        min_num_proc=1,
        max_num_proc=len(hosts),
        hosts=hosts,
        elastic=True,
        elastic_timeout_s=limit_s + start_s + _SLACK_S + _END_S,
        start_timeout_s=start_s,
        heartbeat_timeout_s=_HEARTBEAT_S,
        hang_timeout_s=_HEARTBEAT_S,
        check_network=True,
        on_change=IN_PLACE,
        warm_starts=False,
        stdin=NO_STDIN,
        page=False,
        history=False,
        quiet=True,
        event_log=events,
        grace_s=_GRACE_S,
        logs=Logs(),
        **given.ways,
    )


def _command(given: Settings) -> tuple[str, ...]:
    """Return the worker's command, with the Python of the job's command if it has one: it may differ between hosts."""
    program = given.command[0]
    if is_python(program):
        return (program, *_WORKER)
    # Another command's Python is unknown: then this Python's path is used on all hosts.
    if given.remote_python is None:
        return (sys.executable, *_WORKER)
    either = '[ -x "$0" ] || exec "$1" "$2" "$3"; exec "$0" "$2" "$3"'
    return ("sh", "-c", either, given.remote_python, sys.executable, *_WORKER)


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Redirect the output of this process and the job to a file: the report is printed instead."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


class _Timer:
    """Ends the job of this process by SIGTERM: at a time limit, or when no further host is expected.

    Args:
        limit_s: the time limit, seconds.
        no_more_hosts: returns whether no further host is expected; called in the timer's own thread.

    Attributes:
        is_over: whether it has ended the job.
    """

    def __init__(self, limit_s: float, no_more_hosts: Callable[[], bool]) -> None:
        self.is_over = False
        self._until = time.monotonic() + limit_s
        self._no_more_hosts = no_more_hosts
        self._can_ask = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="elasticrun-doctor", daemon=True)

    def start(self) -> None:
        """Start the timer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the timer's thread: a later signal could hit something else."""
        self._stopped.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if time.monotonic() >= self._until or self._asked():
                self.is_over = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _asked(self) -> bool:
        """Return whether no further host is expected. The time limit holds even if this call fails."""
        if not self._can_ask:
            return False
        try:
            return self._no_more_hosts()
        except Exception:
            self._can_ask = False
            traceback.print_exc()
            return False


@contextlib.contextmanager
def _time_limit(limit_s: float, no_more_hosts: Callable[[], bool]) -> Iterator[_Timer]:
    timer = _Timer(limit_s, no_more_hosts)

    def terminated(number: int, frame: object) -> None:
        # While the job runs, its driver handles this signal itself.
        if not timer.is_over:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminated)
    timer.start()
    try:
        yield timer
    finally:
        timer.stop()
        signal.signal(signal.SIGTERM, before)
