"""The flags of ``elasticrun``: their names, their help, and the parsing of their values.

Flags, defaults and variables are those of horovodrun 0.28.1, with some additions. Owns the parser. A flag that is a
setting has its name and default from :mod:`elastic_driver.settings.settings`; without the flag there is no value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from elastic_driver.cli.help import ShortHelp
from elastic_driver.cli.parser import Parser, read_by
from elastic_driver.cli.torchrun_flags import add_torchrun_flags, take_torchrun_flags
from elastic_driver.dialects.horovod import MODES as PROTOCOLS
from elastic_driver.dialects.horovod_shim import MODES
from elastic_driver.settings.assembly import integer, number, reader_of
from elastic_driver.settings.journal_place import KEY_FLAG
from elastic_driver.settings.machines import BOOTSTRAPS, LAUNCHERS
from elastic_driver.settings.pods import POD_NAMES
from elastic_driver.settings.settings import DISCOVERIES, FLAGS, LOG_LEVELS, ON_CHANGE, Settings
from elastic_driver.version import __version__
from elastic_driver.words import Cloud, HangAction, StragglerAction

_DESCRIPTION = """\
Runs a distributed training job that keeps training while hosts are added, removed or lost.
The first word that is not a flag begins the training command.

subcommands (each has --help):
  jobs                  list your jobs whose driver runs on this machine
  status [JOB]          show what a job is doing, its hosts and its workers
  page [JOB]            print a link to a job's web page; for an ended job, write the page to a file
  stacks [JOB]          show the workers' Python stacks, and which rank waits for which
  doctor [-H HOST,...]  check what would stop or slow a job on these hosts
  history               list your recent jobs, including those that have ended
  report [JOB|FILE]     show where a job's time went, as a table or a picture
  drain HOST            drain a host: its workers leave at their next commit
  end JOB               end a job
  resume DIR            take over a job whose driver has died (--journal DIR)
  join                  join this machine to a job that accepts agents
  leave                 remove this machine from the job that it has joined
  token [FILE]          generate a secret for hosts that join, or for a rendezvous
  rendezvous            serve a rendezvous for torchrun jobs (--rdzv-backend=elastic)
  wrap PROGRAM ...      run accelerate launch (or similar) with elasticrun in place of torchrun
  completion SHELL      print a completion script for bash, zsh or fish"""

_DEFAULTS = {setting.name: setting.default for setting in fields(Settings)}


_integer, _number = read_by(integer), read_by(number)


class _Settings:
    """Adds flags of settings to a group: each gets its name, converter and default from Settings."""

    def __init__(self, group: argparse._ActionsContainer) -> None:
        self._group = group

    def add(self, name: str, *flags: str, help: str, **more: Any) -> None:
        """Add the flags of a setting.

        Args:
            name: the field.
            flags: its flags, if they differ from the one that Settings names.
            help: help text; ``{default}`` stands for the field's default.
            more: further arguments for argparse.
        """
        read = reader_of(name)
        if read in (integer, number) and "action" not in more:
            more.setdefault("type", read_by(read))
        default = _DEFAULTS[name]
        shown = f"{default:g}" if isinstance(default, int | float) else str(default)
        self._group.add_argument(*(flags or (FLAGS[name],)), dest=name, help=help.replace("{default}", shown), **more)  # noqa: RUF027


def _flag(group: argparse._ArgumentGroup, name: str, text: str, *, off: tuple[str, str] | None = None) -> None:
    """Add a switch that has no value unless given; ``off`` is its negation and the help for that."""
    destination = name.removeprefix("--").replace("-", "_")
    group.add_argument(name, dest=destination, action="store_const", const=True, help=text)
    if off is not None:
        group.add_argument(off[0], dest=destination, action="store_const", const=False, help=off[1])


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line to values by the names that ``settings_from`` knows; and ``check_build``.

    Raises:
        SettingsError: a flag is unknown, or its value is invalid; one line for the user.
    """
    return parse_by(build_parser(), words)


