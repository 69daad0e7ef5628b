"""The spec of an ElasticJob: its fields are parsed into a value, and rejected if they are invalid.

Owns the names of the resource, of its fields, and of a job's objects. Fields in common with MPIJob
(kubeflow.org/v2beta1) have the same names and meanings. The CRD's schema rejects wrong types earlier; further rules are
checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar, cast

from elastic_driver.errors import ElasticError
from elastic_driver.hosts import MAX_SLOTS_PER_HOST
from elastic_driver.words import ETCD

GROUP, VERSION, KIND, PLURAL = "elastic-driver.dev", "v1alpha1", "ElasticJob", "elasticjobs"
API_VERSION = f"{GROUP}/{VERSION}"

# The default port of torchrun's c10d rendezvous.
DEFAULT_PORT = 29400
# A commit takes seconds; but a launcher of plain Horovod notices a change only after the kubelet has updated the
# ConfigMap's files, which takes up to about a minute.
DEFAULT_DRAIN_S = 120
_MOST_WORKERS = 4096
# Kubernetes's names of services, and hostnames of pods.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# As in the CRD. The launcher reports other faults of a journal's name.
_JOURNAL = re.compile(rf"{ETCD}[^/\s@]*(/[^/\s]+)+")
_USER = re.compile(rf"{ETCD}[^/]*@")
_MOST_NAME = 63 - len("-worker-") - len(str(_MOST_WORKERS))

_T = TypeVar("_T", bound=StrEnum)


class SpecError(ElasticError, ValueError):
    """An ElasticJob is invalid. The message is one sentence for its user."""


class Transport(StrEnum):
    """How the launcher's driver gets agents in the workers' pods."""

    JOIN = "join"  # workers' pods run elasticrun join, if their template has no command
    SSH = "ssh"  # workers' pods run sshd, if their template has no command; plain Horovod's launcher can use them, too
    EXEC = "exec"  # kubectl exec: the launcher's Role permits it for the existing pods


class CleanPodPolicy(StrEnum):
    """Which worker pods to delete when the job is over."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class LauncherCreation(StrEnum):
    """When to create the launcher."""

    AT_STARTUP = "AtStartup"
    WHEN_READY = "WaitForWorkersReady"


class _LauncherRestart(StrEnum):
    """The restart policies that a Job accepts."""

    NEVER = "Never"
    ON_FAILURE = "OnFailure"


