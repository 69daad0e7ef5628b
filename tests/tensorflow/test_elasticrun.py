"""``elasticrun --parameter-servers`` with TensorFlow itself, and a script that knows nothing of this package."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes.jobs import FORKED, Job

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def run(folder: Path, steps: int, *flags: str, hosts: str = "localhost:3") -> Job:
    """A job of the plain script on this machine's loopback."""
    script = [sys.executable, str(PROGRAMS / "tf_chief_program.py"), str(folder), str(steps)]
    env = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    words = ("-H", hosts, "--parameter-servers", "1", *flags)
    return Job(folder, None, *words, command=script, env=env, elasticrun=FORKED)


def said(job: Job) -> str:
    return job.stdout.read_text(errors="replace")


def kill_parameter_server(job: Job) -> None:
    """It has the first place, though not always the first process."""
    (pid,) = [event["pid"] for event in job.events("worker_started") if event["worker"] == "localhost[0]#0"]
    os.kill(pid, signal.SIGKILL)


def test_a_plain_script_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # who sets it, gets what it is of use for
    with run(tmp_path, 50, "-np", "2") as job:
        assert job.wait() == 0, job.said()[-4000:]
        assert "[chief]<stdout>:sum 50\n" in said(job)
    # The servers say nothing that a user would have to read.
    noise = [line for line in job.said().splitlines() if line.startswith(("[0]", "[1]", "[ps0]"))]
    assert not noise


def test_a_script_that_is_started_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    flags = ("-np", "1", "--min-np", "1", "--restart-chief", "--blacklist-cooldown-range", "1", "1")
    with run(tmp_path, 20, *flags, hosts="localhost:2") as job:
        job.wait_for("the first ten", lambda: "done 10" in said(job))
        kill_parameter_server(job)
        job.wait_for("another chief", lambda: len(job.events("chief_started")) == 2)
        (tmp_path / "hold").unlink()
        assert job.wait() == 0, job.said()[-4000:]
        assert "[chief]<stdout>:begins at 10\n" in said(job)
        assert "[chief]<stdout>:sum 20\n" in said(job)
        # The same worker's server, which knew the first chief, has taken the second.
        workers = [event for event in job.events("worker_started") if event["worker"].startswith("localhost[1]")]
        assert len(workers) == 1


def test_the_script_goes_on_when_the_driver_dies(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with run(tmp_path, 20, "-np", "1", "--journal", str(tmp_path / "kept"), hosts="localhost:2") as job:
        job.wait_for("the first ten", lambda: "done 10" in said(job))
        os.kill(job.driver_pid(), signal.SIGKILL)
        job.wait_for("a takeover", lambda: job.events("took_over"))
        (tmp_path / "hold").unlink()
        assert job.wait() == 0, job.said()[-4000:]
        assert [line for line in said(job).splitlines() if "begins" in line or "done" in line] == [
            "[chief]<stdout>:begins at 0",
            "[chief]<stdout>:done 10",
            "[chief]<stdout>:done 20",
        ]
        assert len(job.events("chief_started")) == 1


def test_a_lost_parameter_server_is_an_error_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with run(tmp_path, 20, "-np", "1", hosts="localhost:2") as job:
        job.wait_for("the first ten", lambda: "done 10" in said(job))
        kill_parameter_server(job)
        assert job.wait() == 1
        message = job.events("job_ended")[-1]["message"]
        assert message.startswith(
            "parameter server 0 (localhost[0]) killed by SIGKILL, and its variables are lost; then"
        )
        assert "UnavailableError" in job.said()
