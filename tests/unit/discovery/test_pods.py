"""What pods and nodes mean."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.discovery.kubernetes.pods import (
    Node,
    Pod,
    Reading,
    Sight,
    Taint,
    look,
    read_node,
    read_pod,
    unused,
)
from elastic_driver.hosts import Host

pytestmark = pytest.mark.unit

READING = Reading("pod", "nvidia.com/gpu", 1, "topology.kubernetes.io/zone", ("example.org/mine",))


def pod(name: str = "a", *, ready: str = "True", phase: str = "Running", **given: Any) -> Pod:
    """As the API gives it; ``metadata``, ``spec`` and ``status`` add to it."""
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"nodeName": "node", "containers": [{"name": "main"}]}
    status = {"phase": phase, "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": ready}]}
    return read_pod(
        {
            "metadata": metadata | given.get("metadata", {}),
            "spec": spec | given.get("spec", {}),
            "status": status | given.get("status", {}),
        },
        given.get("reading", READING),
    )


def node(*taints: Taint, name: str = "node", rack: str = "", cordoned: bool = False) -> dict[str, Node]:
    return {name: Node(name, rack, cordoned, taints)}


def sees(*pods: Pod, nodes: dict[str, Node] | None = None, known: dict[str, str] | None = None) -> Sight:
    return look(pods, nodes or {}, known or {}, READING)


def why(made: Pod, *taints: Taint, cordoned: bool = False) -> str:
    """Why a host goes; "" where it does not."""
    seen = sees(made, nodes=node(*taints, cordoned=cordoned), known={made.host: made.uid})
    assert [host.name for host in seen.hosts] == [made.host]
    return seen.leaving[0].why if seen.leaving else ""


@pytest.mark.parametrize(
    ("taint", "tolerations", "goes"),
    [
        (Taint("x", "", "NoExecute"), [], True),
        (Taint("x", "", "NoSchedule"), [], False),
        (Taint("x", "", "PreferNoSchedule"), [], False),
        (Taint("x", "", "NoExecute"), [{"operator": "Exists"}], False),
        (Taint("x", "", "NoExecute"), [{"operator": "Exists", "tolerationSeconds": 300}], True),
        (Taint("x", "", "NoExecute"), [{"key": "x", "operator": "Exists", "effect": "NoExecute"}], False),
        (Taint("x", "", "NoExecute"), [{"key": "x", "operator": "Exists", "effect": "NoSchedule"}], True),
        (Taint("x", "1", "NoExecute"), [{"key": "x", "value": "1"}], False),
        (Taint("x", "1", "NoExecute"), [{"key": "x", "value": "2"}], True),
        (Taint("x", "1", "NoExecute"), [{"key": "y", "operator": "Exists"}], True),
        (Taint("example.org/mine", "", "NoSchedule"), [], True),
        (Taint("ToBeDeletedByClusterAutoscaler", "17", "NoSchedule"), [], True),
        # A candidate may stay, and its pods are told when it does not.
        (Taint("DeletionCandidateOfClusterAutoscaler", "17", "PreferNoSchedule"), [], False),
        (Taint("node.kubernetes.io/memory-pressure", "", "NoSchedule"), [], False),
        (Taint("node.kubernetes.io/unreachable", "", "NoSchedule"), [{"operator": "Exists"}], True),
        (Taint("karpenter.sh/disrupted", "", "NoSchedule"), [], True),
        (Taint("aws-node-termination-handler/spot-itn", "", "NoSchedule"), [], True),
        (Taint("cloud.google.com/impending-node-termination", "", "NoSchedule"), [], True),
    ],
)
def test_taints(taint: Taint, tolerations: list[dict[str, Any]], goes: bool) -> None:
    said = why(pod(spec={"tolerations": tolerations}), taint)
    assert said == (f"its node node has the taint {taint.key}:{taint.effect}" if goes else "")


def test_cordons_and_nodes_that_are_not_known() -> None:
    assert why(pod(), cordoned=True) == "its node node is cordoned"
    assert not sees(pod(), nodes=node(name="another")).leaving
    assert look([pod()], {}, {"a": "uid-a"}, READING, gone={"node"}).leaving[0].why == "its node node is gone"


def test_a_deletion_has_a_time_whatever_else_is_said() -> None:
    made = pod(
        ready="False",
        metadata={"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 5},
        status={"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]},
    )
    (leaving,) = sees(made, known={"a": "uid-a"}).leaving
    assert leaving.why == "its pod a is being deleted (EvictionByEvictionAPI)"
    assert leaving.at == 1767225630.0
    assert leaving.grace_s == 5
    assert sees(made).hosts == (), "what is deleted already does not become a host"


def test_what_is_not_ready_does_not_become_a_host_and_one_that_was_ready_is_about_to_go() -> None:
    made = pod(ready="False")
    assert sees(made).hosts == ()
    assert why(made) == "its pod a is not ready"
    for phase in ("Pending", "Succeeded", "Failed", "Unknown"):
        assert sees(pod(phase=phase), known={"a": "uid-a"}).hosts == ()


def test_two_pods_of_one_name() -> None:
    reading = Reading("hostname", "nvidia.com/gpu", 1, "zone")

    def twin(uid: str, created: str, **given: Any) -> Pod:
        return pod(
            f"job-0-{uid}",
            reading=reading,
            metadata={"uid": uid, "creationTimestamp": created, **given},
            spec={"hostname": "job-0"},
        )

    ending = {"deletionTimestamp": "2026-01-01T00:00:30Z"}
    old = twin("old", "2026-01-01T00:00:00Z")
    new = twin("new", "2026-01-01T01:00:00Z")
    old_ending = twin("old", "2026-01-01T00:00:00Z", **ending)
    assert look([old, new], {}, {}, reading).uids == {"job-0": "new"}, "the younger"
    assert look([old_ending, new], {}, {}, reading).uids == {"job-0": "new"}
    assert look([old_ending, new], {}, {"job-0": "old"}, reading).uids == {"job-0": "old"}, "while it is there"
    seen = look([new], {}, {"job-0": "old"}, reading)
    assert (seen.hosts, seen.uids, seen.replaced) == ((), {}, ("job-0",))
    assert look([new], {}, seen.uids, reading).uids == {"job-0": "new"}


@pytest.mark.parametrize(
    ("annotations", "limits", "default", "slots", "problem"),
    [
        ({}, [{"nvidia.com/gpu": "4"}], None, 4, ""),
        ({}, [{"nvidia.com/gpu": "4"}, {"cpu": "8"}, {"nvidia.com/gpu": "2"}], None, 6, ""),
        ({}, [{"nvidia.com/gpu": 4}], 2, 4, ""),
        ({}, [{"nvidia.com/gpu": "500m"}], None, 0, "its number of slots is unknown"),
        ({}, [{"nvidia.com/gpu": "0"}], 3, 3, ""),
        ({}, [{"nvidia.com/gpu": "4Gi"}], None, 0, "not a number of slots"),
        ({}, [{"nvidia.com/gpu": "2k"}], None, 2000, ""),
        ({}, [{"nvidia.com/gpu": "5k"}], None, 0, "the maximum is 4096"),
        ({}, [{"nvidia.com/gpu": "9" * 30}], None, 0, "not a number of slots"),
        ({"elastic-driver.dev/slots": "3"}, [{"nvidia.com/gpu": "4"}], None, 3, ""),
        ({"elastic-driver.dev/slots": "0"}, [], 1, 0, "not a number of slots"),
        ({"elastic-driver.dev/slots": "-1"}, [], 1, 0, "not a number of slots"),
        ({"elastic-driver.dev/slots": "9" * 5000}, [], 1, 0, "not a number of slots"),
        ({"elastic-driver.dev/slots": "5000"}, [], 1, 0, "the maximum is 4096"),
        ({"elastic-driver.dev/labels": "rack=a spot"}, [], 1, 1, ""),
        ({"elastic-driver.dev/labels": "a;b"}, [], 1, 1, "cannot read 'a;b' as a label"),
    ],
)
def test_slots(
    annotations: dict[str, str], limits: list[dict[str, Any]], default: int | None, slots: int, problem: str
) -> None:
    made = pod(
        reading=Reading("pod", "nvidia.com/gpu", default, "zone"),
        metadata={"annotations": annotations},
        spec={"containers": [{"name": "c", "resources": {"limits": each}} for each in limits]},
    )
    assert problem in made.problem
    assert bool(problem) == bool(made.problem)
    if not problem:
        assert sees(made).hosts[0].slots == slots
    else:
        assert sees(made).hosts == ()
        assert made.problem in unused([made], ())[0]


@pytest.mark.parametrize(
    ("names", "spec", "ip", "host"),
    [
        ("pod", {"hostname": "h"}, "10.0.0.1", "a"),
        ("hostname", {"hostname": "h"}, "10.0.0.1", "h"),
        ("hostname", {}, "10.0.0.1", "a"),
        ("ip", {}, "fd00::1", "fd00::1"),
        ("ip", {}, "", ""),
        ("dns", {"subdomain": "train"}, "10.0.0.1", "a.train.n.svc"),
        ("dns", {"subdomain": "train", "hostname": "h"}, "10.0.0.1", "h.train.n.svc"),
        ("dns", {"subdomain": "train"}, "", ""),
        ("dns", {}, "10.0.0.1", "10.0.0.1"),
    ],
)
def test_names(names: str, spec: dict[str, Any], ip: str, host: str) -> None:
    made = pod(reading=Reading(names, "x", 1, "zone"), spec=spec, status={"podIP": ip})
    assert made.host == host
    assert [each.name for each in sees(made).hosts] == ([host] if host else [])


def test_racks_and_order() -> None:
    nodes = node(rack="z1")
    own = pod("w-10", metadata={"annotations": {"elastic-driver.dev/labels": "rack=mine"}})
    seen = sees(own, pod("w-9"), nodes=nodes)
    assert seen.hosts == (Host("w-9", 1, ("rack=z1",)), Host("w-10", 1, ("rack=mine",)))


def test_why_pods_are_no_hosts() -> None:
    waiting = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    unscheduled = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}]
    }
    assert unused(
        [
            pod("p-10", phase="Pending", status=waiting),
            pod("p-2", phase="Pending", status=unscheduled),
            pod("p-3", ready="False"),
            pod("p-4", phase="Succeeded"),
            pod("p-5", phase="Failed", status={"reason": "Evicted"}),
            pod("p-6", metadata={"deletionTimestamp": "2026-01-01T00:00:30Z"}),
            pod("p-7"),
        ],
        {"uid-p-7"},
    ) == [
        "pod p-2: Pending: Unschedulable, no room",
        "pod p-3: Running: not ready",
        "pod p-5: Failed: Evicted",
        "pod p-6: being deleted",
        "pod p-10: Pending: ImagePullBackOff",
    ]


def test_nodes_are_read() -> None:
    made = read_node(
        {
            "metadata": {"name": "n", "labels": {"topology.kubernetes.io/zone": "z"}},
            "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoExecute", "timeAdded": "x"}]},
        },
        READING,
    )
    assert made == Node("n", "z", True, (Taint("k", "", "NoExecute"),))
    assert read_node({"metadata": {"name": "n"}}, READING) == Node("n", "", False, ())


@pytest.mark.parametrize(
    "made", [{}, {"metadata": {}}, {"metadata": None}, {"metadata": {"name": "a", "uid": "u"}, "spec": []}]
)
def test_rubbish_is_no_pod(made: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, AttributeError, ValueError)):
        read_pod(made, READING)
