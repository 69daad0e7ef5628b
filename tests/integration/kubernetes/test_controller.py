"""The controller against a strict API server, with the rights that its manifest gives it, and no more."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import requests
import yaml

from elastic_driver.kubernetes import objects
from elastic_driver.kubernetes.api import Api
from elastic_driver.kubernetes.controller import Controller, _said, main
from elastic_driver.kubernetes.plan import DriverReport
from elastic_driver.kubernetes.spec import PLURAL
from tests.support.clusters.controllers import running_controller
from tests.support.clusters.elastic_job_objects import NAME, NAMESPACE, UID, resource
from tests.support.clusters.kubernetes_fake import FakeKubernetes
from tests.support.network.machines import wait_for
from tests.support.network.ports import free_port

pytestmark = pytest.mark.integration

MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "controller"
WHO = "system:serviceaccount:elastic-driver:elastic-driver-controller"


class Driver:
    """What stands for the jobs' drivers."""

    def __init__(self) -> None:
        self.says: DriverReport | None = None
        self.drained: list[str] = []
        self.keys: set[bytes] = set()
        self.ended = threading.Event()

    def ask_status(self, url: str, key: bytes) -> DriverReport | None:
        assert url == f"https://{NAME}-launcher.{NAME}.{NAMESPACE}.svc:29400"
        self.keys.add(key)
        return self.says

    def ask_drain(self, url: str, key: bytes, host: str, within_s: float) -> str | None:
        self.drained.append(host)
        if self.says is not None:  # they leave at once
            self.says = replace(self.says, drained=self.says.drained | {host}, busy=self.says.busy - {host})
        return "drained"

    def ask_end(self, url: str, key: bytes) -> str | None:
        self.keys.add(key)
        self.ended.set()
        return "the job is ending"


class World:
    """A cluster, and a controller in it that may be ended and started again."""

    def __init__(self, cluster: FakeKubernetes, kubeconfig: Path) -> None:
        self.cluster, self.kubeconfig = cluster, kubeconfig
        self.driver = Driver()

    @contextmanager
    def controller(self) -> Iterator[None]:
        """Runs one."""

        def make(api: Api) -> Controller:
            driver = self.driver
            return Controller(api, ask_status=driver.ask_status, ask_drain=driver.ask_drain, ask_end=driver.ask_end)

        with running_controller(make):
            yield

    def names(self, plural: str) -> list[str]:
        return sorted(each["metadata"]["name"] for each in self.cluster.list(plural, NAMESPACE))

    def pods(self) -> list[str]:
        return [name for name in self.names("pods") if "-worker-" in name]

    def uid_of(self, name: str) -> str | None:
        """A pod's; None where there is none of this name."""
        pod = self.cluster.get("pods", name, NAMESPACE)
        return None if pod is None else str(pod["metadata"]["uid"])

    def run_pods(self, count: int) -> None:
        """Waits until there are so many, and has them run."""
        self.wait(lambda: len(self.pods()) == count, f"{count} pods")
        for pod in self.cluster.list("pods", NAMESPACE):
            if (pod.get("status") or {}).get("phase") != "Running":
                self.cluster.run_pod(pod["metadata"]["name"], NAMESPACE)

    def wait(self, holds: Any, what: str) -> Any:
        try:
            return self.cluster.wait_for(holds, 150)
        except TimeoutError:
            said = [event["message"] for event in self.cluster.list("events", NAMESPACE)]
            raise AssertionError(f"no {what}; events: {said}; {self.status()}") from None

    def status(self) -> dict[str, Any]:
        found = self.cluster.get(PLURAL, NAME, NAMESPACE)
        return {} if found is None else found.get("status") or {}

    def listed(self) -> list[str]:
        config = self.cluster.get("configmaps", f"{NAME}-config", NAMESPACE)
        return [] if config is None else config["data"]["discover_hosts.sh"].split("echo ")[1:]

    def launcher_runs(self) -> None:
        """Its Job has a pod that runs, as far as its status says."""
        self.wait(lambda: self.names("jobs"), "launcher")
        self.cluster.patch("jobs", f"{NAME}-launcher", {"status": {"active": 1}}, NAMESPACE, subresource="status")

    def trains(self) -> None:
        """The driver answers: it trains on all pods that run."""
        hosts = frozenset(f"{name}.{NAME}.{NAMESPACE}.svc" for name in self.pods())
        self.driver.says = DriverReport("round 1 runs", 1, hosts, frozenset(), hosts, len(hosts))
        self.launcher_runs()

    def scale(self, replicas: int) -> None:
        changes = {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}}}
        self.cluster.patch(PLURAL, NAME, changes, NAMESPACE)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with FakeKubernetes(namespaces=(NAMESPACE, "elastic-driver")) as cluster:
        for name in ("crd.yaml", "rbac.yaml"):
            cluster.create_all((MANIFESTS / name).read_text())
        kubeconfig = cluster.kubeconfig(tmp_path / "config", token=cluster.user(WHO))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield World(cluster, kubeconfig)
        refused = [request for request in cluster.requests if request.code == 403]
        assert not refused, "its manifest gives it too few rights"


