"""``elasticrun``: the command line. Collects values from flags, config file and environment, and hands Settings on.

Flags, defaults and variables are those of horovodrun 0.28.1, with a few more. Owns nothing but the collecting: whether
values can be is checked in :mod:`elastic_driver.settings`. Heavy imports come late, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastic_driver.dialects.horovod_shim import AUTO, ENV_SHIM, MODES
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host, parse_host, parse_hosts
from elastic_driver.report.printable import one_line
from elastic_driver.settings.settings import LOG_LEVELS, Settings, check_seconds
from elastic_driver.system.safe_files import read_named
from elastic_driver.version import __version__

_MB = 1 << 20
# Room for 65,536 hosts with names as long as names can be.
_HOSTFILE_BYTES = 20 << 20
# Of the tuning flags. Workers read them as integers of 64 bits, bytes where a flag has MB.
_MOST = 10**9


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, and says which flag a misspelt one is like."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, 0.8)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f' (did you mean {near[0]}?)' if near else ''}")
        return parsed


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        # Python reads no integer of thousands of digits.
        why = "has too many digits" if re.fullmatch(r"[+-]?[0-9]+", text) else "is not an integer"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} {why}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None


def _flag(group: argparse._ArgumentGroup, name: str, text: str, *, off: tuple[str, str] | None = None) -> None:
    """A switch that says nothing when it is not given; ``off`` is its negation and that one's help."""
    destination = name.removeprefix("--").replace("-", "_")
    group.add_argument(name, dest=destination, action="store_const", const=True, default=None, help=text)
    if off is not None:
        group.add_argument(off[0], dest=destination, action="store_const", const=False, default=None, help=off[1])


def build_parser() -> argparse.ArgumentParser:
    """All flags. Those that are not given are None, so that config file and environment can fill them."""
    parser = _Parser(
        prog="elasticrun",
        usage="elasticrun [flags] command ...\n       elasticrun drain [--job ID] [--undo] HOST",
        description="Runs a distributed training job that keeps going while hosts come and go. Everything from the "
        "first word that is no flag is the command.",
        epilog="Exit codes: 0 success, 1 user code failed, 2 bad usage, 3 too few slots or workers in time, "
        "4 reset limit, 70 internal error, 129, 130 and 143 interrupted.",
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=f"elasticrun {__version__}", help="print the version and exit")
    add("-cb", "--check-build", action="store_true", help="print what this installation can use, and exit")
    add(
        "-np",
        "--num-proc",
        type=_integer,
        metavar="N",
        help="slots needed before the start; fixed jobs run this many workers",
    )
    add("--config-file", metavar="YAML", help="file with values for the tuning flags; flags given here win")
    add("--disable-cache", action="store_true", help="accepted for compatibility; nothing is cached")
    _elastic_flags(parser)
    _host_flags(parser)
    _output_flags(parser)
    _tuning_flags(parser)
    add("command", nargs=argparse.REMAINDER, help="training command, for instance: python train.py")
    return parser


