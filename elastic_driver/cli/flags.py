"""The flags of ``elasticrun``: their names, their help, and what was given by them.

Flags, defaults and variables are those of horovodrun 0.28.1, with a few more. Owns the parser. A flag that is a setting
has its name and its default from :mod:`elastic_driver.settings.settings`; one that is not given gives nothing.
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
Runs a distributed training job that keeps going while hosts come and go.
Everything from the first word that is no flag is the command.

subcommands (each has --help):
  jobs                  your jobs whose driver runs on this machine
  status [JOB]          what a job does, its hosts and its workers
  page [JOB]            a link to its page in a browser; of an ended job, its page as a file
  stacks [JOB]          where the workers' Python is now, and who waits for whom
  doctor [-H HOST,...]  what would stop or slow a job on these hosts
  history               your last jobs, ended ones too
  report [JOB|FILE]     what a job's time went into: a table, or a picture
  drain HOST            have a host's workers leave at their next commit
  end JOB               end a job
  resume DIR            go on with a job whose driver has died (--journal DIR)
  join                  have this machine join a job that accepts agents
  leave                 have this machine leave the job that it has joined
  token [FILE]          make a secret for hosts that join, or for a rendezvous
  rendezvous            serve jobs that torchrun runs (--rdzv-backend=elastic)
  wrap PROGRAM ...      run accelerate launch, say, and what it has torchrun do by this
  completion SHELL      print a script that completes all this in bash, zsh or fish"""

_DEFAULTS = {setting.name: setting.default for setting in fields(Settings)}


_integer, _number = read_by(integer), read_by(number)


class _Settings:
    """Adds flags of settings to a group: each gets its name, how it is read, and its default from Settings."""

    def __init__(self, group: argparse._ActionsContainer) -> None:
        self._group = group

    def add(self, name: str, *flags: str, help: str, **more: Any) -> None:
        """Adds one.

        Args:
            name: the field.
            flags: its flags, where it has others than the one that Settings names.
            help: in it ``{default}`` stands for the field's default.
            more: for argparse.
        """
        read = reader_of(name)
        if read in (integer, number) and "action" not in more:
            more.setdefault("type", read_by(read))
        default = _DEFAULTS[name]
        shown = f"{default:g}" if isinstance(default, int | float) else str(default)
        self._group.add_argument(*(flags or (FLAGS[name],)), dest=name, help=help.replace("{default}", shown), **more)


def _flag(group: argparse._ArgumentGroup, name: str, text: str, *, off: tuple[str, str] | None = None) -> None:
    """A switch that says nothing when it is not given; ``off`` is its negation and that one's help."""
    destination = name.removeprefix("--").replace("-", "_")
    group.add_argument(name, dest=destination, action="store_const", const=True, help=text)
    if off is not None:
        group.add_argument(off[0], dest=destination, action="store_const", const=False, help=off[1])


def parse(words: Sequence[str]) -> dict[str, Any]:
    """What the words of a command line give, by the names that ``settings_from`` knows; and ``check_build``.

    Raises:
        SettingsError: a flag is unknown, or its value cannot be read; one line for the user.
    """
    return parse_by(build_parser(), words)


