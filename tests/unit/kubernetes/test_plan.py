"""What the controller decides, on a cluster of dicts."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.kubernetes.objects import exec_pods_of
from elastic_driver.kubernetes.plan import Create, EndTraining, Update, plan
from tests.support.clusters.elastic_job_objects import Cluster, resource

TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "main", "image": "image"}]}}


def started(**more: Any) -> Cluster:
    """A job whose pods run."""
    cluster = Cluster(resource(**more))
    cluster.settle()
    return cluster


def condition(cluster: Cluster) -> str:
    return next(c["type"] for c in reversed(cluster.status["conditions"]) if c["status"] == "True")


def test_a_job_gets_its_objects() -> None:
    cluster = started(replicas=3)
    assert sorted(cluster.pods) == ["digits-worker-0", "digits-worker-1", "digits-worker-2"]
    assert set(cluster.others) == {
        "Service", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Job", "tokens",
    }  # fmt: skip
    assert cluster.listed() == [f"digits-worker-{index}.digits.training.svc:1" for index in range(3)]
    assert condition(cluster) == "Created"
    cluster.says()
    cluster.look()
    assert condition(cluster) == "Running"
    assert cluster.status["replicaStatuses"]["Worker"] == {"active": 3, "succeeded": 0, "failed": 0}
    assert (cluster.status["explain"], cluster.status["workers"]) == ("round 1 runs", 3)


def test_what_the_driver_says_becomes_an_event_when_it_is_another() -> None:
    cluster = started()
    for text in ("waiting for 2 slots; 600 s left", "waiting for 2 slots; 595 s left", "round 1 runs with 2 workers"):
        cluster.says(explain=text)
        cluster.look()
        cluster.look()
        cluster.now += 11
    assert [tell.message for tell in cluster.told] == ["waiting for 2 slots; 600 s left", "round 1 runs with 2 workers"]
    cluster.says(explain="round 1 is over")
    cluster.look()
    cluster.says(explain="round 2 runs with 2 workers")
    cluster.look()
    assert cluster.told[-1].message == "round 1 is over", "not each second"
    assert cluster.status["explain"] == "round 2 runs with 2 workers"


def test_names_and_rights_are_made_before_who_uses_them() -> None:
    cluster = Cluster(resource())
    kinds = [action.body["kind"] for action in cluster.look().actions if isinstance(action, Create)]
    assert kinds.index("Service") < kinds.index("Pod") < kinds.index("Job")
    assert kinds.index("RoleBinding") < kinds.index("Job")


def test_hosts_are_in_the_order_of_their_numbers() -> None:
    assert started(replicas=12).listed()[9:] == [
        f"digits-worker-{index}.digits.training.svc:1" for index in (9, 10, 11)
    ]


def test_shrinking_drains_first_and_takes_the_last_pods() -> None:
    cluster = started(replicas=4)
    cluster.says()
    cluster.body["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = 2
    cluster.look()
    going = [cluster.job.host_of(f"digits-worker-{index}") for index in (2, 3)]
    assert not cluster.deleted
    assert [drain.host for drain in cluster.drains] == going
    assert [drain.within_s for drain in cluster.drains] == [120, 120]
    assert len(cluster.listed()) == 2, "they have left the list"
    # One has left, the other works on.
    assert cluster.driver is not None
    cluster.says(drained=frozenset(going), busy=cluster.driver.busy - {going[0]})
    assert cluster.look().again_s <= 1.0
    assert cluster.deleted == ["digits-worker-2"]
    cluster.now += 121
    cluster.look()
    assert cluster.deleted == ["digits-worker-2", "digits-worker-3"]
    assert cluster.told[-1].reason == "DrainTimeout"


def test_growing_again_while_pods_leave_makes_them_anew() -> None:
    cluster = started(replicas=2)
    cluster.says()
    workers = cluster.body["spec"]["mpiReplicaSpecs"]["Worker"]
    workers["replicas"] = 1
    cluster.look()
    uid = cluster.pods["digits-worker-1"]["metadata"]["uid"]
    workers["replicas"] = 2
    cluster.look()
    assert len(cluster.listed()) == 1, "its host is drained, and would get no workers"
    host = cluster.job.host_of("digits-worker-1")
    cluster.says(drained=frozenset({host}), busy=frozenset())
    cluster.settle()
    cluster.settle()
    assert cluster.pods["digits-worker-1"]["metadata"]["uid"] != uid
    assert len(cluster.listed()) == 2


def test_without_a_driver_that_answers_pods_go_after_their_time() -> None:
    """A plain Horovod launcher hears of it by the discovery script only."""
    cluster = started(replicas=2, transport="ssh", drainTimeoutSeconds=30)
    cluster.body["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = 1
    cluster.look()
    assert len(cluster.listed()) == 1
    cluster.now += 29
    cluster.look()
    assert not cluster.deleted
    cluster.now += 2
    cluster.look()
    assert cluster.deleted == ["digits-worker-1"]


def test_a_pod_that_does_not_run_needs_no_drain() -> None:
    cluster = Cluster(resource(replicas=2))
    cluster.look()
    cluster.body["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = 1
    cluster.look()
    assert cluster.deleted == ["digits-worker-1"]


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_ends_is_made_anew_with_growing_pauses(phase: str) -> None:
    cluster = started()
    pauses = []
    for _ in range(8):
        cluster.finish("digits-worker-0", phase)
        began = cluster.now
        while "digits-worker-0" not in cluster.deleted:
            cluster.now += max(cluster.look().again_s, 0.5)
        pauses.append(cluster.now - began)
        cluster.deleted.clear()
        cluster.settle()
    assert 5 <= pauses[0] < 12
    assert pauses[3] > 3 * pauses[0]
    assert 300 <= pauses[-1] < 320
    # One that runs for a while begins anew.
    cluster.now += 301
    cluster.look()
    assert "0" not in cluster.status["failures"]


def test_the_end_of_the_launcher_is_the_jobs() -> None:
    cluster = started(runPolicy={"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": 60})
    cluster.finish("digits-worker-0", "Succeeded")
    cluster.launcher_ends("Complete")
    cluster.look()
    assert condition(cluster) == "Succeeded"
    assert cluster.deleted == ["digits-worker-1"], "the other has ended by itself"
    cluster.settle()
    assert [tell.reason for tell in cluster.told].count("Succeeded") == 1
    assert not cluster.is_gone
    cluster.now += 61
    cluster.look()
    assert cluster.is_gone


def test_a_failed_launcher_says_why() -> None:
    cluster = started(runPolicy={"cleanPodPolicy": "All"})
    cluster.launcher_ends("Failed", "Job has reached the specified backoff limit")
    cluster.settle()
    assert condition(cluster) == "Failed"
    assert cluster.status["explain"] == "the launcher failed: Job has reached the specified backoff limit"
    assert not cluster.pods


def test_exec_is_allowed_before_a_pod_is_listed_and_only_for_pods_that_there_are() -> None:
    cluster = Cluster(resource(replicas=2, transport="exec"))
    cluster.look()
    assert exec_pods_of(cluster.others["Role"]) == frozenset()
    assert all(
        rule.get("resourceNames") for rule in cluster.others["Role"]["rules"] if "pods/exec" in rule["resources"]
    )
    for name in cluster.pods:
        cluster.run(name)
    cluster.look()
    assert exec_pods_of(cluster.others["Role"]) == set(cluster.pods)
    assert cluster.listed() == [], "the Role that was seen named none of them"
    cluster.look()
    assert len(cluster.listed()) == 2


def test_a_suspended_job_has_no_pods_and_comes_back() -> None:
    cluster = started()
    cluster.says()
    cluster.others["Job"]["status"] = {"active": 1}
    cluster.body["spec"]["runPolicy"] = {"suspend": True}
    cluster.look()
    assert cluster.others["Job"]["spec"]["suspend"] is True
    assert cluster.listed() == []
    # Its pod is being ended: the driver may have its workers checkpoint yet.
    cluster.others["Job"]["status"] = {"active": 0, "terminating": 1}
    cluster.driver = None
    cluster.look()
    assert not cluster.deleted
    # Once it is gone, nobody is waited for.
    cluster.others["Job"]["status"] = {"active": 0, "terminating": 0}
    cluster.settle()
    assert not cluster.pods
    assert condition(cluster) == "Suspended"
    cluster.body["spec"]["runPolicy"] = {}
    cluster.settle()
    assert cluster.others["Job"]["spec"]["suspend"] is False
    assert len(cluster.pods) == 2


def test_a_driver_that_hands_over_is_to_end_the_job_before_it_is_suspended() -> None:
    """Else it would leave the job to another, and the pods of its workers would be deleted under them."""
    cluster = started(journal="etcd://a:2379/jobs/digits")
    cluster.says()
    cluster.look()
    cluster.body["spec"]["runPolicy"] = {"suspend": True}
    actions = cluster.look().actions
    suspends = actions[actions.index(EndTraining()) + 1]
    assert isinstance(suspends, Update)
    assert suspends.seen["kind"] == "Job"
    assert cluster.others["Job"]["spec"]["suspend"] is True
    # Once; and one that does not answer is not waited for.
    cluster.look()
    assert cluster.ends == 1
    cluster.body["spec"]["runPolicy"] = {}
    cluster.driver = None
    cluster.settle()
    cluster.body["spec"]["runPolicy"] = {"suspend": True}
    cluster.look()
    assert (cluster.ends, cluster.others["Job"]["spec"]["suspend"]) == (1, True)


def test_a_driver_without_a_journal_ends_the_job_with_its_pod() -> None:
    cluster = started()
    cluster.says()
    cluster.body["spec"]["runPolicy"] = {"suspend": True}
    cluster.look()
    assert (cluster.ends, cluster.others["Job"]["spec"]["suspend"]) == (0, True)


def test_the_launcher_may_wait_for_the_workers() -> None:
    cluster = Cluster(resource(launcherCreationPolicy="WaitForWorkersReady"))
    cluster.look()
    assert "Job" not in cluster.others
    cluster.settle()
    assert "Job" in cluster.others


def test_replicas_stay_within_their_bounds() -> None:
    bounds = {"minReplicas": 2, "maxReplicas": 3}
    for asked, there in ((0, 2), (2, 2), (9, 3)):
        assert len(started(replicas=asked, elasticPolicy=bounds).pods) == there


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"journal": "/a/folder"}, "spec.journal '/a/folder' is not etcd://HOST:PORT,.../PREFIX"),
        ({"journal": "etcd://a:2379"}, "spec.journal 'etcd://a:2379' is not etcd://HOST:PORT,.../PREFIX"),
        ({"journal": "etcd://jobs:secret@a:2379/jobs/a"}, "spec.journal contains a user"),
        ({"journal": "etcd://jobs:secret@a:2379"}, "spec.journal contains a user"),
        ({"transport": "carrier pigeon"}, "spec.transport 'carrier pigeon' is not one of join, ssh, exec"),
        ({"slotsPerWorker": 0}, "spec.slotsPerWorker '0' is not an integer from 1 to 4096"),
        ({"slotsPerWorker": True}, "spec.slotsPerWorker 'True' is not an integer"),
        ({"elasticPolicy": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas 3 is above maxReplicas 2"),
        ({"mpiReplicaSpecs": {}}, "spec.mpiReplicaSpecs.Launcher.template.spec.containers is empty"),
        ({"mpiReplicaSpecs": []}, "spec.mpiReplicaSpecs is not an object"),
        ({"runLauncherAsWorker": True}, "spec.runLauncherAsWorker is not supported"),
        (
            {
                "mpiReplicaSpecs": {
                    "Launcher": {"restartPolicy": "Always", "template": TEMPLATE},
                    "Worker": {"template": TEMPLATE},
                }
            },
            "spec.mpiReplicaSpecs.Launcher.restartPolicy 'Always' is not one of Never, OnFailure",
        ),
        (
            {"mpiReplicaSpecs": {"Launcher": {"template": {"spec": {**TEMPLATE["spec"], "volumes": "none"}}}}},
            "spec.mpiReplicaSpecs.Launcher.template.spec.volumes is not a list of objects",
        ),
        (
            {"mpiReplicaSpecs": {"Launcher": {"template": {"spec": {**TEMPLATE["spec"], "securityContext": 7}}}}},
            "spec.mpiReplicaSpecs.Launcher.template.spec.securityContext is not an object",
        ),
        (
            {"mpiReplicaSpecs": {"Launcher": {"template": {"spec": {"containers": [{"env": ["A=1"]}]}}}}},
            "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].env is not a list of objects",
        ),
        (
            {"runPolicy": {"cleanPodPolicy": "Some"}},
            "cleanPodPolicy 'Some' is not one of None, Running, All",
        ),
    ],
)
def test_a_spec_that_cannot_be_is_refused_once(changes: dict[str, Any], said: str) -> None:
    cluster = Cluster(resource(**changes))
    cluster.look()
    cluster.look()
    assert not cluster.pods
    assert not cluster.others
    assert condition(cluster) == "Failed"
    [told] = cluster.told
    assert told.warning
    assert said in told.message
    assert "secret" not in told.message
    # Mended, it begins.
    cluster.body = resource()
    cluster.settle()
    assert len(cluster.pods) == 2
    assert condition(cluster) == "Created"


@pytest.mark.parametrize("name", ["UPPER", "1st", "a.b", "x" * 60, "-a"])
def test_names_that_no_service_can_have(name: str) -> None:
    cluster = Cluster(resource(name=name))
    cluster.look()
    assert "is invalid: pods and a Service are named after it" in cluster.told[0].message


def test_nothing_is_done_for_a_job_that_is_being_deleted() -> None:
    cluster = started()
    cluster.body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.pods.clear()
    assert plan(cluster.body, cluster.observed()).actions == ()


def test_what_somebody_has_changed_is_put_right() -> None:
    cluster = started()
    cluster.others["ConfigMap"]["data"] = {"discover_hosts.sh": "rm -rf /", "more": "x"}
    cluster.others["Role"]["rules"] = []
    del cluster.others["Service"]
    [*actions] = cluster.look().actions
    assert [type(action) for action in actions] == [Create, Update, Update]
    assert len(cluster.listed()) == 2
    assert set(cluster.others["ConfigMap"]["data"]) == {"discover_hosts.sh", "hostfile"}