def _elastic_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("elastic").add_argument
    add(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        type=_integer,
        metavar="N",
        help="fewest workers to go on with (default -np)",
    )
    add(
        "--max-np", "--max-num-proc", dest="max_np", type=_integer, metavar="N", help="most workers (default: no bound)"
    )
    add(
        "--standby",
        type=_integer,
        metavar="N",
        help="keep N more workers booted and waiting in slots beyond --max-np (default then: -np), to take the place "
        "of a lost one at once (default 0)",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="prints a line 'host' or 'host:slots' for each host there is; run each second",
    )
    add("--slots-per-host", type=_integer, metavar="N", help="slots of hosts that the script lists without any")
    add("--slots", dest="slots_per_host", type=_integer, metavar="N", help="same as --slots-per-host")
    add("--discovery-interval", type=_number, metavar="S", help="seconds between two runs of the script (default 1)")
    add("--discovery-timeout", type=_number, metavar="S", help="seconds one run of the script may take (default 10)")
    add(
        "--elastic-timeout",
        type=_number,
        metavar="S",
        help="seconds to wait when there are too few slots (default 600)",
    )
    add(
        "--start-timeout",
        type=_number,
        metavar="S",
        help="seconds a worker may take from its start to hvd.init(), and from the break of a round to asking for the "
        "next (default 300; Horovod's bounds its network probe, 30)",
    )
    add(
        "--heartbeat-timeout",
        type=_number,
        metavar="S",
        help="end a worker that is frozen: silent for this long while it trains (default 60; 0 never)",
    )
    add(
        "--hang-timeout",
        type=_number,
        metavar="S",
        help="end a worker that finishes no collective operation for this long and waits in none (default 0: never)",
    )
    add(
        "--reset-limit",
        type=_integer,
        metavar="N",
        help="end the job after this many unplanned resets (default: no limit)",
    )
    add("--reset-window", type=_number, metavar="S", help="count only resets of the last S seconds (default: all)")
    add(
        "--drain-timeout",
        type=_number,
        metavar="S",
        help="seconds a worker that is drained (elasticrun drain HOST, or SIGTERM or SIGUSR1 to it) may take to reach "
        "a commit (default 300)",
    )
    add(
        "--blacklist-cooldown-range",
        type=_number,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="seconds a failed host stays out: LOW at first, doubled at each failure, at most HIGH (default: for ever)",
    )
    add(
        "--durable-dir",
        metavar="DIR",
        help="also put commits on disc there, in the background; a job started again goes on from the last one",
    )
    add("--durable-every", type=_integer, metavar="N", help="not each commit, but every N (default 1)")
    add("--durable-interval", type=_number, metavar="S", help="a commit when S seconds have passed since the last")
    add("--durable-keep", type=_integer, metavar="K", help="keep the last K commits on disc (default 2)")
    add("--rendezvous-port", type=_integer, metavar="PORT", help="port of the driver's HTTP server (default 0: any)")
    add(
        "--horovod-shim",
        choices=MODES,
        help="whether 'import horovod' gives workers this package: auto (default) unless Horovod is installed, "
        "always, never",
    )
    add(
        "--preload",
        metavar="MODULE,...",
        help="what the process imports that later workers of a Python script are forked from (default: the heavy "
        "modules that the script imports)",
    )
    add("--no-preload", dest="warm_starts", action="store_const", const=False, help="start every worker afresh")
    add(
        "--grace-time",
        type=_number,
        metavar="S",
        help="seconds between TERM and KILL when a worker is stopped (default 5)",
    )


def _host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts and ssh")
    hosts = group.add_mutually_exclusive_group().add_argument
    hosts("-H", "--hosts", metavar="HOST:N,...", help="fixed hosts and their slots (default localhost:NP)")
    hosts("-hostfile", "--hostfile", metavar="FILE", help="fixed hosts, one 'HOST slots=N' a line")
    add = group.add_argument
    add("-p", "--ssh-port", type=_integer, metavar="PORT", help="for remote hosts, which are not yet supported")
    add("-i", "--ssh-identity-file", metavar="FILE", help="for remote hosts, which are not yet supported")
    add("--network-interfaces", metavar="NAME,...", help="accepted and kept; local workers use the loopback interface")
    add("--network-interface", action="append", metavar="NAME", help="same, one at a time")
    add("--gloo", action="store_true", help="accepted: collectives always run on Gloo")
    add("--mpi", action="store_true", help="refused: there is no MPI here")
    add("--jsrun", action="store_true", help="refused: there is no jsrun here")
    add("--mpi-args", metavar="TEXT", help="accepted without effect")
    add("--binding-args", metavar="TEXT", help="accepted without effect")


