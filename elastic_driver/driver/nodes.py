"""A job of nodes: each runs the same command with the same endpoint, as under torchrun.

Owns a node's life: it is the driver if the endpoint is its own (:mod:`elastic_driver.driver.endpoint`); otherwise it
joins the driver there, waits for it, and waits again if it is lost. The fleet defines what a joining host means to the
job; the core decides when the job starts, and with which hosts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from elastic_driver.driver.endpoint import LOOPBACK
from elastic_driver.driver.job import check_recorded, run_job
from elastic_driver.driver.node import ENDING_S, LOOK_S, Node, Wait, outlive_signals
from elastic_driver.errors import SettingsError
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.hosts import MAX_SLOTS_PER_HOST, Host
from elastic_driver.launch.agent.agent import AgentEnd, End
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.rendezvous.routes import Routes
from elastic_driver.rendezvous.token_file import JOIN, read_token, token_in
from elastic_driver.settings.join_token import ENV_JOIN_TOKEN, ENV_JOIN_TOKEN_FILE
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.settings import Settings
from elastic_driver.settings.torchrun_options import TRUE
from elastic_driver.system.leash import ENV_HELD

# How long to try a driver on this machine: if it has gone meanwhile, this node may be the next. Longer than it takes to
# see that a port is not a driver's.
_HERE_S = 3.0


def run_node(
    settings: Settings,
    nodes: Nodes,
    *,
    environ: MutableMapping[str, str] = os.environ,
    routes: Routes = (),
) -> int:
    """Run one node on this process's own event loop, using its terminal. Blocks until its part is over.

    Args:
        settings: the user's settings. Of those on hosts, only the file of the join token counts: the rest follows from
            the nodes.
        nodes: this node's options about the others; they include an endpoint.
        routes: routes for workers in addition to the standard ones, if this node is the driver's.
        environ: this process's environment. The token's variables are removed from it: workers would inherit them.

    Returns:
        On the driver's node the exit code of ``elasticrun``; on the others that of :func:`attend`.

    Raises:
        SettingsError: as run_job does; or the endpoint, the token, or an option about the nodes cannot be used.
    """
    given, is_beside = dict(environ), bool(environ.pop(ENV_HELD, ""))
    token_text, token_file = environ.pop(ENV_JOIN_TOKEN, ""), environ.pop(ENV_JOIN_TOKEN_FILE, "")
    if nodes.nproc_per_node > MAX_SLOTS_PER_HOST:
        raise SettingsError(f"--nproc-per-node {nodes.nproc_per_node} is not between 1 and {MAX_SLOTS_PER_HOST}")
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
    node = Node(settings, nodes, token, source)
    if settings.journal is None:
        return _AtEndpoint(node, routes).run()
    check_recorded(settings, routes)
    from elastic_driver.driver.nodes_in_etcd import NodeInEtcd, drive  # late: the HTTP client takes a while to load

    if is_beside:
        return drive(node)
    return NodeInEtcd(node, EtcdPlace.parse(settings.journal.url, environ), given).run()


class _AtEndpoint:
    """A node that is the driver if the endpoint is its own, and otherwise joins the driver there."""

    def __init__(self, node: Node, routes: Routes) -> None:
        self._node, self._routes = node, routes
        self._is_host = _is_host(node.nodes)

    def run(self) -> int:
        """Run the node. Blocks until its part in the job is over. Returns its exit code."""
        began = time.monotonic()
        wait = self._node.new_wait()
        why = ""
        while True:
            outlive_signals()
            ours = self._is_host if self._is_host is not None else self._node.place.is_ours()
            listener = self._node.place.claim() if ours else None
            if listener is not None:
                with contextlib.closing(listener):
                    return self._drive(listener)
            if wait.left_s <= 0:
                return self._node.gives_up(why, f"at {self._node.place}")
            if ours is None:
                why = f"the name {self._node.place.host} does not resolve yet"
            elif self._is_host:
                why = f"cannot be the driver: port {self._node.place.port} of this machine is in use by another program"
                wait.until = min(wait.until, began + ENDING_S)
            else:
                url = self._url(here=bool(ours))
                if url:
                    end = self._join(url, wait, here=bool(ours))
                    code = self._node.code_of(end)
                    if code is not None:
                        return code
                    why = end.why
                    if end.how is AgentEnd.LOST:
                        wait = self._node.new_wait()
                        wait.tell(f"{why}; its workers on this node were stopped", at_once=True)
                        continue
                    elif end.how is AgentEnd.TOO_LATE:
                        wait.until = min(wait.until, time.monotonic() + ENDING_S)
                    elif end.how is AgentEnd.NOT_MET:
                        continue  # it was reported
                else:
                    why = f"port {self._node.place.port} of this machine does not belong to a driver of this user yet"
            wait.tell(why)
            time.sleep(LOOK_S)

    def _drive(self, listener: socket.socket) -> int:
        node = self._node
        settings = replace(node.driver_settings(), hosts=(Host(node.name, node.nodes.nproc_per_node),))
        node_job = replace(
            node.node_job(), listener=listener, host=node.name, node_rank=node.rank, address=node.address
        )
        return run_job(settings, routes=self._routes, early=EarlyAgent(), node_job=node_job)

    def _url(self, *, here: bool) -> str:
        """Return the driver's URL; "" if there is none yet. Without a token it is the socket of a job of this user."""
        if not self._node.token:
            return next((job.url for job in running_jobs() if job.meets_at == self._node.place.port), "")
        # A name of this machine may resolve to a loopback address where the driver does not listen.
        return f"https://{LOOPBACK}:{self._node.place.port}" if here else self._node.place.url

    def _join(self, url: str, wait: Wait, *, here: bool) -> End:
        return self._node.join(
            (url,),
            wait,
            # A node that may be the driver itself soon checks whether there is one.
            first_s=min(_HERE_S, wait.left_s) if here and self._is_host is None else wait.left_s,
            address=self._node.place.own_address if here and not self._node.address else "",
            tells_at_once=not here,
        )


def _is_host(nodes: Nodes) -> bool | None:
    """Return whether this node was configured to be the driver; None if that is to be determined."""
    text = nodes.conf.get("is_host", "").strip().lower()
    if text:
        return text in TRUE
    return None if nodes.node_rank is None else nodes.node_rank == 0
