"""Restarted workers that end as they like: the job's end is that of its first round in which all end well."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.events import EndJob, HostsDiscovered, PublishRound, WorkerExited
from elastic_driver.core.state import WorkerPhase
from elastic_driver.hosts import Host
from elastic_driver.words import ExitCode, OnChange
from tests.support.extent import examples
from tests.support.fakes.membership_job import Job, worker_id

pytestmark = pytest.mark.property

MOST = 3
# Who ends in a round, one after the other, and with which code; who is not reached before a failure is stopped.
rounds = st.lists(
    st.permutations([0, 0, 0]) | st.permutations([0, 0, 1]) | st.permutations([1, 0, 2]), min_size=MOST + 1
)


@given(
    codes=rounds,
    order=st.permutations(range(3)),
    limit=st.integers(0, MOST),
    together=st.booleans(),
    draw=st.integers(0, 2),
)
@settings(max_examples=examples(80), deadline=None)
def test_all_are_started_again_until_all_end_well(
    codes: list[list[int]], order: list[int], limit: int, draw: int, *, together: bool
) -> None:
    """However many have ended well before another fails, and whether they are on one host or on three."""
    hosts = (Host("a", 3),) if together else tuple(Host(name, 1) for name in "abc")
    job = Job(
        num_proc=3,
        min_num_proc=3,
        reset_limit=limit,
        on_change=OnChange.RESTART,
        blames_hosts=False,
        retries_starts=True,
        setbacks_limit=MOST + 2,
        last_call_s=0.0,
    )
    job.feed(HostsDiscovered(hosts))
    begun = 0
    for of_round in codes[: limit + 1]:
        while not job.of(WorkerPhase.BOOTING):  # a pause after a setback
            deadline = next_deadline(job.state)
            assert deadline is not None
            job.timer(at=deadline)
        started = [worker_id(name) for name in job.of(WorkerPhase.BOOTING)]
        assert len(started) == 3, "also those that had ended well"
        for worker in started:
            job.begin(worker)
        begun += 1
        for place in order:
            worker = started[place]
            if str(worker) in job.of(WorkerPhase.MEMBER):
                job.feed(WorkerExited(worker, of_round[place], f"exited with code {of_round[place]}", draw / 2))
        for name in job.of(WorkerPhase.LEAVING):
            job.exit(name, -15)
        if not any(of_round):
            assert job.last(EndJob).exit_code == ExitCode.SUCCESS
            break
    else:
        assert job.last(EndJob).exit_code == ExitCode.RESET_LIMIT
    assert len([command for command in job.commands if isinstance(command, PublishRound)]) == begun
