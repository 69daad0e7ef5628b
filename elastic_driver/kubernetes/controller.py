"""The controller: carries out the plans of :mod:`~elastic_driver.kubernetes.plan` for each ElasticJob.

    elastic-driver-controller [--namespace N] [--health-port P]        or: python -m elastic_driver.kubernetes

kopf watches the jobs and the pods and Jobs that belong to them; an event only wakes the job's task. That task
reconciles the job: it reads all the job's objects, computes a plan, and carries it out. It does so after each event,
after the time that the plan names, and at least once a minute. An object is changed only if it is unchanged since it
was read; otherwise the job is reconciled again. Several controllers at once are harmless, but useless.

Owns the reading and the actions, and the handling of rejected requests. Decides nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import aiohttp
import kopf
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kubernetes_asyncio.client.exceptions import ApiException

from elastic_driver.discovery.kubernetes.access import Access
from elastic_driver.errors import DiscoveryError, in_words
from elastic_driver.kubernetes import objects
from elastic_driver.kubernetes.api import GONE, Api
from elastic_driver.kubernetes.driver_link import ask_drain, ask_end, ask_status
from elastic_driver.kubernetes.objects import LABEL_JOB, Object
from elastic_driver.kubernetes.plan import (
    Action,
    Create,
    CreateEvent,
    Delete,
    DeleteJob,
    Drain,
    DriverReport,
    EndTraining,
    MakeSshKeys,
    MakeTokens,
    Observed,
    Plan,
    Update,
    plan,
)
from elastic_driver.kubernetes.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, ElasticJob, SpecError
from elastic_driver.system.interfaces import host_addresses, without_loopback

# Events within this time are handled together.
_GATHER_S = 0.05
# The pause after an error of the API server, and the longest one if errors persist.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 60.0
# The number of drivers queried at a time. A driver answers at once, or takes seconds.
_ASKED_AT_ONCE = 128
_HEALTH_PATH = "/healthz"
_CONFLICT, _REFUSED = 409, (400, 403, 422)

_T = TypeVar("_T")

_log = logging.getLogger("elastic_driver.kubernetes")


@dataclass(eq=False, slots=True)
class _Watched:
    """A watched job.

    Attributes:
        woken: set by an event.
        task: reconciles the job.
        told: the API server's rejections that were reported.
        pause_s: the pause after the next failure, seconds.
    """

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    told: set[str] = field(default_factory=set)
    pause_s: float = _FIRST_PAUSE_S

    def next_pause_s(self) -> float:
        """Return the pause after a failure, seconds, and double the next one."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, _MOST_PAUSE_S)
        return pause_s


