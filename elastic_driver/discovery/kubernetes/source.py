"""Hosts from the pods of a Kubernetes cluster, found through its API: KubernetesDiscovery.

Owns which lists are watched, and when the driver is notified of changes. Which pods are hosts is decided in
:mod:`~elastic_driver.discovery.kubernetes.pods`, and :mod:`~elastic_driver.discovery.kubernetes.reflector` keeps a list
up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import cast

from kubernetes_asyncio.client import ApiClient, CoreV1Api

from elastic_driver.discovery.kubernetes.access import Access
from elastic_driver.discovery.kubernetes.pods import (
    Leaving,
    Node,
    Pod,
    Reading,
    Sight,
    look,
    read_node,
    read_pod,
    unused,
)
from elastic_driver.discovery.kubernetes.reflector import Read, Reflector
from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Departure, Host
from elastic_driver.system.job_clock import CallLater, time_limit
from elastic_driver.system.tasks import start_task

_log = logging.getLogger("elastic_driver.discovery")
# A server that is being updated is unavailable for a moment, and a broken watch resumes where it stopped.
_TOLD_AFTER_S = 2.0
# Changes arrive in bursts: those within this time are reported together.
_GATHER_S = 0.01
_MOST_REMARKS = 3


class KubernetesDiscovery:
    """The pods that match a selector: a HostDiscovery of :mod:`elastic_driver.discovery.source`.

    Args:
        selector: a label selector.
        namespace: of the pods; None for the default namespace of the configuration.
        reading: how to interpret pods.
        timeout_s: the limit of one answer, and of the first list with all its retries, seconds.
        access: access to the server.
        call_later: the timer for the first list. By default the loop's, which counts the time while this process is
            stopped.
    """

    def __init__(
        self,
        selector: str,
        namespace: str | None,
        reading: Reading,
        timeout_s: float,
        *,
        access: Access | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        self._selector = selector
        self._namespace = namespace
        self._reading = reading
        self._timeout_s = timeout_s
        self._access = access or Access()
        self._call_later = call_later
        self._following: asyncio.Task[None] | None = None
        self._pods: Reflector[Pod] | None = None
        self._nodes: Reflector[Node] | None = None
        self._nowhere: DiscoveryError | None = None  # why there is no client
        self._has_begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_stale = True
        self._sight = Sight((), {}, (), ())
        self._seen_nodes: set[str] = set()  # the nodes of hosts that were listed at some time
        self._told_of_nodes = False

    async def find_hosts(self) -> tuple[Host, ...]:
        """Return the pods that are hosts now.

        Raises:
            DiscoveryError: the server cannot be queried, so the known hosts may be out of date.
        """
        if self._following is None or self._following.done():
            self._has_begun.clear()
            self._following = start_task(self._follow())
        if self._pods is None or not self._pods.listed:
            await self._begin()
        pods = self._pods
        self._changed.clear()
        if pods is None or not pods.listed:
            if self._nowhere is not None:
                raise DiscoveryError(str(self._nowhere), may_pass=self._nowhere.may_pass)
            trouble, may_pass = ("", True) if pods is None else (pods.trouble, not pods.is_forbidden)
            raise DiscoveryError(trouble or self._slow(), may_pass=may_pass)
        if pods.trouble and time.monotonic() - pods.since >= _TOLD_AFTER_S:
            raise DiscoveryError(pods.trouble, may_pass=not pods.is_forbidden)
        self._tell_of_nodes()
        if self._is_stale:
            self._look(pods)
        return self._sight.hosts

    async def wait_change(self, limit_s: float) -> None:
        """Wait until a pod or a node has changed, for at most ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
                await asyncio.sleep(_GATHER_S)

    def departures(self) -> tuple[Departure, ...]:
        """Return the hosts that are about to leave: deleted, disrupted, not ready, or with a departing node."""
        return tuple(Departure(each.hostname, each.why, self._left_s(each)) for each in self._sight.leaving)

    def remark(self) -> str:
        """Return the remark that the server cannot be queried, or which pods are not hosts yet."""
        pods = self._pods
        if self._nowhere is not None or pods is None:
            return "" if self._nowhere is None else str(self._nowhere)
        if pods.trouble:
            return pods.trouble
        if not pods.listed:
            return ""
        if not pods.objects:
            return f"no pod in namespace {self._namespace} matches {self._selector}"
        others = unused(pods.objects.values(), set(self._sight.uids.values()))
        more = f"; and {len(others) - _MOST_REMARKS} more pods" if len(others) > _MOST_REMARKS else ""
        return "; ".join(others[:_MOST_REMARKS]) + more

    async def close(self) -> None:
        """Stop watching the lists. Canceling all tasks of its loop does so, too."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))

    # --- watching --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        self._nowhere = None
        try:
            client = await self._access.client()
        except DiscoveryError as error:
            self._nowhere = error
            return
        finally:
            self._has_begun.set()
        self._namespace = namespace = self._namespace or self._access.namespace
        self._pods = pods = Reflector(
            f"pods in namespace {namespace}",
            "the verbs list and watch on pods",
            reads=_pods_of,
            query={"namespace": namespace, "label_selector": self._selector},
            parse=lambda made: read_pod(made, self._reading),
            renew=self._access.renew,
            changed=self._change,
            patience_s=self._timeout_s,
        )
        self._nodes = nodes = Reflector(
            "nodes",
            "the verbs list and watch on nodes (a ClusterRole)",
            reads=_nodes_of,
            query={},
            parse=lambda made: read_node(made, self._reading),
            renew=self._access.renew,
            changed=self._change,
            patience_s=self._timeout_s,
        )
        async with client, asyncio.TaskGroup() as group:
            group.create_task(pods.keep(client))
            group.create_task(nodes.keep(client))

    async def _begin(self) -> None:
        """Wait until the first lists have arrived or failed for good, at most until the time limit."""
        with contextlib.suppress(TimeoutError):
            async with time_limit(self._timeout_s, self._call_later):
                await self._has_begun.wait()
                if self._pods is None or self._nodes is None:
                    return
                # Other failures may be temporary, and are retried.
                while not self._pods.listed and not self._pods.is_forbidden:
                    self._changed.clear()
                    await self._changed.wait()
                await self._nodes.settled.wait()

    def _tell_of_nodes(self) -> None:
        nodes = self._nodes
        if nodes is not None and nodes.is_forbidden and not self._told_of_nodes:
            self._told_of_nodes = True
            _log.warning("%s; continuing without racks, taints and cordons", nodes.trouble)

    def _slow(self) -> str:
        return f"Kubernetes has not answered within {self._timeout_s:g} s (--discovery-timeout)"

    def _change(self) -> None:
        self._is_stale = True
        self._changed.set()

    def _look(self, pods: Reflector[Pod]) -> None:
        nodes = {} if self._nodes is None else {node.name: node for node in self._nodes.objects.values()}
        gone = self._seen_nodes - nodes.keys()
        self._sight = look(pods.objects.values(), nodes, self._sight.uids, self._reading, gone=gone)
        # A host whose name now belongs to another pod is omitted once, and listed again the next time.
        self._is_stale = False
        if self._sight.replaced:
            self._change()
        used = {pods.objects[uid].node for uid in self._sight.uids.values()}
        self._seen_nodes = used & (nodes.keys() | gone)

    def _left_s(self, leaving: Leaving) -> float | None:
        if leaving.at is None or self._pods is None:
            return None
        # At most its grace period, whatever the clocks say.
        return max(0.0, min(leaving.at - time.time() - self._pods.ahead_s, leaving.grace_s))


def _pods_of(client: ApiClient) -> Read:
    return cast(Read, CoreV1Api(client).list_namespaced_pod)


def _nodes_of(client: ApiClient) -> Read:
    return cast(Read, CoreV1Api(client).list_node)
