"""Pods as machines: of a Kubeflow TrainJob, with exactly the environment and names that Trainer gives; of a JobSet."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.support.clusters.fake_trainer import PATH
from tests.support.network.machines import made_machines, marks
from tests.support.network.namespaces import NamespaceHost
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes.jobs import check_agreement
from tests.support.processes.json_lines import JsonLines
from tests.support.processes.nodes import Node, NodesJob

pytestmark = marks


class Pods(NodesJob):
    """The pods of the TrainJob "train": ``train-node-0-INDEX``, under the headless service of the job's name."""

    def __init__(self, folder: Path, machines: list[NamespaceHost], *flags: str) -> None:
        super().__init__(folder)
        self.machines, self.flags = machines, flags
        self.token = folder / "token"
        self.token.write_text("a token of the test's own\n")
        self.token.chmod(0o600)
        for number, host in enumerate(machines):
            (host.etc / "hostname").write_text(f"train-node-0-{number}\n")

    def resolve(self) -> None:
        """The names of all pods are there, as when the service has its endpoints."""
        for host in self.machines:
            with (host.etc / "hosts").open("a") as hosts:
                for number, each in enumerate(self.machines):
                    hosts.write(f"{each.ipv4} train-node-0-{number}.train train-node-0-{number}\n")

    def run(self, index: int, name: str) -> Node:
        """Starts a pod's container, with Trainer's environment and nothing else that says anything."""
        host = self.machines[index]
        told = {
            "PET_NNODES": str(len(self.machines)),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "train-node-0-0.train",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(index),
            "ELASTIC_DRIVER_JOIN_TOKEN_FILE": str(self.token),
            "ELASTIC_DRIVER_GRACE": "30",
            # Of a Trainer that this pod cannot reach.
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:1{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/var/run/secrets/kubeflow/trainer/ca.crt",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": "/var/run/secrets/kubeflow/trainer/token",
        }
        log = {"NODE": name, "LOG": str(self.log), "END": str(self._end), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "elastic_driver", *self.flags, str(PROGRAMS / "node_worker.py")]
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            env: dict[str, Any] = {**host.environment(), **told, **log}
            process = host.popen(command, stdout=out, stderr=err, env=env, cwd=self.folder)
        node = Node(name, process, self.folder)
        self.started.append(node)
        return node


def test_a_trainjob_with_nothing_but_what_trainer_says(tmp_path: Path) -> None:
    with made_machines(2, sshd=False) as machines, Pods(tmp_path, list(machines)) as job:
        second = job.run(1, "second")
        job.wait_for("it waits for the name", lambda: "waiting for up to " in second.err)
        job.resolve()
        first = job.run(0, "first")
        world = job.wait_for_world("first", "second")
        assert [world[rank]["NODE"] for rank in range(2)] == ["first", "second"]
        assert {line["MASTER_ADDR"] for line in world.values()} == {machines[0].ipv4}

        # The second pod is evicted: its grace period counts, and it is not done. Another one takes its place.
        second.signal(signal.SIGTERM)
        assert second.wait() == 128 + signal.SIGTERM
        assert "its agent received SIGTERM; its machine goes away in 30 s" in first.err
        again = job.run(1, "again")
        world = job.wait_for_world("first", "again")
        assert [world[rank]["NODE"] for rank in range(2)] == ["first", "again"]

        job.end(0)
        assert [first.wait(), again.wait()] == [0, 0]
        assert first.err.count("cannot report progress to Kubeflow Trainer") == 1
        assert "Kubeflow" not in again.err, "only the driver tells"


def test_a_trainjob_that_goes_on_with_fewer_pods(tmp_path: Path) -> None:
    with made_machines(3, sshd=False) as machines, Pods(tmp_path, list(machines), "--nnodes", "2:3") as job:
        job.resolve()
        nodes = [job.run(index, f"pod{index}") for index in range(3)]
        job.wait_for_world("pod0", "pod1", "pod2")
        nodes[2].signal(signal.SIGKILL)
        job.wait_for_world("pod0", "pod1")
        late = job.run(2, "pod2-again")
        job.wait_for_world("pod0", "pod1", "pod2-again")
        job.end(0)
        assert [node.wait() for node in (nodes[0], nodes[1], late)] == [0, 0, 0]


def test_a_jobset_whose_pods_join(tmp_path: Path) -> None:
    """The commands of the manifest, as they stand there but for paths and names of what is installed."""
    [manifest] = yaml.safe_load_all((ROOT / "deploy/kubernetes/jobset/jobset.yaml").read_text(encoding="utf-8"))
    token = tmp_path / "token"
    token.write_text("a token of the test's own\n")
    token.chmod(0o600)
    installed = {"/etc/elastic-driver/token": [str(token)], "elasticrun": [sys.executable, "-m", "elastic_driver"]}
    installed |= {"python": [sys.executable], "train.py": [str(PROGRAMS / "step_program.py")]}
    commands = {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
        for job in manifest["spec"]["replicatedJobs"]
    }
    steps = JsonLines(tmp_path / "steps.jsonl")
    (tmp_path / "steps.jsonl").touch()

    with made_machines(3, sshd=False) as machines, NodesJob(tmp_path) as pods:

        def run(job: str, host: NamespaceHost, pod: str) -> Node:
            words = [each for word in commands[job] for each in installed.get(word, [word.replace("$(POD_NAME)", pod)])]
            env = {**host.environment(), "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "STEPS": "1000000"}
            env |= {"STEP_LOG": str(tmp_path / "steps.jsonl"), "STEP_S": "0.02"}
            with (tmp_path / f"{pod}.out").open("wb") as out, (tmp_path / f"{pod}.err").open("wb") as err:
                process = host.popen(words, stdout=out, stderr=err, env=env, cwd=tmp_path)
            pods.started.append(Node(pod, process, tmp_path))
            return pods.started[-1]

        def wait_for_hosts(size: int, *names: str) -> None:
            at = time.time()

            def found() -> bool:
                fresh = [line for line in steps.all() if line["time"] > at and line["size"] == size]
                return {line["worker"].partition("[")[0] for line in fresh} == set(names)

            pods.wait_for(f"steps on {names}", found)

        first = run("worker", machines[1], "elastic-worker-0-0-aaaaa")
        pods.wait_for("it waits for the driver", lambda: "cannot reach the driver yet" in first.err)
        for host in machines:
            with (host.etc / "hosts").open("a") as hosts:
                hosts.write(f"{machines[0].ipv4} elastic-driver-0-0.elastic\n")
        driver = run("driver", machines[0], "elastic-driver-0-0-bbbbb")
        second = run("worker", machines[2], "elastic-worker-0-1-ccccc")
        wait_for_hosts(2, first.name, second.name)

        # A pod is evicted, and the one in its place comes before it has left.
        third = run("worker", machines[1], "elastic-worker-0-0-ddddd")
        wait_for_hosts(3, first.name, second.name, third.name)
        first.signal(signal.SIGTERM)
        assert first.wait() == 143, "it is not done"
        wait_for_hosts(2, second.name, third.name)
        check_agreement(steps.all())
        assert (
            f"host {first.name} is leaving at the next commit: its agent received SIGTERM; its machine goes away in "
            "60 s" in (driver.err)
        )
        driver.signal(signal.SIGTERM)
        assert driver.wait() == 128 + signal.SIGTERM
        assert [second.wait(), third.wait()] == [75, 75], "their driver was told to end, and another may come"
