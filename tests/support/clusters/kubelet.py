"""What runs a fake API server's pods: a kubelet and the controller of Jobs, over a test's pods with real processes.

Each pod that appears gets a machine, its volumes, its container with the command and environment of its spec, and a
status. Containers that end are started again where the restartPolicy says so; pods that are deleted end as with the
kubelet: preStop, SIGTERM for the first process, SIGKILL after the grace period. Volumes follow their objects at once.
Pauses between restarts are shorter than Kubernetes's, so that tests are. Pods have one container.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tests.support.clusters.config_volume import ConfigVolume
from tests.support.clusters.kubernetes_fake import ApiError, FakeKubernetes
from tests.support.clusters.pods import HOME, Pod, Pods
from tests.support.network.machines import kill

Object = dict[str, Any]

_TRACKED = "batch.kubernetes.io/job-tracking"
_FINISHED = ("Succeeded", "Failed")
# Kubernetes: 10 s, then twice as long each time.
_RESTART_S = 0.3
_END_S = 20.0


class Kubelet:
    """See above. A context manager; at the end all pods are killed, and it fails where an error was its own.

    Args:
        cluster: whose pods it runs.
        pods: makes them. Its job and namespace are theirs.
        image: environment of all containers, as an image has it.
    """

    def __init__(self, cluster: FakeKubernetes, pods: Pods, image: Mapping[str, str]) -> None:
        self.cluster, self.pods, self.image = cluster, pods, dict(image)
        self.namespace = pods.namespace
        self.errors: list[BaseException] = []
        self._lives: dict[str, Life] = {}  # by uid
        self._changed, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        self._unlisten = self.cluster.storage.listen(self._changed.set)
        self._changed.set()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlisten()
        self._ended = True
        self._changed.set()
        self._thread.join(_END_S)
        for life in self._lives.values():
            life.end()
        if error is None:
            assert not self.errors, self.errors

    def life(self, name: str) -> Life:
        """Of the pod that has this name now."""
        pod = self.cluster.get("pods", name, self.namespace)
        assert pod is not None, f"no pod {name}"
        return self._lives[pod["metadata"]["uid"]]

    def crash(self, name: str) -> None:
        """Kills a container, all of it at once."""
        kill(self.life(name).pod.first_process)

    def evict(self, name: str) -> None:
        """Kills a container as its node does when that is short of memory: the pod has failed, and stays."""
        self.life(name).evict()

    def lose(self, name: str) -> None:
        """Its node is lost: nobody says what has become of the pod, which is given up, and stays as it was."""
        self.life(name).lose()
        self.cluster.delete_pod(name, self.namespace)

    def exec_words(self, caller: str, name: str, words: Sequence[str]) -> list[str] | str:
        """For ``kubectl exec``: the words that run a command in a pod, or why the caller may not have it run."""
        spec = next(life.spec for life in reversed(self._lives.values()) if life.spec.get("hostname") == caller)
        user = f"system:serviceaccount:{self.namespace}:{spec['serviceAccountName']}"
        try:
            self.cluster.users.check(user, "create", "", "pods/exec", self.namespace, name)
        except ApiError as error:
            return error.message
        return self.life(name).pod.inside(words)

    def logs(self) -> str:
        """What all containers have said, the last of it."""
        lives = list(self._lives.values())
        return "\n".join(f"--- {life.name} ({life.phase})\n{life.log()[-3000:]}" for life in lives)

    def _run(self) -> None:
        while not self._ended:
            self._changed.wait()
            self._changed.clear()
            try:
                self._look()
            except BaseException as error:
                self.errors.append(error)

    def _look(self) -> None:
        _control_jobs(self.cluster, self.namespace)
        found = {pod["metadata"]["uid"]: pod for pod in self.cluster.list("pods", self.namespace)}
        for uid, pod in found.items():
            if uid not in self._lives and not pod["metadata"].get("deletionTimestamp"):
                self._lives[uid] = Life(self, pod)
            elif uid in self._lives:
                self._lives[uid].look(pod)
        for uid, life in self._lives.items():
            if uid not in found:
                life.look(None)


class Life:
    """One pod's, in a thread of its own.

    Attributes:
        name: the pod's.
        pod: it, from when it is scheduled on.
        phase: as it was told.
        restarts: how often its container was started again.
    """

    pod: Pod

    def __init__(self, kubelet: Kubelet, body: Object) -> None:
        self._kubelet, self._body = kubelet, body
        self.name: str = body["metadata"]["name"]
        self.phase, self.restarts = "Pending", 0
        self._volumes: dict[str, tuple[ConfigVolume, dict[str, str]]] = {}
        self._lock = threading.Lock()
        self._grace_s: float | None = None  # once it is deleted
        self._is_gone = self._evicted = self._is_lost = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    @property
    def spec(self) -> Object:
        """Of the pod."""
        spec: Object = self._body["spec"]
        return spec

    def look(self, body: Object | None) -> None:
        """It may have changed, or what its volumes are made of."""
        if body is None:
            self._is_gone = True
        elif body["metadata"].get("deletionTimestamp"):
            self._grace_s = float(body["metadata"]["deletionGracePeriodSeconds"])
        if body is None or self._grace_s is not None:
            os.eventfd_write(self._woken, 1)
        with self._lock:
            for at, (volume, files) in self._volumes.items():
                new = self._files(at)
                if new is not None and new != files:
                    volume.write(new)
                    self._volumes[at] = (volume, new)

    def evict(self) -> None:
        """See Kubelet."""
        self._evicted = True
        os.eventfd_write(self._woken, 1)

    def lose(self) -> None:
        """See Kubelet."""
        self._is_lost = True
        self.pod.kill()

    def end(self) -> None:
        """Kills it, if it still runs. Blocks until nothing of it is left."""
        self._is_gone = True
        os.eventfd_write(self._woken, 1)
        self._thread.join(_END_S)
        assert not self._thread.is_alive(), f"{self.name} does not end: {_stack_of(self._thread)}"

    def log(self) -> str:
        """What its containers have said."""
        return self.pod.log() if hasattr(self, "pod") else ""

    def _run(self) -> None:
        try:
            self._live()
        except BaseException as error:
            self._kubelet.errors.append(error)

    def _live(self) -> None:
        self.pod = self._kubelet.pods.pod(self._body["spec"].get("hostname", self.name), resolves=True)
        storage = self._kubelet.cluster.storage
        with storage.lock:
            if not self._exists():
                return
            storage.bind(storage.kind("", "v1", "pods"), self._body, f"node-of-{self.pod.address.replace('.', '-')}")
        try:
            while not self._mount_all():
                if not self._wait(None, 0.05):  # ContainerCreating, until its ConfigMaps and Secrets are there
                    return
            while self._run_container():
                self.restarts += 1
                self._wait(None, _RESTART_S * 2 ** min(self.restarts - 1, 3))
            while self._is_lost and not self._is_gone:
                self._wait_for_news([], None)
            while self._wait(None, None):
                pass
        finally:
            self.pod.kill()
            self._kubelet.pods.release(self.pod)
            if self.phase not in _FINISHED and not self._is_lost:
                self._finish(137)
            if self._grace_s is not None and not self._is_gone:
                self._tell(self._kubelet.cluster.finish_pod)

    def _run_container(self) -> bool:
        """Runs it until it ends. Returns whether it is started again."""
        if self._grace_s is not None or self._is_gone or self._evicted:
            return False
        container, cluster = self._body["spec"]["containers"][0], self._kubelet.cluster
        env = {each["name"]: each.get("value", "") for each in container.get("env", ())}
        words = [*container.get("command", ()), *container.get("args", ())]
        process = self.pod.start(words, {**self._kubelet.image, **env})
        self.phase = "Running"
        self._tell(cluster.run_pod, ip=self.pod.address)
        while process.poll() is None and self._wait(process, None):
            pass
        if self._is_lost:
            return False
        if self._evicted:
            self.pod.kill()
            self._finish(137, reason="Evicted")
            return False
        if process.poll() is None:
            self._terminate(process)
            self._finish(process.returncode)
            return False
        self.pod.kill()  # what it has left
        policy = self._body["spec"]["restartPolicy"]
        if policy == "Always" or (policy == "OnFailure" and process.returncode):
            self._tell(cluster.set_ready, ready=False)
            return True
        self._finish(process.returncode)
        return False

    def _finish(self, code: int, **more: Any) -> None:
        cluster = self._kubelet.cluster
        self.phase = "Failed" if code else "Succeeded"
        if code:
            self._tell(cluster.fail_pod, exit_code=code if code > 0 else 128 - code, **more)
        else:
            self._tell(cluster.succeed_pod)

    def _terminate(self, process: subprocess.Popen[Any]) -> None:
        if self._is_gone:
            self.pod.kill()
            return
        assert self._grace_s is not None
        end = time.monotonic() + self._grace_s
        pre_stop = self._body["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {})
        if pre_stop and process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.pod.run(pre_stop["command"], timeout=max(self._grace_s, 0.1))
        kill(self.pod.first_process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 2.0))  # the kubelet's least
        self.pod.kill()

    def _wait(self, process: subprocess.Popen[Any] | None, limit_s: float | None) -> bool:
        """Blocks until the process has ended, the time is over, or the pod is to end. Returns whether it is not."""

        def goes_on() -> bool:
            return self._grace_s is None and not self._is_gone and not (process is not None and self._evicted)

        if not goes_on():
            return False
        with contextlib.ExitStack() as exit_:
            read: list[int] = []
            if process is not None:
                read.append(os.pidfd_open(process.pid))
                exit_.callback(os.close, read[-1])
            self._wait_for_news(read, limit_s)
        return goes_on()

    def _wait_for_news(self, read: list[int], limit_s: float | None) -> None:
        """Blocks until the pod may be to end, one of these can be read, or the time is over."""
        select.select([self._woken, *read], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    # --- the API server --------------------------------------------------------------------------------------------

    def _exists(self) -> bool:
        found = self._kubelet.cluster.get("pods", self.name, self._kubelet.namespace)
        return found is not None and found["metadata"]["uid"] == self._body["metadata"]["uid"]

    def _tell(self, call: Callable[..., Any], **more: Any) -> None:
        """Has it write the pod's status, if that is still there."""
        with self._kubelet.cluster.storage.lock:
            if self._exists():
                call(self.name, self._kubelet.namespace, **more)

    # --- volumes ---------------------------------------------------------------------------------------------------

    def _mount_all(self) -> bool:
        """Mounts all; False where an object that a volume is made of is not there yet."""
        places = [mount["mountPath"] for mount in self._body["spec"]["containers"][0].get("volumeMounts", ())]
        found = {at: self._files(at) for at in places}
        if None in found.values():
            return False
        group = self._body["spec"].get("securityContext", {}).get("fsGroup", -1)
        with self._lock:
            for at, files in found.items():
                assert files is not None
                source = self._source(at)
                mode = source.get("defaultMode", 0o644)
                volume = self.pod.mount(at.replace("/root/", f"{HOME}/"), files, mode=mode, group=group)
                self._volumes[at] = (volume, files)
        return True

    def _source(self, at: str) -> Object:
        spec = self._body["spec"]
        mounts = {each["mountPath"]: each["name"] for each in spec["containers"][0].get("volumeMounts", ())}
        volume = next(each for each in spec["volumes"] if each["name"] == mounts[at])
        source: Object = volume.get("secret") or volume["configMap"]
        return source

    def _files(self, at: str) -> dict[str, str] | None:
        source, cluster = self._source(at), self._kubelet.cluster
        kind, name = ("secrets", source["secretName"]) if "secretName" in source else ("configmaps", source["name"])
        found = cluster.get(kind, name, self._kubelet.namespace)
        data = (found or {}).get("data") or {}
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        if found is None or any(item["key"] not in data for item in items):
            return None
        texts = {item["path"]: data[item["key"]] for item in items}
        return texts if kind == "configmaps" else {p: base64.b64decode(t).decode() for p, t in texts.items()}


