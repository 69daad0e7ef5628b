"""The objects of a job, in the API's format.

Pure: built from a job alone, or from a job and its existing pods. Owns labels, annotations, mounts and environment. If
mpi-operator has such an object, it has the same name, keys and environment here, so images for mpi-operator work.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_driver.kubernetes.spec import API_VERSION, GROUP, KIND, ElasticJob, Transport

Object = dict[str, Any]

LABEL_JOB, LABEL_ROLE, LABEL_INDEX = f"{GROUP}/job-name", f"{GROUP}/job-role", f"{GROUP}/replica-index"
LAUNCHER, WORKER = "launcher", "worker"
# The annotation of a pod to be removed: since when its host is being drained.
DRAINED_SINCE = f"{GROUP}/drained-since"

JOIN_TOKEN, OPERATOR_TOKEN, JOURNAL_KEY = "join-token", "operator-token", "journal-key"
_TOKENS_PATH = "/etc/elastic-driver"
_CONFIG_PATH = "/etc/mpi"
_DEFAULT_GRACE_S = 30
_TOKENS, _CONFIG, _SSH = "elastic-driver-tokens", "elastic-driver-config", "elastic-driver-ssh"
# For the launcher of a job with a journal: the time from the loss of its node until its pod is evicted. Kubernetes' own
# 300 s are half of the time that workers wait for another launcher.
_LOST_S = 30
_LOST = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
# Files in such volumes belong to root, and to the pod's fsGroup if it has one. Without a group, users other than root
# (an image's own user, or a container's runAsUser) could not read them: then they have Kubernetes's default mode, as in
# mpi-operator. Pods without a group do not get one: it would change the owners of all files on their other volumes.
_READABLE, _READABLE_BY_ALL = 0o440, 0o444


def labels_of(job: ElasticJob, role: str = "") -> dict[str, str]:
    """Return the labels of all objects of a job, or of the pods of one role."""
    return {LABEL_JOB: job.name, **({LABEL_ROLE: role} if role else {})}


def _metadata(job: ElasticJob, name: str, role: str = "") -> Object:
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels_of(job, role),
        "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
    }


def service(job: ElasticJob) -> Object:
    """Build the headless service for the pods' names, which exist before the pods are ready: ranks connect earlier."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {"clusterIP": "None", "selector": labels_of(job), "publishNotReadyAddresses": True},
    }


def tokens(job: ElasticJob, join_token: str, operator_token: str, journal_key: str) -> Object:
    """Build the Secret of the join token, the controller's token for the driver, and the key of a journal in etcd."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, job.tokens_name),
        "type": "Opaque",
        "stringData": {JOIN_TOKEN: join_token, OPERATOR_TOKEN: operator_token, JOURNAL_KEY: journal_key},
    }


def ssh_keys(job: ElasticJob, private: str, public: str) -> Object:
    """Build the Secret of the ssh keys, in mpi-operator's format."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, job.ssh_name),
        "type": "kubernetes.io/ssh-auth",
        "stringData": {"ssh-privatekey": private, "ssh-publickey": public},
    }


def config(job: ElasticJob, running: Sequence[str]) -> Object:
    """Build the ConfigMap of ``hostfile``, ``discover_hosts.sh`` and ``kubexec.sh``.

    The first two have mpi-operator's format: ``hostfile`` lists all wanted hosts, ``discover_hosts.sh`` running ones.

    Args:
        job: the job.
        running: names of the pods with usable hosts, in order.
    """
    wanted = [job.host_of(job.worker_name(index)) for index in range(job.replicas)]
    data = {
        "hostfile": "".join(f"{host} slots={job.slots}\n" for host in wanted),
        "discover_hosts.sh": "#!/bin/sh\n" + "".join(f"echo {job.host_of(pod)}:{job.slots}\n" for pod in running),
    }
    if job.transport is Transport.EXEC:
        data["kubexec.sh"] = _KUBEXEC
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, job.config_name), "data": data}


# An rsh agent. The first label of the host's name is its pod's name. Standard input carries the bootstrap.
_KUBEXEC = """#!/bin/sh
pod="${1%%.*}"
shift
exec kubectl exec -i "$pod" -- /bin/sh -c "$*"
"""