def parse_by(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Likewise by a parser of :func:`build_parser` that knows more flags, whose values are in the result, too."""
    given = vars(parser.parse_args(words))
    command = given["command"]
    given["command"] = tuple(command[1:] if command[:1] == ["--"] else command)
    take_torchrun_flags(given)
    interfaces = [*given.pop("network_interface", ()), *given.pop("network_interfaces", "").split(",")]
    return {**given, "network_interfaces": tuple(interfaces)} if any(interfaces) else given


def _where_pages_are() -> str:
    """Where this installation, or this checkout, has the pages that flags name."""
    package = Path(__file__).parents[1]
    folder = next((each for each in (package, package.parent) if (each / "docs").is_dir()), None)
    return "" if folder is None else f"Pages called docs/... are in {folder}."


def build_parser(*, shows_all: bool = False) -> Parser:
    """All flags. What is not given is not in the result, so that config file, environment and defaults can fill it.

    Args:
        shows_all: ``--help`` shows all flags, and not only what most jobs need.
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
        add("-h", "--help", action="help", help="show this help, and exit")
    else:
        add("-h", "--help", action=ShortHelp, help="show the flags that most jobs need, and exit")
        add("--help-all", action="help", dest="help", help="show all flags, and exit")
    add("-v", "--version", action="version", version=f"elasticrun {__version__}", help="print the version and exit")
    add("-cb", "--check-build", action="store_true", help="print what this installation can use, and exit")
    text = "slots needed before the start; fixed jobs run this many workers"
    _Settings(parser).add("num_proc", "-np", "--np", "--num-proc", metavar="N", help=text)
    add("--config-file", metavar="YAML", help="file with values for the tuning flags; flags given here win")
    add("--disable-cache", action="store_true", help="accepted for compatibility; nothing is cached")
    add_torchrun_flags(parser)
    _elastic_flags(parser)
    _host_flags(parser)
    _output_flags(parser)
    _tuning_flags(parser)
    add("command", nargs=argparse.REMAINDER, help="training command, for instance: python train.py")
    return parser


def _elastic_flags(parser: Parser) -> None:
    group = parser.add_topic("elastic", "how many workers, and on which hosts")
    add = _Settings(group).add
    add("min_num_proc", "--min-np", "--min-num-proc", metavar="N", help="fewest workers to go on with (default -np)")
    add("max_num_proc", "--max-np", "--max-num-proc", metavar="N", help="most workers (default: no bound)")
    text = "as --min-np, counted in slots, of which parameter servers take some; --min-np wins"
    group.add_argument("--min-slots", metavar="N", type=_integer, help=text)
    group.add_argument("--max-slots", metavar="N", type=_integer, help="likewise, as --max-np")
    add(
        "num_standby",
        metavar="N",
        help="keep N more workers booted and waiting in slots beyond --max-np (default then: -np), to take the place "
        "of a lost one at once (default {default})",
    )
    add("num_proc_multiple", metavar="K", help="the number of workers is always a multiple of K (default {default})")
    add(
        "ranks_per_host_multiple",
        metavar="K",
        help="the number of workers on each host is always a multiple of K (default {default})",
    )
    add(
        "num_parameter_servers",
        metavar="N",
        help="the command is the chief of TensorFlow's parameter server training: it runs here, once, and N servers on "
        "the first slots keep its variables; -np counts its workers (docs/parameter-servers.md)",
    )
    add(
        "restart_chief",
        action="store_const",
        const=True,
        help="start the chief again when it fails or a parameter server is lost: it has to go on from a checkpoint",
    )
    add(
        "discovery_script",
        metavar="COMMAND",
        help="prints a line 'host' or 'host:slots' for each host there is, and perhaps its labels behind it (rack=a "
        "spot); run each second",
    )
    add("slots_per_host", metavar="N", help="slots of hosts that the script lists without any")
    add("slots_per_host", "--slots", metavar="N", help="same as --slots-per-host")
    add("discovery_interval_s", metavar="S", help="seconds between two runs of the script (default {default})")
    add("discovery_timeout_s", metavar="S", help="seconds one run of the script may take (default {default})")
    add("elastic_timeout_s", metavar="S", help="seconds to wait when there are too few slots (default {default})")
    group = parser.add_topic("failures", "failures and time limits")
    add = _Settings(group).add
    add(
        "start_timeout_s",
        metavar="S",
        help="seconds a worker may take from its start to hvd.init(), and from the break of a round to asking for the "
        "next (default {default}; Horovod's bounds its network probe, 30)",
    )
    add(
        "heartbeat_timeout_s",
        metavar="S",
        help="end a worker that is frozen: silent for this long while it trains (default {default}; 0 never)",
    )
    add(
        "hang_timeout_s",
        metavar="S",
        help="end a worker that finishes no collective operation for this long and waits in none (default {default}: "
        "never)",
    )
    add(
        "hang_action",
        choices=tuple(HangAction),
        help="what comes of a worker that is proven to hang: it is stopped by a signal, or for the whole deadline "
        "neither computes, reads, writes nor wakes while others wait for it (default {default}; docs/hangs.md)",
    )
    add(
        "straggler_action",
        choices=tuple(StragglerAction),
        help="what comes of a worker that is slower than the others: warn of it, or drain its place, where the job can "
        "do without (default {default}; docs/hangs.md)",
    )
    add("reset_limit", metavar="N", help="end the job after this many unplanned resets (default: no limit)")
    add("reset_window_s", metavar="S", help="count only resets of the last S seconds (default: all)")
    add(
        "drain_timeout_s",
        metavar="S",
        help="seconds a worker that is drained (elasticrun drain HOST, or SIGTERM or SIGUSR1 to it) may take to reach "
        "a commit (default {default})",
    )
    add(
        "cooldown_range_s",
        type=_number,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="seconds a failed host stays out: LOW at first, doubled at each failure, at most HIGH (default: for ever)",
    )
    group = parser.add_topic("recovery", "commits on disc, and the driver's death (docs/survive.md)")
    add = _Settings(group).add
    add(
        "durable_dir",
        metavar="DIR",
        help="also put commits on disc there, in the background; a job started again goes on from the last one",
    )
    add("durable_every", metavar="N", help="not each commit, but every N (default 1)")
    add("durable_interval_s", metavar="S", help="a commit when S seconds have passed since the last")
    add("durable_keep", metavar="K", help="keep the last K commits on disc (default 2)")
    add(
        "journal",
        metavar="DIR",
        help="write what happens to the job there before anything comes of it: another driver can take it over then. "
        "A folder, or for drivers on several machines etcd://HOST:PORT,.../PREFIX",
    )
    group.add_argument(
        KEY_FLAG,
        metavar="FILE",
        help="the key that seals a journal in etcd (elasticrun token FILE makes one); all drivers of the job need it",
    )
    add(
        "driver_timeout_s",
        metavar="S",
        help="how long workers go on without a driver, and wait for another; and how long the driver waits for a disc "
        "that does not answer (default {default})",
    )
    add(
        "hands_over",
        action="store_true",
        help="SIGTERM ends this driver, and not the job: another driver takes that over, with the journal",
    )
    add(
        "standby_driver",
        action="store_true",
        help="where a driver has that journal, wait until it has died, and take its job over at once",
    )
    add(
        "rendezvous_port",
        metavar="PORT",
        help="the driver's TCP port, open from its start (default {default}: any, once something needs one)",
    )
    group = parser.add_topic("workers", "how workers are started and restarted")
    add = _Settings(group).add
    add(
        "on_change",
        choices=ON_CHANGE,
        help="what a change means for the workers: in-place (they reset inside their processes), restart (they are "
        "ended and started again), or auto (default): restart until one of them calls hvd.init()",
    )
    add(
        "horovod_shim",
        choices=MODES,
        help="whether 'import horovod' gives workers this package: auto (default) unless Horovod is installed, "
        "always, never",
    )
    add(
        "horovod_protocol",
        choices=PROTOCOLS,
        help="whether workers that run Horovod's own library are served: auto (default) where 'import horovod' gives "
        "it, on, off",
    )
    add(
        "preload",
        metavar="MODULE,...",
        help="what the process imports that later workers of a Python script are forked from (default: the heavy "
        "modules that the script imports)",
    )
    add("warm_starts", action="store_const", const=False, help="start every worker afresh")
    add("grace_s", metavar="S", help="seconds between TERM and KILL when a worker is stopped (default {default})")


def _host_flags(parser: Parser) -> None:
    group = parser.add_topic("hosts", "hosts and ssh")
    hosts = group.add_mutually_exclusive_group().add_argument
    hosts(
        "-H",
        "--hosts",
        metavar="HOST:N,...",
        help="fixed hosts and their slots (default localhost:NP); me@HOST: ssh logs in as me",
    )
    hosts("-hostfile", "--hostfile", metavar="FILE", help="fixed hosts, one 'HOST slots=N' a line")
    add, setting = group.add_argument, _Settings(group).add
    setting(
        "protect",
        action="append",
        metavar="HOST,...",
        help="of workers that are equally far, one on these hosts is rank 0 (also: the label protected); may be "
        "repeated",
    )
    setting(
        "launcher",
        choices=LAUNCHERS,
        help="none: hosts that are listed are not dialled, but join by themselves (elasticrun join), and only those "
        "listed are used (default: {default}: they are dialled)",
    )
    setting("ssh_port", "-p", "--ssh-port", metavar="PORT", help="of the hosts' ssh servers (default: as ssh has it)")
    setting("ssh_identity_file", "-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    setting("ssh_connect_timeout_s", metavar="S", help="seconds ssh may take to connect (default {default})")
    setting(
        "rsh_agent",
        metavar="COMMAND",
        help="instead of ssh, started as COMMAND HOST WORD... (default: $OMPI_MCA_plm_rsh_agent, if that is set and "
        "is not ssh)",
    )
    setting(
        "launcher_command",
        metavar="COMMAND",
        help="instead of ssh, a template with {host} and perhaps {command}, as 'srun -w {host}' or 'docker exec -i "
        "{host}'",
    )
    setting(
        "launcher_bootstrap",
        choices=BOOTSTRAPS,
        help="how an agent started by one of these gets its secret: on standard input, or, where that does not get "
        "there, as a ticket in its command that is good once, and every user of the hosts can read (default: stdin; an "
        "rsh agent's hosts get a ticket where nothing arrives)",
    )
    setting("remote_python", metavar="PATH", help="Python of other hosts (default: the same path as here)")
    setting(
        "passed_env",
        "-x",
        action="append",
        metavar="NAME[=VALUE]",
        help="variable for the workers on all hosts, with this value or its own; may be repeated",
    )
    group = parser.add_topic("pods", "pods as hosts (docs/kubernetes_pods.md)")
    setting = _Settings(group).add
    setting("discovery", choices=DISCOVERIES, help="find hosts there: kubernetes: the pods that --selector selects")
    setting("pod_selector", metavar="LABELS", help="of the job's pods, as app=train")
    setting("pod_namespace", metavar="NAME", help="theirs (default: the kubeconfig's, or this pod's own)")
    setting(
        "pod_names",
        choices=POD_NAMES,
        help="which of a pod's names is its host's (default {default}: its DNS name for ssh, its own hostname where it "
        "joins, else the pod's)",
    )
    text = "a pod has as many slots as its containers' limit of this (default {default}), or --slots-per-host"
    setting("slots_from", metavar="RESOURCE", help=text)
    setting("rack_from", metavar="LABEL", help="the nodes' label that names their rack (default {default})")
    text = "of nodes that are about to go, beside those known; may be repeated"
    setting("departure_taints", action="append", metavar="KEY,...", help=text)
    group = parser.add_topic("network", "agents and network")
    add, setting = group.add_argument, _Settings(group).add
    text = "let hosts join by themselves (elasticrun join); without fixed hosts or a script the job waits for them"
    setting("accept_agents", action="store_const", const=True, help=text)
    setting(
        "join_token_file",
        metavar="FILE",
        help="with the secret that hosts join with, a random text of 16 characters or more, as elasticrun token makes "
        "it (default: one is made; elasticrun jobs --write-join-token FILE JOB)",
    )
    setting(
        "operator_token_file",
        metavar="FILE",
        help="with a key of 64 hexadecimal digits: who has it can ask for the status, drain and end the job from other "
        "machines (default: one is made; elasticrun jobs --write-token FILE JOB)",
    )
    setting(
        "agent_timeout_s",
        metavar="S",
        help="a host that has not been heard of for this long is lost, and ends its workers (default {default})",
    )
    setting(
        "host_timeout_s",
        metavar="S",
        help="a host that has not been heard for this long is gone on without, and so is one that another host's "
        "workers cannot reach (default {default})",
    )
    setting("tls", action="store_const", const=True, help="no effect: connections between machines are encrypted")
    setting(
        "port_range",
        metavar="LOW-HIGH",
        help="ports that workers listen on, and the driver without --rendezvous-port (default: any)",
    )
    add(
        "--network-interfaces",
        metavar="NAME,...",
        help="names, addresses or networks (10.0.0.0/8) to listen on, on each host what fits (default: by route)",
    )
    add("--network-interface", action="append", metavar="NAME", help="same, one at a time")
    setting(
        "check_network",
        action="store_const",
        const=True,
        help="use a host only when it and those in use reach each other where workers listen, and name slow links",
    )
    setting(
        "spot_notices",
        choices=tuple(Cloud),
        metavar="CLOUD",
        help="have each host watch for what its cloud (aws, gcp or azure) says of the machine's end, and leave before",
    )
    group = parser.add_topic("mpi", "started by mpirun (docs/howto/run-under-mpi.md)")
    add = group.add_argument
    starters = group.add_mutually_exclusive_group().add_argument
    starters("--mpi", action="store_true", help="have mpirun start the ranks, which then stay as they are")
    starters("--gloo", action="store_true", help="accepted: collectives always run on Gloo")
    starters("--jsrun", action="store_true", help="refused: there is no jsrun here")
    add("--mpi-args", metavar="TEXT", help="more words for mpirun, as --mpi-args='--mca plm_base_verbose 5'")
    text = "words for mpirun that bind ranks to processors (default with Open MPI: -bind-to none -map-by slot)"
    add("--binding-args", metavar="TEXT", help=text)


def _output_flags(parser: Parser) -> None:
    group = parser.add_topic("output", "output and logging")
    add = _Settings(group).add
    add("output_filename", metavar="DIR", help="also append workers' output to DIR/rank.R/stdout and stderr")
    add(
        "stdin",
        metavar="RANK",
        help="the worker of this rank has this terminal, or whatever else the standard input is; none: no worker has "
        "(default: the only one that there is, or that --local-ranks-filter shows)",
    )
    add(
        "progress_rank",
        metavar="RANK",
        help="whose progress bars are shown: of this rank, of all, or of none (default: all; a terminal has room for "
        "those of 8 ranks at most)",
    )
    stamps = group.add_mutually_exclusive_group()
    _Settings(stamps).add(
        "prefix_timestamp",
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="begin each forwarded line with the time",
    )
    for name, value, text in (
        ("--log-with-timestamp", True, "log lines of Horovod's own library have the time"),
        ("--log-without-timestamp", False, "they have not"),
        ("--no-log-hide-timestamp", True, "deprecated: --log-with-timestamp"),
        ("--log-hide-timestamp", False, "deprecated: --log-without-timestamp"),
    ):
        stamps.add_argument(name, dest="log_with_timestamp", action="store_const", const=value, help=text)
    add("verbose", action="store_true", help="tell more")
    add(
        "quiet",
        action="store_true",
        help="tell only warnings, errors and how the job ended, beside the workers' output; no status line",
    )
    add(
        "log_level",
        type=str.upper,
        choices=LOG_LEVELS,
        help="of the driver (default: {default}); also of workers that run Horovod's own library",
    )
    add("event_log", metavar="FILE", help="append what happens to the job as JSON lines")
    add(
        "event_hook",
        metavar="COMMAND",
        help="a shell command, run for each event with the event as a JSON line on its standard input",
    )
    add("page_address", metavar="HOST[:PORT]", help="the job's page is there, too, encrypted if not on loopback")
    add("page", action="store_const", const=False, help="no page for browsers")
    add("history", action="store_const", const=False, help="keep nothing of the job for elasticrun history")


def _tuning_flags(parser: Parser) -> None:
    group = parser.add_topic("tuning", "tuning (exported to the workers)")
    add = group.add_argument
    text = "for workers to connect to each other (default {default})"
    _Settings(group).add("gloo_timeout_s", type=_integer, metavar="S", help=text)
    add("--fusion-threshold-mb", type=_integer, metavar="MB", help="most bytes of tensors that are sent as one")
    add("--timeline-filename", metavar="FILE", help="Chrome trace of the collectives")
    _flag(group, "--timeline-mark-cycles", "with its cycles", off=("--no-timeline-mark-cycles", "without"))
    _flag(group, "--stall-check", "warn of stalled collectives (default)", off=("--no-stall-check", "do not"))
    add("--stall-check-warning-time-seconds", type=_integer, metavar="S", help="before the warning")
    add("--stall-check-shutdown-time-seconds", type=_integer, metavar="S", help="before the job fails; 0 never")
    add("--tcp", action="store_true", help="NCCL over TCP, not InfiniBand")
    text = "tuning of Horovod's own library (no effect on other workers: docs/reference/horovod-flags.md)"
    group = parser.add_topic("horovod", text)
    add = group.add_argument
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
    _flag(group, "--mpi-threads-disable", "no MPI threads", off=("--no-mpi-threads-disable", "MPI threads"))
    add("--num-nccl-streams", type=_integer, metavar="N", help="NCCL streams")
    add("--thread-affinity", type=_integer, metavar="N", help="core of the first worker's background thread")
