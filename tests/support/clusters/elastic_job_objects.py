"""ElasticJobs for tests, and a cluster that does as the controller's plans say."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from elastic_driver.kubernetes import objects
from elastic_driver.kubernetes.objects import LABEL_INDEX, Object
from elastic_driver.kubernetes.plan import (
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
from elastic_driver.kubernetes.spec import API_VERSION, KIND, ElasticJob
from tests.support.clusters.kubernetes_fake.patches import merged

NAMESPACE, NAME, UID = "training", "digits", "11111111-2222-3333-4444-555555555555"


def resource(*, replicas: int = 2, transport: str = "join", name: str = NAME, **spec: Any) -> Object:
    """An ElasticJob as a user writes it and the API server gives it."""
    template = {"spec": {"containers": [{"name": "main", "image": "image"}]}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": UID, "generation": 1},
        "spec": {
            "transport": transport,
            "mpiReplicaSpecs": {
                "Launcher": {"template": copy.deepcopy(template)},
                "Worker": {"replicas": replicas, "template": copy.deepcopy(template)},
            },
            **spec,
        },
    }


class Cluster:
    """The objects of one job, changed by its plans at once, and by the test. Its time is the test's."""

    def __init__(self, body: Object) -> None:
        self.body = body
        self.now = 1_700_000_000.0
        self.pods: dict[str, Object] = {}
        self.others: dict[str, Object] = {}
        self.status: Object = {}
        self.driver: DriverReport | None = None
        self.told: list[CreateEvent] = []
        self.drains: list[Drain] = []
        self.ends = 0
        self.deleted: list[str] = []
        self.is_gone = False
        self._uids = itertools.count(1)

    @property
    def job(self) -> ElasticJob:
        return ElasticJob.of(self.body)

    def observed(self) -> Observed:
        """All there is."""
        others = self.others
        return Observed(
            status=copy.deepcopy(self.status),
            pods=[copy.deepcopy(pod) for pod in self.pods.values()],
            launcher=others.get("Job"),
            service=others.get("Service"),
            config=others.get("ConfigMap"),
            tokens=others.get("tokens"),
            ssh=others.get("ssh"),
            account=others.get("ServiceAccount"),
            role=others.get("Role"),
            binding=others.get("RoleBinding"),
            driver=self.driver,
            now=self.now,
        )

    def look(self) -> Plan:
        """One plan, carried out."""
        made = plan(self.body, self.observed())
        for action in made.actions:
            match action:
                case Create(body) if body["kind"] == "Pod":
                    name = body["metadata"]["name"]
                    assert name not in self.pods, "made twice"
                    self.pods[name] = copy.deepcopy(body)
                    self.pods[name]["metadata"]["uid"] = str(next(self._uids))
                    self.pods[name]["status"] = {"phase": "Pending"}
                case Create(body):
                    assert body["kind"] not in self.others, "made twice"
                    self.others[body["kind"]] = copy.deepcopy(body)
                case MakeTokens():
                    self.others["tokens"] = objects.tokens(self.job, "j" * 64, "0" * 64, "e" * 64)
                case MakeSshKeys():
                    self.others["ssh"] = objects.ssh_keys(self.job, "private", "public")
                case Update(seen, changes) if seen["kind"] == "Pod":
                    name = seen["metadata"]["name"]
                    self.pods[name] = merged(self.pods[name], changes)
                case Update(seen, changes):
                    self.others[seen["kind"]] = merged(self.others[seen["kind"]], changes)
                case Delete(seen):
                    self.end(seen["metadata"]["name"])
                case Drain():
                    self.drains.append(action)
                case EndTraining():
                    self.ends += 1
                case CreateEvent():
                    self.told.append(action)
                case DeleteJob():
                    self.is_gone = True
        self.status = copy.deepcopy(made.status)
        return made

    def settle(self) -> None:
        """Plans until there is nothing more to do. The kubelet runs and ends pods meanwhile."""
        for _ in range(20):
            made = self.look()
            gone = [name for name, pod in self.pods.items() if pod["metadata"].get("deletionTimestamp")]
            pending = [name for name, pod in self.pods.items() if pod["status"]["phase"] == "Pending"]
            for name in gone:
                del self.pods[name]
            for name in set(pending) - set(gone):
                self.run(name)
            rests = not gone and not pending
            if rests and not any(isinstance(action, Create | Update | Delete) for action in made.actions):
                return
        raise AssertionError(f"it does not come to rest: {made.actions}")

    def run(self, name: str) -> None:
        """A pod runs and is ready."""
        self.pods[name]["status"] = {
            "phase": "Running",
            "startTime": _time(self.now),
            "conditions": [{"type": "Ready", "status": "True"}],
        }

    def finish(self, name: str, phase: str) -> None:
        """A pod has ended by itself."""
        ended = {"state": {"terminated": {"finishedAt": _time(self.now), "exitCode": int(phase == "Failed")}}}
        self.pods[name]["status"] = {"phase": phase, "containerStatuses": [ended]}

    def end(self, name: str) -> None:
        """A pod is being deleted."""
        self.deleted.append(name)
        self.pods[name]["metadata"]["deletionTimestamp"] = _time(self.now)

    def launcher_ends(self, kind: str, message: str = "") -> None:
        """Its Job is over."""
        condition = {"type": kind, "status": "True", "message": message}
        self.others["Job"] = {**self.others["Job"], "status": {"conditions": [condition]}}

    def says(self, **changes: Any) -> None:
        """The driver answers: by default that it trains on all pods that run."""
        hosts = frozenset(self.job.host_of(name) for name in self.running())
        if self.driver is None:
            self.driver = DriverReport("round 1 runs", 1, hosts, frozenset(), hosts, len(hosts))
        self.driver = replace(self.driver, **changes)

    def running(self) -> list[str]:
        """Names of the pods that run, by index."""
        names = [n for n, pod in self.pods.items() if pod["status"]["phase"] == "Running"]
        return sorted(names, key=lambda name: int(self.pods[name]["metadata"]["labels"][LABEL_INDEX]))

    def listed(self) -> list[str]:
        """What the discovery script prints."""
        lines = self.others["ConfigMap"]["data"]["discover_hosts.sh"].splitlines()
        assert lines[0] == "#!/bin/sh"
        return [line.removeprefix("echo ") for line in lines[1:]]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