class _Restart(StrEnum):
    NEVER = "Never"
    ON_FAILURE = "OnFailure"
    ALWAYS = "Always"


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """One job, parsed from its resource.

    Attributes:
        name, namespace, uid, generation: of the resource.
        deleted: whether it is being deleted.
        transport: see Transport.
        slots: the number of workers per pod.
        replicas: the wanted number of worker pods, within the bounds.
        min_replicas, max_replicas: the bounds; None if not given.
        launcher, worker: pod templates.
        launcher_restart, worker_restart: their pods' restartPolicy.
        launcher_creation: see LauncherCreation.
        clean: see CleanPodPolicy.
        ttl_s: how long to keep the resource when the job is over, seconds; None for no limit.
        active_deadline_s, backoff_limit: of the launcher's Job.
        suspend: whether the job should have no pods for now.
        port: of the driver.
        ssh_path: where the ssh keys are mounted.
        drain_s: how long a pod to be removed may take to reach a commit, seconds.
        journal: the place of its journal in etcd, with which a launcher on another node takes over; "" for none.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    deleted: bool
    transport: Transport
    slots: int
    replicas: int
    min_replicas: int | None
    max_replicas: int | None
    launcher: Mapping[str, Any]
    worker: Mapping[str, Any]
    launcher_restart: str
    worker_restart: str
    launcher_creation: LauncherCreation
    clean: CleanPodPolicy
    ttl_s: int | None
    active_deadline_s: int | None
    backoff_limit: int | None
    suspend: bool
    port: int
    ssh_path: str
    drain_s: int
    journal: str

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Parse a resource.

        Raises:
            SpecError: a field is invalid.
        """
        metadata, spec = body["metadata"], _Reader(body.get("spec") or {}, "spec")
        name = str(metadata["name"])
        if not _NAME.fullmatch(name) or len(name) > _MOST_NAME:
            raise SpecError(
                f"metadata.name {name!r} is invalid: pods and a Service are named after it, so it must consist of "
                f"lower-case letters, digits and dashes, begin with a letter, and have at most {_MOST_NAME} characters"
            )
        if spec.get("runLauncherAsWorker"):
            raise SpecError("spec.runLauncherAsWorker is not supported: add a worker replica instead")
        if spec.get("mpiImplementation", "OpenMPI") != "OpenMPI":
            raise SpecError("spec.mpiImplementation has no effect here: remove it")
        roles = spec.reader("mpiReplicaSpecs")
        launcher, worker = (roles.reader(role) for role in ("Launcher", "Worker"))
        policy, elastic = spec.reader("runPolicy"), spec.reader("elasticPolicy")
        if launcher.number("replicas", 1, 1, 1) != 1:
            raise SpecError(f"{launcher.at}.replicas must be 1")
        least = elastic.number("minReplicas", None, 0, _MOST_WORKERS)
        most = elastic.number("maxReplicas", None, 1, _MOST_WORKERS)
        if least is not None and most is not None and least > most:
            raise SpecError(f"spec.elasticPolicy.minReplicas {least} is above maxReplicas {most}")
        asked = worker.number("replicas", 1, 0, _MOST_WORKERS)
        transport = spec.one_of("transport", Transport, Transport.JOIN)
        return cls(
            name=name,
            namespace=str(metadata["namespace"]),
            uid=str(metadata["uid"]),
            generation=int(metadata.get("generation", 0)),
            deleted=bool(metadata.get("deletionTimestamp")),
            transport=transport,
            slots=spec.number("slotsPerWorker", 1, 1, MAX_SLOTS_PER_HOST) or 1,
            replicas=max(least or 0, min(asked or 0, most if most is not None else _MOST_WORKERS)),
            min_replicas=least,
            max_replicas=most,
            launcher=launcher.template(),
            worker=worker.template(),
            launcher_restart=launcher.one_of("restartPolicy", _LauncherRestart, _LauncherRestart.ON_FAILURE).value,
            # An agent that has lost its driver ends, and its container must be restarted.
            worker_restart=worker.one_of(
                "restartPolicy",
                _Restart,
                _Restart.ON_FAILURE if transport is Transport.JOIN else _Restart.NEVER,
            ).value,
            launcher_creation=spec.one_of("launcherCreationPolicy", LauncherCreation, LauncherCreation.AT_STARTUP),
            clean=policy.one_of("cleanPodPolicy", CleanPodPolicy, CleanPodPolicy.NONE),
            ttl_s=policy.number("ttlSecondsAfterFinished", None, 0, None),
            active_deadline_s=policy.number("activeDeadlineSeconds", None, 1, None),
            backoff_limit=policy.number("backoffLimit", None, 0, None),
            suspend=bool(policy.get("suspend", False)),
            port=spec.number("rendezvousPort", DEFAULT_PORT, 1, 65535) or DEFAULT_PORT,
            ssh_path=spec.text("sshAuthMountPath", "/root/.ssh"),
            drain_s=spec.number("drainTimeoutSeconds", DEFAULT_DRAIN_S, 0, None) or 0,
            journal=spec.journal(),
        )

    # --- names ------------------------------------------------------------------------------------------------------

    @property
    def launcher_name(self) -> str:
        """The name of the launcher's Job, ServiceAccount and Role, and its pod's hostname."""
        return f"{self.name}-launcher"

    @property
    def config_name(self) -> str:
        """The name of the ConfigMap."""
        return f"{self.name}-config"

    @property
    def ssh_name(self) -> str:
        """The name of the Secret of the ssh keys."""
        return f"{self.name}-ssh"

    @property
    def tokens_name(self) -> str:
        """The name of the Secret of the join and operator tokens."""
        return f"{self.name}-tokens"

    @property
    def journal_url(self) -> str:
        """The URL of the journal. An earlier ElasticJob of this name had another URL, since it had another key."""
        return f"{self.journal}/{self.uid}" if self.journal else ""

    def worker_name(self, index: int) -> str:
        """Return the name of a worker's pod."""
        return f"{self.name}-worker-{index}"

    def host_of(self, pod: str) -> str:
        """Return a pod's name in the cluster's DNS, which is its host's name in the job."""
        return f"{pod}.{self.name}.{self.namespace}.svc"

    @property
    def driver_url(self) -> str:
        """The URL of the driver."""
        return f"https://{self.host_of(self.launcher_name)}:{self.port}"


