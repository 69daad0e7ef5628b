"""Workers that stand still for some seconds, or are stopped: who is suspected, who is ended, and who never is.

The jobs run side by side, since mostly they wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.worker.engine import native_loader
from tests.support.processes.hang_jobs import HangJob, is_gone

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.slow]

try:
    native_loader.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

# The first steps are slow: they are none of the last 100 by then, nor at the second standstill.
AT, AGAIN_AT = 110, 130
STEP_S = 0.05
# More than 60 steps' time, and 50; and than the least limit, with what looks take on a busy machine.
CHECKPOINT_S, EVALUATION_S = 12.0, 20.0
# Longer than a suspicion takes on a busy machine, too.
HANG_TIMEOUT_S = 30.0


class Jobs:
    """All jobs of this module, with the processes of each."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        def job(name: str, stands: str, *flags: str, slots: int = 1, **env: object) -> HangJob:
            texts = {"STEP_S": str(STEP_S), **{key: str(value) for key, value in env.items()}}
            return stack.enter_context(HangJob(folder / name, stands, *flags, slots=slots, env=texts))

        self.checkpoint = job("checkpoint", f"checkpoint 0 {AT} {AGAIN_AT}", LASTS_S=CHECKPOINT_S)
        self.evaluation = job("evaluation", f"evaluate 1 {AT}", LASTS_S=EVALUATION_S)
        self.spinning = job("spinning", f"spin 1 {AT}", "--hang-timeout", str(HANG_TIMEOUT_S))
        self.stopped = job("stopped", "nothing -1")
        self.host = job("host", "nothing -1", slots=2)
        self.let_go = job("let-go", "nothing -1")
        self.pids = {
            each: each.pids()
            for each in (self.checkpoint, self.evaluation, self.spinning, self.stopped, self.host, self.let_go)
        }
        self.stopped_at = time.time()
        for stops, ranks in ((self.stopped, [1]), (self.host, [2, 3])):
            for rank in ranks:
                os.kill(self.pids[stops][rank], signal.SIGSTOP)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with contextlib.ExitStack() as stack:
        yield Jobs(tmp_path_factory.mktemp("stands"), stack)


def test_who_is_stopped_and_goes_on_soon_is_cleared(jobs: Jobs) -> None:
    """It is let go as soon as it is suspected: ten seconds after it was stopped it would be ended."""
    job, pids = jobs.let_go, jobs.pids[jobs.let_go]
    stopped_at = time.time()
    os.kill(pids[0], signal.SIGSTOP)
    suspected = job.suspected(0, after=stopped_at)
    at = time.time()
    os.kill(pids[0], signal.SIGCONT)
    assert suspected["kind"] == "stopped"
    job.cleared(suspected, not_before=at)
    job.same_go_on(pids, after=at)


def test_who_is_stopped_is_suspected_at_once_and_ended_ten_seconds_later(jobs: Jobs) -> None:
    job, pids = jobs.stopped, jobs.pids[jobs.stopped]
    suspected = job.suspected(1, after=jobs.stopped_at)
    assert (suspected["worker"], suspected["kind"]) == ("127.0.0.1[0]#0", "stopped")
    assert suspected["why"] == "it is stopped by a signal (state T)"
    assert suspected["ends_s"] <= 10
    hung = job.one("worker_hung")
    assert suspected["time"] < hung["time"]
    assert hung["worker"] == "127.0.0.1[0]#0"
    assert float(re.fullmatch(r"stopped by a signal \(state T\) for ([\d.]+) s", hung["reason"])[1]) >= 10  # type: ignore[index]
    assert hung["time"] - jobs.stopped_at >= 10
    lines = job.wait_for_steps(1, 3)
    assert {line["pid"] for line in lines} == {pids[0]}
    job.wait_for("its end", lambda: is_gone(pids[1]))
    assert f"host 127.0.0.1 lost (worker 127.0.0.1[0] hung: {hung['reason']}" in job.said()


def test_a_host_of_which_all_workers_are_stopped(jobs: Jobs) -> None:
    job, pids = jobs.host, jobs.pids[jobs.host]
    assert {job.suspected(rank, after=jobs.stopped_at)["kind"] for rank in (2, 3)} == {"stopped"}
    lines = job.wait_for_steps(2, 3)
    assert {line["pid"] for line in lines} == {pids[0], pids[1]}, "on the other host"
    hung = job.events("worker_hung")
    assert {one["worker"] for one in hung} <= {"127.0.0.1[0]#0", "127.0.0.1[1]#0"}
    assert hung[0]["time"] - jobs.stopped_at >= 10
    job.wait_for("their end", lambda: is_gone(pids[2]) and is_gone(pids[3]))


def test_a_checkpoint_is_suspected_once_and_is_usual_then(jobs: Jobs) -> None:
    job, pids = jobs.checkpoint, jobs.pids[jobs.checkpoint]
    marks = job.stood(2)
    suspected = job.suspected(0, after=marks[0][2])
    assert (suspected["kind"], suspected["collective"]) == ("awaited", "allreduce 'gradient'")
    assert "it has not submitted allreduce 'gradient'" in suspected["why"]
    assert "10 times the slowest of the last " in suspected["limit"]
    assert any("hang_program.py" in frame and frame.endswith("in checkpoint") for frame in suspected["frames"])
    assert 5 <= suspected["still_s"] < marks[0][3]
    assert suspected["ends_s"] == pytest.approx(max(60, 6 * suspected["limit_s"]), abs=0.01)
    job.same_go_on(pids, after=marks[1][2] + marks[1][3])
    assert job.was_suspected_once(0, after=marks[0][2]), "the second one takes no longer than is usual"
    job.cleared(suspected, not_before=marks[0][2] + marks[0][3])


def test_an_evaluation_is_named_and_goes_on(jobs: Jobs) -> None:
    job, pids = jobs.evaluation, jobs.pids[jobs.evaluation]
    ((_, _, at, lasts_s),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert (suspected["kind"], suspected["collective"]) == ("awaited", "allreduce 'gradient'")
    assert any(frame.endswith("in evaluate") for frame in suspected["frames"])
    job.same_go_on(pids, after=at + lasts_s)
    job.cleared(suspected, not_before=at + lasts_s)


def test_who_spins_is_ended_where_a_limit_was_given(jobs: Jobs) -> None:
    job, pids = jobs.spinning, jobs.pids[jobs.spinning]
    ((_, _, at, _),) = job.stood()
    suspected = job.suspected(1, after=at)
    assert suspected["kind"] == "awaited"
    assert any(frame.endswith("in spin") for frame in suspected["frames"])
    hung = job.one("worker_hung")
    assert hung["worker"] == "127.0.0.1[0]#0"
    assert hung["reason"].startswith("no progress for ")
    assert hung["time"] - at > HANG_TIMEOUT_S - 5, "its last collective was a moment before"
    lines = job.wait_for_steps(1, 3)
    assert {line["pid"] for line in lines} == {pids[0]}
    job.wait_for("its end", lambda: is_gone(pids[1]))
    assert "in spin" in job.said(), "its stack"
