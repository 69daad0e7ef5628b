"""Settings: the user's whole input, each default once, checked for consistency before anything starts.

Owns the fields, their defaults, flags and variables, and the checks of values. Knows nothing of where values come from
(:mod:`elastic_driver.settings.assembly`), and touches no disk (:mod:`elastic_driver.settings.preflight` does).
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import lcm
from pathlib import Path
from typing import Any

from elastic_driver.codec import OsText
from elastic_driver.dialects.horovod import ENV_PROTOCOL, OFF, ON, check_protocol
from elastic_driver.dialects.horovod_shim import ALWAYS, AUTO, ENV_SHIM, NEVER, check_mode
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import CHIEF, MAX_SLOTS_PER_HOST, Host, is_host_name, is_loopback, total_slots
from elastic_driver.rendezvous.environment import GLOO_TIMEOUT_S, MOST_GLOO_S
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.logs import Logs
from elastic_driver.settings.machines import (
    AUTO_LAUNCHER,
    BOOTSTRAPS,
    LAUNCHERS,
    LEAST_AGENT_TIMEOUT_OF_ETCD_S,
    LEAST_AGENT_TIMEOUT_S,
    LEAST_HOST_TIMEOUT_S,
    NO_LAUNCHER,
    STDIN,
    check_interface,
    check_port_range,
)
from elastic_driver.settings.mpirun import Mpirun
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.pods import AUTO_NAMES, KUBERNETES, RACK_FROM, SLOTS_FROM, check_pods
from elastic_driver.words import ALL_BARS, NO_BARS, Cloud, HangAction, OnChange, Sizing, StragglerAction

AUTO_ON_CHANGE, IN_PLACE, RESTART = ON_CHANGE = ("auto", OnChange.IN_PLACE.value, OnChange.RESTART.value)
DISCOVERIES = (KUBERNETES,)
NO_STDIN = "none"
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

_LOOPBACK = "127.0.0.1"

# A typing error must not fill the machine with processes.
_MAX_NUM_PROC = 65536

# Over 30 years. Some of the system's clocks and timers cannot count much further.
MAX_SECONDS = 1e9

_DRIVER_TIMEOUT_S = 600.0

# Horovod's bounds for the cooldown range, seconds.
_COOLDOWN_BOUNDS_S = (1.0, 3600.0)


def _given_by(flag: str = "", variable: str = "", *, is_way: bool = False) -> Mapping[str, Any]:
    """Return a field's metadata: its flag, as in messages, and the environment variable that replaces the flag.

    With ``is_way`` the field is among ``Settings.ways``.
    """
    return {"flag": flag, "variable": variable, "is_way": is_way}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one job, valid as a whole. Durations are seconds.

    Attributes:
        command: the training command; no shell parses it.
        num_proc: slots needed before the start (-np).
        min_num_proc: fewest workers of a round (--min-np).
        max_num_proc: most workers of a round; None for no limit (--max-np).
        num_standby: booted workers to keep beyond max_num_proc, in slots that no member needs (--standby).
        num_proc_multiple: the number of workers of a round is a multiple of this (--np-multiple).
        ranks_per_host_multiple: the number on each host is a multiple of this.
        num_parameter_servers: parameter servers beside these workers, if the command is the script of a chief; 0 if it
            is the workers'.
        restart_chief: whether the chief is restarted when it has failed, or a parameter server is lost.
        protect: names of hosts that are preferred for rank 0.
        slots_per_host: slots of hosts that name none.
        elastic: whether membership may change (a discovery script or --min-np was given).
        elastic_timeout_s: how long the job may lack slots.
        start_timeout_s: from a worker's start, or its round's break, until it asks for a round.
        heartbeat_timeout_s: how long a member may be silent before it counts as frozen; 0 for no limit.
        hang_timeout_s: how long a member may neither finish operations nor wait for others; 0 for no limit.
        hang_action: the reaction to a worker that is proven to hang: "end" or "warn".
        straggler_action: the reaction to a worker that is slower than the others: "warn" or "drain".
        reset_limit: unplanned resets allowed; None for no limit.
        reset_window_s: how long a reset counts for that; None for no limit.
        drain_timeout_s: how long a drained worker may take to leave.
        cooldown_range_s: shortest and longest time a failed host is excluded; None for no limit.
        hosts: fixed hosts; None with a discovery script or object.
        discovery_script: shell command that prints the hosts; None without one.
        discovery_socket: descriptor of the driver's process by which the caller's discovery object is queried; None
            without one.
        discovery: another way to find hosts: "kubernetes"; "" for none.
        pod_selector: label selector of the pods that are hosts.
        pod_namespace: their namespace; None for the one in the server's configuration.
        pod_names: which of a pod's names is its host's.
        slots_from: the resource whose limit is a pod's number of slots.
        rack_from: the label of nodes that names their rack.
        departure_taints: keys of nodes' taints, beside the known ones, that announce their departure.
        discovery_interval_s: between the end of one discovery run and the next.
        discovery_timeout_s: time limit of one run.
        rendezvous_port: the driver's TCP port; 0 for any, once one is needed.
        rendezvous_address: the address it then listens on.
        output_filename: folder for the workers' output; None for none.
        prefix_timestamp: whether forwarded lines begin with the time.
        stdin: the rank that gets the driver's standard input, or NO_STDIN; None for the only worker, or the only one
            shown.
        verbose: whether to log details.
        progress_rank: whose progress bars the terminal shows: "all", "none", or of one rank.
        quiet: whether to log only warnings, errors and the end.
        log_level: of the driver's lines.
        grace_s: between TERM and KILL.
        event_log: JSON-lines file; None for none.
        event_hook: shell command that gets each event on its standard input; None for none.
        page: whether the job has a page for browsers.
        history: whether the job is kept for later in this user's state folder.
        page_address: a further address of the page besides loopback, HOST or HOST:PORT; "" for none.
        gloo_timeout_s: time limit for building the workers' contexts.
        worker_env: variables of the tuning flags for the workers.
        durable_dir: folder for commits on disk; None for none.
        durable_every: commits from one on disk to the next; None not to count.
        durable_interval_s: seconds from one on disk to the next; None for no interval.
        durable_keep: how many commits are kept on disk.
        journal: where the driver records each event before it acts on it; None for nowhere.
        driver_timeout_s: how long an event may wait for that.
        hands_over: whether SIGTERM ends only the driver, and leaves its job to another.
        standby_driver: whether to wait for a living driver that holds the journal, to take its job over.
        on_change: what workers do at a membership change: "in-place" (they reset inside their processes), "restart"
            (they are ended and restarted), or "auto": restart until one calls ``init()``.
        horovod_shim: when workers find this package as ``horovod``: "auto" unless Horovod is installed, "always",
            "never".
        horovod_protocol: whether to serve workers that run Horovod's own library: "auto" if ``import horovod`` gives
            it, "on" for all, "off".
        warm_starts: whether later workers are forked from a process that has imported their heavy modules.
        preload: those modules; None to choose them by the script.
        agent_timeout_s: how long an agent may go unacknowledged before it ends its workers, and its host is lost.
        host_timeout_s: how long a host, or a peer of a worker, may be silent before the others continue without it.
        accept_agents: whether hosts may join by themselves.
        join_token_file: file with the secret that authenticates them; None to make one.
        operator_token_file: file with the operators' key; None to make one.
        launcher: "none" to start no agents on listed hosts, but wait until they join; or "auto".
        rsh_agent: words of a command that is called as ``AGENT HOST COMMAND...`` instead of ssh; None for ssh.
        launcher_command: template of a command that starts an agent on a host instead of ssh; None for ssh.
        launcher_bootstrap: how such an agent gets its parameters: "stdin", or "command" if standard input does not
            reach it; None for "stdin", and with rsh_agent for "command" on hosts where nothing arrives.
        remote_python: Python of other hosts' agents; None for the same path as here.
        ssh_port, ssh_identity_file: for ssh; None for its own configuration.
        logins: login names for ssh, by host, where given.
        ssh_connect_timeout_s: time limit for ssh to connect.
        port_range: first and last port that workers listen on, and the driver, unless it has its own port; None for
            any.
        network_interfaces: names, addresses or networks: on each host workers listen on a matching interface.
        check_network: whether hosts must reach each other before they are first used.
        spot_notices: "aws", "gcp" or "azure": agents watch that cloud's notices that their machine will end; None for
            none.
        tls: no effect, except a remark: connections between machines are always encrypted.
        passed_env: variables for the workers on all hosts (-x).
        nodes: torchrun's options for this node; None if none was given.
        logs: torchrun's options for the workers' output.
        virtual_local_rank: whether each worker sees only its own GPU.
        numa_binding: the processors a worker is bound to: "node", "socket", "exclusive" or "core-complex" of its GPU;
            None for none.
        more_signals: names of signals that end the job, as SIGHUP, SIGINT and SIGTERM always do.
        blames_hosts: whether a worker's failure excludes its host.
        sizing: the kind of flags by which the number of workers was given.
        remarks: remarks on the user's input.
        of_horovod_alone: given flags that affect only Horovod's own library.
        mpi: how mpirun starts the ranks, instead of agents; None for agents.
        orders_hosts: whether to sort the script's hosts by name, numbers as numbers: the script's author has sorted
            them as texts.

    Raises:
        SettingsError: a value is invalid, or two conflict; one line that names flag, value and limit.
    """

    command: tuple[OsText, ...]
    num_proc: int = field(metadata=_given_by("-np"))
    min_num_proc: int = field(metadata=_given_by("--min-np"))
    max_num_proc: int | None = field(default=None, metadata=_given_by("--max-np"))
    num_standby: int = field(default=0, metadata=_given_by("--standby"))
    num_proc_multiple: int = field(default=1, metadata=_given_by("--np-multiple"))
    ranks_per_host_multiple: int = field(default=1, metadata=_given_by("--ranks-per-host-multiple"))
    num_parameter_servers: int = field(default=0, metadata=_given_by("--parameter-servers"))
    restart_chief: bool = field(default=False, metadata=_given_by("--restart-chief"))
    protect: tuple[str, ...] = field(default=(), metadata=_given_by("--protect"))
    slots_per_host: int | None = field(
        default=None, metadata=_given_by("--slots-per-host", "OMPI_MCA_orte_set_default_slots")
    )
    elastic: bool = False
    elastic_timeout_s: float = field(default=600.0, metadata=_given_by("--elastic-timeout", "HOROVOD_ELASTIC_TIMEOUT"))
    start_timeout_s: float = field(default=300.0, metadata=_given_by("--start-timeout", "HOROVOD_START_TIMEOUT"))
    heartbeat_timeout_s: float = field(default=60.0, metadata=_given_by("--heartbeat-timeout"))
    hang_timeout_s: float = field(default=0.0, metadata=_given_by("--hang-timeout"))
    hang_action: str = field(default=HangAction.END, metadata=_given_by("--hang-action"))
    straggler_action: str = field(default=StragglerAction.WARN, metadata=_given_by("--straggler-action"))
    reset_limit: int | None = field(default=None, metadata=_given_by("--reset-limit"))
    reset_window_s: float | None = field(default=None, metadata=_given_by("--reset-window"))
    drain_timeout_s: float = field(default=300.0, metadata=_given_by("--drain-timeout"))
    cooldown_range_s: tuple[float, float] | None = field(default=None, metadata=_given_by("--blacklist-cooldown-range"))
    hosts: tuple[Host, ...] | None = field(default=None, metadata=_given_by("-H"))
    discovery_script: OsText | None = field(default=None, metadata=_given_by("--host-discovery-script"))
    discovery_socket: int | None = None
    discovery: str = field(default="", metadata=_given_by("--discovery"))
    pod_selector: str = field(default="", metadata=_given_by("--selector"))
    pod_namespace: str | None = field(default=None, metadata=_given_by("--namespace"))
    pod_names: str = field(default=AUTO_NAMES, metadata=_given_by("--pod-names"))
    slots_from: str = field(default=SLOTS_FROM, metadata=_given_by("--slots-from"))
    rack_from: str = field(default=RACK_FROM, metadata=_given_by("--rack-from"))
    departure_taints: tuple[str, ...] = field(default=(), metadata=_given_by("--departure-taints"))
    discovery_interval_s: float = field(default=1.0, metadata=_given_by("--discovery-interval"))
    discovery_timeout_s: float = field(default=10.0, metadata=_given_by("--discovery-timeout"))
    rendezvous_port: int = field(default=0, metadata=_given_by("--rendezvous-port", is_way=True))
    rendezvous_address: str = field(default=_LOOPBACK, metadata=_given_by(is_way=True))
    output_filename: Path | None = field(default=None, metadata=_given_by("--output-filename"))
    stdin: str | None = field(default=None, metadata=_given_by("--stdin"))
    prefix_timestamp: bool = field(default=False, metadata=_given_by("--prefix-output-with-timestamp"))
    verbose: bool = field(default=False, metadata=_given_by("--verbose"))
    progress_rank: str = field(default=ALL_BARS, metadata=_given_by("--progress-rank"))
    quiet: bool = field(default=False, metadata=_given_by("--quiet"))
    log_level: str = field(default="INFO", metadata=_given_by("--log-level"))
    grace_s: float = field(default=5.0, metadata=_given_by("--grace-time"))
    event_log: Path | None = field(default=None, metadata=_given_by("--event-log"))
    event_hook: OsText | None = field(default=None, metadata=_given_by("--event-hook"))
    page: bool = field(default=True, metadata=_given_by("--no-page"))
    history: bool = field(default=True, metadata=_given_by("--no-history", "ELASTIC_DRIVER_HISTORY"))
    page_address: str = field(default="", metadata=_given_by("--page-address"))
    gloo_timeout_s: float = field(
        default=GLOO_TIMEOUT_S,
        metadata=_given_by("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", is_way=True),
    )
    worker_env: Mapping[str, OsText] = field(default_factory=dict, metadata=_given_by(is_way=True))
    durable_dir: Path | None = field(default=None, metadata=_given_by("--durable-dir"))
    durable_every: int | None = field(default=None, metadata=_given_by("--durable-every"))
    durable_interval_s: float | None = field(default=None, metadata=_given_by("--durable-interval"))
    durable_keep: int | None = field(default=None, metadata=_given_by("--durable-keep"))
    journal: JournalPlace | None = field(default=None, metadata=_given_by("--journal"))
    driver_timeout_s: float = field(default=_DRIVER_TIMEOUT_S, metadata=_given_by("--driver-timeout"))
    hands_over: bool = field(default=False, metadata=_given_by("--hand-over"))
    standby_driver: bool = field(default=False, metadata=_given_by("--standby-driver"))
    on_change: str = field(default=AUTO_ON_CHANGE, metadata=_given_by("--on-change", "ELASTIC_DRIVER_ON_CHANGE"))
    horovod_shim: str = field(default=AUTO, metadata=_given_by("--horovod-shim", ENV_SHIM))
    horovod_protocol: str = field(default=AUTO, metadata=_given_by("--horovod-protocol", ENV_PROTOCOL))
    warm_starts: bool = field(default=True, metadata=_given_by("--no-preload"))
    preload: tuple[str, ...] | None = field(default=None, metadata=_given_by("--preload"))
    agent_timeout_s: float = field(default=15.0, metadata=_given_by("--agent-timeout", is_way=True))
    host_timeout_s: float = field(default=5.0, metadata=_given_by("--host-timeout", is_way=True))
    accept_agents: bool = field(default=False, metadata=_given_by("--accept-agents"))
    join_token_file: Path | None = field(default=None, metadata=_given_by("--join-token-file"))
    operator_token_file: Path | None = field(default=None, metadata=_given_by("--operator-token-file"))
    launcher: str = field(default=AUTO_LAUNCHER, metadata=_given_by("--launcher"))
    rsh_agent: tuple[OsText, ...] | None = field(
        default=None, metadata=_given_by("--rsh-agent", "OMPI_MCA_plm_rsh_agent", is_way=True)
    )
    launcher_command: OsText | None = field(default=None, metadata=_given_by("--launcher-command", is_way=True))
    launcher_bootstrap: str | None = field(default=None, metadata=_given_by("--launcher-bootstrap", is_way=True))
    remote_python: OsText | None = field(default=None, metadata=_given_by("--remote-python", is_way=True))
    logins: Mapping[str, str] = field(default_factory=dict, metadata=_given_by(is_way=True))
    ssh_port: int | None = field(default=None, metadata=_given_by("--ssh-port", is_way=True))
    ssh_identity_file: OsText | None = field(default=None, metadata=_given_by("--ssh-identity-file", is_way=True))
    ssh_connect_timeout_s: float = field(default=10.0, metadata=_given_by("--ssh-connect-timeout", is_way=True))
    port_range: tuple[int, int] | None = field(default=None, metadata=_given_by("--port-range", is_way=True))
    network_interfaces: tuple[str, ...] = field(default=(), metadata=_given_by("--network-interfaces", is_way=True))
    check_network: bool = field(default=False, metadata=_given_by("--check-network"))
    spot_notices: str | None = field(default=None, metadata=_given_by("--spot-notices"))
    tls: bool = field(default=False, metadata=_given_by("--tls", is_way=True))
    passed_env: Mapping[str, OsText] = field(default_factory=dict, metadata=_given_by("-x", is_way=True))
    nodes: Nodes | None = None
    logs: Logs = field(default_factory=Logs)
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    more_signals: tuple[str, ...] = ()
    blames_hosts: bool = True
    sizing: Sizing = Sizing.NP
    remarks: tuple[str, ...] = ()
    of_horovod_alone: tuple[str, ...] = ()
    mpi: Mpirun | None = None
    orders_hosts: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_multiples()
        self._check_hosts()
        self._check_durable()
        self._check_journal()
        self._check_machines()
        self._check_chief()
        if not self.command:
            raise SettingsError("no command to run: add it after the flags, e.g. elasticrun -np 2 python train.py")

    @property
    def ways(self) -> dict[str, Any]:
        """The fields that decide how hosts are reached, and how their workers reach the driver and each other."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.metadata.get("is_way")}

    @property
    def has_journal(self) -> bool:
        """Whether another driver may take the job over."""
        return self.journal is not None

    @property
    def journal_folder(self) -> Path | None:
        """The journal's folder; None for a job without a journal, or with one in etcd."""
        return None if self.journal is None else self.journal.folder

    @property
    def nodes_at_endpoint(self) -> Nodes | None:
        """The parameters of this machine and the other nodes, if all run this command and meet at an endpoint."""
        return self.nodes if self.nodes is not None and self.nodes.endpoint else None

    @property
    def has_etcd(self) -> bool:
        """Whether a driver of another machine may take the job over: its journal is in etcd."""
        return self.journal is not None and self.journal.folder is None

    @property
    def opens_port(self) -> bool:
        """Whether the driver listens on TCP from its start: its address was published, or the port is named."""
        is_named = self.rendezvous_port != 0 or self.rendezvous_address != _LOOPBACK
        return is_named or self.accept_agents or self.operator_token_file is not None

    @property
    def driver_ports(self) -> Sequence[int]:
        """The ports that the driver may listen on, in the order of trial; 0 for any."""
        if self.rendezvous_port or self.port_range is None:
            return (self.rendezvous_port,)
        low, high = self.port_range
        return range(high, low - 1, -1)  # workers of this machine begin at the other end

    @property
    def stdin_rank(self) -> int | None:
        """The rank that gets the driver's standard input; None for no rank."""
        if self.stdin is not None:
            return None if self.stdin == NO_STDIN else int(self.stdin)
        if self.num_parameter_servers or self.has_journal:
            return None
        if self.max_num_proc == 1:
            return 0
        shown = self.logs.shown
        is_one_host = self.hosts is not None and len(self.hosts) == 1 and not self.accept_agents
        return next(iter(shown)) if is_one_host and shown is not None and len(shown) == 1 else None

    @property
    def most_workers(self) -> int:
        """The most workers at a time, including standbys; num_proc if only later hosts will determine it."""
        bounds = [] if self.hosts is None or self.accept_agents else [total_slots(self.hosts)]
        if self.max_num_proc is not None:
            bounds.append(self.max_num_proc + self.num_standby + self.num_parameter_servers)
        return min(bounds, default=self.num_proc + self.num_parameter_servers)

    def _check_numbers(self) -> None:
        self._check_counts()
        for name in (
            "elastic_timeout_s",
            "start_timeout_s",
            "discovery_interval_s",
            "discovery_timeout_s",
            "drain_timeout_s",
            "reset_window_s",
        ):
            value = getattr(self, name)
            if value is not None:
                check_seconds(FLAGS[name], value)
        check_seconds(FLAGS["gloo_timeout_s"], self.gloo_timeout_s, most=MOST_GLOO_S)
        for name in ("grace_s", "heartbeat_timeout_s", "hang_timeout_s"):
            if value := getattr(self, name):
                check_seconds(FLAGS[name], value, zero=", 0 or above")
        if not 0 <= self.rendezvous_port <= 65535:
            raise SettingsError(f"--rendezvous-port {self.rendezvous_port} is not a port: 0 to 65535")
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise SettingsError(f"--ssh-port {self.ssh_port} is not a port: 1 to 65535")
        if self.quiet and self.verbose:
            raise SettingsError("--quiet and --verbose exclude each other")
        self._check_stdin()
        self._check_progress_rank()
        if self.log_level not in LOG_LEVELS:
            raise SettingsError(f"--log-level {self.log_level} is not one of {', '.join(LOG_LEVELS)}")
        if self.spot_notices is not None and self.spot_notices not in tuple(Cloud):
            raise SettingsError(f"--spot-notices {self.spot_notices} is not one of {', '.join(Cloud)}")
        if self.hang_action not in tuple(HangAction):
            raise SettingsError(f"--hang-action {self.hang_action} is not one of {', '.join(HangAction)}")
        if self.straggler_action not in tuple(StragglerAction):
            raise SettingsError(
                f"--straggler-action {self.straggler_action} is not one of {', '.join(StragglerAction)}"
            )
        if self.on_change not in ON_CHANGE:
            raise SettingsError(f"--on-change {self.on_change} is not one of {', '.join(ON_CHANGE)}")
        check_mode(self.horovod_shim, FLAGS["horovod_shim"])
        check_protocol(self.horovod_protocol, FLAGS["horovod_protocol"])
        if self.horovod_protocol == ON and self.horovod_shim == ALWAYS:
            raise SettingsError("--horovod-protocol on serves Horovod's own library, which --horovod-shim always hides")
        if self.horovod_protocol == ON and self.durable_dir is not None:
            raise SettingsError("--durable-dir does not support Horovod's own library (--horovod-protocol on)")
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

    def _check_stdin(self) -> None:
        if self.stdin is None or self.stdin == NO_STDIN:
            return
        if not _is_rank(self.stdin):
            raise SettingsError(f"--stdin {self.stdin} is neither a rank nor {NO_STDIN}")
        if self.num_parameter_servers:
            raise SettingsError("--stdin does not apply to jobs with --parameter-servers: their chief has no rank")
        if self.max_num_proc is not None and int(self.stdin) >= self.max_num_proc:
            raise SettingsError(f"--stdin {self.stdin} is not a rank of a job of at most {self.max_num_proc} workers")

    def _check_progress_rank(self) -> None:
        if self.progress_rank not in (ALL_BARS, NO_BARS) and not _is_rank(self.progress_rank):
            raise SettingsError(f"--progress-rank {self.progress_rank} is neither a rank nor {ALL_BARS} nor {NO_BARS}")

    def _check_counts(self) -> None:
        _at_least("-np", self.num_proc, 1)
        _at_least("--min-np", self.min_num_proc, 1)
        if self.min_num_proc > self.num_proc:
            raise SettingsError(f"--min-np {self.min_num_proc} is above -np {self.num_proc}")
        if self.max_num_proc is not None and self.max_num_proc < self.num_proc:
            raise SettingsError(f"--max-np {self.max_num_proc} is below -np {self.num_proc}")
        _at_least("--standby", self.num_standby, 0)
        if self.num_standby and self.max_num_proc is None:
            raise SettingsError(
                "--standby needs --max-np: without it every slot gets a rank and none is left for a standby"
            )
        if self.num_standby and self.on_change == RESTART:
            raise SettingsError("--standby needs workers that reset in place: --on-change restart restarts them all")
        for name in ("num_standby", "num_proc"):
            value = getattr(self, name)
            if value > _MAX_NUM_PROC:
                raise SettingsError(
                    f"{FLAGS[name]} {value} is above {_MAX_NUM_PROC}, the maximum number of workers of a job"
                )
        if self.slots_per_host is not None:
            _at_least("--slots-per-host", self.slots_per_host, 1)
            if self.slots_per_host > MAX_SLOTS_PER_HOST:
                raise SettingsError(
                    f"--slots-per-host {self.slots_per_host} is above {MAX_SLOTS_PER_HOST}, the maximum for a host"
                )
        if self.reset_limit is not None:
            _at_least("--reset-limit", self.reset_limit, 0)

    def _check_multiples(self) -> None:
        given = [name for name in ("num_proc_multiple", "ranks_per_host_multiple") if getattr(self, name) != 1]
        for name in given:
            _at_least(FLAGS[name], getattr(self, name), 1)
        if self.ranks_per_host_multiple > MAX_SLOTS_PER_HOST:
            raise SettingsError(
                f"--ranks-per-host-multiple {self.ranks_per_host_multiple} is above {MAX_SLOTS_PER_HOST}, the "
                "maximum number of slots of a host"
            )
        multiple = lcm(self.num_proc_multiple, self.ranks_per_host_multiple)
        flags = ", ".join(f"{FLAGS[name]} {getattr(self, name)}" for name in given)
        for name in ("num_proc", "min_num_proc", "max_num_proc"):
            value = getattr(self, name)
            if value is None or value % multiple == 0:
                continue
            below, above = value - value % multiple, value - value % multiple + multiple
            would_do = f"{below} or {above}" if below else str(above)
            raise SettingsError(f"{FLAGS[name]} {value} is not a multiple of {multiple} ({flags}): use {would_do}")

    def _check_hosts(self) -> None:
        for name in self.protect:
            if not is_host_name(name) or name.count(":") == 1:  # no IPv6 address has just one
                raise SettingsError(f"--protect {name!r} is not the name of a host")
        self._check_pods()
        if self.discovery:
            return
        if self.discovery_script is not None:
            if self.hosts is not None or self.discovery_socket is not None:
                other = "fixed hosts (-H, --hostfile)" if self.hosts is not None else "a discovery object"
                raise SettingsError(f"give either --host-discovery-script or {other}, not both")
            script_words(self.discovery_script)
            return
        if self.discovery_socket is not None:
            if self.hosts is not None:
                raise SettingsError("give either a discovery object or fixed hosts (-H, --hostfile), not both")
            return
        if not self.hosts and not self.accept_agents:
            raise SettingsError("no hosts: give -H, --hostfile, --host-discovery-script or --accept-agents")
        for host in self.hosts or ():
            if host.slots > MAX_SLOTS_PER_HOST:
                raise SettingsError(
                    f"host {host.name!r} would have {host.slots} slots; the most is {MAX_SLOTS_PER_HOST}"
                )
        if self.accept_agents:
            return
        assert self.hosts is not None
        slots = total_slots(self.hosts)
        if self.num_parameter_servers and slots < self.num_proc + self.num_parameter_servers:
            raise SettingsError(
                f"-np {self.num_proc} and --parameter-servers {self.num_parameter_servers} are above the {slots} slots "
                f"of the hosts given ({', '.join(str(host) for host in self.hosts)})"
            )
        if slots < self.num_proc:
            raise SettingsError(
                f"-np {self.num_proc} is above the {slots} slots of the hosts given "
                f"({', '.join(str(host) for host in self.hosts)})"
            )
        size = self.ranks_per_host_multiple
        whole = sum(host.slots - host.slots % size for host in self.hosts)
        if whole < self.num_proc:
            raise SettingsError(
                f"-np {self.num_proc} is above the {whole} slots that --ranks-per-host-multiple {size} leaves of the "
                f"hosts given ({', '.join(str(host) for host in self.hosts)})"
            )
        strangers = [name for name in self.protect if name not in {host.name for host in self.hosts}]
        if strangers:
            raise SettingsError(
                f"--protect {strangers[0]} is not one of the hosts given "
                f"({', '.join(host.name for host in self.hosts)})"
            )
        if self.num_standby and slots < (self.max_num_proc or 0) + self.num_standby:
            raise SettingsError(
                f"--standby {self.num_standby} needs as many slots beyond --max-np {self.max_num_proc}; the hosts "
                f"given have {slots} in all ({', '.join(str(host) for host in self.hosts)})"
            )

    def _check_pods(self) -> None:
        if not self.discovery:
            for name in ("pod_selector", "pod_namespace", "departure_taints"):
                if getattr(self, name):
                    raise SettingsError(f"{FLAGS[name]} has no effect: give --discovery kubernetes, too")
            return
        if self.discovery not in DISCOVERIES:
            raise SettingsError(f"--discovery {self.discovery} is not one of {', '.join(DISCOVERIES)}")
        others = {
            "fixed hosts (-H, --hostfile)": self.hosts,
            "--host-discovery-script": self.discovery_script,
            "a discovery object": self.discovery_socket,
        }
        for other, value in others.items():
            if value is not None:
                raise SettingsError(f"give either --discovery {self.discovery} or {other}, not both")
        check_pods(
            selector=self.pod_selector,
            namespace=self.pod_namespace,
            slots_from=self.slots_from,
            rack_from=self.rack_from,
            pod_names=self.pod_names,
            departure_taints=self.departure_taints,
        )

    @property
    def is_torchruns(self) -> bool:
        """Whether the job was described by torchrun's options, and its script expects torchrun's behavior."""
        return self.nodes is not None

    @property
    def is_horovods(self) -> bool:
        """Whether its script may expect Horovod's behavior: any may, except one described by torchrun's options."""
        return not self.is_torchruns or self.horovod_shim != NEVER or self.horovod_protocol != OFF

    @property
    def _login(self) -> str:
        """One of the login names, for messages."""
        host, login = next(iter(self.logins.items()))
        return f"the login name in {login}@{host}"

    def _check_launcher(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise SettingsError(f"--launcher {self.launcher} is not one of {', '.join(LAUNCHERS)}")
        if self.launcher != NO_LAUNCHER:
            return
        if not self.accept_agents:
            raise SettingsError("with --launcher none, hosts join by themselves: give --accept-agents, too")
        for name in ("rsh_agent", "launcher_command", "ssh_port", "ssh_identity_file", "remote_python"):
            if getattr(self, name) is not None:
                raise SettingsError(f"{FLAGS[name]} has no effect with --launcher none: no host is dialled")
        if self.logins:
            raise SettingsError(f"{self._login} has no effect with --launcher none: no host is dialled")

    def _check_chief(self) -> None:
        """Check what cannot be combined with a chief, or needs one. Defaults count as not given."""
        _at_least(FLAGS["num_parameter_servers"], self.num_parameter_servers, 0)
        if not self.num_parameter_servers:
            if self.restart_chief:
                raise SettingsError("--restart-chief has no effect: give --parameter-servers, too")
            return
        if self.num_parameter_servers > _MAX_NUM_PROC:
            raise SettingsError(f"--parameter-servers {self.num_parameter_servers} is above {_MAX_NUM_PROC}")
        if self.sizing is not Sizing.NP or self.nodes is not None:
            raise SettingsError("--parameter-servers excludes torchrun's flags: give the number of workers as -np")
        if self.on_change != AUTO_ON_CHANGE:
            raise SettingsError(
                f"--on-change {self.on_change} applies to workers that run the script; with --parameter-servers "
                "only the chief does"
            )
        if self.has_journal and any(host.name == CHIEF for host in self.hosts or ()):
            raise SettingsError(
                f"with --journal and --parameter-servers no host can be named {CHIEF}: that name denotes the script"
            )
        why = {
            "num_standby": "servers have nothing to boot",
            "num_proc_multiple": "its workers have no ranks",
            "ranks_per_host_multiple": "its workers have no ranks",
            "durable_dir": "the chief saves its own checkpoints",
            "preload": "servers are always started as new processes",
            "hang_timeout_s": "servers wait for their chief",
        }
        given = {setting.name: setting.default for setting in fields(self)}
        for name, reason in why.items():
            if getattr(self, name) != given[name]:
                raise SettingsError(f"{FLAGS[name]} cannot be combined with --parameter-servers: {reason}")

    def _check_durable(self) -> None:
        for name in ("durable_every", "durable_interval_s", "durable_keep"):
            value = getattr(self, name)
            if value is not None and self.durable_dir is None:
                raise SettingsError(f"{FLAGS[name]} {value:g} has no effect: give --durable-dir, too")
        if self.durable_every is not None:
            _at_least("--durable-every", self.durable_every, 1)
        if self.durable_keep is not None:
            _at_least("--durable-keep", self.durable_keep, 1)
        if self.durable_interval_s is not None:
            check_seconds("--durable-interval", self.durable_interval_s)

    def _check_journal(self) -> None:
        check_seconds(FLAGS["driver_timeout_s"], self.driver_timeout_s)
        if not self.has_journal:
            if self.driver_timeout_s != _DRIVER_TIMEOUT_S:
                raise SettingsError("--driver-timeout has no effect: give --journal, too")
            if self.hands_over:
                raise SettingsError("--hand-over needs --journal, from which another driver continues the job")
            if self.standby_driver:
                raise SettingsError("--standby-driver needs --journal: it stands by for the job recorded there")
            return
        if self.has_etcd:
            self._check_etcd()
        others = {
            "--stdin": self.stdin not in (None, NO_STDIN),
            "a discovery object": self.discovery_socket is not None,
        }
        for other, is_given in others.items():
            if is_given:
                raise SettingsError(f"--journal cannot be combined with {other}")
        if self.nodes_at_endpoint is not None and not self.has_etcd:
            raise SettingsError(
                "nodes with an --rdzv-endpoint need a journal in etcd: a folder is lost with the node that runs "
                "the driver"
            )

    def _check_etcd(self) -> None:
        """Check that a driver of another machine can take the job over."""
        if self.num_parameter_servers:
            raise SettingsError(
                "--parameter-servers cannot be combined with a journal in etcd: the chief runs on the driver's "
                "machine and is lost with it; --journal DIR covers only the driver's death"
            )
        if self.agent_timeout_s < LEAST_AGENT_TIMEOUT_OF_ETCD_S:
            raise SettingsError(
                f"--agent-timeout {self.agent_timeout_s:g} is below {LEAST_AGENT_TIMEOUT_OF_ETCD_S:g} s: another "
                "driver needs that long to take the job over, since it waits for the lease in etcd"
            )
        if self.driver_timeout_s < self.agent_timeout_s:
            raise SettingsError(
                f"--driver-timeout {self.driver_timeout_s:g} is below --agent-timeout {self.agent_timeout_s:g}: another"
                " driver could not take the job over in time"
            )
        for host in self.hosts or ():
            if is_loopback(host.name):
                raise SettingsError(
                    f"host {host.name} means a different machine to each driver: with a journal in etcd, use host "
                    f"names that mean the same on all machines, e.g. -H {platform.node()}:{host.slots}"
                )

    def _check_machines(self) -> None:
        check_seconds(FLAGS["ssh_connect_timeout_s"], self.ssh_connect_timeout_s)
        self._check_launcher()
        check_agent_timeout(self.agent_timeout_s)
        check_host_timeout(self.host_timeout_s)
        if self.join_token_file is not None and not self.accept_agents:
            raise SettingsError("--join-token-file has no effect: give --accept-agents, too")
        for name in ("rsh_agent", "launcher_command", "remote_python", "ssh_identity_file"):
            value = getattr(self, name)
            if value is not None and not (value[0] if isinstance(value, tuple) and value else value):
                raise SettingsError(f"{FLAGS[name]} is empty")
        if self.rsh_agent is not None and self.launcher_command is not None:
            raise SettingsError("give either --rsh-agent or --launcher-command, not both")
        if self.launcher_bootstrap not in (None, *BOOTSTRAPS):
            raise SettingsError(f"--launcher-bootstrap {self.launcher_bootstrap} is not one of {', '.join(BOOTSTRAPS)}")
        instead = next((name for name in ("rsh_agent", "launcher_command") if getattr(self, name) is not None), None)
        if instead is not None:
            for name in ("ssh_port", "ssh_identity_file"):
                if getattr(self, name) is not None:
                    raise SettingsError(f"{FLAGS[name]} applies to ssh, which {FLAGS[instead]} replaces")
            if self.logins:
                raise SettingsError(f"{self._login} applies to ssh, which {FLAGS[instead]} replaces")
        if self.launcher_bootstrap not in (None, STDIN) and instead is None:
            raise SettingsError("--launcher-bootstrap has no effect: give --rsh-agent or --launcher-command, too")
        if self.port_range is not None:
            check_port_range(FLAGS["port_range"], self.port_range)
        for text in self.network_interfaces:
            check_interface(FLAGS["network_interfaces"], text)


FLAGS: Mapping[str, str] = {
    setting.name: setting.metadata["flag"] for setting in fields(Settings) if setting.metadata.get("flag")
}
"""The flag of each field that has one, as in messages."""

VARIABLES: Mapping[str, str] = {
    setting.name: setting.metadata["variable"] for setting in fields(Settings) if setting.metadata.get("variable")
}
"""The environment variable of each field that has one; the flag and the config file override it."""


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 6


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise SettingsError(f"{flag} {value} is below {least}")


def check_seconds(flag: str, value: float, *, zero: str = " above 0", most: float = MAX_SECONDS) -> None:
    """Raise SettingsError unless this is a valid duration; ``zero`` says whether it may be 0, too."""
    if not value > 0:  # false for NaN, too
        raise SettingsError(f"{flag} {value:g} is not a number of seconds{zero}")
    if value > most:
        raise SettingsError(f"{flag} {value:g} is above the maximum of {most:g} seconds")


def check_agent_timeout(seconds: float) -> None:
    """Raise SettingsError unless this is a valid --agent-timeout."""
    if seconds < LEAST_AGENT_TIMEOUT_S:
        raise SettingsError(
            f"--agent-timeout {seconds:g} is below {LEAST_AGENT_TIMEOUT_S:g} s: machines acknowledge each other once "
            "a second"
        )
    check_seconds(FLAGS["agent_timeout_s"], seconds)


def check_host_timeout(seconds: float) -> None:
    """Raise SettingsError unless this is a valid --host-timeout."""
    if seconds < LEAST_HOST_TIMEOUT_S:
        raise SettingsError(
            f"--host-timeout {seconds:g} is below {LEAST_HOST_TIMEOUT_S:g} s: machines acknowledge each other once a "
            "second"
        )
    check_seconds(FLAGS["host_timeout_s"], seconds)


def script_words(script: str, flag: str = "--host-discovery-script") -> list[str]:
    """Split a shell command's line into words, as a shell would; at least one.

    Args:
        script: the command.
        flag: its flag.

    Raises:
        SettingsError: it is empty, or cannot be split.
    """
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise SettingsError(f"cannot read {flag} {script!r}: {error}") from error
    if not words:
        raise SettingsError(f"{flag} is empty")
    return words
