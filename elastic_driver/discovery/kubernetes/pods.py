"""The interpretation of pods and nodes: which pods are hosts, their slots, and which of them are about to leave.

Owns the parsing of the API's objects, as far as it is needed here, and the decisions. Pure: no requests, no clock.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import MAX_SLOTS_PER_HOST, RACK, Host, is_host_name, natural_key, parse_labels
from elastic_driver.settings.pods import DNS, HOSTNAME, IP

SLOTS_ANNOTATION = "elastic-driver.dev/slots"
LABELS_ANNOTATION = "elastic-driver.dev/labels"

DEPARTURE_TAINTS = frozenset(
    (
        # Kubernetes' own: the node does not answer, is shut down, or accepts no more pods.
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/out-of-service",
        "node.kubernetes.io/unschedulable",
        "node.cloudprovider.kubernetes.io/shutdown",
        # Autoscalers', once they have decided to remove the node.
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        # Cloud providers', for preemptions and maintenance.
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/scheduled-maintenance",
        "cloud.google.com/impending-node-termination",
    )
)
"""Keys of taints that announce a node's departure, with any effect. Other keys count only with NoExecute."""

# A quantity in Kubernetes' notation: 4, 4000m, 0.5, 2k.
_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?)(?P<suffix>m|k)?")
_FACTORS = {"m": Decimal("0.001"), "k": Decimal(1000), None: Decimal(1)}
_MOST_SAID = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """How to interpret pods.

    Attributes:
        names: which of a pod's names is its host's name (:data:`~elastic_driver.settings.pods.POD_NAMES`).
        slots_from: the resource whose limit is the pod's number of slots.
        default_slots: the slots of a pod without that limit and without an annotation; None makes that a problem.
        rack_from: the node label with the node's rack.
        taints: further keys of taints that announce a departure.
    """

    names: str
    slots_from: str
    default_slots: int | None
    rack_from: str
    taints: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Toleration:
    """A pod's toleration, as in Kubernetes.

    Attributes:
        is_limited: whether it has ``tolerationSeconds``.
    """

    key: str
    operator: str
    value: str
    effect: str
    is_limited: bool


@dataclass(frozen=True, slots=True)
class Taint:
    """A node's taint, as in Kubernetes."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Node:
    """The part of a node that is used here."""

    name: str
    rack: str
    is_cordoned: bool
    taints: tuple[Taint, ...]


@dataclass(frozen=True, slots=True)
class Pod:
    """The part of a pod that is used here.

    Attributes:
        host: its name as a host; "" as long as it has none.
        state: in words: "Running", "Pending: ImagePullBackOff".
        slots: 0 if unknown.
        problem: why it cannot be a host, whatever its state; "" if it can.
        ends_at: when its grace period ends, by the server's clock, in seconds since the epoch; None if it was not
            deleted.
        disruption: why it is about to be evicted; "" if it is not.
    """

    name: str
    uid: str
    created: str
    host: str
    node: str
    state: str
    is_running: bool
    is_ready: bool
    slots: int
    labels: tuple[str, ...]
    problem: str
    ends_at: float | None
    grace_s: float
    disruption: str
    tolerations: tuple[Toleration, ...]


@dataclass(frozen=True, slots=True)
class Leaving:
    """The announced departure of a host.

    Attributes:
        at: when it will be gone, by the server's clock, in seconds since the epoch; None if unknown.
        grace_s: its grace period, seconds.
    """

    hostname: str
    why: str
    at: float | None
    grace_s: float


@dataclass(frozen=True, slots=True)
class Sight:
    """The hosts at one time.

    Attributes:
        hosts: in natural order.
        uids: host name -> uid of its pod.
        leaving: the hosts that are about to leave.
        replaced: names that now belong to another pod, and are omitted from the hosts this time.
    """

    hosts: tuple[Host, ...]
    uids: Mapping[str, str]
    leaving: tuple[Leaving, ...]
    replaced: tuple[str, ...]


# --- parsing ---------------------------------------------------------------------------------------------------------


def read_node(made: Mapping[str, Any], reading: Reading) -> Node:
    """Parse a node's object. Raises KeyError, TypeError, AttributeError, ValueError if it is invalid."""
    spec = made.get("spec") or {}
    taints = (Taint(taint["key"], taint.get("value") or "", taint["effect"]) for taint in spec.get("taints") or ())
    rack = (made["metadata"].get("labels") or {}).get(reading.rack_from, "")
    return Node(made["metadata"]["name"], rack, bool(spec.get("unschedulable")), tuple(taints))