class _Reader:
    """Fields of one object, with their paths for messages."""

    def __init__(self, fields: Any, at: str) -> None:
        if not isinstance(fields, Mapping):
            raise SpecError(f"{at} is not an object")
        self._fields = fields
        self.at = at

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def reader(self, name: str) -> _Reader:
        return _Reader(self.get(name, {}), f"{self.at}.{name}")

    def number(self, name: str, default: int | None, least: int, most: int | None) -> int | None:
        value = self.get(name, default)
        if value is None:
            return None
        if type(value) is not int or value < least or (most is not None and value > most):
            bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
            raise SpecError(f"{self.at}.{name} {str(value)[:40]!r} is not an integer {bounds}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or not value:
            raise SpecError(f"{self.at}.{name} is not a non-empty string")
        return value

    def journal(self) -> str:
        """Return a place in etcd; "" for none."""
        if self.get("journal") is None:
            return ""
        place = self.text("journal", "")
        if _USER.match(place):
            # The message omits the value: it may contain a password, and the message becomes a status and an event.
            raise SpecError(
                f"{self.at}.journal contains a user, which everyone who can read the job would see: set "
                "ETCDCTL_USER in the launcher's template instead"
            )
        if not _JOURNAL.fullmatch(place):
            raise SpecError(f"{self.at}.journal {place[:200]!r} is not {ETCD}HOST:PORT,.../PREFIX")
        return place

    def one_of(self, name: str, kind: type[_T], default: _T) -> _T:
        value = self.get(name, default)
        try:
            return kind(value)
        except ValueError:
            raise SpecError(f"{self.at}.{name} {str(value)[:40]!r} is not one of {', '.join(kind)}") from None

    def template(self) -> Mapping[str, Any]:
        """Return a pod template. Only the parts to which the controller adds something are checked here.

        The API server checks the rest.
        """
        template = self.reader("template")
        template.reader("metadata").objects("labels", "annotations")
        pod = template.reader("spec")
        pod.objects("securityContext", "dnsConfig")
        pod.reader("dnsConfig").list_of("searches", str)
        pod.list_of("volumes", Mapping)
        pod.list_of("tolerations", Mapping)
        containers = pod.list_of("containers", Mapping)
        if not containers:
            raise SpecError(f"{pod.at}.containers is empty: at least one is required")
        first = _Reader(containers[0], f"{pod.at}.containers[0]")
        first.objects("lifecycle", "securityContext")
        first.list_of("env", Mapping)
        first.list_of("volumeMounts", Mapping)
        # In a pod, the API server drops null fields; in this template, which it does not check, it keeps them.
        return cast(Mapping[str, Any], _without_nulls(template._fields))

    def objects(self, *names: str) -> None:
        for name in names:
            self.reader(name)

    def list_of(self, name: str, kind: type) -> Sequence[Any]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise SpecError(f"{self.at}.{name} is not a list of {'strings' if kind is str else 'objects'}")
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
