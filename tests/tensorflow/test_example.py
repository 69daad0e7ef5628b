"""examples/train_ps.py as a user runs it: with a TF_CONFIG made by hand, killed and run again, and with elasticrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.jobs import FORKED, Job
from tests.support.processes.tensorflow_servers import Servers, a_closed_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_ps.py"

pytestmark = [pytest.mark.integration, pytest.mark.tensorflow, pytest.mark.slow]


def environment(cluster: dict[str, list[str]], job: str = "chief") -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": job, "index": 0}}
    return {**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONPATH": str(ROOT)}


def test_by_hand(servers: Servers, tmp_path: Path) -> None:
    ps, worker = servers.start_all("ps", "worker")
    with a_closed_port() as chief:
        cluster = {"ps": [ps.address], "worker": [worker.address], "chief": [chief]}

    def run(epochs: int) -> subprocess.CompletedProcess[str]:
        # To the parameter server this path is another folder, which does not exist, as on another machine.
        command = [sys.executable, str(SCRIPT), "--checkpoints", "kept", "--epochs", str(epochs)]
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment(cluster), capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    run(6)
    # The second resumes from the checkpoint of the first.
    ran = run(20)
    lines = ran.stdout.splitlines()
    assert lines[0] == "resuming after epoch 6"
    assert lines[1].startswith("epoch 7: ")
    accuracy = re.fullmatch(r"test accuracy (0\.\d+|1\.000)", lines[-1])
    assert accuracy, lines
    assert float(accuracy[1]) > 0.95


def test_the_script_is_a_server_where_tf_config_says_so(servers: Servers, tmp_path: Path) -> None:
    ps = servers.start("ps")
    with a_closed_port() as there:
        address = there
    with a_closed_port() as chief:
        cluster = {"ps": [ps.address], "worker": [address], "chief": [chief]}
    with subprocess.Popen([sys.executable, str(SCRIPT)], env=environment(cluster, "worker")) as worker:
        try:
            command = [sys.executable, str(SCRIPT), "--checkpoints", str(tmp_path), "--epochs", "2"]
            ran = subprocess.run(command, env=environment(cluster), capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0, ran.stderr
            assert "epoch 2: " in ran.stdout
            assert worker.poll() is None
        finally:
            worker.send_signal(signal.SIGKILL)


def test_without_a_cluster(servers: Servers) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "TF_CONFIG is not set" in ran.stderr


def accuracies(job: Job) -> list[float]:
    """After each epoch so far."""
    said = re.findall(r"^\[chief\]<stdout>:epoch .* test accuracy ([0-9.]+),", job.stdout.read_text(), re.MULTILINE)
    return [float(one) for one in said]


def test_with_elasticrun(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--checkpoints", str(tmp_path / "checkpoints"), "--epochs"]
    flags = ("--parameter-servers", "1", "-np", "1", "--min-np", "1", "--max-np", "2")
    given = {"env": {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}, "elasticrun": FORKED}
    with Job(tmp_path, "localhost:2\n", *flags, command=[*command, "100000"], **given) as job:
        job.wait_for("an epoch of one", lambda: ", workers [0]\n" in job.stdout.read_text())
        job.set_hosts("localhost:3\n")
        job.wait_for("an epoch of two", lambda: ", workers [0, 1]\n" in job.stdout.read_text())
        # The first worker's server dies, and another is started: a worker at a new address, with a new index.
        started = [event for event in job.events("worker_started") if event["worker"].startswith("localhost[1]")]
        os.kill(started[0]["pid"], signal.SIGKILL)
        job.wait_for("an epoch with another", lambda: ", workers [1, 2]\n" in job.stdout.read_text())
        # However long the newcomer took to come, the training goes on until here.
        job.wait_for("it has learnt", lambda: any(one > 0.95 for one in accuracies(job)[-1:]))
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.said()[-4000:]