def _output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output and logging")
    add = group.add_argument
    add("--output-filename", metavar="DIR", help="also append workers' output to DIR/rank.R/stdout and stderr")
    stamps = group.add_mutually_exclusive_group()
    stamps.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_timestamp",
        action="store_true",
        help="begin each forwarded line with the time",
    )
    for name, value, text in (
        ("--log-with-timestamp", True, "workers' library log lines have the time"),
        ("--log-without-timestamp", False, "they have not"),
        ("--no-log-hide-timestamp", True, "deprecated: --log-with-timestamp"),
        ("--log-hide-timestamp", False, "deprecated: --log-without-timestamp"),
    ):
        stamps.add_argument(name, dest="log_with_timestamp", action="store_const", const=value, default=None, help=text)
    add("--verbose", action="store_true", help="tell more")
    add(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        help="of driver and workers' library (default: INFO, WARNING)",
    )
    add("--event-log", metavar="FILE", help="append what happens to the job as JSON lines")


def _tuning_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tuning (exported to the workers)")
    add = group.add_argument
    add("--gloo-timeout-seconds", type=_integer, metavar="S", help="for workers to connect to each other (default 30)")
    add("--fusion-threshold-mb", type=_integer, metavar="MB", help="most bytes of tensors that are sent as one")
    add("--cycle-time-ms", type=_number, metavar="MS", help="between two looks for tensors to send")
    add("--cache-capacity", type=_integer, metavar="N", help="tensors whose negotiation is remembered")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        _flag(group, f"--{name}", f"use {name.replace('-', ' ')}", off=(f"--no-{name}", "do not"))
    _flag(group, "--autotune", "let the library tune itself", off=("--no-autotune", "do not"))
    add("--autotune-log-file", metavar="FILE", help="log of the tuning")
    add("--autotune-warmup-samples", type=_integer, metavar="N", help="samples thrown away first")
    add("--autotune-steps-per-sample", type=_integer, metavar="N", help="steps of a sample")
    add("--autotune-bayes-opt-max-samples", type=_integer, metavar="N", help="most samples")
    add("--autotune-gaussian-process-noise", type=_number, metavar="X", help="0 to 1")
    add("--timeline-filename", metavar="FILE", help="Chrome trace of the collectives")
    _flag(group, "--timeline-mark-cycles", "with its cycles", off=("--no-timeline-mark-cycles", "without"))
    _flag(group, "--stall-check", "warn of stalled collectives (default)", off=("--no-stall-check", "do not"))
    add("--stall-check-warning-time-seconds", type=_integer, metavar="S", help="before the warning")
    add("--stall-check-shutdown-time-seconds", type=_integer, metavar="S", help="before the job fails; 0 never")
    _flag(group, "--mpi-threads-disable", "no MPI threads", off=("--no-mpi-threads-disable", "MPI threads"))
    add("--tcp", action="store_true", help="NCCL over TCP, not InfiniBand")
    add("--num-nccl-streams", type=_integer, metavar="N", help="NCCL streams")
    add("--thread-affinity", type=_integer, metavar="N", help="core of the first worker's background thread")