def parse_by(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Do the same with a parser of :func:`build_parser` with additional flags, whose values are in the result, too."""
    given = vars(parser.parse_args(words))
    command = given["command"]
    given["command"] = tuple(command[1:] if command[:1] == ["--"] else command)
    take_torchrun_flags(given)
    interfaces = [*given.pop("network_interface", ()), *given.pop("network_interfaces", "").split(",")]
    return {**given, "network_interfaces": tuple(interfaces)} if any(interfaces) else given


def _where_pages_are() -> str:
    """Return the location of the documentation pages in this installation or checkout, as a sentence."""
    package = Path(__file__).parents[1]
    folder = next((each for each in (package, package.parent) if (each / "docs").is_dir()), None)
    return "" if folder is None else f"The docs/... pages are in {folder}."


def build_parser(*, shows_all: bool = False) -> Parser:
    """Return the parser of all flags. Flags not given are not in the result, so that other sources apply.

    Args:
        shows_all: whether ``--help`` shows all flags, not only those that most jobs need.
    """
    parser = Parser(
        prog="elasticrun",
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="elasticrun [flags] command ...\n       elasticrun SUBCOMMAND ...",
        description=_DESCRIPTION,
        epilog="Exit codes: 0 success, 1 user code failed, 2 bad usage, 3 too few slots or workers in\ntime, "
        "4 reset limit, 70 internal error, 75 another driver has the job, 129, 130 and 143 interrupted.\n"
        f"{_where_pages_are()}",
    )
    add = parser.add_argument
    if shows_all:
        add("-h", "--help", action="help", help="show this help and exit")
    else:
        add("-h", "--help", action=ShortHelp, help="show the most common flags and exit")
        add("--help-all", action="help", dest="help", help="show all flags and exit")
    add("-v", "--version", action="version", version=f"elasticrun {__version__}", help="print the version and exit")
    add("-cb", "--check-build", action="store_true", help="print which features this installation supports and exit")
    text = "slots required before training starts; without a discovery script, the number of workers"
    _Settings(parser).add("num_proc", "-np", "--np", "--num-proc", metavar="N", help=text)
    add(
        "--config-file",
        metavar="YAML",
        help="YAML file with settings; flags on the command line take precedence",
    )
    add("--disable-cache", action="store_true", help="accepted for compatibility; has no effect")
    add_torchrun_flags(parser)
    _elastic_flags(parser)
    _host_flags(parser)
    _output_flags(parser)
    _tuning_flags(parser)
    add("command", nargs=argparse.REMAINDER, help="training command, e.g. python train.py")
    return parser


def _elastic_flags(parser: Parser) -> None:
    group = parser.add_topic("elastic", "number and placement of workers")
    add = _Settings(group).add
    add(
        "min_num_proc",
        "--min-np",
        "--min-num-proc",
        metavar="N",
        help="minimum number of workers; training waits below it (default: -np)",
    )
    add("max_num_proc", "--max-np", "--max-num-proc", metavar="N", help="maximum number of workers (default: no limit)")
    text = "same as --min-np, but counts slots, including those of parameter servers; --min-np takes precedence"
    group.add_argument("--min-slots", metavar="N", type=_integer, help=text)
    group.add_argument("--max-slots", metavar="N", type=_integer, help="same as --max-np, but counts slots")
    add(
        "num_standby",
        metavar="N",
        help="keep N spare workers booted, in slots beyond --max-np (which then defaults to -np), to replace a lost "
        "worker at once (default {default})",
    )
    add("num_proc_multiple", metavar="K", help="keep the number of workers a multiple of K (default {default})")
    add(
        "ranks_per_host_multiple",
        metavar="K",
        help="keep the number of workers on each host a multiple of K (default {default})",
    )
    add(
        "num_parameter_servers",
        metavar="N",
        help="the command is the chief of TensorFlow's parameter server training: it runs once, on this machine, "
        "and N servers in the first slots hold its variables; -np counts the workers "
        "(docs/parameter-servers.md)",
    )
    add(
        "restart_chief",
        action="store_const",
        const=True,
        help="restart the chief if it fails or a parameter server is lost; it must resume from a checkpoint",
    )
    add(
        "discovery_script",
        metavar="COMMAND",
        help="script that prints one 'host' or 'host:slots' per line, optionally followed by labels (rack=a spot); "
        "runs every second",
    )
    add("slots_per_host", metavar="N", help="slots of hosts that the script lists without a number")
    add("slots_per_host", "--slots", metavar="N", help="same as --slots-per-host")
    add("discovery_interval_s", metavar="S", help="seconds between runs of the script (default {default})")
    add("discovery_timeout_s", metavar="S", help="time limit in seconds for one run of the script (default {default})")
    add("elastic_timeout_s", metavar="S", help="seconds to wait for enough slots (default {default})")
    group = parser.add_topic("failures", "failures and time limits")
    add = _Settings(group).add
    add(
        "start_timeout_s",
        metavar="S",
        help="seconds a worker may take from its start to hvd.init(), and from the end of a round to requesting the "
        "next one (default {default}; in Horovod, 30 seconds for its network probe)",
    )
    add(
        "heartbeat_timeout_s",
        metavar="S",
        help="kill a frozen worker: one that sends no heartbeat for this long while it trains (default {default}; "
        "0: never)",
    )
    add(
        "hang_timeout_s",
        metavar="S",
        help="kill a worker that completes no collective for this long and is not waiting in one (default "
        "{default}: never)",
    )
    add(
        "hang_action",
        choices=tuple(HangAction),
        help="what to do with a worker that provably hangs: one stopped by a signal, or one that for the whole "
        "deadline uses no CPU, does no I/O and does not wake while others wait for it (default {default}; "
        "docs/hangs.md)",
    )
    add(
        "straggler_action",
        choices=tuple(StragglerAction),
        help="what to do with a worker that is slower than the others: log a warning, or drain its slot if the job "
        "can spare it (default {default}; docs/hangs.md)",
    )
    add("reset_limit", metavar="N", help="end the job after this many unplanned resets (default: no limit)")
    add("reset_window_s", metavar="S", help="count only resets in the last S seconds (default: all)")
    add(
        "drain_timeout_s",
        metavar="S",
        help="seconds a drained worker (elasticrun drain HOST, or SIGTERM or SIGUSR1 to the worker) may take to "
        "reach a commit (default {default})",
    )
    add(
        "cooldown_range_s",
        type=_number,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="seconds a failed host is excluded: LOW after the first failure, doubled at each further one, up to "
        "HIGH (default: forever)",
    )
    group = parser.add_topic("recovery", "commits on disk, and surviving the driver's death (docs/survive.md)")
    add = _Settings(group).add
    add(
        "durable_dir",
        metavar="DIR",
        help="also write commits to this folder on disk, in the background; a restarted job resumes from the last one",
    )
    add("durable_every", metavar="N", help="write every Nth commit (default 1)")
    add("durable_interval_s", metavar="S", help="write a commit when S seconds have passed since the last one written")
    add("durable_keep", metavar="K", help="keep the last K commits on disk (default 2)")
    add(
        "journal",
        metavar="DIR",
        help="write-ahead journal of the job, from which another driver can take the job over: a folder, or "
        "etcd://HOST:PORT,.../PREFIX for drivers on several machines",
    )
    group.add_argument(
        KEY_FLAG,
        metavar="FILE",
        help="file with the key that encrypts a journal in etcd (elasticrun token FILE generates one); all drivers "
        "of the job need it",
    )
    add(
        "driver_timeout_s",
        metavar="S",
        help="how long workers continue without a driver and wait for a new one, and how long the driver waits for "
        "a disk that does not respond (default {default})",
    )
    add(
        "hands_over",
        action="store_true",
        help="SIGTERM ends this driver but not the job: another driver takes the job over, with the journal",
    )
    add(
        "standby_driver",
        action="store_true",
        help="if another driver holds the journal, stand by until it dies, then take its job over at once",
    )
    add(
        "rendezvous_port",
        metavar="PORT",
        help="the driver's TCP port, opened at start (default {default}: any free port, opened when needed)",
    )
    group = parser.add_topic("workers", "how workers are started and restarted")
    add = _Settings(group).add
    add(
        "on_change",
        choices=ON_CHANGE,
        help="what workers do when hosts change: in-place (reset inside their processes), restart (the processes "
        "are restarted), or auto (default): restart until a worker calls hvd.init()",
    )
    add(
        "horovod_shim",
        choices=MODES,
        help="whether 'import horovod' imports this package in workers: auto (default: if Horovod is not "
        "installed), always, never",
    )
    add(
        "horovod_protocol",
        choices=PROTOCOLS,
        help="whether to serve workers that run Horovod's own library: auto (default: if 'import horovod' imports "
        "it), on, off",
    )
    add(
        "preload",
        metavar="MODULE,...",
        help="modules to import in the process from which later workers of a Python script are forked (default: the "
        "heavy modules that the script imports)",
    )
    add(
        "warm_starts",
        action="store_const",
        const=False,
        help="start every worker as a new process instead of forking it",
    )
    add("grace_s", metavar="S", help="seconds between SIGTERM and SIGKILL when a worker is stopped (default {default})")


def _host_flags(parser: Parser) -> None:
    group = parser.add_topic("hosts", "hosts and ssh")
    hosts = group.add_mutually_exclusive_group().add_argument
    hosts(
        "-H",
        "--hosts",
        metavar="HOST:N,...",
        help="fixed hosts and their slots (default localhost:NP); USER@HOST sets the ssh login name",
    )
    hosts("-hostfile", "--hostfile", metavar="FILE", help="file with fixed hosts, one 'HOST slots=N' per line")
    add, setting = group.add_argument, _Settings(group).add
    setting(
        "protect",
        action="append",
        metavar="HOST,...",
        help="prefer these hosts for rank 0, among equally advanced workers (also: the label protected); may be "
        "repeated",
    )
    setting(
        "launcher",
        choices=LAUNCHERS,
        help="none: do not start agents on the listed hosts; they join by themselves (elasticrun join), and only "
        "listed hosts are used (default {default}: start agents on them)",
    )
    setting("ssh_port", "-p", "--ssh-port", metavar="PORT", help="port of the hosts' ssh servers (default: ssh's own)")
    setting("ssh_identity_file", "-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    setting("ssh_connect_timeout_s", metavar="S", help="ssh connection timeout in seconds (default {default})")
    setting(
        "rsh_agent",
        metavar="COMMAND",
        help="command to use instead of ssh, run as COMMAND HOST WORD... (default: $OMPI_MCA_plm_rsh_agent, if set "
        "and not ssh)",
    )
    setting(
        "launcher_command",
        metavar="COMMAND",
        help="command template to use instead of ssh, with {host} and optionally {command}, e.g. 'srun -w {host}' "
        "or 'docker exec -i {host}'",
    )
    setting(
        "launcher_bootstrap",
        choices=BOOTSTRAPS,
        help="how an agent started this way receives its secret: stdin; or command, for launchers that do not forward "
        "standard input: a single-use ticket on its command line, which all users of the hosts can read "
        "(default: stdin; with --rsh-agent, command on hosts where nothing arrives on stdin)",
    )
    setting("remote_python", metavar="PATH", help="Python interpreter on other hosts (default: the same path as here)")
    setting(
        "passed_env",
        "-x",
        action="append",
        metavar="NAME[=VALUE]",
        help="export a variable to the workers on all hosts, with the given value or its current one; may be repeated",
    )
    group = parser.add_topic("pods", "pods as hosts (docs/kubernetes_pods.md)")
    setting = _Settings(group).add
    setting("discovery", choices=DISCOVERIES, help="where to find hosts: kubernetes (the pods that --selector selects)")
    setting("pod_selector", metavar="LABELS", help="label selector of the job's pods, e.g. app=train")
    setting(
        "pod_namespace", metavar="NAME", help="namespace of the pods (default: the kubeconfig's, or this pod's own)"
    )
    setting(
        "pod_names",
        choices=POD_NAMES,
        help="which name of a pod is its host name (default {default}: its DNS name for ssh, its own hostname if it "
        "joins by itself, else the pod's name)",
    )
    text = (
        "resource whose limit in a pod's containers is its number of slots (default {default}); without a limit, "
        "--slots-per-host"
    )
    setting("slots_from", metavar="RESOURCE", help=text)
    setting("rack_from", metavar="LABEL", help="node label that names the rack (default {default})")
    text = "further node taint that announces a node's departure; may be repeated"
    setting("departure_taints", action="append", metavar="KEY,...", help=text)
    group = parser.add_topic("network", "agents and network")
    add, setting = group.add_argument, _Settings(group).add
    text = "let hosts join by themselves (elasticrun join); without fixed hosts or a script, the job waits for them"
    setting("accept_agents", action="store_const", const=True, help=text)
    setting(
        "join_token_file",
        metavar="FILE",
        help="file with the secret for hosts that join: random text of at least 16 characters, as elasticrun token "
        "generates it (default: generated; elasticrun jobs --write-join-token FILE JOB writes it to a file)",
    )
    setting(
        "operator_token_file",
        metavar="FILE",
        help="file with a key of 64 hexadecimal digits, which permits status, drain and end from other machines "
        "(default: generated; elasticrun jobs --write-token FILE JOB writes it to a file)",
    )
    setting(
        "agent_timeout_s",
        metavar="S",
        help="an agent whose driver does not respond for this long kills its workers, and its host is lost "
        "(default {default})",
    )
    setting(
        "host_timeout_s",
        metavar="S",
        help="a host that does not respond for this long is lost if enough workers are left without it; training also "
        "continues without a host that another host's workers cannot reach (default {default})",
    )
    setting(
        "tls", action="store_const", const=True, help="no effect: connections between machines are always encrypted"
    )
    setting(
        "port_range",
        metavar="LOW-HIGH",
        help="ports for workers to listen on, and for the driver unless --rendezvous-port is given (default: any)",
    )
    add(
        "--network-interfaces",
        metavar="NAME,...",
        help="interface names, addresses or networks (10.0.0.0/8) to listen on; each host uses those that match "
        "(default: by route)",
    )
    add("--network-interface", action="append", metavar="NAME", help="same, one per flag")
    setting(
        "check_network",
        action="store_const",
        const=True,
        help="use a host only after checking that it and the hosts in use can connect to each other; report slow links",
    )
    setting(
        "spot_notices",
        choices=tuple(Cloud),
        metavar="CLOUD",
        help="have each host watch its cloud (aws, gcp or azure) for preemption and maintenance notices, and leave "
        "in time",
    )
    group = parser.add_topic("mpi", "started by mpirun (docs/howto/run-under-mpi.md)")
    add = group.add_argument
    starters = group.add_mutually_exclusive_group().add_argument
    starters("--mpi", action="store_true", help="start the ranks with mpirun; the job is then not elastic")
    starters("--gloo", action="store_true", help="accepted for compatibility: collectives always run on Gloo")
    starters("--jsrun", action="store_true", help="rejected: jsrun is not supported")
    add("--mpi-args", metavar="TEXT", help="further arguments for mpirun, e.g. --mpi-args='--mca plm_base_verbose 5'")
    text = "arguments for mpirun that bind ranks to CPUs (default with Open MPI: -bind-to none -map-by slot)"
    add("--binding-args", metavar="TEXT", help=text)


def _output_flags(parser: Parser) -> None:
    group = parser.add_topic("output", "output and logging")
    add = _Settings(group).add
    add("output_filename", metavar="DIR", help="also append workers' output to DIR/rank.R/stdout and stderr")
    add(
        "stdin",
        metavar="RANK",
        help="rank whose worker gets elasticrun's standard input (the terminal, if it is one); none: no worker "
        "(default: the only worker, or the only one that --local-ranks-filter shows)",
    )
    add(
        "progress_rank",
        metavar="RANK",
        help="show the progress bars of this rank, of all ranks, or none (default: all; a terminal shows those of "
        "at most 8 ranks)",
    )
    stamps = group.add_mutually_exclusive_group()
    _Settings(stamps).add(
        "prefix_timestamp",
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="prefix each forwarded line with the time",
    )
    for name, value, text in (
        ("--log-with-timestamp", True, "timestamps in log lines of Horovod's own library"),
        ("--log-without-timestamp", False, "no timestamps in log lines of Horovod's own library"),
        ("--no-log-hide-timestamp", True, "deprecated: --log-with-timestamp"),
        ("--log-hide-timestamp", False, "deprecated: --log-without-timestamp"),
    ):
        stamps.add_argument(name, dest="log_with_timestamp", action="store_const", const=value, help=text)
    add("verbose", action="store_true", help="print more details")
    add(
        "quiet",
        action="store_true",
        help="besides the workers' output, print only warnings, errors and how the job ended; no status line",
    )
    add(
        "log_level",
        type=str.upper,
        choices=LOG_LEVELS,
        help="log level of the driver (default: {default}) and of workers that run Horovod's own library",
    )
    add("event_log", metavar="FILE", help="append the job's events to this file as JSON lines")
    add(
        "event_hook",
        metavar="COMMAND",
        help="shell command to run for each event, with the event as a JSON line on its standard input",
    )
    add(
        "page_address",
        metavar="HOST[:PORT]",
        help="also serve the job's web page at this address (with TLS unless on loopback)",
    )
    add("page", action="store_const", const=False, help="do not serve the web page")
    add("history", action="store_const", const=False, help="do not record the job for elasticrun history")


def _tuning_flags(parser: Parser) -> None:
    group = parser.add_topic("tuning", "tuning (exported to the workers)")
    add = group.add_argument
    text = "seconds for workers to connect to each other (default {default})"
    _Settings(group).add("gloo_timeout_s", type=_integer, metavar="S", help=text)
    add(
        "--fusion-threshold-mb",
        type=_integer,
        metavar="MB",
        help="maximum size in MB of tensors fused into one operation",
    )
    add("--timeline-filename", metavar="FILE", help="write a Chrome trace of the collectives to this file")
    _flag(
        group,
        "--timeline-mark-cycles",
        "mark cycles in the timeline",
        off=("--no-timeline-mark-cycles", "do not mark cycles in the timeline"),
    )
    _flag(
        group,
        "--stall-check",
        "warn about stalled collectives (default)",
        off=("--no-stall-check", "do not warn about stalled collectives"),
    )
    add("--stall-check-warning-time-seconds", type=_integer, metavar="S", help="seconds before the warning")
    add(
        "--stall-check-shutdown-time-seconds", type=_integer, metavar="S", help="seconds before the job fails; 0: never"
    )
    add("--tcp", action="store_true", help="have NCCL use TCP instead of InfiniBand")
    text = "tuning of Horovod's own library (no effect on other workers: docs/reference/horovod-flags.md)"
    group = parser.add_topic("horovod", text)
    add = group.add_argument
    add("--cycle-time-ms", type=_number, metavar="MS", help="milliseconds between checks for tensors to send")
    add("--cache-capacity", type=_integer, metavar="N", help="number of tensors whose negotiation is cached")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        _flag(
            group,
            f"--{name}",
            f"use {name.replace('-', ' ')}",
            off=(f"--no-{name}", f"do not use {name.replace('-', ' ')}"),
        )
    _flag(
        group, "--autotune", "let the library tune itself", off=("--no-autotune", "do not let the library tune itself")
    )
    add("--autotune-log-file", metavar="FILE", help="write a log of the tuning to this file")
    add("--autotune-warmup-samples", type=_integer, metavar="N", help="number of initial samples to discard")
    add("--autotune-steps-per-sample", type=_integer, metavar="N", help="steps per sample")
    add("--autotune-bayes-opt-max-samples", type=_integer, metavar="N", help="most samples")
    add("--autotune-gaussian-process-noise", type=_number, metavar="X", help="0 to 1")
    _flag(group, "--mpi-threads-disable", "no MPI threads", off=("--no-mpi-threads-disable", "MPI threads"))
    add("--num-nccl-streams", type=_integer, metavar="N", help="NCCL streams")
    add("--thread-affinity", type=_integer, metavar="N", help="core of the first worker's background thread")
