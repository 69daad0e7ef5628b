"""Horovod's workers of TensorFlow: a host comes, a worker dies, the job ends."""

from __future__ import annotations

import time

import pytest

from tests.support.processes.horovod_jobs import TENSORFLOW_PROGRAM, Start
from tests.support.processes.jobs import check_agreement

pytestmark = [pytest.mark.integration, pytest.mark.horovod, pytest.mark.slow]


def test_a_host_comes_and_a_worker_dies(start: Start) -> None:
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", "STEPS": "400"}
    job = start("localhost:2\n", "-np", "2", "--min-np", "1", program=TENSORFLOW_PROGRAM, **quiet)
    first = {line["pid"] for line in job.wait_for_steps(2)}
    job.set_hosts("localhost:2\n127.0.0.1:1\n")
    grown = job.wait_for_steps(3)
    assert first < {line["pid"] for line in grown}
    at = time.time()
    job.kill(grown, 2)
    after = job.wait_for_steps(2, after=at)
    assert {line["pid"] for line in after} == first
    assert job.wait() == 0, job.all_said()
    lines = job.steps()
    check_agreement(lines)
    assert max(line["step"] for line in lines) == 400
    for pid in first:
        steps = [line["step"] for line in lines if line["pid"] == pid]
        assert len(steps) - len(set(steps)) <= 1, "a commit each step"
    assert "rank 0 of 2 is done" in job.printed()
