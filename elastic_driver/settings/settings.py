"""Settings: everything the user asked for, checked once, before anything starts.

Owns the checks of values against each other. The command line and the config file only collect values.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_driver.dialects.horovod_shim import AUTO, check_mode
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import MAX_SLOTS_PER_HOST, Host, total_slots
from elastic_driver.system.safe_files import make_folder, who_else_writes

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

# A slip of the finger must not fill the machine with processes.
_MAX_NUM_PROC = 65536
# A word that the shell takes as it stands. Any other (a variable, a tilde, a bracket) it reads in its own way first.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./-]+")

# Over 30 years. Some of the system's clocks and timers cannot count much further.
MAX_SECONDS = 1e9
_MOST_GLOO_S = 1e7  # the workers' own bound

# Horovod's bounds for the cooldown range, seconds.
_COOLDOWN_BOUNDS_S = (1.0, 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one job is to be. Durations in seconds. Made whole or not at all.

    Attributes:
        command: the training command; no shell reads it.
        num_proc: slots needed before the start (-np).
        min_num_proc: fewest workers of a round (--min-np).
        max_num_proc: most workers of a round; None for no bound (--max-np).
        num_standby: booted workers to keep beyond max_num_proc, in slots that no member needs (--standby).
        slots_per_host: slots of hosts that name none.
        elastic: whether membership may change (a discovery script or --min-np was given).
        elastic_timeout_s: how long the job may lack slots.
        start_timeout_s: from a worker's start, or its round's break, until it asks for a round.
        heartbeat_timeout_s: how long a member may be silent before it is taken for frozen; 0 for ever.
        hang_timeout_s: how long a member may neither finish operations nor wait for others; 0 for ever.
        reset_limit: unplanned resets allowed; None for no bound.
        reset_window_s: how long a reset counts for that; None for ever.
        drain_timeout_s: how long a drained worker may take to leave.
        cooldown_range_s: shortest and longest time a failed host stays out; None for ever.
        hosts: fixed hosts; None with a discovery script.
        discovery_script: shell command that prints the hosts; None with fixed hosts.
        discovery_interval_s: between the end of one run of it and the next.
        discovery_timeout_s: how long one run may take.
        rendezvous_port: of the driver's HTTP server; 0 for any.
        rendezvous_address: where it listens, and where workers listen for each other.
        output_filename: folder for the workers' output; None for none.
        prefix_timestamp: whether forwarded lines begin with the time.
        verbose: whether details are told.
        log_level: of the driver's lines.
        grace_s: between TERM and KILL.
        event_log: JSON-lines file; None for none.
        gloo_timeout_s: for building the workers' contexts.
        worker_env: variables of the tuning flags for the workers.
        durable_dir: folder for commits on disc; None for none.
        durable_every: commits from one on disc to the next; None not to count.
        durable_interval_s: seconds from one to the next; None not to look.
        durable_keep: how many are kept.
        horovod_shim: when workers find this package as ``horovod``: "auto" unless Horovod is installed, "always",
            "never".
        warm_starts: whether later workers are forked from a process that has imported their heavy modules.
        preload: those modules; None to choose them by the script.
        network_interfaces, ssh_port, ssh_identity_file: for remote hosts; kept, without effect on local ones.

    Raises:
        SettingsError: a value cannot be, or two contradict each other; one line that names flag, value and limit.
    """

    command: tuple[str, ...]
    num_proc: int
    min_num_proc: int
    max_num_proc: int | None = None
    num_standby: int = 0
    slots_per_host: int | None = None
    elastic: bool = False
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 60.0
    hang_timeout_s: float = 0.0
    reset_limit: int | None = None
    reset_window_s: float | None = None
    drain_timeout_s: float = 300.0
    cooldown_range_s: tuple[float, float] | None = None
    hosts: tuple[Host, ...] | None = None
    discovery_script: str | None = None
    discovery_interval_s: float = 1.0
    discovery_timeout_s: float = 10.0
    rendezvous_port: int = 0
    rendezvous_address: str = "127.0.0.1"
    output_filename: Path | None = None
    prefix_timestamp: bool = False
    verbose: bool = False
    log_level: str = "INFO"
    grace_s: float = 5.0
    event_log: Path | None = None
    gloo_timeout_s: float = 30.0
    worker_env: Mapping[str, str] = field(default_factory=dict)
    durable_dir: Path | None = None
    durable_every: int | None = None
    durable_interval_s: float | None = None
    durable_keep: int | None = None
    horovod_shim: str = AUTO
    warm_starts: bool = True
    preload: tuple[str, ...] | None = None
    network_interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_hosts()
        self._check_durable()
        self._check_files()
        check_command(self.command)

    @property
    def most_workers(self) -> int:
        """How many workers there may come to be at a time, standbys too; num_proc where only a script's hosts tell."""
        bounds = [] if self.hosts is None else [total_slots(self.hosts)]
        if self.max_num_proc is not None:
            bounds.append(self.max_num_proc + self.num_standby)
        return min(bounds, default=self.num_proc)

    def _check_numbers(self) -> None:
        _at_least("-np", self.num_proc, 1)
        _at_least("--min-np", self.min_num_proc, 1)
        if self.min_num_proc > self.num_proc:
            raise SettingsError(f"--min-np {self.min_num_proc} is above -np {self.num_proc}")
        if self.max_num_proc is not None and self.max_num_proc < self.num_proc:
            raise SettingsError(f"--max-np {self.max_num_proc} is below -np {self.num_proc}")
        _at_least("--standby", self.num_standby, 0)
        if self.num_standby and self.max_num_proc is None:
            raise SettingsError("--standby needs --max-np: without it every slot gets a rank, and none is left over")
        if self.num_standby > _MAX_NUM_PROC:
            raise SettingsError(
                f"--standby {self.num_standby} is above {_MAX_NUM_PROC}, the most workers a job may have"
            )
        if self.num_proc > _MAX_NUM_PROC:
            raise SettingsError(f"-np {self.num_proc} is above {_MAX_NUM_PROC}, the most workers a job may have")
        if self.slots_per_host is not None:
            _at_least("--slots-per-host", self.slots_per_host, 1)
            if self.slots_per_host > MAX_SLOTS_PER_HOST:
                raise SettingsError(
                    f"--slots-per-host {self.slots_per_host} is above {MAX_SLOTS_PER_HOST}, the most a host may have"
                )
        if self.reset_limit is not None:
            _at_least("--reset-limit", self.reset_limit, 0)
        for flag, value in (
            ("--elastic-timeout", self.elastic_timeout_s),
            ("--start-timeout", self.start_timeout_s),
            ("--discovery-interval", self.discovery_interval_s),
            ("--discovery-timeout", self.discovery_timeout_s),
            ("--drain-timeout", self.drain_timeout_s),
            ("--reset-window", 1.0 if self.reset_window_s is None else self.reset_window_s),
        ):
            check_seconds(flag, value)
        check_seconds("--gloo-timeout-seconds", self.gloo_timeout_s, most=_MOST_GLOO_S)
        for flag, value in (
            ("--grace-time", self.grace_s),
            ("--heartbeat-timeout", self.heartbeat_timeout_s),
            ("--hang-timeout", self.hang_timeout_s),
        ):
            if value:
                check_seconds(flag, value, zero=", 0 or above")
        if not 0 <= self.rendezvous_port <= 65535:
            raise SettingsError(f"--rendezvous-port {self.rendezvous_port} is not a port: 0 to 65535")
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise SettingsError(f"--ssh-port {self.ssh_port} is not a port: 1 to 65535")
        if self.log_level not in LOG_LEVELS:
            raise SettingsError(f"--log-level {self.log_level} is none of {', '.join(LOG_LEVELS)}")
        check_mode(self.horovod_shim, "--horovod-shim")
        for name in self.preload or ():
            if not all(part.isidentifier() for part in name.split(".")):
                raise SettingsError(f"--preload {name!r} is not the name of a module")
        if self.cooldown_range_s is not None:
            low, high = self.cooldown_range_s
            least, most = _COOLDOWN_BOUNDS_S
            if not least <= low <= high <= most:
                raise SettingsError(
                    f"--blacklist-cooldown-range {low:g} {high:g} is not a range within {least:g} to {most:g} s, "
                    "lower bound first"
                )

    def _check_hosts(self) -> None:
        if self.discovery_script is not None:
            if self.hosts is not None:
                raise SettingsError("give either --host-discovery-script or fixed hosts (-H, --hostfile), not both")
            _check_script(self.discovery_script)
            return
        if not self.hosts:
            raise SettingsError("no hosts: give -H, --hostfile or --host-discovery-script")
        for host in self.hosts:
            if host.slots > MAX_SLOTS_PER_HOST:
                raise SettingsError(
                    f"host {host.name!r} would have {host.slots} slots; the most is {MAX_SLOTS_PER_HOST}"
                )
        slots = total_slots(self.hosts)
        if slots < self.num_proc:
            raise SettingsError(
                f"-np {self.num_proc} is above the {slots} slots of the hosts given "
                f"({', '.join(str(host) for host in self.hosts)})"
            )
        if self.num_standby and slots < (self.max_num_proc or 0) + self.num_standby:
            raise SettingsError(
                f"--standby {self.num_standby} needs as many slots beyond --max-np {self.max_num_proc}; the hosts "
                f"given have {slots} in all ({', '.join(str(host) for host in self.hosts)})"
            )

    def _check_durable(self) -> None:
        for flag, value in (
            ("--durable-every", self.durable_every),
            ("--durable-interval", self.durable_interval_s),
            ("--durable-keep", self.durable_keep),
        ):
            if value is not None and self.durable_dir is None:
                raise SettingsError(f"{flag} {value:g} is without effect: give --durable-dir too")
        if self.durable_every is not None:
            _at_least("--durable-every", self.durable_every, 1)
        if self.durable_keep is not None:
            _at_least("--durable-keep", self.durable_keep, 1)
        if self.durable_interval_s is not None:
            check_seconds("--durable-interval", self.durable_interval_s)

    def _check_files(self) -> None:
        if self.output_filename is not None:
            try:
                make_folder(self.output_filename)
            except OSError as error:
                raise SettingsError(
                    f"cannot make the folder {self.output_filename} (--output-filename): {error.strerror}"
                ) from error
            if not os.access(self.output_filename, os.W_OK):
                raise SettingsError(f"cannot write to the folder {self.output_filename} (--output-filename)")
        if self.event_log is not None and not self.event_log.parent.is_dir():
            raise SettingsError(
                f"cannot write {self.event_log} (--event-log): there is no folder {self.event_log.parent}"
            )

    def suspicions(self) -> list[str]:
        """What the user should know of the folders that he named: who else can put something there."""
        folders = (
            # A commit that another user adds is one that the job may go on from.
            (self.durable_dir, "--durable-dir", True, "who can write to it can change what the job goes on from"),
            (self.output_filename, "--output-filename", False, "who can write to it can change the workers' output"),
            (self.event_log and self.event_log.parent, "--event-log", False, "who can write to it can change the log"),
        )
        found = []
        for folder, flag, only_adding, so_what in folders:
            who = who_else_writes(folder, only_adding=only_adding) if folder is not None else ""
            if who:
                found.append(f"the folder {folder} ({flag}): {who}; {so_what}")
        return found


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise SettingsError(f"{flag} {value} is below {least}")


