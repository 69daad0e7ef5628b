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
from tensorflow_servers import Servers, a_closed_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_ps.py"

pytestmark = [pytest.mark.integration, pytest.mark.tensorflow, pytest.mark.slow, pytest.mark.timeout(200)]


def environment(cluster: dict[str, list[str]], job: str = "chief") -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": job, "index": 0}}
    return {**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONPATH": str(ROOT)}


def test_by_hand(servers: Servers, tmp_path: Path) -> None:
    ps, worker = servers.start_all("ps", "worker")
    with a_closed_port() as chief:
        cluster = {"ps": [ps.address], "worker": [worker.address], "chief": [chief]}
    command = [sys.executable, str(SCRIPT), "--checkpoints", str(tmp_path), "--epochs"]
    ran = subprocess.run([*command, "6"], env=environment(cluster), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    # The second goes on from the checkpoint of the first.
    ran = subprocess.run([*command, "20"], env=environment(cluster), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "goes on after epoch 6"
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
