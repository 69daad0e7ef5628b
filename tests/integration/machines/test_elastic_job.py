"""An ElasticJob from end to end: the controller, the API server's stand-in, and real processes in its pods."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from elastic_driver.kubernetes.api import Api
from elastic_driver.kubernetes.controller import Controller
from elastic_driver.kubernetes.driver_link import ask_drain, ask_end, ask_status
from elastic_driver.kubernetes.spec import PLURAL
from tests.support.clusters.controllers import running_controller
from tests.support.clusters.elastic_job_objects import NAME, NAMESPACE, resource
from tests.support.clusters.kubectl_exec import KubectlServer
from tests.support.clusters.kubelet import Kubelet
from tests.support.clusters.kubernetes_fake import FakeKubernetes
from tests.support.clusters.mpi_operator import LIMITS
from tests.support.clusters.pods import HOME, SHARED, SSHD, Pods
from tests.support.network.machines import marks, wait_for
from tests.support.network.namespaces import NamespaceHost, Namespaces, cannot_serve_ssh
from tests.support.paths import PROGRAMS, ROOT, SUPPORT
from tests.support.processes.etcd import PORT, etcd_on, needs_etcd
from tests.support.processes.jobs import check_agreement
from tests.support.processes.json_lines import JsonLines

pytestmark = marks

MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "controller"
WHO = "system:serviceaccount:elastic-driver:elastic-driver-controller"
UID = 1000
WORK = f"{SHARED}/work"
Line = dict[str, Any]


class Asker:
    """Asks drivers from within the pods' network, where the controller would be."""

    def __init__(self, pods: Pods, host: NamespaceHost) -> None:
        self._pods = pods
        # Its threads are in the pod's network, and the test is not.
        self._there = ThreadPoolExecutor(2, "asker", initializer=host.enter)

    def close(self) -> None:
        self._there.shutdown()

    def make(self, api: Api) -> Controller:
        return Controller(api, ask_status=self._status, ask_drain=self._drain, ask_end=self._end)

    def _status(self, url: str, key: bytes) -> Any:
        address = self._address(url)
        return None if address is None else self._there.submit(ask_status, address, key).result()

    def _drain(self, url: str, key: bytes, host: str, within_s: float) -> Any:
        address = self._address(url)
        return None if address is None else self._there.submit(ask_drain, address, key, host, within_s).result()

    def _end(self, url: str, key: bytes) -> Any:
        address = self._address(url)
        return None if address is None else self._there.submit(ask_end, address, key).result()

    def _address(self, url: str) -> str | None:
        parts = urlsplit(url)
        pod, _, rest = (parts.hostname or "").partition(".")
        assert rest == f"{NAME}.{NAMESPACE}.svc"
        address = self._pods.address_of(pod)
        return None if address is None else f"https://{address}:{parts.port}"