def read_pod(made: Mapping[str, Any], reading: Reading) -> Pod:
    """Parse a pod's object. Raises KeyError, TypeError, AttributeError, ValueError if it is invalid."""
    metadata, spec, status = made["metadata"], made["spec"], made.get("status") or {}
    annotations = metadata.get("annotations") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    problem = ""
    slots = 0
    labels: tuple[str, ...] = ()
    try:
        slots = _slots(annotations, spec, reading)
        labels = parse_labels(str(annotations.get(LABELS_ANNOTATION, "")).split())
    except SettingsError as error:
        problem = str(error)
    host = _host_name(metadata, spec, status, reading.names)
    if host and not is_host_name(host):
        problem = f"{host[:80]!r} is not a valid host name"
    disruption = conditions.get("DisruptionTarget") or {}
    grace_s = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds"))
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        created=metadata.get("creationTimestamp") or "",
        host=host,
        node=spec.get("nodeName") or "",
        state=_state(status, conditions),
        is_running=status.get("phase") == "Running",
        is_ready=(conditions.get("Ready") or {}).get("status") == "True",
        slots=slots,
        labels=labels,
        problem=problem,
        ends_at=_seconds(metadata["deletionTimestamp"]) if metadata.get("deletionTimestamp") else None,
        grace_s=float(30 if grace_s is None else grace_s),
        disruption=str(disruption.get("reason") or "disrupted") if disruption.get("status") == "True" else "",
        tolerations=tuple(
            Toleration(
                toleration.get("key") or "",
                toleration.get("operator") or "Equal",
                toleration.get("value") or "",
                toleration.get("effect") or "",
                toleration.get("tolerationSeconds") is not None,
            )
            for toleration in spec.get("tolerations") or ()
        ),
    )


def _host_name(metadata: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any], names: str) -> str:
    hostname: str = spec.get("hostname") or metadata["name"]
    address: str = status.get("podIP") or ""
    if names == IP or (names == DNS and not spec.get("subdomain")):
        return address
    if names == DNS:
        # The name that a headless service gives its pods; the cluster's domain is in each pod's DNS search list.
        return f"{hostname}.{spec['subdomain']}.{metadata['namespace']}.svc" if address else ""
    return hostname if names == HOSTNAME else str(metadata["name"])


def _slots(annotations: Mapping[str, Any], spec: Mapping[str, Any], reading: Reading) -> int:
    """Return the number of a pod's slots. Raises SettingsError if it is unknown, invalid or too large."""
    said = annotations.get(SLOTS_ANNOTATION)
    if said is not None:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", str(said)):
            raise SettingsError(
                f"its annotation {SLOTS_ANNOTATION} is {str(said)[:40]!r}, which is not a number of slots"
            )
        slots = int(said)
    else:
        limits = [(container.get("resources") or {}).get("limits") or {} for container in spec.get("containers") or ()]
        slots = int(sum(_quantity(limit[reading.slots_from]) for limit in limits if reading.slots_from in limit))
        slots = slots or reading.default_slots or 0
    if not slots:
        raise SettingsError(
            f"its number of slots is unknown: set a limit of {reading.slots_from} (--slots-from) or the annotation "
            f"{SLOTS_ANNOTATION} on it, or --slots-per-host on the job"
        )
    if slots > MAX_SLOTS_PER_HOST:
        raise SettingsError(f"it would have {slots} slots; the maximum is {MAX_SLOTS_PER_HOST}")
    return slots


def _quantity(text: object) -> Decimal:
    """Parse a quantity. Raises SettingsError."""
    match = _QUANTITY.fullmatch(str(text)) if len(str(text)) < 20 else None
    if match is None:
        raise SettingsError(f"its limit {str(text)[:40]!r} is not a number of slots")
    return Decimal(match["number"]) * _FACTORS[match["suffix"]]


