"""Which library a worker gets where Horovod is installed, and how its workers do that are started in other ways."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.processes.horovod_jobs import HorovodJob, Start
from tests.support.processes.jobs import PROGRAM as OUR_PROGRAM
from tests.support.processes.jobs import check_agreement

pytestmark = [
    pytest.mark.integration,
    pytest.mark.horovod,
    pytest.mark.only_elasticrun,
    pytest.mark.slow,
]

TWO = "localhost:2\n"
FOUR = "localhost:2\n127.0.0.1:2\n"
PATIENT_GLOO = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}


def backends(job: HorovodJob) -> set[str]:
    # A script that the driver cannot read has a round without one before its first init().
    return {event["backend"] for event in job.events("round_formed") if event["backend"] is not None}


def test_horovods_own(start: Start) -> None:
    job = start(None, "-np", "2")
    assert job.wait() == 0, job.all_said()
    assert backends(job) == {"horovod"}


def test_a_script_of_ours_stays_ours(start: Start) -> None:
    """It never comes to the older protocol because of what else is installed."""
    job = start(None, "-np", "2", program=OUR_PROGRAM, STEPS="5")
    assert job.wait() == 0, job.all_said()
    assert backends(job) == {"native"}


def test_this_package_under_horovods_name(start: Start) -> None:
    job = start(None, "-np", "2", "--horovod-shim", "always")
    assert job.wait() == 0, job.all_said()
    assert backends(job) == {"native"}
    assert job.sizes() == [2]


WAYS = {
    # No import hook runs there: what Horovod asks by itself has to do.
    "isolated": (sys.executable, "-I"),
    "behind_a_shell": ("sh", "-c", 'exec python3 "$0"'),
}


@pytest.mark.parametrize("way", WAYS)
def test_workers_that_are_started_otherwise(start: Start, way: str) -> None:
    """They grow, shrink, and live through a death as others do; who is removed may abort, and is not blamed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    flags = ("-np", "2", "--min-np", "1")
    job = start(TWO, *flags, python=WAYS[way], PATH=path, SIZES="2,4,2,3,1", **PATIENT_GLOO)
    job.wait_for_epoch(1)
    job.set_hosts(FOUR)
    job.wait_for_epoch(2)
    job.set_hosts(TWO)
    job.wait_for_epoch(3)
    assert "blacklisted" not in job.said(), job.said()
    assert "removed from the job" not in job.said(), job.said()
    job.set_hosts("localhost:2\n127.0.0.2:1\n")
    job.wait_for_epoch(4)
    job.set_hosts("localhost:1\n127.0.0.2:1\n")
    lines = job.wait_for_steps(2, 3, after=job.steps()[-1]["time"])
    job.kill(lines, 1)
    assert job.wait() == 0, job.all_said()
    assert job.sizes() == [2, 4, 2, 3, 1]
    assert job.leaders() == [0] * 5
    assert backends(job) == {"horovod"}
    check_agreement(job.steps())
