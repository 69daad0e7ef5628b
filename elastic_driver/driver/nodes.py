"""One node of a job of nodes: each runs the same command with the same endpoint, as under torchrun.

Owns the node's life: it is the driver where the endpoint is its own (:mod:`elastic_driver.driver.endpoint`), else it
joins the driver there, waits for it, and waits again when it is lost. What a host that joins means to the job is the
fleet's; when the job starts, and with whom, is the core's.
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
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from elastic_driver.dialects.ours import inheritable
from elastic_driver.dialects.torchrun import TorchrunJob
from elastic_driver.driver.agent_side import Gathering
from elastic_driver.driver.endpoint import LOOPBACK, Endpoint
from elastic_driver.driver.job import run_job
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import MAX_SLOTS_PER_HOST, Host, WorkerId, is_host_name
from elastic_driver.launch.agent.agent import End, Home, How, attend
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.launch.local.locality import addresses_of
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.launch.words import PASSED_ON, Stream
from elastic_driver.rendezvous.agent_messages import Bootstrap
from elastic_driver.rendezvous.credentials import Role, join_key
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.rendezvous.routes import Routes
from elastic_driver.rendezvous.token_file import JOIN, read_token, token_in
from elastic_driver.report.console import Console
from elastic_driver.report.printable import one_line
from elastic_driver.settings.grace import grace_s
from elastic_driver.settings.join_token import ENV_JOIN_TOKEN, ENV_JOIN_TOKEN_FILE, who_else_reads
from elastic_driver.settings.logs import Logs
from elastic_driver.settings.machines import node_environment
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.settings import Settings
from elastic_driver.settings.torchrun_options import TRUE

JOIN_TIMEOUT_S = 600.0
"""How long a node looks for its driver, and how long the job may lack nodes; torchrun's default."""
# Between two looks for what no connection tells of: the port, a name, a token.
_LOOK_S = 0.2
# A try to reach a driver on this machine: when it has gone meanwhile, this node may be the next. Longer than it takes
# to see that what answers is no driver.
_HERE_S = 3.0
# What is looked for again so soon is not worth a line before.
_QUIET_S = 2.0
# How long the end of the job that was here before may take.
_ENDING_S = 30.0
# Of a command in words; behind that its digest tells the rest.
_SHOWN = 200


def run_node(
    settings: Settings,
    nodes: Nodes,
    *,
    environ: MutableMapping[str, str] = os.environ,
    routes: Routes = (),
) -> int:
    """Runs one node on this process's own event loop, talking to its terminal. Blocks until its part is over.

    Args:
        settings: what the user asked for. Of hosts, their number and how they come nothing counts but the file of the
            join token: that follows from the nodes.
        nodes: what this node was told of the others; there is an endpoint.
        routes: what workers may ask beside what all workers may, if this node is the driver's.
        environ: this process's environment. The token's variables are taken out of it: workers would inherit them.

    Returns:
        On the driver's node the exit code of ``elasticrun``; on the others see :func:`attend`.

    Raises:
        SettingsError: as run_job does; or the endpoint, the token, or what nodes were told cannot be used.
    """
    token_text, token_file = environ.pop(ENV_JOIN_TOKEN, ""), environ.pop(ENV_JOIN_TOKEN_FILE, "")
    if nodes.nproc_per_node > MAX_SLOTS_PER_HOST:
        raise SettingsError(f"--nproc-per-node {nodes.nproc_per_node} is not within 1 to {MAX_SLOTS_PER_HOST}")
    named_by = "--join-token-file"
    if settings.join_token_file is None and token_file:
        settings = replace(settings, accept_agents=True, join_token_file=Path(token_file).absolute())
        named_by = ENV_JOIN_TOKEN_FILE
    token, source = "", ""
    if settings.join_token_file is not None:
        source = f"the file {settings.join_token_file} ({named_by})"
        token = read_token(settings.join_token_file, JOIN)
    elif token_text:
        source = f"the variable {ENV_JOIN_TOKEN}"
        token = token_in(token_text.encode(errors="surrogateescape"), source, JOIN)
    return _Node(settings, nodes, token, source, routes).run()


def _nnodes(nodes: Nodes) -> str:
    return str(nodes.least) if nodes.least == nodes.most else f"{nodes.least}:{nodes.most}"


