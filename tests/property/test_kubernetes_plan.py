"""Random lives of a job under the controller's plans: pods that come, fail and vanish, sizes that change, a driver that
answers now and then, and objects that somebody has deleted.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_driver.kubernetes.objects import LABEL_INDEX, exec_pods_of
from elastic_driver.kubernetes.plan import Delete, plan
from tests.support.clusters.elastic_job_objects import Cluster, resource
from tests.support.extent import examples

pytestmark = pytest.mark.property

KINDS = ("Service", "ConfigMap", "tokens", "ServiceAccount", "Role", "RoleBinding")


class Life(RuleBasedStateMachine):
    """One job."""

    @initialize(
        transport=st.sampled_from(("join", "ssh", "exec")),
        replicas=st.integers(0, 4),
        journal=st.sampled_from((None, "etcd://a:2379/jobs/digits")),
    )
    def begin(self, transport: str, replicas: int, journal: str | None) -> None:
        self.cluster = Cluster(resource(transport=transport, replicas=replicas, journal=journal))

    @property
    def workers(self) -> dict[str, int]:
        return self.cluster.body["spec"]["mpiReplicaSpecs"]["Worker"]  # type: ignore[no-any-return]

    @rule()
    def look(self) -> None:
        cluster = self.cluster
        if (cluster.others.get("Job", {}).get("spec") or {}).get("suspend"):
            cluster.driver = None  # its pod is gone: nobody answers any more
        before = cluster.observed()
        made = cluster.look()
        busy = frozenset() if before.driver is None else before.driver.busy
        over = "Job" in cluster.others and cluster.others["Job"].get("status")
        for action in made.actions:
            if not isinstance(action, Delete) or over:
                continue
            pod = next(pod for pod in before.pods if pod["metadata"]["name"] == action.seen["metadata"]["name"])
            index = int(pod["metadata"]["labels"][LABEL_INDEX])
            runs, drained = pod["status"]["phase"] == "Running", pod["metadata"]["annotations"]
            if runs and before.launcher is not None:
                assert any("drained-since" in key for key in drained), "deleted without a drain"
                late = any(tell.reason == "DrainTimeout" for tell in cluster.told)
                assert late or cluster.job.host_of(pod["metadata"]["name"]) not in busy, "its workers were there"
            elif runs:
                assert index >= cluster.job.replicas or cluster.job.suspend

    @rule(replicas=st.integers(0, 4))
    def scale(self, replicas: int) -> None:
        self.workers["replicas"] = replicas

    @rule(suspend=st.booleans())
    def suspend(self, *, suspend: bool) -> None:
        self.cluster.body["spec"]["runPolicy"] = {"suspend": suspend}

    @rule(seconds=st.sampled_from((0.5, 6.0, 70.0)))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data(), what=st.sampled_from(("run", "Failed", "Succeeded", "deleted", "gone")))
    def a_pod(self, data: st.DataObject, what: str) -> None:
        cluster = self.cluster
        name = data.draw(st.sampled_from(sorted(cluster.pods)))
        match what:
            case "run":
                cluster.run(name)
            case "gone":
                del cluster.pods[name]
            case "deleted":
                cluster.end(name)
            case _:
                cluster.finish(name, what)

    @rule(answers=st.booleans(), leaves=st.booleans())
    def the_driver(self, *, answers: bool, leaves: bool) -> None:
        self.cluster.driver = None
        if answers:
            self.cluster.says()
            if leaves:
                hosts = frozenset(drain.host for drain in self.cluster.drains)
                assert self.cluster.driver is not None
                self.cluster.says(drained=hosts, busy=self.cluster.driver.busy - hosts)

    @rule(kind=st.sampled_from(KINDS))
    def somebody_deletes(self, kind: str) -> None:
        self.cluster.others.pop(kind, None)

    @precondition(lambda self: "Job" in self.cluster.others)
    @rule(kind=st.sampled_from(("Complete", "Failed")))
    def the_launcher_ends(self, kind: str) -> None:
        self.cluster.launcher_ends(kind)

    @invariant()
    def the_same_is_planned_for_the_same(self) -> None:
        if hasattr(self, "cluster"):
            seen = self.cluster.observed()
            assert plan(self.cluster.body, seen) == plan(self.cluster.body, seen)

    @invariant()
    def exec_is_never_allowed_everywhere(self) -> None:
        if hasattr(self, "cluster") and (role := self.cluster.others.get("Role")) is not None:
            assert all(rule.get("resourceNames") for rule in role["rules"] if "pods/exec" in rule["resources"])

    def teardown(self) -> None:
        """Left alone, it comes to what was asked for."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        over = bool(cluster.others.get("Job", {}).get("status"))
        cluster.driver = None
        for _ in range(6):
            cluster.now += 400
            cluster.settle()
        if over:
            return
        wanted = 0 if cluster.job.suspend else cluster.job.replicas
        assert len(cluster.running()) == len(cluster.pods) == wanted
        assert len(cluster.listed()) == wanted
        if cluster.job.transport == "exec":
            assert exec_pods_of(cluster.others["Role"]) == set(cluster.pods)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