def _state(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a pod's state in words, with the reason if the API gives one."""
    phase = status.get("phase") or "Unknown"
    reason = status.get("reason") or ""
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        reason = reason or ((each.get("state") or {}).get("waiting") or {}).get("reason") or ""
    scheduled = conditions.get("PodScheduled") or {}
    if not reason and scheduled.get("status") == "False":
        reason = f"{scheduled.get('reason') or 'not scheduled'}, {scheduled.get('message') or ''}".rstrip(", ")
    if not reason and phase == "Running" and (conditions.get("Ready") or {}).get("status") != "True":
        reason = "not ready"
    return f"{phase}: {reason}"[:_MOST_SAID] if reason else phase


def _seconds(text: str) -> float:
    """Parse a time of the API, to seconds since the epoch."""
    return datetime.datetime.fromisoformat(text).timestamp()


# --- decisions -------------------------------------------------------------------------------------------------------


def look(
    pods: Iterable[Pod],
    nodes: Mapping[str, Node],
    known: Mapping[str, str],
    reading: Reading,
    *,
    gone: Collection[str] = (),
) -> Sight:
    """Decide which pods are hosts, and which hosts are about to leave.

    Args:
        pods: all pods that match the selector.
        nodes: name -> node, for all known nodes.
        gone: names of nodes that existed earlier and do not any more.
        known: host name -> uid of its pod, from the previous call.
        reading: how to interpret pods.
    """
    by_host: dict[str, list[Pod]] = {}
    for each in pods:
        if each.host and each.is_running and not each.problem:
            by_host.setdefault(each.host, []).append(each)
    hosts, uids, leaving, replaced = [], {}, [], []
    for name in sorted(by_host, key=natural_key):
        pod = _chosen(by_host[name], known.get(name, ""))
        if pod is None:
            continue
        if known.get(name, pod.uid) != pod.uid:
            replaced.append(name)
            continue
        node = nodes.get(pod.node)
        rack = (f"{RACK}={node.rack}",) if node is not None and node.rack and not _has_rack(pod) else ()
        hosts.append(Host(name, pod.slots, (*rack, *pod.labels)))
        uids[name] = pod.uid
        why = _why_it_leaves(pod, node, reading)
        if not why and pod.node in gone:
            why = f"its node {pod.node} is gone"
        if why:
            leaving.append(Leaving(name, why, pod.ends_at, pod.grace_s))
    return Sight(tuple(hosts), uids, tuple(leaving), tuple(replaced))


def unused(pods: Iterable[Pod], used: Collection[str]) -> Sequence[str]:
    """Return, for each pod that is not a host, a sentence why; ``used`` has the uids of the hosts' pods."""
    return [
        f"pod {pod.name}: {pod.problem or ('being deleted' if pod.ends_at is not None else pod.state)}"
        for pod in sorted(pods, key=lambda pod: natural_key(pod.name))
        if pod.uid not in used and pod.state != "Succeeded"
    ]


def _chosen(pods: Sequence[Pod], known: str) -> Pod | None:
    """Return, of the running pods of one name, the known host's, or else the youngest that can become a host."""
    for pod in pods:
        if pod.uid == known:
            return pod
    able = [pod for pod in pods if pod.is_ready and pod.ends_at is None]
    return max(able, key=lambda pod: (pod.created, pod.uid), default=None)


def _has_rack(pod: Pod) -> bool:
    return any(label.partition("=")[0] == RACK for label in pod.labels)


def _why_it_leaves(pod: Pod, node: Node | None, reading: Reading) -> str:
    """Return why its host is about to leave; "" if it is not."""
    if pod.ends_at is not None:
        return f"its pod {pod.name} is being deleted" + (f" ({pod.disruption})" if pod.disruption else "")
    if pod.disruption:
        return f"its pod {pod.name} is about to be evicted ({pod.disruption})"
    if node is not None:
        for taint in node.taints:
            if _ends(taint, pod, reading):
                return f"its node {node.name} has the taint {taint}"
        if node.is_cordoned:
            return f"its node {node.name} is cordoned"
    return "" if pod.is_ready else f"its pod {pod.name} is not ready"


def _ends(taint: Taint, pod: Pod, reading: Reading) -> bool:
    if taint.key in DEPARTURE_TAINTS or taint.key in reading.taints:
        return True
    # A pod that tolerates a taint only for some time is evicted, too.
    return taint.effect == "NoExecute" and not any(
        _tolerates(toleration, taint) and not toleration.is_limited for toleration in pod.tolerations
    )


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    return (
        toleration.effect in ("", taint.effect)
        and (toleration.key == taint.key or (not toleration.key and toleration.operator == "Exists"))
        and (toleration.operator == "Exists" or toleration.value == taint.value)
    )