@dataclass(slots=True)
class _Wait:
    """Something that this node waits for, until some time; why is told once for each cause."""

    until: float
    quiet_until: float
    told: set[str] = field(default_factory=set)

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def tell(self, text: str, *, at_once: bool = False) -> None:
        if text not in self.told and (at_once or time.monotonic() >= self.quiet_until):
            self.told.add(text)
            _say(f"{text}; waiting for up to {max(self.left_s, 0.0):.0f} s")


class _Node:
    """See above."""

    def __init__(self, settings: Settings, nodes: Nodes, token: str, source: str, routes: Routes) -> None:
        self._settings, self._nodes, self._routes = settings, nodes, routes
        self._place = Endpoint.parse(nodes.endpoint)
        self._token, self._source = token, source
        if not token and not self._place.only_here:
            raise SettingsError(
                f"nodes that meet at {self._place} need a secret, or whoever reaches that port could run as one of "
                "them: make a file with (umask 077; head -c 24 /dev/urandom | base64 > token), give all nodes a copy, "
                f"and name it with --join-token-file token or the variable {ENV_JOIN_TOKEN_FILE}"
            )
        self._is_host = _is_host(nodes)
        name = next((name for name in ("join_timeout", "timeout") if name in nodes.conf), "")
        self._join_timeout_s, self._has_join_timeout = float(nodes.conf.get(name, JOIN_TIMEOUT_S)), bool(name)
        name = socket.gethostname()
        self._name = name if is_host_name(name) else "localhost"
        self._has_warned = False
        self._address = _own_address(nodes.local_addr)
        self._grace_s = grace_s(os.environ)
        self._alike = {
            "--rdzv-id": nodes.run_id,
            "--nnodes": _nnodes(nodes),
            "--role": nodes.role,
            "the command": _shown(settings.command),
        }

    def run(self) -> int:
        """Runs it. Blocks until its part in the job is over. Returns its exit code."""
        began = time.monotonic()
        wait = self._new_wait()
        why = ""
        while True:
            _outlive_signals()
            ours = self._is_host if self._is_host is not None else self._place.is_ours()
            listener = self._place.claim() if ours else None
            if listener is not None:
                with contextlib.closing(listener):
                    return self._drive(listener)
            if wait.left_s <= 0:
                return self._gives_up(why)
            if ours is None:
                why = f"the name {self._place.host} does not resolve yet"
            elif self._is_host:
                why = f"cannot be the driver: another program has port {self._place.port} of this machine"
                wait.until = min(wait.until, began + _ENDING_S)
            else:
                url = self._url(here=bool(ours))
                if url:
                    end = self._join(url, wait, here=bool(ours))
                    code = self._code_of(end)
                    if code is not None:
                        return code
                    why = end.why
                    if end.how is How.LOST:
                        wait = self._new_wait()
                        wait.tell(f"{why}; its workers here were ended", at_once=True)
                        continue
                    elif end.how is How.TOO_LATE:
                        wait.until = min(wait.until, time.monotonic() + _ENDING_S)
                    elif end.how is How.NOT_MET:
                        continue  # it was told
                else:
                    why = f"port {self._place.port} of this machine is not a driver's of this user yet"
            wait.tell(why)
            time.sleep(_LOOK_S)

    def _new_wait(self) -> _Wait:
        now = time.monotonic()
        return _Wait(now + self._join_timeout_s, now + _QUIET_S)

    def _gives_up(self, why: str) -> int:
        _say(f"{why or 'no time was left'}; this node gives up to wait for the driver at {self._place}")
        return 1

    # --- as the driver ---------------------------------------------------------------------------------------------

    def _drive(self, listener: socket.socket) -> int:
        nodes, settings = self._nodes, self._settings
        number = nodes.nproc_per_node
        settings = replace(
            settings,
            num_proc=nodes.least * number,
            min_num_proc=nodes.least * number,
            max_num_proc=nodes.most * number,
            elastic=True,
            elastic_timeout_s=self._join_timeout_s if self._has_join_timeout else settings.elastic_timeout_s,
            hosts=(Host(self._name, number),),
            discovery_script=None,
            discovery="",
            accept_agents=True,
            rendezvous_port=self._place.port,
        )
        others = "" if nodes.most == 1 else f"; the others join it with --rdzv-endpoint {self._place}"
        gathering = Gathering(
            listener=listener,
            token=self._token,
            host=self._name,
            node_rank=-1 if nodes.node_rank is None else nodes.node_rank,
            address=self._address,
            only_here=self._place.only_here,
            alike=self._alike,
            invitation=f"this node is the driver{others}",
            torchrun=TorchrunJob(nodes.run_id, nodes.role, settings.reset_limit),
        )
        return run_job(settings, routes=self._routes, early=EarlyAgent(), gathering=gathering)

    # --- as one of the others --------------------------------------------------------------------------------------

    def _url(self, *, here: bool) -> str:
        """Of the driver; "" where there is none yet. Without a token that is the socket of a job of this user's."""
        if not self._token:
            return next((job.url for job in running_jobs() if job.meets_at == self._place.port), "")
        # A name of this machine may mean an address of loopback where the driver does not listen.
        return f"https://{LOOPBACK}:{self._place.port}" if here else self._place.url

    def _join(self, url: str, wait: _Wait, *, here: bool) -> End:
        nodes, settings = self._nodes, self._settings
        self._warn_of_readers()
        own = inheritable(os.environ)
        bootstrap = Bootstrap(
            (url,),
            identity=Role.JOINER,
            key=join_key(self._token).hex() if self._token else "",
            host=self._name,
            slots=nodes.nproc_per_node,
            agent_timeout_s=settings.agent_timeout_s,
            # Who may be the driver itself looks soon whether there is one.
            first_s=min(_HERE_S, wait.left_s) if here and self._is_host is None else wait.left_s,
            address=self._address or (self._place.own_address if here else ""),
            node_rank=-1 if nodes.node_rank is None else nodes.node_rank,
            alike=self._alike,
            spot_notices=settings.spot_notices or "",
            grace_s=self._grace_s,
            source=self._source,
        )
        with Console(log_level=settings.log_level, quiet=settings.quiet) as console:
            console.training_began()  # what workers write is shown as it comes
            home = Home(
                environ=lambda given: node_environment(own, given),
                screen=_NodeScreen(console, settings.logs, nodes.role),
                signals=tuple(signal.Signals[name] for name in settings.more_signals),
                waits=lambda why: wait.tell(f"cannot reach the driver yet: {why}", at_once=not here),
            )
            return attend(bootstrap, home)

    def _warn_of_readers(self) -> None:
        file = self._settings.join_token_file
        if file is not None and not self._has_warned and (others := who_else_reads(file)):
            _say(f"warning: the join token's file {file}: {others}")
        self._has_warned = True

    def _code_of(self, end: End) -> int | None:
        """The node's exit code; None where it goes on waiting."""
        match end.how:
            case How.LOST | How.TOO_LATE | How.NOT_MET:
                return None
            case How.STRANGE if not self._token:
                return None  # that driver has gone
            case How.OVER:
                result = "failed" if end.code else "succeeded"
                _say(f"the job has {result}: {end.why}")
            case _:
                _say(end.why)
        return end.code


