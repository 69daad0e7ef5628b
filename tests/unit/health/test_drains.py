"""The pauses between drains of slow workers, also when another driver has taken the job over."""

from __future__ import annotations

import pytest

from elastic_driver.core.events import DrainRequested
from elastic_driver.health.drains import DRAIN_PAUSE_S, HOST_PAUSE_S, Drains
from elastic_driver.health.findings import NotDrained, StragglerFound
from elastic_driver.hosts import WorkerId
from tests.support.fakes.membership_job import Job

pytestmark = pytest.mark.unit


def found(hostname: str) -> StragglerFound:
    return StragglerFound(WorkerId(hostname, 0, 0), 0, 0.2, 0.1, 0.5, 0.5, 20)


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_host_whose_slow_worker_was_drained_is_left_alone_for_an_hour(is_taken_over: bool) -> None:
    """And the others for a minute."""
    job = Job(num_proc=4, min_num_proc=1)
    job.train("a:1", "b:1", "c:1", "d:1")
    drains, now = Drains(), job.now
    assert [type(each) for each in drains.take(found("b"), job.state, now)] == [DrainRequested]
    if is_taken_over:
        kept, drains = drains.kept(), Drains()
        drains.go_on(kept)
    (early,) = drains.take(found("c"), job.state, now + DRAIN_PAUSE_S / 2)
    assert isinstance(early, NotDrained)
    assert early.why == "another slow worker was drained 30 s ago"
    (again,) = drains.take(found("b"), job.state, now + DRAIN_PAUSE_S)
    assert isinstance(again, NotDrained)
    assert again.why == "a slow worker of host b was drained recently"
    assert [type(each) for each in drains.take(found("b"), job.state, now + HOST_PAUSE_S)] == [DrainRequested]
