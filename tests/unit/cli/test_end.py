"""Which jobs elasticrun end ends, and how, where their driver has died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_driver.cli import undriven
from elastic_driver.cli.target import left_behind
from elastic_driver.launch.agent.control import AgentHere
from elastic_driver.rendezvous.job_files import Posting
from tests.support.fakes.left_jobs import leave

pytestmark = pytest.mark.unit

JOB = "0123"


def post(kept: Path, *, lives: bool, parent: str = "") -> Posting:
    """The file of a driver."""
    posting = Posting.post(JOB, kept / "driver.sock", ["true"], journal=kept, parent=parent)
    assert posting is not None
    if not lives:
        os.close(posting._descriptor)
    return posting


def test_a_job_that_another_driver_takes_over_at_this_moment_is_not_one_without(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver is in its journal, and has no file yet."""
    kept = tmp_path / "kept"
    agents = {Path("agent.sock"): AgentHere(JOB, "localhost", connected=False, pid=1, workers=2, alone_s=3.0)}
    monkeypatch.setattr(undriven, "agents_here", lambda: agents)
    post(kept, lives=False)
    assert [job.job_id for job in undriven.undriven_jobs(JOB, left_behind(JOB).ids)] == [JOB], "nothing tells of it"
    leave(kept)  # with this process as its driver
    post(kept, lives=False)
    left = left_behind(JOB)
    assert (left.jobs, left.taken) == ([], [JOB])
    assert undriven.undriven_jobs(JOB, left.ids) == []