class _NodeScreen:
    """What this node's terminal shows of its own workers, as its flags have it. Files are the driver's."""

    def __init__(self, console: Console, logs: Logs, role: str) -> None:
        shown = replace(logs, stdout_filters=(), stderr_filters=())
        self._console = console
        self._logs = RankLogs(shown, folder=Path(), name="", role=role, with_hosts=True)

    def show(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """See NodeScreen."""
        shown = self._logs.take(worker, stream, data)
        if shown:
            self._console.write(stream, shown)


def _is_host(nodes: Nodes) -> bool | None:
    """Whether this node was told outright that it is the driver, or not; None to find out."""
    text = nodes.conf.get("is_host", "").strip().lower()
    if text:
        return text in TRUE
    return None if nodes.node_rank is None else nodes.node_rank == 0


def _own_address(local_addr: str) -> str:
    """The address that --local-addr names; "" where it is not given."""
    if not local_addr:
        return ""
    addresses = addresses_of(local_addr)
    if not addresses:
        raise SettingsError(f"--local-addr {local_addr} does not resolve on this node")
    return addresses[0]


def _shown(command: tuple[str, ...]) -> str:
    """A command as it is compared: its words, or their beginning and their digest."""
    text = shlex.join(command)
    if len(text) <= _SHOWN:
        return text
    digest = sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{text[:_SHOWN].encode(errors='replace').decode()}... ({len(text)} characters, digest {digest})"


def _outlive_signals() -> None:
    """What is passed on to workers is nothing to a node that has none. The loop of a life takes its handlers away."""
    if threading.current_thread() is threading.main_thread():
        for number in PASSED_ON:
            if number != signal.SIGQUIT and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda *_: None)


def _say(text: str) -> None:
    """One line on standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"elasticrun: {one_line(text)}", file=sys.stderr, flush=True)