def service_account(job: ElasticJob) -> Object:
    """Build the launcher's ServiceAccount."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(job, job.launcher_name)}


def role(job: ElasticJob, pods: Sequence[str]) -> Object:
    """Build the launcher's Role: it may read pods; with ``exec``, run commands in these pods only.

    Args:
        job: the job.
        pods: names of the existing pods.
    """
    rules: list[Object] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    if job.transport is Transport.EXEC and pods:  # a rule without names applies to all pods
        names = {"resourceNames": sorted(pods)}
        rules.append({"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create"], **names})
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _metadata(job, job.launcher_name),
        "rules": rules,
    }


def role_binding(job: ElasticJob) -> Object:
    """Build the RoleBinding of the Role to the launcher."""
    name = job.launcher_name
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(job, name),
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
    }


def exec_pods_of(role_object: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the pods in which a Role permits commands."""
    rules = [rule for rule in role_object.get("rules") or () if "pods/exec" in rule.get("resources", ())]
    return frozenset(name for rule in rules for name in rule.get("resourceNames") or ())


def worker_pod(job: ElasticJob, index: int) -> Object:
    """Build one worker's pod."""
    name = job.worker_name(index)
    metadata, spec = _pod_of(job, job.worker, WORKER)
    metadata |= {key: value for key, value in _metadata(job, name).items() if key not in ("labels",)}
    metadata["labels"] |= {LABEL_INDEX: str(index)}
    spec |= {"hostname": name, "subdomain": job.name, "restartPolicy": job.worker_restart}
    container, grace_s = spec["containers"][0], spec.setdefault("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if job.transport is Transport.SSH:
        _mount(spec, container, _SSH, _ssh_volume(job, spec), job.ssh_path)
        if "command" not in container and "args" not in container:
            container["command"] = ["/usr/sbin/sshd", "-De"]
    if job.transport is Transport.JOIN:
        _mount(spec, container, _TOKENS, _tokens_volume(job, spec, JOIN_TOKEN), _TOKENS_PATH)
        if "command" not in container and "args" not in container:
            container["command"] = _join_command(job, name)
    if job.transport is Transport.EXEC and "command" not in container and "args" not in container:
        container["command"] = ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"]
    # Notifies the workers, which may commit before the kubelet stops the container. Does nothing in images without
    # elasticrun.
    leave = f"elasticrun leave --within {grace_s} --timeout {grace_s}"
    container.setdefault("lifecycle", {}).setdefault(
        "preStop", {"exec": {"command": ["/bin/sh", "-c", f"! command -v elasticrun >/dev/null || {leave} || true"]}}
    )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _join_command(job: ElasticJob, pod: str) -> list[str]:
    words = ["elasticrun", "join", "--driver", job.driver_url, "--slots", str(job.slots), "--host", job.host_of(pod)]
    # The launcher's image may still have to be pulled.
    return [*words, "--join-token-file", f"{_TOKENS_PATH}/{JOIN_TOKEN}", "--agent-timeout", "600"]


def launcher_job(job: ElasticJob) -> Object:
    """Build the launcher's Job."""
    metadata, spec = _pod_of(job, job.launcher, LAUNCHER)
    spec |= {"hostname": job.launcher_name, "subdomain": job.name, "restartPolicy": job.launcher_restart}
    spec.setdefault("serviceAccountName", job.launcher_name)
    container = spec["containers"][0]
    items = [{"key": "hostfile", "path": "hostfile", "mode": 0o444}]
    scripts = ["discover_hosts.sh", *(["kubexec.sh"] if job.transport is Transport.EXEC else [])]
    items += [{"key": name, "path": name, "mode": 0o555} for name in scripts]
    _mount(spec, container, _CONFIG, {"configMap": {"name": job.config_name, "items": items}}, _CONFIG_PATH)
    keys = [JOIN_TOKEN, OPERATOR_TOKEN, *([JOURNAL_KEY] if job.journal else [])]
    _mount(spec, container, _TOKENS, _tokens_volume(job, spec, *keys), _TOKENS_PATH)
    if job.transport is Transport.SSH:
        _mount(spec, container, _SSH, _ssh_volume(job, spec), job.ssh_path)
    _add_env(container, _launcher_env(job))
    if job.journal:
        _tolerate_for(spec, _LOST_S)
    body: Object = {
        # A lost node's pod exists until the node is removed. With etcd, only one driver at a time is in charge.
        "podReplacementPolicy": "TerminatingOrFailed" if job.journal else "Failed",
        "suspend": job.suspend,
        "template": {"metadata": metadata, "spec": spec},
    }
    if job.backoff_limit is not None:
        body["backoffLimit"] = job.backoff_limit
    if job.active_deadline_s is not None:
        body["activeDeadlineSeconds"] = job.active_deadline_s
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, job.launcher_name, LAUNCHER),
        "spec": body,
    }