class World:
    """A cluster with a kubelet and a controller, and one job in it."""

    def __init__(self, cluster: FakeKubernetes, pods: Pods, kubelet: Kubelet) -> None:
        self.cluster, self.pods, self.kubelet = cluster, pods, kubelet
        self.stop = pods.work / "stop"
        self._steps = JsonLines(pods.work / "steps.jsonl")

    def create(self, transport: str, replicas: int, *flags: str, worker: Line | None = None, **spec: Any) -> None:
        """The job, as its user writes it."""
        program = [sys.executable, str(PROGRAMS / "durable_program.py")]
        command = ["elasticrun", "-np", "2", "--min-np", "1", *LIMITS, "--verbose", *flags, *program]
        user = {"runAsUser": UID, "runAsGroup": UID}
        launcher: Line = {"name": "launcher", "image": "training", "command": command}
        body = resource(transport=transport, replicas=replicas, **spec)
        body["metadata"] = {"name": NAME, "namespace": NAMESPACE}
        for role, container in (("Launcher", launcher), ("Worker", {"name": "worker", "image": "training"})):
            template: Line = {"spec": {"securityContext": user, "containers": [container]}}
            if role == "Worker":
                container |= worker or {}
                template["spec"]["terminationGracePeriodSeconds"] = 20
            body["spec"]["mpiReplicaSpecs"][role]["template"] = template
        self.cluster.create(body)

    def scale(self, replicas: int) -> None:
        changes = {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}}}
        self.cluster.patch(PLURAL, NAME, changes, NAMESPACE)

    def suspend(self, *, suspend: bool) -> None:
        self.cluster.patch(PLURAL, NAME, {"spec": {"runPolicy": {"suspend": suspend}}}, NAMESPACE)

    def status(self) -> Line:
        found = self.cluster.get(PLURAL, NAME, NAMESPACE)
        return {} if found is None else found.get("status") or {}

    def held(self) -> list[str]:
        """The conditions that hold."""
        return [one["type"] for one in self.status().get("conditions", ()) if one["status"] == "True"]

    def names(self, part: str) -> list[str]:
        return [
            pod["metadata"]["name"] for pod in self.cluster.list("pods", NAMESPACE) if part in pod["metadata"]["name"]
        ]

    def phases(self, part: str) -> list[str]:
        return [
            pod["status"]["phase"] for pod in self.cluster.list("pods", NAMESPACE) if part in pod["metadata"]["name"]
        ]

    def steps(self) -> list[Line]:
        return self._steps.all()

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        return wait_for(what, found, more=self.told)

    def wait_for_steps(self, size: int, *, after: int = -1, count: int = 5) -> list[Line]:
        """So many steps of each rank of a round of this size, of the lines behind so many."""
        after = len(self.steps()) if after < 0 else after

        def found() -> list[Line]:
            lines = [line for line in self.steps()[after:] if line["size"] == size]
            return lines if all(sum(line["rank"] == rank for line in lines) >= count for rank in range(size)) else []

        lines: list[Line] = self.wait(f"steps at size {size}", found)
        return lines

    def told(self) -> str:
        events = [f"{event['reason']}: {event['message']}" for event in self.cluster.list("events", NAMESPACE)]
        return f"{self.kubelet.logs()}\n{self.kubelet.errors}\n{events}\n{self.status()}"

    def delete(self) -> None:
        """Deletes the job, with all that it has."""
        self.cluster.delete(PLURAL, NAME, NAMESPACE)
        self.wait("an empty namespace", lambda: not self.names(""))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Up to six pods at a time, beside the controller."""
    if reason := cannot_serve_ssh():
        pytest.skip(reason)
    with ExitStack() as stack:
        machines = stack.enter_context(Namespaces(7, sshd=False))
        pods = stack.enter_context(Pods(machines, job=NAME, namespace=NAMESPACE, uid=UID))
        cluster = stack.enter_context(FakeKubernetes(namespaces=(NAMESPACE, "elastic-driver")))
        for name in ("crd.yaml", "rbac.yaml"):
            cluster.create_all((MANIFESTS / name).read_text())
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "config", token=cluster.user(WHO))))
        kubelet = stack.enter_context(Kubelet(cluster, pods, image(pods)))
        stack.enter_context(KubectlServer(pods.shared, kubelet.exec_words))
        asker = Asker(pods, pods.pod("controller").host)
        stack.callback(asker.close)
        stack.enter_context(running_controller(asker.make))
        yield World(cluster, pods, kubelet)
        assert not [request for request in cluster.requests if request.code == 403]
        assert not kubelet.errors


def image(pods: Pods) -> dict[str, str]:
    """What containers have of their image: elasticrun, and the variables."""
    folder = pods.shared / "image"
    folder.mkdir()
    kubectl = SUPPORT / "clusters/kubectl_exec.py"
    for name, words in (("elasticrun", "-m elastic_driver"), ("kubectl", f"-I -S {kubectl}")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{SHARED}/image:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",  # hash() of bytes is compared between workers
        "STEP_LOG": f"{WORK}/steps.jsonl",
        "STEP_S": "0.02",
        "STOP": f"{WORK}/stop",
    }


def check_no_step_is_lost(lines: list[Line]) -> None:
    """Each rank has done each step once, and all agree."""
    check_agreement(lines)
    done = [(line["step"], line["rank"]) for line in lines]
    assert len(done) == len(set(done)), "a step was done again"
    steps = sorted({step for step, _ in done})
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_hosts_join_and_all_that_can_happen_to_them(world: World) -> None:
    # A lease that does not end while the launcher is started again, however slow that is.
    flags = ("--durable-dir", f"{WORK}/commits", "--agent-timeout", "60")
    world.create("join", 2, *flags, runPolicy={"cleanPodPolicy": "Running"})
    world.wait_for_steps(2)
    world.wait("what the driver says", lambda: world.status().get("workers") == 2 and world.status().get("explain"))
    assert world.held() == ["Created", "Running"]

    # What is planned costs no step.
    world.scale(3)
    world.wait_for_steps(3)
    world.scale(1)
    world.wait_for_steps(1)
    world.wait("only one pod", lambda: world.names("worker") == [f"{NAME}-worker-0"])
    check_no_step_is_lost(world.steps())

    # A container that is killed is started again.
    world.scale(2)
    world.wait_for_steps(2)
    world.kubelet.crash(f"{NAME}-worker-1")
    world.wait("a restart", lambda: world.kubelet.life(f"{NAME}-worker-1").restarts == 1)
    world.wait_for_steps(2)

    # The launcher's node loses it: its Job makes another one, elsewhere, and the agents find that.
    [launcher] = world.names("launcher")
    world.kubelet.evict(launcher)
    before = len(world.steps())
    world.wait("another launcher", lambda: len(world.names("launcher")) == 2)
    after = world.wait_for_steps(2, after=before)
    assert world.kubelet.life(f"{NAME}-worker-0").restarts == 0, "its agent joins the new driver by itself"
    assert after[0]["step"] > world.steps()[before - 1]["step"] - 60, "it begins from its last commit"
    check_agreement(world.steps())

    world.stop.touch()
    world.wait("success", lambda: world.held() == ["Created", "Succeeded"])
    world.wait("no pod that runs", lambda: set(world.phases("worker")) <= {"Succeeded"})
    world.delete()


def test_the_launchers_node_is_drained(world: World) -> None:
    """Its elasticrun is told to end, and tells its hosts: their containers have failed, and are started again."""
    world.create("join", 2, "--durable-dir", f"{WORK}/commits")
    world.wait_for_steps(2)
    [launcher] = world.names("launcher")
    before = {pod["metadata"]["uid"] for pod in world.cluster.list("pods", NAMESPACE)}
    world.cluster.delete_pod(launcher, NAMESPACE)
    world.wait("another launcher", lambda: world.names("launcher") not in ([], [launcher]))
    done = len(world.steps())
    after = world.wait_for_steps(2, after=done)
    assert after[0]["step"] > world.steps()[done - 1]["step"] - 60, "it begins from its last commit"
    now = {pod["metadata"]["uid"] for pod in world.cluster.list("pods", NAMESPACE)}
    assert len(before & now) == 2, "the workers' pods stay"
    check_agreement(world.steps())
    # Deleted while it runs: nothing may be left.
    world.delete()


@pytest.mark.parametrize("transport", ["ssh", "exec"])
def test_hosts_that_are_reached(world: World, transport: str) -> None:
    """With mpi-operator's command of the launcher; for ssh with its image's server."""
    server = {"command": list(SSHD)} if transport == "ssh" else None
    flags = ("--host-discovery-script", "/etc/mpi/discover_hosts.sh")
    world.create(transport, 2, *flags, worker=server, sshAuthMountPath=f"{HOME}/.ssh")
    world.wait_for_steps(2)
    world.scale(1)
    world.wait_for_steps(1)
    world.wait("only one pod", lambda: world.names("worker") == [f"{NAME}-worker-0"])
    check_no_step_is_lost(world.steps())
    world.stop.touch()
    world.wait("success", lambda: world.held() == ["Created", "Succeeded"])
    assert world.phases("worker") == ["Running"], "cleanPodPolicy None: its first process lives on"
    world.delete()


@needs_etcd
def test_the_launchers_node_is_lost_and_the_next_one_is_drained(world: World, tmp_path: Path) -> None:
    """With its journal in etcd the job has another driver, at another address, before anybody has removed the node."""
    machine = world.pods.pod("etcd").host
    with etcd_on(machine, tmp_path):
        journal = f"etcd://{machine.ipv4}:{PORT}/jobs/{NAME}"
        world.create("join", 2, "--on-change", "in-place", "--agent-timeout", "10", journal=journal)
        world.wait_for_steps(2)
        world.wait("what the driver says", lambda: world.status().get("workers") == 2)
        [lost] = world.names("launcher")
        before = {pod["metadata"]["uid"] for pod in world.cluster.list("pods", NAMESPACE)}
        world.kubelet.lose(lost)
        [launcher] = world.wait("another launcher", lambda: [name for name in world.names("launcher") if name != lost])
        took_over = "2 workers on 2 hosts kept training, no step is lost"
        world.wait("a takeover", lambda: took_over in world.kubelet.logs())
        world.wait_for_steps(2)
        assert world.kubelet.life(launcher).pod.address != world.kubelet.life(lost).pod.address
        now = {pod["metadata"]["uid"] for pod in world.cluster.list("pods", NAMESPACE)}
        assert before < now, "the workers' pods stay, and so does the one that is lost"
        assert all(world.kubelet.life(f"{NAME}-worker-{index}").restarts == 0 for index in range(2))

        # The next one's pod is deleted in order: it hands the job over.
        world.cluster.delete_pod(launcher, NAMESPACE)
        [third] = world.wait(
            "a third launcher", lambda: [name for name in world.names("launcher") if name not in (lost, launcher)]
        )
        world.wait("another takeover", lambda: world.kubelet.logs().count(took_over) == 2)
        assert third
        world.wait_for_steps(2)

        # Whoever goes by the new driver's address changes the job through it.
        world.scale(1)
        world.wait_for_steps(1)
        check_no_step_is_lost(world.steps())
        world.stop.touch()
        world.wait("success", lambda: world.held() == ["Created", "Succeeded"])
        world.cluster.finish_pod(lost, NAMESPACE)  # its node is removed
        world.delete()


@needs_etcd
def test_a_job_that_outlives_its_launchers_is_suspended_and_deleted(world: World, tmp_path: Path) -> None:
    """Its driver ends the job before its pod ends: nobody has anything to take over when it is to go on."""
    machine = world.pods.pod("etcd").host
    with etcd_on(machine, tmp_path):
        journal = f"etcd://{machine.ipv4}:{PORT}/jobs/{NAME}"
        flags = ("--durable-dir", f"{WORK}/commits", "--agent-timeout", "10")
        world.create("join", 2, *flags, journal=journal)
        world.wait_for_steps(2)
        world.wait("what the driver says", lambda: world.status().get("workers") == 2)
        world.suspend(suspend=True)
        world.wait("no pods", lambda: not world.names(""))
        world.wait("suspension", lambda: world.held() == ["Created", "Suspended"])
        assert world.kubelet.logs().count("elasticrun end: stopping all workers") == 1
        assert "leaves the job to another" not in world.kubelet.logs()

        done = len(world.steps())
        world.suspend(suspend=False)
        after = world.wait_for_steps(2, after=done)
        assert after[0]["step"] > world.steps()[done - 1]["step"] - 60, "it begins from its last commit"
        check_agreement(world.steps())
        # Deleted while it runs: nothing may be left.
        world.delete()