class Controller:
    """The tasks of all watched jobs. Used on one event loop.

    Args:
        api: a client of the API server.
        ask_status, ask_drain, ask_end: see :mod:`~elastic_driver.kubernetes.driver_link`.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        api: Api,
        *,
        ask_status: Callable[[str, bytes], DriverReport | None] = ask_status,
        ask_drain: Callable[[str, bytes, str, float], str | None] = ask_drain,
        ask_end: Callable[[str, bytes], str | None] = ask_end,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._ask_status, self._ask_drain, self._ask_end = ask_status, ask_drain, ask_end
        self._clock = clock
        # Requests to unreachable drivers take long, and must not delay other jobs.
        self._asking = ThreadPoolExecutor(_ASKED_AT_ONCE, "driver-link")
        self._jobs: dict[tuple[str, str], _Watched] = {}
        self._closed = False

    def look_at(self, namespace: str, name: str) -> None:
        """Wake the task of a job after an event of the job or of one of its objects."""
        watched = self._jobs.get((namespace, name))
        if watched is None and self._closed:
            return
        if watched is None:
            watched = self._jobs[namespace, name] = _Watched()
            watched.task = asyncio.get_running_loop().create_task(self._look_after(namespace, name, watched))
        watched.woken.set()

    async def close(self) -> None:
        """Stop the tasks of all jobs. Idempotent."""
        self._closed = True
        tasks = [watched.task for watched in self._jobs.values() if watched.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._asking.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, question: Callable[..., _T], *words: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._asking, question, *words)

    async def _look_after(self, namespace: str, name: str, watched: _Watched) -> None:
        while True:
            await asyncio.sleep(_GATHER_S)
            watched.woken.clear()
            try:
                again_s = await self._look_once(namespace, name, watched)
            except Exception as error:
                # A failure with one job, or an unreachable API server, must not end the tasks.
                again_s = watched.next_pause_s()
                if not _is_passing(error):
                    _log.warning("job %s/%s: %s; retrying in %.1f s", namespace, name, _said(error), again_s)
            if again_s is None:
                if watched.woken.is_set():
                    continue  # a job of the same name was created just before this one was found to be gone
                del self._jobs[namespace, name]
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await watched.woken.wait()

    async def _look_once(self, namespace: str, name: str, watched: _Watched) -> float | None:
        """Reconcile a job once. Returns the time until the next time, seconds; None if the job does not exist."""
        body = await self._api.find(API_VERSION, KIND, namespace, name)
        if body is None:
            return None
        seen, key = await self._observe(body)
        made = plan(body, seen)
        refused: ApiException | None = None
        try:
            for action in made.actions:
                try:
                    await self._do(action, body, key, watched)
                except ApiException as error:
                    if not _is_alone(action, error):
                        raise
                    refused = refused or error
        finally:
            # After a rejected action, the status still holds for the earlier ones.
            await self._write_status(body, made)
        if refused is None:
            watched.pause_s = _FIRST_PAUSE_S
            return made.again_s
        again_s = min(watched.next_pause_s(), made.again_s)
        _log.warning("job %s/%s: %s; retrying in %.1f s", namespace, name, _said(refused), again_s)
        return again_s

    async def _observe(self, body: Object) -> tuple[Observed, bytes]:
        """Return the observed state of a job, and the key for its driver."""
        status, now = body.get("status") or {}, self._clock()
        try:
            job = ElasticJob.of(body)
        except SpecError:
            return Observed(status=status, now=now), b""
        names = [
            ("v1", "Service", job.name),
            ("v1", "ConfigMap", job.config_name),
            ("v1", "Secret", job.tokens_name),
            ("v1", "Secret", job.ssh_name),
            ("v1", "ServiceAccount", job.launcher_name),
            ("rbac.authorization.k8s.io/v1", "Role", job.launcher_name),
            ("rbac.authorization.k8s.io/v1", "RoleBinding", job.launcher_name),
            ("batch/v1", "Job", job.launcher_name),
        ]
        pods, *found = await asyncio.gather(
            self._api.list("v1", "Pod", job.namespace, objects.labels_of(job, objects.WORKER)),
            *(self._find_own(job, *name) for name in names),
        )
        service, config, tokens, ssh, account, role, binding, launcher = cast(list[Object | None], found)
        key = _operator_key(tokens)
        driver = None
        if key and ((launcher or {}).get("status") or {}).get("active"):
            driver = await self._ask(self._ask_status, job.driver_url, key)
        return Observed(
            status=status,
            pods=[pod for pod in cast(list[Object], pods) if _is_owned(pod, job.uid)],
            launcher=launcher,
            service=service,
            config=config,
            tokens=tokens,
            ssh=ssh,
            account=account,
            role=role,
            binding=binding,
            driver=driver,
            now=now,
        ), key

    async def _find_own(self, job: ElasticJob, api_version: str, kind: str, name: str) -> Object | None:
        """Return an object of the job. A foreign one of that name counts as missing: creating the job's reports it."""
        found = await self._api.find(api_version, kind, job.namespace, name)
        return found if found is not None and _is_owned(found, job.uid) else None

    # --- actions ----------------------------------------------------------------------------------------------------

    async def _do(self, action: Action, body: Object, key: bytes, watched: _Watched) -> None:
        try:
            await self._do_one(action, body, key)
        except ApiException as error:
            if error.status == GONE and isinstance(action, Delete | Update):
                return  # another controller was faster
            if error.status == _CONFLICT and isinstance(action, Delete):
                return
            what = _made_by(action, body)
            is_taken = error.status == _CONFLICT and what is not None and await self._is_anothers(what, body)
            if error.status in _REFUSED or is_taken:
                await self._tell_refusal(action, body, error, watched)
            raise

    async def _is_anothers(self, what: tuple[str, str, str], body: Object) -> bool:
        """Return whether an object that could not be created exists and is not this job's.

        If it is this job's, another controller has created it.
        """
        found = await self._api.find(*what[:2], body["metadata"]["namespace"], what[2])
        return found is not None and not _is_owned(found, body["metadata"]["uid"])

    async def _do_one(self, action: Action, body: Object, key: bytes) -> None:
        match action:
            case Create(wanted):
                await self._api.create(wanted)
                _log.info("created %s %s", wanted["kind"], wanted["metadata"]["name"])
            case MakeTokens():
                await self._api.create(objects.tokens(ElasticJob.of(body), *(secrets.token_hex(32) for _ in range(3))))
            case MakeSshKeys():
                await self._api.create(objects.ssh_keys(ElasticJob.of(body), *await asyncio.to_thread(_new_ssh_keys)))
            case Update(seen, changes):
                await self._api.patch(seen, changes)
            case Delete(seen):
                await self._api.delete(seen)
                _log.info("deleted %s %s", seen["kind"], seen["metadata"]["name"])
            case Drain(host, within_s):
                said = await self._ask(self._ask_drain, ElasticJob.of(body).driver_url, key, host, within_s)
                _log.info("drain of %s: %s", host, said or "the driver does not answer")
            case EndTraining():
                said = await self._ask(self._ask_end, ElasticJob.of(body).driver_url, key)
                _log.info("end of %s: %s", body["metadata"]["name"], said or "the driver does not answer")
            case CreateEvent(reason, message, warning):
                try:
                    await self._tell(body, reason, message, warning=warning)
                except ApiException as error:
                    # An event that cannot be created (a quota) must not prevent the action that it reports.
                    if error.status not in (*_REFUSED, GONE, _CONFLICT):
                        raise
                    _log.warning("cannot create event %s for %s: %s", reason, body["metadata"]["name"], _said(error))
            case DeleteJob():
                await self._api.delete(body)

    async def _tell_refusal(self, action: Action, body: Object, error: ApiException, watched: _Watched) -> None:
        """Report the API server's rejection as an event of the job, once for each text: a quota, a webhook, a name in
        use.
        """
        made = _made_by(action, body)
        text = f"{type(action).__name__ if made is None else f'cannot create {made[1]} {made[2]}'}: {_said(error)}"
        if text not in watched.told:
            watched.told.add(text)
            with contextlib.suppress(ApiException):
                await self._tell(body, "Refused", text, warning=True)

    async def _tell(self, body: Object, reason: str, message: str, *, warning: bool) -> None:
        metadata = body["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {name: metadata[name] for name in ("name", "namespace", "uid")}
        await self._api.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
                "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **about},
                "reason": reason,
                "message": message[:1024],
                "type": "Warning" if warning else "Normal",
                "source": {"component": "elastic-driver-controller"},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )

    async def _write_status(self, body: Object, made: Plan) -> None:
        before = body.get("status") or {}
        if made.status == before:
            return
        # Null removes the fields and counters that the plan no longer has.
        gone = dict.fromkeys(before.keys() - made.status.keys())
        failures = dict.fromkeys((before.get("failures") or {}).keys() - (made.status.get("failures") or {}).keys())
        status = {**gone, **made.status, "failures": {**failures, **(made.status.get("failures") or {})}}
        try:
            await self._api.patch(body, {"status": status}, part="status")
        except ApiException as error:
            if error.status not in (GONE, _CONFLICT):
                raise