def job(**more: Any) -> dict[str, Any]:
    body = resource(**more)
    body["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    return body


def test_a_job_lives(world: World) -> None:
    with world.controller():
        world.cluster.create(job(slotsPerWorker=2, runPolicy={"cleanPodPolicy": "Running"}))
        world.run_pods(2)
        world.wait(lambda: len(world.listed()) == 2, "list of two")
        assert world.names("secrets") == [f"{NAME}-tokens"]
        world.trains()
        world.wait(lambda: world.status().get("workers") == 2, "status")
        assert world.status()["explain"] == "round 1 runs"
        tokens = world.cluster.get("secrets", f"{NAME}-tokens", NAMESPACE)
        assert tokens is not None
        assert world.driver.keys == {bytes.fromhex(base64.b64decode(tokens["data"]["operator-token"]).decode())}

        world.scale(3)
        world.run_pods(3)
        world.wait(lambda: len(world.listed()) == 3, "list of three")
        world.trains()
        world.scale(1)
        world.wait(lambda: len(world.listed()) == 1, "list of one")
        world.wait(lambda: len(world.driver.drained) == 2, "drain of two")
        ending = [f"{NAME}-worker-1", f"{NAME}-worker-2"]
        for name in ending:
            world.wait(lambda name=name: pod_is_ending(world, name), "deletion")
            world.cluster.finish_pod(name, NAMESPACE)

        done = {"conditions": [{"type": "Complete", "status": "True"}], "active": 0, "succeeded": 1}
        world.cluster.patch("jobs", f"{NAME}-launcher", {"status": done}, NAMESPACE, subresource="status")
        world.wait(lambda: "completionTime" in world.status(), "end")
        held = [one["type"] for one in world.status()["conditions"] if one["status"] == "True"]
        assert held == ["Created", "Succeeded"]
        world.wait(lambda: pod_is_ending(world, f"{NAME}-worker-0"), "cleaning")
    reasons = [event["reason"] for event in world.cluster.list("events", NAMESPACE)]
    assert reasons.count("Draining") == 2
    assert reasons.count("Succeeded") == 1


def pod_is_ending(world: World, name: str) -> bool:
    pod = world.cluster.get("pods", name, NAMESPACE)
    return pod is None or "deletionTimestamp" in pod["metadata"]


def test_a_job_with_a_journal_is_ended_by_its_driver_before_it_is_suspended(world: World) -> None:
    with world.controller():
        world.cluster.create(job(journal="etcd://etcd:2379/jobs/digits"))
        world.run_pods(2)
        world.trains()
        world.wait(lambda: world.status().get("workers") == 2, "status")
        world.cluster.patch(PLURAL, NAME, {"spec": {"runPolicy": {"suspend": True}}}, NAMESPACE)
        world.wait(lambda: world.cluster.get("jobs", f"{NAME}-launcher", NAMESPACE)["spec"]["suspend"], "suspension")
        assert world.driver.ended.is_set()
        assert len(world.driver.keys) == 1


def test_a_controller_that_was_away_goes_on_where_it_was(world: World) -> None:
    with world.controller():
        world.cluster.create(job(replicas=3, drainTimeoutSeconds=1000))
        world.run_pods(3)
        world.trains()
        world.wait(lambda: world.status().get("workers") == 3, "status")
        world.driver.says = None  # it does not answer, so the drain takes its time
        world.scale(2)
        drained = objects.DRAINED_SINCE
        world.wait(lambda: drained in str(world.cluster.get("pods", f"{NAME}-worker-2", NAMESPACE)), "drain")
    before = world.cluster.get("pods", f"{NAME}-worker-2", NAMESPACE)
    failed = world.cluster.fail_pod(f"{NAME}-worker-0", NAMESPACE)
    world.cluster.delete("configmaps", f"{NAME}-config", NAMESPACE)
    with world.controller():
        world.wait(lambda: len(world.listed()) == 1, "list of those that run")
        after = world.cluster.get("pods", f"{NAME}-worker-2", NAMESPACE)
        assert before is not None
        assert after is not None
        assert after["metadata"]["annotations"] == before["metadata"]["annotations"], "its drain began once"
        # No kubelet has to end the failed one: it is gone, and made anew, at once.
        world.wait(lambda: world.uid_of(f"{NAME}-worker-0") not in (None, failed["metadata"]["uid"]), "new pod")
        world.run_pods(3)
        world.wait(lambda: len(world.listed()) == 2, "list")


def test_two_controllers_do_no_harm(world: World) -> None:
    with world.controller(), world.controller():
        world.cluster.create(job(replicas=4))
        world.run_pods(4)
        world.wait(lambda: len(world.listed()) == 4, "list")
        assert len(world.pods()) == 4


def test_what_is_anothers_is_left_alone_and_told(world: World) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "b"}}
    world.cluster.create({**theirs, "metadata": {"name": f"{NAME}-config", "namespace": NAMESPACE}})
    with world.controller():
        world.cluster.create(job())
        events = lambda: [e for e in world.cluster.list("events", NAMESPACE) if e["reason"] == "Refused"]  # noqa: E731
        world.wait(events, "event")
        [event, *_] = events()
        assert f"cannot create ConfigMap {NAME}-config" in event["message"]
    found = world.cluster.get("configmaps", f"{NAME}-config", NAMESPACE)
    assert found is not None
    assert found["data"] == {"a": "b"}


