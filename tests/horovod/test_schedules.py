"""Horovod's elastic schedules with its own workers, as its own tests of whole jobs want them to end.

An epoch goes on until the job has the size that it should have by then; a change that does not come is a time-out.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.support.processes.horovod_jobs import Start
from tests.support.processes.jobs import check_agreement

pytestmark = [pytest.mark.integration, pytest.mark.horovod, pytest.mark.slow]

TWO = "localhost:2\n"
FOUR = "localhost:2\n127.0.0.1:2\n"
THREE_HOSTS = f"localhost:1\n127.0.0.1:1\n{os.uname().nodename}:1\n"
FIXED = ("-H", "localhost:2,127.0.0.1:2")
# What horovodrun says of a job whose workers have failed.
THEY_FAILED = "one or more processes exited with non-zero status"


def faults(*each: tuple[int, int, str]) -> dict[str, str]:
    return {"FAULTS": json.dumps(each)}


@pytest.mark.parametrize("slots", [2, 1])
def test_hosts_are_added_and_removed(start: Start, slots: int) -> None:
    """Rank 0 stays where it is until its host goes; then the first of the other host's workers leads.

    Nothing is lost: it was planned.
    """
    one, other = f"localhost:{slots}\n", f"127.0.0.1:{slots}\n"
    job = start(one, "-np", str(slots), "--min-np", "1", SIZES=f"{slots},{2 * slots},{slots}")
    job.wait_for_epoch(1)
    job.set_hosts(one + other)
    job.wait_for_epoch(2)
    job.set_hosts(other)
    assert job.wait() == 0, job.all_said()
    lines = job.steps()
    assert job.sizes() == [slots, 2 * slots, slots]
    assert job.leaders() == [0, 0, slots], "who was started as that rank leads"
    assert {line["host"] for line in lines[-slots:]} == {"127.0.0.1"}
    check_agreement(lines)
    for pid in {line["pid"] for line in lines}:
        steps = [line["step"] for line in lines if line["pid"] == pid]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "no step was lost, none done twice"
    if job.is_ours:
        assert len(job.events("round_formed")) == 3
        assert "127.0.0.1 added" in job.said()
        assert "localhost removed" in job.said()
        assert "blacklisted" not in job.said()
        assert "removed from the job" not in job.said()


@pytest.mark.parametrize("how", ["exception", "kill"])
@pytest.mark.parametrize("hosts", ["discovered", "fixed"])
def test_one_rank_fails(start: Start, hosts: str, how: str) -> None:
    """Its host goes with it, and the first worker of the other host leads; on fixed hosts (-H) just so."""
    flags, script = ("-np", "4", "--min-np", "2"), FOUR
    job = start(
        script if hosts == "discovered" else None,
        *(flags if hosts == "discovered" else (*flags, *FIXED)),
        SIZES="4,2,2",
        **faults((1, 0, how)),
    )
    assert job.wait() == 0, job.all_said()
    lines = job.steps()
    assert job.sizes() == [4, 2, 2]
    assert job.leaders() == [0, 2, 2]
    assert {line["host"] for line in lines if line["epoch"] == 2} == {"127.0.0.1"}
    check_agreement(lines)
    for pid in {line["pid"] for line in lines if line["size"] == 2}:
        steps = [line["step"] for line in lines if line["pid"] == pid]
        assert len(steps) - len(set(steps)) <= 1, "a commit each batch"
    if how == "exception":
        assert "a bug in the training script" in job.all_said()
    if job.is_ours:
        assert len(job.events("round_formed")) == 2
        cause = "exited with code 1" if how == "exception" else "killed by SIGKILL"
        assert f"worker localhost[0] {cause}" in re.sub(r" \(pid \d+\)", "", job.said())
        assert "host localhost lost" in job.said()


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_all_ranks_fail(start: Start, how: str) -> None:
    job = start(FOUR, "-np", "4", "--min-np", "2", SIZES="4,4", **faults(*((1, rank, how) for rank in range(4))))
    assert job.wait() == 1
    assert {line["epoch"] for line in job.steps()} == {0, 1}
    cause = "exited with code 1" if how == "exception" else "killed by SIGKILL"
    assert (f"{cause}" if job.is_ours else THEY_FAILED) in job.said(), job.said()
    if job.is_ours:
        assert "job failed" in job.said()
        assert len(job.events("round_formed")) == 1


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_all_hosts_are_blacklisted(start: Start, how: str) -> None:
    job = start(FOUR, "-np", "4", "--min-np", "2", SIZES="4,2", **faults((1, 0, how), (1, 2, how)))
    assert job.wait() == 1
    assert ("is removed from the job" if job.is_ours else THEY_FAILED) in job.said(), job.said()


def test_too_few_slots_in_time(start: Start) -> None:
    """horovodrun ends with 1; here an exit code of its own says that slots were missing."""
    flags = ("-np", "4", "--min-np", "4", "--elastic-timeout", "3")
    job = start(FOUR, *flags, SIZES="4,4", **faults((1, 0, "kill")))
    assert job.wait() == (3 if job.is_ours else 1)
    if job.is_ours:
        assert "gave up after 3 s (--elastic-timeout)" in job.said()
        assert "blacklisted: localhost" in job.said()


@pytest.mark.parametrize("limit", [1, 2])
def test_the_reset_limit(start: Start, limit: int) -> None:
    """Two workers die, one after the other. The exit code 4 is this driver's own."""
    flags = ("-np", "3", "--min-np", "1", "--reset-limit", str(limit))
    job = start(THREE_HOSTS, *flags, SIZES="3,2,1", **faults((1, 2, "kill"), (2, 1, "kill")))
    code = job.wait()
    if limit == 2:
        assert code == 0, job.all_said()
        assert job.sizes() == [3, 2, 1]
        return
    assert code == (4 if job.is_ours else 1)
    assert ("--reset-limit" if job.is_ours else "number of resets during elastic job exceeded limit: 1") in job.said()
    assert 1 not in {line["size"] for line in job.steps()}


@pytest.mark.parametrize("limit", [1, 2])
def test_planned_changes_and_the_reset_limit(start: Start, limit: int) -> None:
    """Differs on purpose: for horovodrun a host that comes and one that goes are two resets, here they are none."""
    job = start(TWO, "-np", "2", "--min-np", "2", "--reset-limit", str(limit), SIZES="2,4,2")
    job.wait_for_epoch(1)
    job.set_hosts(FOUR)
    job.wait_for_epoch(2)
    job.set_hosts(TWO)
    code = job.wait()
    if job.is_ours or limit == 2:
        assert code == 0, job.all_said()
        assert job.sizes() == [2, 4, 2]
    else:
        assert code == 1
        assert "number of resets during elastic job exceeded limit: 1" in job.said()


def test_a_host_comes_back_after_its_cooldown_and_fails_again(start: Start) -> None:
    """In Horovod's own test an epoch takes as long as it takes; here it goes on until the host is there again."""
    job = start(
        FOUR,
        *("-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "1", "2"),
        SIZES="4,2,4,2,4",
        BATCHES="4",
        **faults((1, 3, "kill"), (3, 3, "kill")),
    )
    assert job.wait() == 0, job.all_said()
    assert job.sizes() == [4, 2, 4, 2, 4]
    assert set(job.leaders()) == {0}
    check_agreement(job.steps())
    # Who has come back is another process each time, and the others are those of the start.
    of_rank_3 = {line["pid"] for line in job.steps() if line["rank"] == 3}
    of_rank_0 = {line["pid"] for line in job.steps() if line["rank"] == 0}
    assert (len(of_rank_3), len(of_rank_0)) == (3, 1)