def _made_by(action: Action, body: Object) -> tuple[str, str, str] | None:
    """Return the API version, kind and name of the object that an action creates; None if it creates nothing."""
    match action:
        case Create(wanted):
            return wanted["apiVersion"], wanted["kind"], wanted["metadata"]["name"]
        case MakeTokens():
            return "v1", "Secret", ElasticJob.of(body).tokens_name
        case MakeSshKeys():
            return "v1", "Secret", ElasticJob.of(body).ssh_name
        case _:
            return None


def _is_alone(action: Action, error: ApiException) -> bool:
    """Return whether to carry out the rest of a plan although this action was rejected.

    With a quota for two of four pods a job trains on two, and a job without any quota must still be able to shrink.
    """
    if not isinstance(action, Create) or error.status not in (*_REFUSED, _CONFLICT):
        return False
    return action.body["kind"] in ("Pod", "Job")


def _is_owned(found: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or ())


def _operator_key(tokens: Object | None) -> bytes:
    data = ((tokens or {}).get("data") or {}).get(objects.OPERATOR_TOKEN, "")
    with contextlib.suppress(ValueError):
        return bytes.fromhex(base64.b64decode(data).decode("ascii", "replace").strip())
    return b""


def _is_passing(error: Exception) -> bool:
    """Return whether reconciling again resolves the error: an object had changed since it was read."""
    return isinstance(error, ApiException) and error.status == _CONFLICT