def test_a_secret_of_that_name_which_is_anothers_is_told_too(world: World) -> None:
    theirs = {"apiVersion": "v1", "kind": "Secret", "data": {"join-token": "dGhlaXJz"}}
    world.cluster.create({**theirs, "metadata": {"name": f"{NAME}-tokens", "namespace": NAMESPACE}})
    with world.controller():
        world.cluster.create(job())
        texts = lambda: [e["message"] for e in world.cluster.list("events", NAMESPACE) if e["reason"] == "Refused"]  # noqa: E731
        world.wait(texts, "event")
        assert f"cannot create Secret {NAME}-tokens" in texts()[0]
    assert not world.pods(), "it would join nobody knows whom"


def test_drivers_that_do_not_answer_keep_nobody_waiting() -> None:
    class Jobs:
        """An API server with jobs whose launchers run."""

        async def find(self, version: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
            owned = {"metadata": {"name": name, "namespace": namespace, "ownerReferences": [{"uid": UID}]}}
            match kind:
                case "ElasticJob":
                    return resource(name=name)
                case "Secret" if name.endswith("-tokens"):
                    return {**owned, "data": {objects.OPERATOR_TOKEN: base64.b64encode(b"00" * 32).decode()}}
                case "Job":
                    return {**owned, "spec": {}, "status": {"active": 1}}
            return None

        async def list(self, *what: Any) -> list[Any]:
            return []

        async def create(self, body: dict[str, Any]) -> dict[str, Any]:
            return body

        async def patch(self, seen: dict[str, Any], changes: dict[str, Any], *, part: str = "") -> None:
            pass

    answered, release = threading.Event(), threading.Event()

    def ask_status(url: str, key: bytes) -> None:
        if "//quick-" in url:
            answered.set()
        else:
            release.wait(150)

    async def scenario() -> None:
        controller = Controller(cast(Api, Jobs()), ask_status=ask_status)
        for index in range(40):
            controller.look_at(NAMESPACE, f"slow-{index}")
        await asyncio.sleep(0.2)
        controller.look_at(NAMESPACE, "quick")
        try:
            async with asyncio.timeout(150):
                while not answered.is_set():
                    await asyncio.sleep(0.01)  # threads are what is short
        finally:
            release.set()
            await controller.close()

    asyncio.run(scenario())


def test_a_quota_for_fewer_pods_lets_the_job_begin_and_shrink(world: World) -> None:
    """It is told, too; and an event that cannot be made keeps nothing from being done."""

    def refuse_new(resource: str) -> None:
        world.cluster.refuse(
            403, times=1_000_000, when=lambda asked: (asked.verb, asked.resource) == ("create", resource)
        )

    with world.controller():
        world.cluster.create(job())
        world.run_pods(2)
        world.wait(lambda: world.names("jobs"), "launcher")
        refuse_new("pods")
        world.scale(4)
        world.cluster.delete("jobs", f"{NAME}-launcher", NAMESPACE)
        refused = lambda: [e for e in world.cluster.list("events", NAMESPACE) if e["reason"] == "Refused"]  # noqa: E731
        world.wait(refused, "event")
        world.trains()  # there is a launcher
        refuse_new("events")
        world.scale(1)
        world.cluster.delete_pod(f"{NAME}-worker-0", NAMESPACE, grace_s=0)  # its like is refused now
        world.wait(lambda: world.driver.drained, "drain")
        world.wait(lambda: _is_ending(world.cluster.get("pods", f"{NAME}-worker-1", NAMESPACE)), "pod's end")
    world.cluster.forget_requests()


def _is_ending(pod: dict[str, Any] | None) -> bool:
    return pod is None or bool(pod["metadata"].get("deletionTimestamp"))


def test_a_job_that_is_made_anew_while_its_end_is_seen_is_looked_after() -> None:
    class Empty:
        """An API server that has nothing; while it says so the first time, something is made."""

        def __init__(self) -> None:
            self.asked = 0

        async def find(self, *what: str) -> None:
            self.asked += 1
            if self.asked == 1:
                controller.look_at(NAMESPACE, NAME)

    async def scenario() -> int:
        controller.look_at(NAMESPACE, NAME)
        async with asyncio.timeout(150):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        return empty.asked

    empty = Empty()
    controller = Controller(cast(Api, empty))
    assert asyncio.run(scenario()) == 2


def test_watches_that_break_and_an_api_server_that_is_away(world: World) -> None:
    with world.controller():
        world.cluster.create(job())
        world.run_pods(2)
        world.wait(lambda: len(world.listed()) == 2, "list")
        world.cluster.cut_watches()
        world.cluster.compact()
        world.cluster.refuse(503, times=2)
        world.scale(3)
        world.run_pods(3)
        world.wait(lambda: len(world.listed()) == 3, "list of three")


def test_a_deleted_job_takes_all_of_its_objects_along(world: World) -> None:
    """The owner references do it: no controller need be there."""
    with world.controller():
        world.cluster.create(job(transport="ssh"))
        world.run_pods(2)
        world.wait(lambda: world.names("jobs"), "launcher")
        assert world.names("secrets") == [f"{NAME}-ssh", f"{NAME}-tokens"]
    world.cluster.delete(PLURAL, NAME, NAMESPACE)
    for name in world.pods():
        world.wait(lambda name=name: pod_is_ending(world, name), "deletion")
        world.cluster.finish_pod(name, NAMESPACE)
    for plural in ("configmaps", "secrets", "services", "jobs", "roles", "rolebindings", "serviceaccounts"):
        assert world.names(plural) == [], plural


def test_ssh_keys_are_such_as_ssh_takes(world: World, tmp_path: Path) -> None:
    with world.controller():
        world.cluster.create(job(transport="ssh"))
        secret = world.wait(lambda: world.cluster.get("secrets", f"{NAME}-ssh", NAMESPACE), "keys")
    private, public = (base64.b64decode(secret["data"][f"ssh-{kind}key"]) for kind in ("private", "public"))
    key = tmp_path / "id_rsa"
    key.touch(0o600)
    key.write_bytes(private)
    derived = subprocess.run(["ssh-keygen", "-y", "-f", str(key)], capture_output=True, timeout=150, check=True).stdout
    assert derived.split()[:2] == public.split()[:2]


def test_jobs_that_cannot_be_are_told_so(world: World) -> None:
    with world.controller():
        body = job()
        body["spec"]["mpiReplicaSpecs"]["Worker"]["template"] = {
            "spec": {"containers": [{"name": "main", "ports": "none"}]}
        }
        world.cluster.create(body)
        world.wait(lambda: "Refused" in str(world.cluster.list("events", NAMESPACE)), "event")
        body = job(runLauncherAsWorker=True)
        body["metadata"]["name"] = "other"
        world.cluster.create(body)
        world.wait(lambda: "runLauncherAsWorker" in str(world.cluster.get(PLURAL, "other", NAMESPACE)), "status")


def test_the_manifests_rights_are_for_what_it_does() -> None:
    """No verb on everything, and no wildcard."""
    for body in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text()):
        assert "*" not in str(body.get("rules", ""))


