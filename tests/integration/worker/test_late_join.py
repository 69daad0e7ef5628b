"""A worker that is started while a round runs: init() returns at once, and the round is joined when it is needed."""

from __future__ import annotations

import signal

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.environment import ENV_PLACE, ENV_ROUND
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support.fakes.fake_job import FakeJob, Process, workers_on
from tests.support.paths import PROGRAMS
from tests.support.processes.backends import FIRST

pytestmark = pytest.mark.integration

PROGRAM = PROGRAMS / "late_join_program.py"
LATE = WorkerId("b", 0, 0)
THIRD_OF_THREE = [2, 3, 0, 1, 1, 2]


def spawn_late(job: FakeJob, program: str, *args: str, place: list[int]) -> Process:
    env = {ENV_ROUND: "1", ENV_PLACE: ",".join(map(str, place))}
    return job.spawn(LATE, program, *args, env=env, file=PROGRAM)


def wait_built(job: FakeJob, worker: WorkerId) -> list[int]:
    """Blocks until init() has returned there; gives the place that the worker believes to have."""
    lines = job.processes[worker].lines
    job.wait_for(lambda: any("place" in line for line in lines), f"init() of {worker}")
    assert lines[0]["initialized"] is True
    place: list[int] = lines[0]["place"]
    return place


def asked(job: FakeJob) -> list[WorkerId]:
    return [request.worker for request in job.requests]


@pytest.mark.parametrize("backend", FIRST)
@pytest.mark.parametrize("planned", [THIRD_OF_THREE, [1, 2, 0, 1, 1, 2]], ids=["as-planned", "elsewhere"])
def test_members_train_on_until_the_joiner_enters_run(backend: Backend, planned: list[int]) -> None:
    first = workers_on(a=2)
    with FakeJob(backend=backend) as job:
        job.start(first, "train", "60", "1", hold={first[0]: "5,30"})
        job.wait_held(first[0], 5)
        late = spawn_late(job, "joins_at_run", "60", place=planned)
        assert wait_built(job, LATE) == planned
        job.release(first[0])
        job.wait_held(first[0], 30)  # 25 steps while the joiner is still building
        assert LATE not in asked(job)
        assert len(job.rounds) == 1
        job.release(LATE)
        job.wait_for(lambda: LATE in asked(job), "the joiner's READY")
        job.plan([*first, LATE])
        job.notify(NoticeKind.HOSTS_UPDATED, "host b added")
        job.release(first[0])
        ends = {worker: job.wait_end(worker).lines for worker in (*first, LATE)}
    assert [line["step"] for line in ends[first[0]] if "step" in line] == list(range(1, 61))
    entered = next(line for line in late.lines if "entered" in line)
    again = [line for line in ends[first[0]] if "entered" in line][1]
    assert (entered["rank"], entered["size"]) == (2, 3)
    assert entered["weights"] == again["weights"]
    assert entered["entered"] == again["entered"] >= 30
    assert len({lines[-1]["weights"] for lines in ends.values()}) == 1
    # What it derived from the planned place, before the join, is made anew only where that was another.
    assert ends[LATE][-1]["resets"] == ([] if planned == THIRD_OF_THREE else [3])
    (request,) = [request for request in job.requests if request.worker == LATE]
    assert (request.after_round, request.commits, request.cause) == (0, 0, ReadyCause.START)


@pytest.mark.parametrize("backend", FIRST)
def test_the_first_collective_joins(backend: Backend) -> None:
    member = workers_on(a=1)[0]
    with FakeJob(backend=backend) as job:
        job.spawn(member, "starts_again_for_it", file=PROGRAM)
        job.plan([member])
        assert wait_built(job, member) == [0, 1, 0, 1, 0, 1]
        # Planned for three; it is two that meet.
        spawn_late(job, "joins_at_collective", place=THIRD_OF_THREE)
        assert wait_built(job, LATE) == THIRD_OF_THREE
        assert asked(job) == [member]
        job.plan([member, LATE])
        for worker in (member, LATE):
            job.release(worker)
        job.wait_for(lambda: sum("place" in line for line in job.processes[member].lines) == 2, "the second init()")
        job.release(member)
        ends = [job.wait_end(worker).lines[-1] for worker in (member, LATE)]
    assert ends == [{"total": 2, "place": [0, 2, 0, 1, 0, 2]}, {"total": 2, "place": [1, 2, 0, 1, 1, 2]}]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_joiner_that_is_ended_before_it_joins_disturbs_nobody(number: signal.Signals) -> None:
    member = workers_on(a=1)[0]
    with FakeJob() as job:
        job.start([member], "train", "20", "1", hold={member: "5"})
        job.wait_held(member, 5)
        late = spawn_late(job, "joins_at_run", "20", place=[1, 2, 0, 1, 1, 2])
        wait_built(job, LATE)

        def has_ended() -> bool:
            # Again and again: Python handles one that comes just before it waits in the kernel with the next only.
            late.popen.send_signal(number)
            return late.popen.poll() is not None

        job.wait_for(has_ended, "the joiner's end")
        job.wait_end(LATE, -number)
        job.release(member)
        job.wait_end(member)
        assert asked(job) == [member]
        assert len(job.rounds) == 1


def test_a_joiner_whose_place_is_gone_ends_with_code_0() -> None:
    member = workers_on(a=1)[0]
    with FakeJob() as job:
        job.start([member], "train", "20", "1", hold={member: "5"})
        job.wait_held(member, 5)
        spawn_late(job, "joins_at_run", "20", place=[1, 2, 0, 1, 1, 2])
        wait_built(job, LATE)
        job.plan([], removed=[LATE])
        job.release(LATE)
        late = job.wait_end(LATE)
        job.release(member)
        job.wait_end(member)
    assert len(late.lines) == 1
    assert any("has no slot in the next round (the test says so)" in text for text in late.noise), late.noise


def test_shutdown_before_the_join_asks_for_nothing() -> None:
    with FakeJob() as job:
        spawn_late(job, "never_joins", place=THIRD_OF_THREE)
        wait_built(job, LATE)
        job.release(LATE)
        assert job.wait_end(LATE).lines[-1] == {"initialized": False}
        assert not job.requests


@pytest.mark.parametrize("rubbish", ["", "1,1,1,1,two,1", "1,1,1,1,1"])
def test_a_planned_place_that_cannot_be_read_is_an_error(rubbish: str) -> None:
    with FakeJob() as job:
        env = {ENV_ROUND: "1", ENV_PLACE: rubbish}
        job.spawn(LATE, "never_joins", env=env, file=PROGRAM)
        late = job.wait_end(LATE, 1)
    assert any("cannot read this worker's planned place" in text for text in late.noise), late.noise
    assert not late.lines