def settings_from(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Makes Settings of what was given: a flag wins over the config file, that over the environment.

    Raises:
        SettingsError: something cannot be; one line for the user.
    """
    values: dict[str, Any] = vars(arguments)
    if arguments.config_file:
        from elastic_driver.settings.config_file import read_config_file

        for name, value in read_config_file(Path(arguments.config_file)).items():
            if name == "controller":
                values["mpi"] = values["mpi"] or value == "mpi"
            elif values.get(name) is None:
                values[name] = value
    if values["mpi"] or values["jsrun"]:
        raise SettingsError("elasticrun runs on Gloo only: leave --mpi and --jsrun away")
    if arguments.num_proc is None:
        raise SettingsError("-np is missing: how many slots does the job need to start?")
    if values["log_level"] is not None:
        values["log_level"] = values["log_level"].upper()  # the config file's may be lower case
    hosts = _fixed_hosts(arguments)
    min_np = arguments.min_np if arguments.min_np is not None else arguments.num_proc
    elastic = arguments.host_discovery_script is not None or arguments.min_np is not None
    max_np = arguments.max_np
    if max_np is None and (not elastic or arguments.standby):
        max_np = arguments.num_proc
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    interfaces = [*(arguments.network_interface or []), *(arguments.network_interfaces or "").split(",")]
    cooldown = arguments.blacklist_cooldown_range
    return Settings(
        command=tuple(command),
        num_proc=arguments.num_proc,
        min_num_proc=min_np,
        max_num_proc=max_np,
        num_standby=_or(arguments.standby, 0),
        slots_per_host=arguments.slots_per_host,
        elastic=elastic,
        elastic_timeout_s=_seconds(arguments.elastic_timeout, environ, "HOROVOD_ELASTIC_TIMEOUT", 600.0),
        start_timeout_s=_seconds(arguments.start_timeout, environ, "HOROVOD_START_TIMEOUT", 300.0),
        heartbeat_timeout_s=_or(arguments.heartbeat_timeout, 60.0),
        hang_timeout_s=_or(arguments.hang_timeout, 0.0),
        reset_limit=arguments.reset_limit,
        reset_window_s=arguments.reset_window,
        drain_timeout_s=_or(arguments.drain_timeout, 300.0),
        cooldown_range_s=(cooldown[0], cooldown[1]) if cooldown else None,
        hosts=hosts,
        discovery_script=arguments.host_discovery_script,
        discovery_interval_s=_or(arguments.discovery_interval, 1.0),
        discovery_timeout_s=_or(arguments.discovery_timeout, 10.0),
        rendezvous_port=_or(arguments.rendezvous_port, 0),
        output_filename=Path(arguments.output_filename) if arguments.output_filename else None,
        prefix_timestamp=arguments.prefix_timestamp,
        verbose=arguments.verbose,
        log_level=values["log_level"] or "INFO",
        grace_s=_or(arguments.grace_time, 5.0),
        event_log=Path(arguments.event_log) if arguments.event_log else None,
        gloo_timeout_s=_seconds(values["gloo_timeout_seconds"], environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0),
        worker_env=exported(values),
        durable_dir=Path(arguments.durable_dir).absolute() if arguments.durable_dir else None,
        durable_every=arguments.durable_every,
        durable_interval_s=arguments.durable_interval,
        durable_keep=arguments.durable_keep,
        warm_starts=_or(arguments.warm_starts, True),
        preload=_names(arguments.preload),
        horovod_shim=(arguments.horovod_shim or environ.get(ENV_SHIM) or AUTO).lower(),
        network_interfaces=tuple(name for name in interfaces if name),
        ssh_port=arguments.ssh_port,
        ssh_identity_file=arguments.ssh_identity_file,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _seconds(flag: float | None, environ: Mapping[str, str], name: str, default: float) -> float:
    if flag is not None:
        return float(flag)
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"the variable {name} is {text!r}, not a number of seconds") from None
    check_seconds(f"the variable {name}:", value)
    return value


def _fixed_hosts(arguments: argparse.Namespace) -> tuple[Host, ...] | None:
    if arguments.hosts is not None:
        return _parse_list(arguments.hosts, arguments.slots_per_host or 1)
    if arguments.hostfile is not None:
        return _read_hostfile(Path(arguments.hostfile), arguments.slots_per_host or 1)
    if arguments.host_discovery_script is not None:
        return None
    return (Host("localhost", arguments.num_proc),) if arguments.num_proc > 0 else ()


def _parse_list(text: str, default_slots: int) -> tuple[Host, ...]:
    """Reads ``HOST:N,HOST:N``."""
    try:
        hosts = [parse_host(word, default_slots=default_slots) for word in text.split(",") if word.strip()]
    except SettingsError as error:
        raise SettingsError(f"cannot read -H {text!r}: {error}") from None
    names = [host.name for host in hosts]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise SettingsError(f"cannot read -H {text!r}: host {twice!r} is named twice")
    return tuple(hosts)


def _read_hostfile(path: Path, default_slots: int) -> tuple[Host, ...]:
    """Reads lines ``HOST slots=N`` (or ``HOST:N``, or ``HOST``)."""
    try:
        lines = read_named(path, _HOSTFILE_BYTES).decode().splitlines()
    except OSError as error:
        raise SettingsError(f"cannot read the hostfile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"cannot read the hostfile {path}: it is not UTF-8 text") from error
    plain = []
    for line in lines:
        words = line.split("#", 1)[0].split()
        if len(words) == 2 and words[1].startswith("slots="):
            plain.append(f"{words[0]}:{words[1].removeprefix('slots=')}")
        else:
            plain.append(" ".join(words))
    try:
        return parse_hosts(plain, default_slots=default_slots)
    except SettingsError as error:
        raise SettingsError(f"cannot read the hostfile {path}: {error}") from None


# name of the value -> (variable, how it is written). What is not given sets nothing.
_VARIABLES: dict[str, str] = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "hierarchical_allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "torus_allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "mpi_threads_disable": "HOROVOD_MPI_THREADS_DISABLE",
    "num_nccl_streams": "HOROVOD_NUM_NCCL_STREAMS",
    "thread_affinity": "HOROVOD_THREAD_AFFINITY",
    "gloo_timeout_seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "log_level": "HOROVOD_LOG_LEVEL",
}
_AUTOTUNE_VARIABLES: dict[str, str] = {
    "autotune_log_file": "HOROVOD_AUTOTUNE_LOG",
    "autotune_warmup_samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "autotune_bayes_opt_max_samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "autotune_gaussian_process_noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
}


def exported(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables that tuning and logging flags set for the workers.

    Raises:
        SettingsError: a number is below 0, or too large.
    """
    env: dict[str, str] = {}

    def put(variable: str, name: str) -> None:
        value = values.get(name)
        if value is None:
            return
        if isinstance(value, bool):
            env[variable] = "1" if value else "0"
            return
        if isinstance(value, int | float):
            flag = f"--{name.replace('_', '-')} {value}"
            if not value >= 0:  # nor is NaN
                raise SettingsError(f"{flag} is not a number, 0 or above")
            if value > _MOST:
                raise SettingsError(f"{flag} is above {_MOST}, the most it may be")
        env[variable] = str(value)

    for name, variable in _VARIABLES.items():
        put(variable, name)
    put("HOROVOD_FUSION_THRESHOLD", "fusion_threshold_mb")
    if "HOROVOD_FUSION_THRESHOLD" in env:
        env["HOROVOD_FUSION_THRESHOLD"] = str(values["fusion_threshold_mb"] * _MB)
    put("HOROVOD_AUTOTUNE", "autotune")
    if values.get("autotune"):
        noise = values.get("autotune_gaussian_process_noise")
        if noise is not None and not 0 <= noise <= 1:
            raise SettingsError(f"--autotune-gaussian-process-noise {noise} is not within 0 to 1")
        for name, variable in _AUTOTUNE_VARIABLES.items():
            put(variable, name)
    put("HOROVOD_TIMELINE", "timeline_filename")
    if values.get("timeline_filename"):
        put("HOROVOD_TIMELINE_MARK_CYCLES", "timeline_mark_cycles")
    if values.get("stall_check") is not None:
        env["HOROVOD_STALL_CHECK_DISABLE"] = "0" if values["stall_check"] else "1"
    if values.get("log_with_timestamp") is not None:
        env["HOROVOD_LOG_HIDE_TIME"] = "0" if values["log_with_timestamp"] else "1"
    if values.get("tcp"):
        env["NCCL_IB_DISABLE"] = "1"
    return env


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``elasticrun``. Returns its exit code; bad usage is one line on standard error and 2."""
    _open_standard_streams()
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        if words[:1] == ["drain"]:
            from elastic_driver.cli.drain import drain

            return drain(words[1:])
        arguments = build_parser().parse_args(words)
        if arguments.check_build:
            from elastic_driver.cli.check_build import report

            print(report())
            return 0
        settings = settings_from(arguments, os.environ)
        from elastic_driver.driver.job import run_job

        return run_job(settings)
    except SettingsError as error:
        # Words of the user's may stand in it; whatever they hold, it stays one line without control characters.
        print(f"elasticrun: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Before the job's own handler is there: nothing runs yet.
        return 130


def _open_standard_streams() -> None:
    """Gives a closed standard stream (``2>&-``) to /dev/null, or the next file opened would get what is said there."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one


if __name__ == "__main__":
    sys.exit(main())
