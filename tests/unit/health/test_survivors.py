"""Whether the training's state would be lost with a worker that hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver.health.survivors import why_spared
from elastic_driver.hosts import WorkerId
from elastic_driver.words import OnChange
from tests.support.fakes.membership_job import Job

pytestmark = pytest.mark.unit

A0, A1, B0 = WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0)
ALONE = "no remaining worker would have the training's state, and no commit is on disk (--durable-dir)"


def trained(*hosts: str, **limits: object) -> Job:
    job = Job(**{"num_proc": 2, "min_num_proc": 1, **limits})
    job.train(*hosts)
    return job


@pytest.mark.parametrize(
    ("limits", "is_on_disk", "why"),
    [
        ({}, False, ALONE),
        ({}, True, ALONE),  # of a job that does not look there
        ({"durable": True}, False, ALONE),
        ({"durable": True}, True, ""),
        ({"blames_hosts": False}, False, ""),  # the other worker of its host stays
    ],
)
def test_the_last_host_with_the_state(limits: dict[str, object], is_on_disk: bool, why: str) -> None:
    assert why_spared(trained("a:2", **limits).state, A0, (), is_on_disk=is_on_disk) == why


def test_who_is_restarted_from_a_checkpoint_has_no_state_to_lose() -> None:
    state = trained("a:2").state
    for on_change in (OnChange.RESTART, OnChange.NO_ROUNDS):
        other = replace(state, policy=replace(state.policy, on_change=on_change))
        assert why_spared(other, A0, (), is_on_disk=False) == ""


def test_who_is_ended_at_the_same_moment_or_leaves_does_not_count() -> None:
    job = trained("a:2", "b:1", num_proc=3)
    assert why_spared(job.state, A0, (), is_on_disk=False) == ""
    assert why_spared(job.state, A0, (B0,), is_on_disk=False) == ALONE
    assert why_spared(job.state, A0, (A1,), is_on_disk=False) == ""
    job.exit(str(B0), -9)
    assert why_spared(job.state, A0, (), is_on_disk=False) == ALONE
    assert why_spared(job.state, B0, (), is_on_disk=False) == "", "it is not there any more"