def is_alive(url: str) -> bool:
    """Whether a probe is answered."""
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=150).ok
    return False


def test_it_runs_as_a_program_and_ends_at_once(world: World) -> None:
    [deployment] = yaml.safe_load_all((MANIFESTS / "deployment.yaml").read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [port], probe = container["ports"], container["livenessProbe"]["httpGet"]
    command = [sys.executable, "-m", "elastic_driver.kubernetes", *container["command"][1:], "--namespace", NAMESPACE]
    at = command.index("--health-port") + 1
    assert (port["name"], str(port["containerPort"])) == (probe["port"], command[at])
    command[at] = str(free_port())
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        assert "watching ElasticJobs" in process.stderr.readline()
        wait_for("an answer to a probe", lambda: is_alive(f"http://127.0.0.1:{command[at]}{probe['path']}"))
        world.cluster.create(job())
        world.wait(lambda: len(world.pods()) == 2, "pods")
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            None,
            "kubeconfig {file} (KUBECONFIG) does not exist, and this process does not run in a pod "
            "(KUBERNETES_SERVICE_HOST is not set)",
        ),
        ("x: [", "cannot use {file}: while parsing a flow node"),
        ("- 1", "cannot use {file}: "),
        ("kind: Config", "cannot use {file}: "),
    ],
)
def test_without_a_cluster_it_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    said: str,
) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic-driver-controller: error: cannot reach Kubernetes: {said.format(file=file)}")


def test_without_its_libraries_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['kopf'] = None; from elastic_driver.kubernetes.__main__ import main; sys.exit(main())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    expected = "elastic-driver-controller: error: kopf is missing: pip install 'elastic-driver[kubernetes]'\n"
    assert ran.stderr == expected


def test_a_server_that_is_not_there_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://127.0.0.1:{port}")

    with pytest.raises(aiohttp.ClientConnectorError) as caught:
        asyncio.run(ask())
    assert _said(caught.value) == (
        f"cannot reach the API server at 127.0.0.1:{port}: nothing listens there (connection refused)"
    )
