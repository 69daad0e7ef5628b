"""accelerate, Lightning and transformers' Trainer under elasticrun, with scripts that know nothing of it.

Run where these are installed: scripts/install-frameworks makes such an environment, see CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.jobs import FORKED, Job

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 40

pytestmark = [pytest.mark.integration, pytest.mark.frameworks]


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_a_worker_is_killed_and_a_host_comes(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"there is no {framework}: scripts/install-frameworks installs it")
    name = "trainer" if framework == "transformers" else framework
    env = {"CHECKPOINTS": str(tmp_path / "checkpoints"), "STEPS": str(STEPS), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPTS / f"with_{name}.py")]
    hosts, flags = "localhost:1\n127.0.0.1:1\n", ("-np", "2", "--min-np", "1")
    with Job(tmp_path, hosts, *flags, command=command, env=env, elasticrun=FORKED) as job:
        lines = job.wait_for_steps(2, 6)
        os.kill(next(line["pid"] for line in lines if line["rank"] == 1), signal.SIGKILL)
        at = lines[-1]["time"]
        job.wait_for_steps(1, 2, after=at)
        job.set_hosts("localhost:1\n127.0.0.2:1\n")
        at = job.steps()[-1]["time"]
        job.wait_for_steps(2, 2, after=at)
        assert job.wait() == 0, job.said()
        of_rank_0 = [line for line in job.steps() if line["rank"] == 0]
        generations = [list(group) for _, group in itertools.groupby(of_rank_0, key=lambda line: line["pid"])]
        assert [group[0]["size"] for group in generations] == [2, 1, 2]
        # Each begins at a checkpoint of those before, and none begins anew.
        assert all(group[0]["step"] > 4 for group in generations[1:]), [group[0] for group in generations]
        assert generations[-1][-1]["step"] == STEPS


def test_accelerate_launch_tells_its_workers_what_it_is_told(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("there is no accelerate: scripts/install-frameworks installs it")
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "from accelerate import Accelerator\n"
        "of = Accelerator()\n"
        "print(of.process_index, of.num_processes, of.mixed_precision, os.environ['ELASTIC_DRIVER_WORKER'])\n"
        "of.end_training()\n"
    )
    flags = ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16"]
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags, str(script)]
    ran = subprocess.run(
        [sys.executable, "-m", "elastic_driver.cli.main", "wrap", *launch],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [f"[{rank}]<stdout>:{rank} 2 bf16 localhost[{rank}]#0" for rank in (0, 1)]