def check_seconds(flag: str, value: float, *, zero: str = " above 0", most: float = MAX_SECONDS) -> None:
    """Raises SettingsError unless this can be a duration; ``zero`` says whether it may be 0, too."""
    if not value > 0:  # nor is NaN
        raise SettingsError(f"{flag} {value:g} is not a number of seconds{zero}")
    if value > most:
        raise SettingsError(f"{flag} {value:g} is above {most:g}, the most seconds it may be")


def _check_script(script: str) -> None:
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise SettingsError(f"cannot read --host-discovery-script {script!r}: {error}") from error
    if not words:
        raise SettingsError("--host-discovery-script is empty")
    program = words[0]
    if not _PLAIN_WORD.fullmatch(program):
        return
    if "/" in program:
        _check_program(program, "the host discovery script", hint="chmod +x it")
    elif shutil.which(program) is None and Path(program).is_file():
        # It may be a word of the shell itself ("cd ... && ..."), so a name that is not found is left to the first run.
        raise SettingsError(f"cannot find the host discovery script {program!r} on the PATH: write ./{program}")


def check_command(command: tuple[str, ...]) -> None:
    """Raises SettingsError unless there is a command and its program can be executed."""
    if not command:
        raise SettingsError("no command to run: add it behind the flags, as in: elasticrun -np 2 python train.py")
    script = command[0]
    hint = f"run it as: python {script}" if script.endswith(".py") else "chmod +x it"
    _check_program(script, "the command", hint=hint)


def _check_program(program: str, what: str, *, hint: str) -> None:
    if "/" not in program:
        if shutil.which(program) is None:
            near = ""
            if Path(program).is_file():
                python = program.endswith(".py") and not os.access(program, os.X_OK)
                near = f"; there is a file of this name here: {hint if python else f'write ./{program}'}"
            raise SettingsError(f"cannot find {what} {program!r} on the PATH{near}")
        return
    path = Path(program)
    if not path.exists():
        raise SettingsError(f"cannot find {what} {program!r}: there is no such file")
    if not path.is_file():
        raise SettingsError(f"cannot run {what} {program!r}: it is not a file")
    if not os.access(path, os.X_OK):
        raise SettingsError(f"cannot run {what} {program!r}: it is not executable; {hint}")
