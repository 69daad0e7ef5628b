"""A worker of a real job that takes longer than the others: named with its figures, or drained."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.worker.engine import native_loader
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes.hang_jobs import HangJob

pytestmark = [pytest.mark.integration, pytest.mark.faults]

try:
    native_loader.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

SLOW = "127.0.0.1[1]"
# So long that a busy machine makes nobody a fifth slower than the others in most of twenty steps.
STEP_S = 0.15


def slow_job(folder: Path, *flags: str) -> tuple[HangJob, Path]:
    """Four workers, and the file that says who of them is slow."""
    slow = folder / "slow"
    command = [sys.executable, str(PROGRAMS / "slow_program.py")]
    env = {"SLOW_FILE": str(slow), "STEP_S": str(STEP_S)}
    return HangJob(folder / "job", "nothing -1", *flags, slots=2, command=command, env=env), slow


def told_of_slow(job: HangJob) -> dict[str, Any]:
    """What the event log has of the slow one, once it has."""
    event: dict[str, Any] = job.wait_for(
        "the slow one is named", lambda: [e for e in job.events("straggler") if e["worker"] == f"{SLOW}#0"]
    )[0]
    return event


def test_a_slow_worker_is_named_with_its_figures_and_again_when_it_is_fast(tmp_path: Path) -> None:
    job, slow = slow_job(tmp_path)
    with job:
        job.wait_for_steps(4, 30)
        assert not job.events("straggler"), job.said()
        slow.write_text(f"{SLOW} 2.5")
        found = told_of_slow(job)
        rank = next(line["rank"] for line in job.steps() if line["worker"] == f"{SLOW}#0")
        assert (found["rank"], found["steps"]) == (rank, 20)
        # It is named as soon as it can be, when not all of the twenty steps are slow ones yet.
        assert 0.2 < found["against_others"] < 1 / 1.2
        assert 0.2 < found["against_past"] < 1 / 1.1
        assert found["own_s"] > 1.2 * found["median_s"]
        assert f"worker {SLOW} (rank {rank}) is slow" in job.said()
        slow.unlink()
        gone = job.wait_for("it is fast again", lambda: job.events("straggler_gone"))[0]
        assert (gone["worker"], gone["why"]) == (f"{SLOW}#0", "it is as fast as the others")
        assert {line["size"] for line in job.steps()} == {4}, "naming changes nothing"


def test_a_slow_worker_is_drained_where_that_is_asked_for_and_comes_back(tmp_path: Path) -> None:
    job, slow = slow_job(tmp_path, "--straggler-action", "drain")
    with job:
        job.wait_for_steps(4, 30)
        slow.write_text(f"{SLOW} 2.5")
        told_of_slow(job)
        job.wait_for("it is drained", lambda: [e["worker"] for e in job.events("worker_drained")] == [f"{SLOW}#0"])
        job.wait_for_steps(3, 5)
        exited = job.one("worker_exited")
        assert exited["worker"] == f"{SLOW}#0"
        assert (exited["returncode"], exited["expected"]) == (0, True), "it has left at a commit"
        assert [event["lost_s"] for event in job.events("round_formed")] == [0.0, 0.0], "and nothing was lost"
        slow.unlink()
        job_id = job.events("job_started")[0]["job_id"]
        undo = [sys.executable, "-m", "elastic_driver", "drain", "--undo", "--job", job_id, "127.0.0.1"]
        assert subprocess.run(undo, cwd=ROOT, timeout=150).returncode == 0
        job.wait_for_steps(4, 5, after=time.time())
        assert any(line["worker"] == f"{SLOW}#1" for line in job.steps())
