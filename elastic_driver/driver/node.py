"""One node of a job of nodes: its identity, and its part in the job as a host that joins.

Owns what follows from its command and its machine alone: its name and secret, the options that must be the same on all
nodes, the settings of a driver of such a job, and the report of the node's own end. Its users find the driver.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from elastic_driver.dialects.ours import inheritable
from elastic_driver.dialects.torchrun import TorchrunJob
from elastic_driver.driver.agent_side import NodeJob
from elastic_driver.driver.endpoint import Endpoint
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import WorkerId, is_host_name
from elastic_driver.launch.agent.agent import AgentEnd, End, NodeContext, attend
from elastic_driver.launch.local.locality import addresses_of
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.launch.words import PASSED_ON, Stream
from elastic_driver.rendezvous.agent_messages import Bootstrap
from elastic_driver.rendezvous.credentials import Role, join_key
from elastic_driver.reporting.console import Console
from elastic_driver.reporting.printable import one_line
from elastic_driver.settings.grace import grace_s
from elastic_driver.settings.join_token import ENV_JOIN_TOKEN_FILE, who_else_reads
from elastic_driver.settings.logs import Logs
from elastic_driver.settings.machines import node_environment
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.settings import Settings
from elastic_driver.words import Bar

LOOK_S = 0.2
"""Seconds between two checks for what no connection reports: the port, a name, a token."""
ENDING_S = 30.0
"""How long the end of the previous job here may take."""
# How long a node looks for its driver, and how long the job may lack nodes; torchrun's default.
_JOIN_TIMEOUT_S = 600.0
# A reason to wait that passes this soon is not reported.
_QUIET_S = 2.0
# The part of a command that is shown; its digest stands for the rest.
_SHOWN = 200


@dataclass(slots=True)
class Wait:
    """A wait of this node, with a time limit; each cause is reported once."""

    until: float
    quiet_until: float
    told: set[str] = field(default_factory=set)

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def tell(self, text: str, *, at_once: bool = False) -> None:
        if text not in self.told and (at_once or time.monotonic() >= self.quiet_until):
            self.told.add(text)
            say(f"{text}; waiting for up to {max(self.left_s, 0.0):.0f} s")


class Node:
    """One node of a job of nodes.

    Args:
        settings: the user's settings.
        nodes: this node's options about the others.
        token: their common secret; "" for none.
        source: where the token was given, in words.

    Attributes:
        settings, nodes, token: as given.
        place: where the nodes meet.
        name: the name of this node's machine.
        address: the address at which the others reach it; "" to find it.

    Raises:
        SettingsError: the endpoint is invalid, a secret is missing, or --local-addr does not resolve.
    """

    def __init__(self, settings: Settings, nodes: Nodes, token: str, source: str) -> None:
        self.settings, self.nodes, self.token, self._source = settings, nodes, token, source
        self.place = Endpoint.parse(nodes.endpoint)
        if not token and (settings.has_etcd or not self.place.only_here):
            where = "etcd" if settings.has_etcd else str(self.place)
            raise SettingsError(
                f"nodes that meet at {where} need a shared secret, since anyone who can reach it could "
                "otherwise join as a node: create one with (umask 077; head -c 24 /dev/urandom | base64 > token), "
                f"copy it to all nodes, and pass --join-token-file token or set {ENV_JOIN_TOKEN_FILE}"
            )
        name = next((name for name in ("join_timeout", "timeout") if name in nodes.conf), "")
        self._join_timeout_s, self._has_join_timeout = float(nodes.conf.get(name, _JOIN_TIMEOUT_S)), bool(name)
        name = socket.gethostname()
        self.name = name if is_host_name(name) else "localhost"
        self.address = _own_address(nodes.local_addr)
        self._has_warned = False
        self._grace_s = grace_s(os.environ)
        self.alike = {
            "--rdzv-id": nodes.run_id,
            "--nnodes": _nnodes(nodes),
            "--role": nodes.role,
            "the command": _shown(settings.command),
        }

    def new_wait(self) -> Wait:
        """Begin to wait for the driver, from now on."""
        now = time.monotonic()
        return Wait(now + self._join_timeout_s, now + _QUIET_S)

    # --- as the driver ---------------------------------------------------------------------------------------------

    def driver_settings(self) -> Settings:
        """Return the settings of a driver of the job, which has no host yet."""
        nodes, number = self.nodes, self.nodes.nproc_per_node
        return replace(
            self.settings,
            num_proc=nodes.least * number,
            min_num_proc=nodes.least * number,
            max_num_proc=nodes.most * number,
            elastic=True,
            elastic_timeout_s=self._join_timeout_s if self._has_join_timeout else self.settings.elastic_timeout_s,
            hosts=(),
            discovery_script=None,
            discovery="",
            accept_agents=True,
            rendezvous_port=self.place.port,
        )

    def node_job(self) -> NodeJob:
        """Return what a driver of the job knows in addition to its settings, while this node is not yet a host."""
        nodes = self.nodes
        others = "" if nodes.most == 1 else f"; other nodes join it with --rdzv-endpoint {self.place}"
        return NodeJob(
            token=self.token,
            only_here=self.place.only_here,
            alike=self.alike,
            invitation=f"this node runs the driver{others}",
            torchrun=TorchrunJob(nodes.run_id, nodes.role, self.settings.reset_limit),
        )

    # --- as one of the others --------------------------------------------------------------------------------------

    def join(
        self,
        urls: Sequence[str],
        wait: Wait,
        *,
        first_s: float,
        fingerprint: str = "",
        address: str = "",
        tells_at_once: bool = True,
    ) -> End:
        """Join the job. Blocks until this node's part in it is over.

        Args:
            urls: the URLs of the driver.
            wait: reports why the driver cannot be reached yet.
            first_s: how long the first connection may take.
            fingerprint: the fingerprint of the driver's certificate; "" if unknown.
            address: the address at which the others reach this node, if it was given none; "" to find it.
            tells_at_once: whether to report immediately that the driver cannot be reached.
        """
        nodes, settings = self.nodes, self.settings
        self._warn_of_readers()
        own = inheritable(os.environ)
        bootstrap = Bootstrap(
            tuple(urls),
            identity=Role.JOINER,
            key=join_key(self.token).hex() if self.token else "",
            host=self.name,
            slots=nodes.nproc_per_node,
            agent_timeout_s=settings.agent_timeout_s,
            fingerprint=fingerprint,
            first_s=first_s,
            address=self.address or address,
            node_rank=self.rank,
            alike=self.alike,
            spot_notices=settings.spot_notices or "",
            grace_s=self._grace_s,
            source=self._source,
        )
        with Console(
            log_level=settings.log_level,
            quiet=settings.quiet,
            progress_rank=settings.progress_rank,
            hears_ends=False,
        ) as console:
            home = NodeContext(
                environ=lambda given: node_environment(own, given),
                screen=_NodeScreen(console, settings.logs, nodes.role),
                signals=tuple(signal.Signals[name] for name in settings.more_signals),
                waits=lambda why: wait.tell(f"cannot reach the driver yet: {why}", at_once=tells_at_once),
            )
            return attend(bootstrap, home)

    @property
    def rank(self) -> int:
        """Its rank among the nodes; -1 to choose one."""
        return -1 if self.nodes.node_rank is None else self.nodes.node_rank

    def _warn_of_readers(self) -> None:
        file = self.settings.join_token_file
        if file is not None and not self._has_warned and (others := who_else_reads(file)):
            say(f"warning: the join token's file {file}: {others}")
        self._has_warned = True

    def code_of(self, end: End) -> int | None:
        """Report why the node ends, and return its exit code; None if it continues to wait."""
        match end.how:
            case AgentEnd.LOST | AgentEnd.TOO_LATE | AgentEnd.NOT_MET:
                return None
            case AgentEnd.STRANGE if not self.token:
                return None  # that driver has gone
            case AgentEnd.OVER:
                result = "failed" if end.code else "succeeded"
                say(f"the job has {result}: {end.why}")
            case _:
                say(end.why)
        return end.code

    def gives_up(self, why: str, driver: str) -> int:
        """Report that the node stops waiting. Return the exit code."""
        say(f"{why or 'no time is left'}; this node stops waiting for the driver {driver}")
        return 1


def _nnodes(nodes: Nodes) -> str:
    return str(nodes.least) if nodes.least == nodes.most else f"{nodes.least}:{nodes.most}"


class _NodeScreen:
    """Shows this node's own workers on its terminal, according to its flags. Files are the driver's."""

    def __init__(self, console: Console, logs: Logs, role: str) -> None:
        self.bars = console.bars_shown
        shown = replace(logs, stdout_filters=(), stderr_filters=())
        self._console = console
        self._logs = RankLogs(shown, folder=Path(), name="", role=role, with_hosts=True)

    def show(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Show output of a worker."""
        shown = self._logs.take(worker, stream, data)
        if shown:
            self._console.write(stream, shown)

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """Show or remove a progress bar of a worker."""
        if bar is not None and bar.data:
            bar = replace(bar, data=self._logs.on_terminal(worker, bar.stream, bar.data))
        self._console.bar(worker, bar)


def _own_address(local_addr: str) -> str:
    """Return the address that --local-addr names; "" if it is not given."""
    if not local_addr:
        return ""
    addresses = addresses_of(local_addr)
    if not addresses:
        raise SettingsError(f"--local-addr {local_addr} does not resolve on this node")
    return addresses[0]


def _shown(command: tuple[str, ...]) -> str:
    """Return a command in the form for comparison: its words, or their beginning and their digest."""
    text = shlex.join(command)
    if len(text) <= _SHOWN:
        return text
    digest = sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{text[:_SHOWN].encode(errors='replace').decode()}... ({len(text)} characters, digest {digest})"


def outlive_signals() -> None:
    """Ignore signals that are passed on to workers, while the node has none. An agent's loop removes these handlers."""
    if threading.current_thread() is threading.main_thread():
        for number in PASSED_ON:
            if number != signal.SIGQUIT and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda *_: None)


def say(text: str) -> None:
    """Print one line on standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"elasticrun: {one_line(text)}", file=sys.stderr, flush=True)
