"""The fake as a test has it: its thread, its address, and what happens in the cluster at the test's will."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.kinds import Object
from tests.support.clusters.kubernetes_fake.patches import MERGE
from tests.support.clusters.kubernetes_fake.rules import Book, Request, Rule, Users
from tests.support.clusters.kubernetes_fake.service import Faults, Refusal, Service
from tests.support.clusters.kubernetes_fake.storage import Storage

ADMIN = "admin"
_START_S = 30.0
_HOST = "127.0.0.1"


class FakeKubernetes:
    """A cluster: use it as a context manager. Its methods are for the test's thread, and are done when they return.

    Args:
        namespaces: that there are, beside ``default``.
        tls: (the server's certificate and key in PEM) to serve HTTPS, as pods see it.

    Attributes:
        token: who has it may do everything.
        users: who else may do what.
        says_date: whether its answers have a Date, as some servers' have not.
    """

    def __init__(self, *, namespaces: Iterable[str] = (), tls: Path | None = None) -> None:
        self.storage = Storage()
        self.users = Users(self.storage, ADMIN)
        self.token = self.users.add(ADMIN, (), "")
        self.says_date = True
        self._tls = tls
        self._book = Book()
        self._faults = Faults()
        self._port = 0
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._service: Service
        self._runner: web.AppRunner
        self._listening: socket.socket
        for name in ("default", *namespaces):
            self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    # --- its life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        started: list[BaseException | None] = []
        there = threading.Event()

        def serve() -> None:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._run(there, started))

        self._thread = threading.Thread(target=serve, name="kubernetes-fake")
        self._thread.start()
        if not there.wait(_START_S):
            raise TimeoutError("the fake API server does not start")
        if started and started[0] is not None:
            self._thread.join()
            raise started[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    async def _run(self, there: threading.Event, started: list[BaseException | None]) -> None:
        self._ended = asyncio.Event()
        try:
            self._service = Service(self.storage, self.users, self._book, self._faults)
            await self._listen()
        except BaseException as error:
            started.append(error)
            raise
        finally:
            there.set()
        await self._ended.wait()
        self._service.close()
        await self._close()

    async def _close(self) -> None:
        # asyncio loses a connection that it has accepted some turns before its server closes, and leaves it open.
        asyncio.get_running_loop().remove_reader(self._listening)
        await _some_turns()
        await self._runner.cleanup()
        await _some_turns()  # the end of a connection takes one, too

    async def _listen(self) -> None:
        app = web.Application(client_max_size=4 << 20)
        app.router.add_route("*", "/{path:.*}", self._service.handle)

        async def date(_: web.Request, response: web.StreamResponse) -> None:
            if not self.says_date:
                response.headers.popall("Date", None)

        app.on_response_prepare.append(date)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        context = None
        if self._tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._tls)
        self._listening = socket.create_server((_HOST, self._port))
        await web.SockSite(self._runner, self._listening, ssl_context=context).start()
        self._port = self._listening.getsockname()[1]

    def _on_loop(self, call: Callable[[], Any]) -> None:
        """Has it called there, and waits for it."""
        assert self._loop is not None

        async def made() -> None:
            found = call()
            if asyncio.iscoroutine(found):
                await found

        asyncio.run_coroutine_threadsafe(made(), self._loop).result(_START_S)

    @property
    def port(self) -> int:
        """Stays over :meth:`down` and :meth:`up`."""
        return self._port

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{_HOST}:{self._port}"

    def kubeconfig(self, path: Path, *, token: str | None = None, namespace: str = "default") -> Path:
        """Writes a kubeconfig there that leads here."""
        cluster: dict[str, Any] = {"server": self.url}
        if self._tls is not None:
            cluster["certificate-authority"] = str(self._tls)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "fake", "user": {"token": token or self.token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    # --- users and requests ----------------------------------------------------------------------------------------

    def user(self, name: str, rules: Iterable[Rule] = (), *, namespace: str = "") -> str:
        """A new token for a user who may do what these rules say, and what Roles bound to the user say.

        A service account's user is ``system:serviceaccount:NAMESPACE:NAME``.
        """
        return self.users.add(name, rules, namespace)

    @property
    def requests(self) -> list[Request]:
        """All, in the order in which they were answered."""
        return self._book.all()

    def forget_requests(self) -> None:
        self._book.clear()

    def wait_request(self, is_it: Callable[[Request], bool], limit_s: float = 30.0, *, count: int = 1) -> Request:
        """Blocks until there are so many such requests. Raises TimeoutError."""
        return self._book.wait(is_it, limit_s, count=count)

    # --- objects ---------------------------------------------------------------------------------------------------

    def create(self, given: Object | str) -> Object:
        """An object, or the text of one in YAML, as the admin."""
        made = yaml.safe_load(given) if isinstance(given, str) else given
        kind = self.storage.kind_of(made)
        namespace = made.get("metadata", {}).get("namespace", "default") if kind.namespaced else ""
        return self.storage.create(kind, namespace, made)

    def create_all(self, text: str) -> list[Object]:
        """Several, as in a file of YAML."""
        return [self.create(made) for made in yaml.safe_load_all(text) if made]

    def get(self, plural: str, name: str, namespace: str = "default") -> Object | None:
        """None when it is not there. ``plural`` may have its group behind a dot."""
        kind = self._kind(plural)
        try:
            return copy.deepcopy(self.storage.get(kind, namespace if kind.namespaced else "", name))
        except ApiError:
            return None

    def list(self, plural: str, namespace: str = "") -> list[Object]:
        """All, by name."""
        return copy.deepcopy(self.storage.every(self._kind(plural), namespace))

    def patch(
        self, plural: str, name: str, patch: Mapping[str, Any], namespace: str = "default", *, subresource: str = ""
    ) -> Object:
        """A merge patch, as the admin."""
        kind = self._kind(plural)
        where = namespace if kind.namespaced else ""
        return self.storage.patch(kind, where, name, MERGE, patch, subresource, dry=False)

    def delete(self, plural: str, name: str, namespace: str = "default", **options: Any) -> None:
        """With DeleteOptions."""
        kind = self._kind(plural)
        self.storage.delete(kind, namespace if kind.namespaced else "", name, options)

    def wait_for(self, holds: Callable[[], Any], limit_s: float = 30.0) -> Any:
        """Blocks until this holds; it is looked at after each change of an object. Returns what it gave.

        Raises:
            TimeoutError: it did not hold in time.
        """
        changed = threading.Condition()
        changes = 0

        def note() -> None:
            nonlocal changes
            with changed:
                changes += 1
                changed.notify_all()

        unlisten = self.storage.listen(note)
        try:
            deadline = datetime.datetime.now() + datetime.timedelta(seconds=limit_s)
            while True:
                seen = changes
                found = holds()
                if found:
                    return found
                left_s = (deadline - datetime.datetime.now()).total_seconds()
                with changed:
                    if left_s <= 0 or not changed.wait_for(lambda: changes > seen, left_s):  # noqa: B023
                        raise TimeoutError(f"it does not hold within {limit_s:g} s")
        finally:
            unlisten()

    def _kind(self, plural: str) -> Any:
        name, _, group = plural.partition(".")
        for kind in self.storage.kinds():
            if kind.plural == name and group in ("", kind.group):
                return kind
        raise LookupError(plural)

    # --- what a kubelet, a scheduler and a cloud do ----------------------------------------------------------------

    def create_pod(
        self,
        name: str,
        namespace: str = "default",
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        limits: Mapping[str, str] | None = None,
        grace_s: int = 30,
        **spec: Any,
    ) -> Object:
        """A pod of one container, not scheduled yet."""
        metadata: Object = {"name": name, "namespace": namespace, "labels": dict(labels or {})}
        if annotations:
            metadata["annotations"] = dict(annotations)
        container: Object = {"name": "main", "image": "train"}
        if limits:
            container["resources"] = {"limits": dict(limits)}
        made = {"containers": [container], "terminationGracePeriodSeconds": grace_s, **spec}
        return self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made})

    def run_pod(self, name: str, namespace: str = "default", *, node: str = "node-1", ip: str = "") -> Object:
        """Its node runs it, and it is ready."""
        pod = self._pod(name, namespace)
        if not pod["spec"].get("nodeName"):
            self.storage.bind(self._kind("pods"), pod, node)
        number = next(self._numbers)
        address = ip or f"10.0.{number >> 8 & 255}.{number & 255}"
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": _now(),
            "containerStatuses": [_container_status(pod, {"running": {"startedAt": _now()}}, ready=True)],
        }
        return self._set_status(name, namespace, status, Ready="True", ContainersReady="True", PodScheduled="True")

    def set_ready(self, name: str, namespace: str = "default", *, ready: bool) -> Object:
        """Its readiness probe says so."""
        return self._set_status(name, namespace, {}, Ready="True" if ready else "False")

    def fail_pod(self, name: str, namespace: str = "default", *, reason: str = "", exit_code: int = 1) -> Object:
        """Its container has ended badly, and is not started again."""
        return self._end_pod(name, namespace, "Failed", reason, exit_code)

    def succeed_pod(self, name: str, namespace: str = "default") -> Object:
        """Its container has ended well."""
        return self._end_pod(name, namespace, "Succeeded", "", 0)

    def disrupt(self, name: str, namespace: str = "default", *, reason: str = "PreemptionByScheduler") -> Object:
        """It is about to be taken away, for a reason that is none of its own."""
        return self._set_status(name, namespace, {}, DisruptionTarget=("True", reason))

    def evict(self, name: str, namespace: str = "default") -> Object:
        """Its node is short of something: it ends, and stays as a failed one."""
        self.disrupt(name, namespace, reason="TerminationByKubelet")
        return self.fail_pod(name, namespace, reason="Evicted", exit_code=137)

    def delete_pod(self, name: str, namespace: str = "default", *, grace_s: int | None = None) -> None:
        """As ``kubectl delete``: it goes when its kubelet has ended it, see :meth:`finish_pod`."""
        self.delete("pods", name, namespace, **({} if grace_s is None else {"gracePeriodSeconds": grace_s}))

    def finish_pod(self, name: str, namespace: str = "default") -> None:
        """Its kubelet has ended it: it is gone, unless a finalizer holds it."""
        self.delete("pods", name, namespace, gracePeriodSeconds=0)

    def create_node(self, name: str, *, labels: Mapping[str, str] | None = None, **spec: Any) -> Object:
        """A node that is ready."""
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        self.create({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": dict(spec)})
        status = {"conditions": [_condition("Ready", "True", "KubeletReady")]}
        return self.patch("nodes", name, {"status": status}, subresource="status")

    def taint(self, node: str, key: str, effect: str, value: str = "") -> Object:
        """Adds a taint."""
        taints = [each for each in self._taints(node) if (each["key"], each["effect"]) != (key, effect)]
        taint = {"key": key, "effect": effect, **({"value": value} if value else {})}
        return self.patch("nodes", node, {"spec": {"taints": [*taints, taint]}})

    def untaint(self, node: str, key: str) -> Object:
        """Takes all taints of this key away."""
        return self.patch(
            "nodes", node, {"spec": {"taints": [each for each in self._taints(node) if each["key"] != key]}}
        )

    def cordon(self, node: str) -> Object:
        """As ``kubectl cordon``, with the taint that the node controller adds."""
        self.patch("nodes", node, {"spec": {"unschedulable": True}})
        return self.taint(node, "node.kubernetes.io/unschedulable", "NoSchedule")

    def uncordon(self, node: str) -> Object:
        """Takes that back."""
        self.patch("nodes", node, {"spec": {"unschedulable": None}})
        return self.untaint(node, "node.kubernetes.io/unschedulable")

    def _taints(self, node: str) -> list[Object]:
        made = self.get("nodes", node)
        assert made is not None, f"there is no node {node}"
        return list(made["spec"].get("taints", ()))

    def _pod(self, name: str, namespace: str) -> Object:
        pod = self.get("pods", name, namespace)
        assert pod is not None, f"there is no pod {namespace}/{name}"
        return pod

    def _end_pod(self, name: str, namespace: str, phase: str, reason: str, exit_code: int) -> Object:
        pod = self._pod(name, namespace)
        ended = {"terminated": {"exitCode": exit_code, "reason": reason or "Error", "finishedAt": _now()}}
        status: Object = {"phase": phase, "containerStatuses": [_container_status(pod, ended, ready=False)]}
        if reason:
            status["reason"] = reason
        return self._set_status(name, namespace, status, Ready="False", ContainersReady="False")

    def _set_status(self, name: str, namespace: str, status: Object, **conditions: str | tuple[str, str]) -> Object:
        pod = self._pod(name, namespace)
        kept = [each for each in pod["status"].get("conditions", ()) if each["type"] not in conditions]
        for kind, said in conditions.items():
            value, reason = (said, "") if isinstance(said, str) else said
            kept.append(_condition(kind, value, reason))
        return self.patch("pods", name, {"status": {**status, "conditions": kept}}, namespace, subresource="status")

    # --- what goes wrong -------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Forgets the history: a watch from an old version is told that it is too old."""
        self.storage.compact()

    def cut_watches(self) -> None:
        """Breaks the connections of all watches."""
        self._on_loop(self._service.cut)

    def deafen_watches(self) -> None:
        """The watches that there are say nothing any more, and stay."""
        self._on_loop(self._service.deafen)

    def bookmark(self) -> None:
        """Sends a bookmark to each watch that takes them."""
        self._on_loop(self._service.bookmark)

    @property
    def watches(self) -> int:
        """How many are under way."""
        return len(self._service.watchers)

    def gone_as_http(self, wanted: bool = True) -> None:
        """Watches from versions that are too old are answered 410 at once, and not by an event."""
        self._faults.gone_as_http = wanted

    def slow(self, seconds: float) -> None:
        """Each answer takes that long."""
        self._faults.slow_s = seconds

    def refuse(
        self,
        code: int,
        *,
        times: int = 1,
        retry_after: str | None = None,
        when: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """Refuses so many of the requests that fit."""
        with self._faults.lock:
            self._faults.refusals.append(Refusal(code, times, retry_after, when))

    def refuse_no_more(self) -> None:
        with self._faults.lock:
            self._faults.refusals.clear()

    def down(self) -> None:
        """Ends all connections, and listens no more."""

        async def stop() -> None:
            self._service.cut()
            await self._close()

        self._on_loop(stop)

    def up(self) -> None:
        """Listens again, on the same port."""
        self._on_loop(self._listen)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Down, and up again."""
        self.down()
        try:
            yield
        finally:
            self.up()


async def _some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def _condition(kind: str, status: str, reason: str) -> Object:
    made = {"type": kind, "status": status, "lastTransitionTime": _now()}
    return {**made, "reason": reason} if reason else made


def _container_status(pod: Object, state: Object, *, ready: bool) -> Object:
    container = pod["spec"]["containers"][0]
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "state": state,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
