"""Jobs whose hosts are pods: the fake API server says which there are; their agents are processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_driver.launch.agent.machine import addresses
from tests.support.clusters.kubernetes_fake import FakeKubernetes
from tests.support.processes.jobs import Job, check_agreement

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not addresses(), reason="this machine has no address but loopback"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can make a namespace of processes for each host"),
]

# As in pods, agents do not see each other's processes.
_HOST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_TOKEN = "a token of the test's own"
_FLAGS = ("-np", "2", "--min-np", "1", "--discovery", "kubernetes", "--selector", "app=train", "--slots-per-host", "1")
# As kubectl does: one pod's name, its input passed on, and the words as they are.
_KUBECTL = """#!/bin/sh
test "$1 $2 $4" = "exec -i --" || exit 64
echo "$3" >> {dialled}
shift 4
exec {host} "$@"
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with FakeKubernetes() as made:
        made.create_node("node-1")
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(tmp_path / "kubeconfig")))
        yield made


def start(api: FakeKubernetes, name: str) -> None:
    api.create_pod(name, labels={"app": "train"}, grace_s=4000)
    api.run_pod(name)


@contextmanager
def joined(folder: Path, host: str, driver: str) -> Iterator[subprocess.Popen[str]]:
    """What runs in a pod. Ends with it."""
    words = ("join", "--driver", driver, "--slots", "2", "--host", host, "--join-token-file", str(folder / "token"))
    with (folder / f"{host}.txt").open("w") as said:
        agent = subprocess.Popen(
            [*_HOST, sys.executable, "-m", "elastic_driver", *words], stdout=said, stderr=said, text=True
        )
    try:
        yield agent
    finally:
        if agent.poll() is None:
            agent.kill()
        agent.wait(150)


def hosts_of(job: Job, after: float) -> set[str]:
    return {line["worker"].partition("[")[0] for line in job.steps() if line["time"] > after}


def test_pods_that_join(api: FakeKubernetes, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(_TOKEN)
    token.chmod(0o600)
    flags = (*_FLAGS, "--launcher", "none", "--accept-agents", "--join-token-file", str(token))
    start(api, "w-0")
    with Job(tmp_path, None, *flags) as job, ExitStack() as pods:
        said = job.wait_for("where to join", lambda: job.said().partition("elasticrun join --driver ")[2])
        driver = said.split()[0]
        pods.enter_context(joined(tmp_path, "stranger", driver))
        pods.enter_context(joined(tmp_path, "w-0", driver))
        last = pods.enter_context(ExitStack())
        last.enter_context(joined(tmp_path, "w-1", driver))
        assert not job.steps()
        start(api, "w-1")
        lines = job.wait_for_steps(2)
        assert hosts_of(job, 0) == {"w-0", "w-1"}, "one slot a pod, and no stranger"
        at = time.time()
        api.delete_pod("w-1")
        lines = job.wait_for_steps(1, after=at)
        assert "host w-1 is leaving at the next commit: its pod w-1 is being deleted" in job.said()
        left_s = float(job.said().partition("its machine goes away in ")[2].split()[0])
        assert 1000 < left_s <= 4000
        last.close()
        api.finish_pod("w-1")
        # It comes back under its name.
        start(api, "w-1")
        pods.enter_context(joined(tmp_path, "w-1", driver))
        lines = job.wait_for_steps(2, after=max(line["time"] for line in lines))
        check_agreement(job.steps())
        assert hosts_of(job, at) == {"w-0", "w-1"}
        steps = sorted(line["step"] for line in job.steps() if line["rank"] == 0)
        assert steps == list(range(steps[0], steps[0] + len(steps))), "no step was lost or done twice"
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        assert all(line.startswith(("elasticrun: ", "[")) for line in job.said().splitlines()), (
            "nothing of what was left open"
        )


def test_pods_that_are_dialled_as_kubectl_does(api: FakeKubernetes, tmp_path: Path) -> None:
    kubectl, dialled = tmp_path / "kubectl", tmp_path / "dialled"
    kubectl.write_text(_KUBECTL.format(dialled=dialled, host=" ".join(_HOST)))
    start(api, "w-0")
    start(api, "w-1")
    with Job(tmp_path, None, *_FLAGS, "--launcher-command", f"sh {kubectl} exec -i {{host}} --") as job:
        job.wait_for_steps(2)
        at = time.time()
        api.cordon("node-1")  # both are to go, and none can: the job needs one
        job.wait_for("what the driver says", lambda: "node-1 has the taint" in job.said())
        api.uncordon("node-1")
        job.wait_for("what the driver says", lambda: "can be used again" in job.said())
        api.evict("w-0")
        job.wait_for_steps(1, after=at)
        start(api, "w-2")
        at = time.time()
        job.wait_for_steps(2, after=at)
        assert hosts_of(job, at) >= {"w-1", "w-2"}
        check_agreement(job.steps())
        assert sorted(dialled.read_text().split()) == ["w-0", "w-1", "w-2"]


def test_what_ends_a_job_at_its_start(api: FakeKubernetes, tmp_path: Path) -> None:
    token = api.user("nobody")
    api.kubeconfig(tmp_path / "kubeconfig", token=token)
    with Job(tmp_path, None, *_FLAGS) as job:
        assert job.wait() == 2
        assert "cannot read pods in namespace default from Kubernetes" in job.said()
        assert "needs the verbs list and watch on pods" in job.said()
        assert "Traceback" not in job.said()