def _launcher_env(job: ElasticJob) -> dict[str, str]:
    # For elasticrun; other launchers ignore it.
    options = ["--rendezvous-port", str(job.port), "--operator-token-file", f"{_TOKENS_PATH}/{OPERATOR_TOKEN}"]
    if job.journal:
        options += ["--journal", job.journal_url, "--journal-key", f"{_TOKENS_PATH}/{JOURNAL_KEY}"]
        # A driver that finds another one active waits for its end: failing would use up the Job's backoffLimit. If a
        # pod is being deleted, the Job creates the next one at once: its driver waits for the old driver to hand over.
        options += ["--standby-driver", "--hand-over"]
    if job.min_replicas is not None:
        options += ["--min-slots", str(max(1, job.min_replicas * job.slots))]
    if job.max_replicas is not None:
        options += ["--max-slots", str(job.max_replicas * job.slots)]
    env = {
        "K_MPI_JOB_ROLE": LAUNCHER,
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": f"{_CONFIG_PATH}/hostfile",
        "OMPI_MCA_orte_set_default_slots": str(job.slots),
    }
    match job.transport:
        case Transport.JOIN:
            # Hosts that the discovery script lists join by themselves, too: the driver cannot start agents there.
            options += ["--accept-agents", "--launcher", "none"]
            options += ["--join-token-file", f"{_TOKENS_PATH}/{JOIN_TOKEN}"]
        case Transport.SSH:
            env["OMPI_MCA_plm_rsh_args"] = "-o ConnectionAttempts=10"
        case Transport.EXEC:
            env["OMPI_MCA_plm_rsh_agent"] = f"{_CONFIG_PATH}/kubexec.sh"
    return {**env, "ELASTIC_DRIVER_OPTIONS": shlex.join(options)}


def _pod_of(job: ElasticJob, template: Mapping[str, Any], role_name: str) -> tuple[Object, Object]:
    """Return the metadata and spec of a pod from its template, which stays unchanged."""
    given = copy.deepcopy(dict(template))
    own = given.get("metadata") or {}
    labels = {**(own.get("labels") or {}), **labels_of(job, role_name)}
    metadata = {"labels": labels, "annotations": dict(own.get("annotations") or {})}
    spec: Object = given["spec"]
    security = spec.setdefault("securityContext", {})
    if security.get("runAsUser"):
        # Otherwise this user could not read its mounted files.
        security.setdefault("fsGroup", security.get("runAsGroup", security["runAsUser"]))
    if role_name == WORKER:
        _add_env(spec["containers"][0], {"K_MPI_JOB_ROLE": WORKER})
    search = f"{job.name}.{job.namespace}.svc.cluster.local"
    dns = spec.setdefault("dnsConfig", {})
    dns["searches"] = [*dict.fromkeys([*dns.get("searches", []), search])]
    return metadata, spec


def _tolerate_for(spec: Object, seconds: int) -> None:
    """Set how long the pod stays bound to an unreachable node. The template's own values win."""
    tolerations = spec.setdefault("tolerations", [])
    # A toleration without an effect applies to all effects, one without a key to all keys.
    given = {
        toleration.get("key") or "" for toleration in tolerations if toleration.get("effect") in (None, "", "NoExecute")
    }
    for key in _LOST:
        if given.isdisjoint((key, "")):
            more = {"effect": "NoExecute", "tolerationSeconds": seconds}
            tolerations.append({"key": key, "operator": "Exists", **more})


def _add_env(container: Object, env: Mapping[str, str]) -> None:
    """Add environment variables. The template's own values win."""
    there = {each.get("name") for each in container.setdefault("env", [])}
    container["env"] += [{"name": name, "value": value} for name, value in env.items() if name not in there]


def _mount(spec: Object, container: Object, name: str, volume: Object, path: str) -> None:
    spec.setdefault("volumes", []).append({"name": name, **volume})
    container.setdefault("volumeMounts", []).append({"name": name, "mountPath": path, "readOnly": True})


def _mode_in(spec: Object) -> int:
    """Return the mode of secret files in this pod."""
    return _READABLE if "fsGroup" in spec["securityContext"] else _READABLE_BY_ALL


def _tokens_volume(job: ElasticJob, spec: Object, *keys: str) -> Object:
    items = [{"key": key, "path": key} for key in keys]
    return {"secret": {"secretName": job.tokens_name, "items": items, "defaultMode": _mode_in(spec)}}


def _ssh_volume(job: ElasticJob, spec: Object) -> Object:
    paths = {"ssh-privatekey": "id_rsa", "ssh-publickey": "id_rsa.pub"}
    items = [{"key": key, "path": path} for key, path in paths.items()]
    items.append({"key": "ssh-publickey", "path": "authorized_keys"})
    # ssh rejects a private key that other users may read. In root's home, mpi-operator uses this mode, too.
    mode = 0o600 if job.ssh_path == "/root/.ssh" else _mode_in(spec)
    return {"secret": {"secretName": job.ssh_name, "items": items, "defaultMode": mode}}