def _stack_of(thread: threading.Thread) -> str:
    return "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))


# --- Jobs ------------------------------------------------------------------------------------------------------------


def _control_jobs(cluster: FakeKubernetes, namespace: str) -> None:
    """What the controller of Jobs does: one pod each, made anew when it fails, until one succeeds."""
    jobs = {job["metadata"]["uid"]: job for job in cluster.list("jobs", namespace)}
    pods: dict[str, list[Object]] = {uid: [] for uid in jobs}
    for pod in cluster.list("pods", namespace):
        if _TRACKED not in pod["metadata"].get("finalizers", ()):
            continue
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        if owner in jobs:
            pods[owner].append(pod)
        else:
            cluster.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": None}}, namespace)
    for uid, job in jobs.items():
        with contextlib.suppress(ApiError):  # it has changed meanwhile, and is looked at again
            _control_job(cluster, job, pods[uid])


def _control_job(cluster: FakeKubernetes, job: Object, pods: list[Object]) -> None:
    metadata, spec, before = job["metadata"], job["spec"], job["status"]
    namespace, name = metadata["namespace"], metadata["name"]
    if any(one["status"] == "True" and one["type"] in ("Complete", "Failed") for one in before.get("conditions", ())):
        return
    status: Object = {key: before.get(key, 0) for key in ("succeeded", "failed")}
    ended = [pod for pod in pods if pod["status"]["phase"] in _FINISHED]
    for pod in ended:
        status["succeeded" if pod["status"]["phase"] == "Succeeded" else "failed"] += 1
    living = [pod for pod in pods if pod not in ended]
    replaces = spec.get("podReplacementPolicy") == "TerminatingOrFailed"
    wanted = [pod for pod in living if not (replaces and pod["metadata"].get("deletionTimestamp"))]
    status["active"] = len(living)
    if status["succeeded"]:
        status["conditions"] = [_condition("Complete", "CompletionsReached", "Reached expected number of pods")]
    elif status["failed"] > spec["backoffLimit"]:
        text = "Job has reached the specified backoff limit"
        status["conditions"] = [_condition("Failed", "BackoffLimitExceeded", text)]
    elif spec["suspend"]:
        for pod in living:
            if not pod["metadata"].get("deletionTimestamp"):
                cluster.delete("pods", pod["metadata"]["name"], namespace)
    elif not wanted:
        _create_pod(cluster, job)
        status["active"] += 1
    if any(status.get(key) != before.get(key, 0) for key in status):
        cluster.patch("jobs", name, {"status": status}, namespace, subresource="status")
    for pod in ended:
        cluster.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": None}}, namespace)


def _create_pod(cluster: FakeKubernetes, job: Object) -> None:
    metadata, template = job["metadata"], job["spec"]["template"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    own = {
        "name": f"{metadata['name']}-{secrets.token_hex(3)[:5]}",
        "namespace": metadata["namespace"],
        "finalizers": [_TRACKED],
        "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], **own}, "spec": template["spec"]}
    cluster.create(body)


def _condition(kind: str, reason: str, message: str) -> Object:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}