def _said(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot reach the API server at {error.host}:{error.port}: {in_words(error.os_error)}"
    if not isinstance(error, ApiException):
        return f"{type(error).__name__}: {error}"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(error.body or b"")["message"])
    return f"{error.status} {error.reason}"


def _new_ssh_keys() -> tuple[str, str]:
    """Create a key as mpi-operator does: ECDSA over P-521, in PEM, and its line for authorized_keys."""
    key = ec.generate_private_key(ec.SECP521R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private.decode(), public.decode() + "\n"


# --- kopf ----------------------------------------------------------------------------------------------------------


def registry_of(controller: Controller) -> kopf.OperatorRegistry:
    """Return kopf's registry of handlers, which wake the controller's tasks."""
    registry = kopf.OperatorRegistry()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(name: str, namespace: str | None, **_: Any) -> None:
        controller.look_at(namespace or "", name)

    async def child_changed(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        controller.look_at(namespace or "", labels[LABEL_JOB])

    for group, version, plural in (("", "v1", "pods"), ("batch", "v1", "jobs")):
        kopf.on.event(group, version, plural, labels={LABEL_JOB: kopf.PRESENT}, registry=registry)(child_changed)

    @kopf.on.login(registry=registry)
    def login(**more: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**more) or kopf.login_with_kubeconfig(**more)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        # kopf must not annotate objects; events are created by the plan's actions.
        settings.posting.enabled = False
        # A handler only wakes a task: no need to wait for it.
        settings.queueing.idle_timeout = settings.queueing.exit_timeout = 0.2
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330

    @kopf.on.cleanup(registry=registry)
    async def close(**_: Any) -> None:
        await controller.close()  # kopf would wait for seconds for tasks that it did not create

    return registry


async def run(
    *,
    namespaces: Sequence[str] = (),
    ready: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
    make: Callable[[Api], Controller] = Controller,
    health_port: int | None = None,
) -> None:
    """Run the controller until it is canceled, or ``stop`` is set.

    Args:
        namespaces: the namespaces to watch; empty for all.
        ready: called when it is watching.
        stop: ends it when set.
        make: creates the controller.
        health_port: the port for liveness probes, at /healthz on all addresses; None serves no probes.

    Raises:
        DiscoveryError: this is not a pod of a cluster, and there is no kubeconfig.
        OSError: it cannot listen at the port.
    """
    api = Api(await Access().client())
    controller = make(api)
    ready_flag = asyncio.Event()

    async def tell_ready() -> None:
        await ready_flag.wait()
        ready()

    telling = asyncio.get_running_loop().create_task(tell_ready())
    try:
        running: Awaitable[None] = kopf.operator(
            registry=registry_of(controller),
            namespaces=list(namespaces),
            clusterwide=not namespaces,
            standalone=True,
            ready_flag=ready_flag,
            stop_flag=stop,
            liveness_endpoint=None if health_port is None else f"http://{_any_address()}:{health_port}{_HEALTH_PATH}",
        )
        await running
    finally:
        telling.cancel()
        await controller.close()
        await api.close()


def _any_address() -> str:
    """Return the wildcard address for a URL. kopf listens on one family; an IPv6-only pod is probed over IPv6."""
    own = without_loopback(host_addresses())
    return "[::]" if own and all(":" in address for address in own) else "0.0.0.0"


def main(words: Sequence[str] | None = None) -> int:
    """Run the controller. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="elastic-driver-controller", description="Run the ElasticJobs of a Kubernetes cluster."
    )
    text = "watch only this namespace; may be repeated (default: all namespaces)"
    parser.add_argument("--namespace", "-n", action="append", default=[], metavar="N", help=text)
    text = "serve liveness probes (GET /healthz) on this port, on all addresses (default: off)"
    parser.add_argument("--health-port", type=int, metavar="P", help=text)
    parser.add_argument("--verbose", action="store_true", help="log every change")
    arguments = parser.parse_args(words)
    health_port: int | None = arguments.health_port
    if health_port is not None and not 1 <= health_port <= 65535:
        parser.error(f"--health-port {health_port} is not between 1 and 65535")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    _log.setLevel(logging.INFO if arguments.verbose or os.environ.get("ELASTIC_DRIVER_VERBOSE") else logging.WARNING)
    try:
        asyncio.run(
            run(
                namespaces=arguments.namespace,
                ready=lambda: _log.warning("watching ElasticJobs"),
                health_port=health_port,
            )
        )
    except DiscoveryError as error:
        print(f"elastic-driver-controller: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
