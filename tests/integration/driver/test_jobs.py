"""Whole jobs: hosts come, go and die while real workers train."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes.backends import EACH
from tests.support.processes.jobs import AFRESH, PATIENCE_S, PROGRAM, Job, check_agreement

pytestmark = [pytest.mark.integration]

TWO = "localhost:2\n"
FOUR = "localhost:2\n127.0.0.1:2\n"
ONE_EACH = "localhost:1\n127.0.0.1:1\n"


def pids(lines: list[dict[str, Any]], size: int) -> set[int]:
    return {line["pid"] for line in lines if line["size"] == size}


def repeated_steps(lines: list[dict[str, Any]], pid: int) -> int:
    steps = [line["step"] for line in lines if line["pid"] == pid]
    return len(steps) - len(set(steps))


@pytest.fixture(params=["native", pytest.param("torch", marks=pytest.mark.release)])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in EACH:
        pytest.skip(f"there is no backend {name} here")
    return name


def job_on(backend: str, folder: Path, hosts: str, *flags: str, **env: str) -> Job:
    env["ELASTIC_DRIVER_BACKEND"] = backend
    if backend == "torch":
        return Job(folder, hosts, *flags, "--preload", "numpy,torch.distributed", env=env)
    return Job(folder, hosts, *flags, env=env)


def test_hosts_are_removed_and_added_without_losing_a_step(tmp_path: Path, backend: str) -> None:
    with job_on(backend, tmp_path, FOUR, "-np", "4", "--min-np", "2") as job:
        before = job.wait_for_steps(4)
        job.set_hosts(TWO)
        at = time.time()
        after = job.wait_for_steps(2, after=at)
        assert pids(after, 2) < pids(before, 4), "survivors keep their processes"
        job.set_hosts(FOUR)
        at = time.time()
        grown = job.wait_for_steps(4, after=at)
        lines = job.steps()
        assert pids(after, 2) < pids(grown, 4)
        for pid in pids(after, 2):
            steps = [line["step"] for line in lines if line["pid"] == pid]
            assert steps == list(range(1, len(steps) + 1)), "no step was lost, none done twice"
        check_agreement(lines)
        ranks = {line["worker"]: line["rank"] for line in grown}
        assert ranks["localhost[0]#0"] == 0
        assert ranks["localhost[1]#0"] == 1
        assert {line["local_size"] for line in grown} == {2}
        assert {(line["rank"], line["local_rank"], line["cross_rank"]) for line in grown} == {
            (0, 0, 0),
            (1, 1, 0),
            (2, 0, 1),
            (3, 1, 1),
        }
        expected = [event for event in job.events("worker_exited") if event["expected"]]
        assert [event["returncode"] for event in expected] == [0, 0], "who is removed ends with exit code 0"
        job.wait_to_say("4 -> 2 workers, host 127.0.0.1 removed, resumed from commit")
        job.wait_to_say("2 -> 4 workers, host 127.0.0.1 added, resumed from commit")
        backends = {event["backend"] for event in job.events("round_formed")}
        assert backends == {backend}


# What is above the engines is the same for both; worker/test_worker_elastic.py has it with each engine.
@pytest.mark.parametrize(
    ("backend", "victim"),
    [
        ("native", 0),
        pytest.param("torch", 3, marks=pytest.mark.release),
        pytest.param("native", 3, marks=pytest.mark.release),
        pytest.param("torch", 0, marks=pytest.mark.release),
    ],
    indirect=["backend"],
)
def test_a_killed_worker_costs_the_steps_since_the_last_commit(tmp_path: Path, backend: str, victim: int) -> None:
    with job_on(backend, tmp_path, FOUR, "-np", "4", "--min-np", "2", COMMIT_EVERY="5") as job:
        before = job.wait_for_steps(4, 12)
        at = time.time()
        os.kill(next(line["pid"] for line in before if line["rank"] == victim), signal.SIGKILL)
        after = job.wait_for_steps(2, after=at)
        assert pids(after, 2) < pids(before, 4)
        for pid in pids(after, 2):
            assert repeated_steps(job.steps(), pid) <= 5, "at most the steps since the last commit"
        check_agreement(job.steps())
        lost = "localhost" if victim == 0 else "127.0.0.1"
        job.wait_to_say(f"4 -> 2 workers, host {lost} lost (worker {lost}[{victim % 2}] killed by SIGKILL)")


UNEVEN = "localhost:1\n127.0.0.1:2\n"


@dataclass
class History:
    """Of that job: the steps that were waited for in each of its chapters, all steps, and how it ended."""

    steps: dict[str, list[dict[str, Any]]]
    replaced_at: float
    all_steps: list[dict[str, Any]]
    said: str
    code: int
    leftovers: list[str]


@pytest.fixture(scope="class")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    flags = ("-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "1", "2")
    steps = {}
    with Job(tmp_path_factory.mktemp("history"), UNEVEN, *flags) as job:
        steps["start"] = job.wait_for_steps(3)
        at = time.time()
        os.kill(next(line["pid"] for line in steps["start"] if line["rank"] == 2), signal.SIGKILL)
        steps["loss"] = job.wait_for_steps(1, after=at)
        steps["return"] = job.wait_for_steps(3, after=time.time())
        replaced_at = time.time()
        job.set_hosts("127.0.0.2:2\n")

        def are_alone() -> bool:
            last = job.steps()[-4:]
            return {line["size"] for line in last} == {2} and all("127.0.0.2" in line["worker"] for line in last)

        job.wait_for("the old hosts' end", are_alone)
        steps["replacement"] = job.wait_for_steps(2, after=time.time())
        job.process.send_signal(signal.SIGINT)
        code = job.wait()
        return History(steps, replaced_at, job.steps(), job.said(), code, job.leftovers())


class TestHistory:
    """A host is lost, comes back, all hosts are replaced, and Ctrl+C ends the job."""

    def test_uneven_slots(self, history: History) -> None:
        places = {
            (line["rank"], line["local_rank"], line["local_size"], line["cross_rank"], line["cross_size"])
            for line in history.steps["start"]
        }
        assert places == {(0, 0, 1, 0, 2), (1, 0, 2, 1, 2), (2, 1, 2, 0, 1)}

    def test_a_lost_host_is_told_of_by_the_driver_and_not_by_each_rank(self, history: History) -> None:
        assert "3 -> 1 worker, host 127.0.0.1 lost" in history.said
        lines = history.said.splitlines()
        # Who is removed later, or stopped at the end, says that.
        own = re.compile(r"has no slot in the next round|it is being stopped")
        ranks = [line for line in lines if "]<stderr>:" in line and not own.search(line)]
        assert ranks == [], "the survivors have nothing to add, nor has anybody to the end"
        assert lines[-2] == "elasticrun: job ended: interrupted by SIGINT (exit code 130)"
        assert lines[-1].startswith("elasticrun: to see this job again: ")

    def test_a_host_comes_back_after_its_cooldown(self, history: History) -> None:
        again = {line["worker"] for line in history.steps["return"]}
        assert again == {"localhost[0]#0", "127.0.0.1[0]#1", "127.0.0.1[1]#1"}

    def test_all_hosts_are_replaced_and_the_state_lives_on(self, history: History) -> None:
        after = history.steps["replacement"]
        before = [line for line in history.all_steps if line["time"] < history.replaced_at]
        assert not pids(after, 2) & {line["pid"] for line in before}
        assert min(line["step"] for line in after) > max(line["step"] for line in before)

    def test_ranks_agree_after_every_change(self, history: History) -> None:
        check_agreement(history.all_steps)

    def test_interrupted(self, history: History) -> None:
        assert history.code == 130
        assert "interrupted by SIGINT" in history.said
        assert history.leftovers == []


def test_an_exception_in_one_worker(tmp_path: Path) -> None:
    env = {"FAULT": "exception 1 10", "ONCE": str(tmp_path / "once"), "STEPS": "60"}
    with Job(tmp_path, ONE_EACH, "-np", "2", "--min-np", "1", env=env) as job:
        assert job.wait() == 0
        sizes = {line["size"] for line in job.steps()}
        assert sizes == {2, 1}
        check_agreement(job.steps())
        assert "worker 127.0.0.1[0] exited with code 1" in job.said()
        assert "a bug in the training script" in job.said()
        assert "job succeeded" in job.said()


def test_below_min_np_the_job_waits_and_goes_on(tmp_path: Path) -> None:
    with Job(tmp_path, ONE_EACH, "-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "1", "1") as job:
        before = job.wait_for_steps(2)
        os.kill(next(line["pid"] for line in before if line["rank"] == 1), signal.SIGKILL)
        after = job.wait_for_steps(2, after=time.time())
        assert len(pids(after, 2) & pids(before, 2)) == 1
        assert "waiting for 2 workers (--min-np)" in job.said()
        check_agreement(job.steps())


def test_too_few_slots_in_time(tmp_path: Path) -> None:
    # That limit is also for the hosts' agents to come at the start.
    with Job(tmp_path, ONE_EACH, "-np", "2", "--min-np", "2", "--elastic-timeout", "8") as job:
        before = job.wait_for_steps(2)
        os.kill(next(line["pid"] for line in before if line["rank"] == 1), signal.SIGKILL)
        assert job.wait() == 3
        assert "gave up after 8 s (--elastic-timeout)" in job.said()
        assert "blacklisted: 127.0.0.1" in job.said()


def test_all_workers_fail(tmp_path: Path) -> None:
    with Job(tmp_path, None, "-np", "2") as job:
        lines = job.wait_for_steps(2)
        os.kill(lines[-1]["pid"], signal.SIGKILL)
        assert job.wait() == 1
        assert "killed by SIGKILL" in job.said()
        assert "job failed" in job.said()


@pytest.mark.parametrize(("step", "rounds"), [pytest.param(0, 10, marks=pytest.mark.release), (2, 11)])
def test_a_job_that_fails_at_the_same_step_each_time_ends(tmp_path: Path, step: int, rounds: int) -> None:
    """Nobody dies in it: without an end it goes round forever, thousands of times a minute."""
    env = {"FAULT": f"lost 1 {step}", "STEP_S": "0", "COMMIT_EVERY": "100"}
    impatient = (str(PROGRAMS / "impatient.py"),)
    with Job(tmp_path, "localhost:2\n", "-np", "2", env=env, elasticrun=impatient) as job:
        assert job.wait() == 1
        formed = job.events("round_formed")
    assert len(formed) == rounds, job.said()
    assert re.search(
        r"job failed: a bad sample at [\d.]+ \(step_program.py:\d+\), rank 1 on localhost, "
        r"raised HorovodInternalError; the training failed 10 times in a row without getting past commit 0"
        r"( and \d+ operations)?, the same error each time \(exit code 1\)",
        job.said(),
    ), job.said()
    assert ("operations" in job.said()) == bool(step)


def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    env = {"FAULT": "exit 1 10", "ONCE": str(tmp_path / "once")}
    with Job(tmp_path, None, "-np", "3", env=env) as job:
        assert job.wait() == 1
        assert "worker localhost[1] exited with code 0 while" in job.said()


def test_a_job_that_ends(tmp_path: Path) -> None:
    with Job(tmp_path, None, "-np", "3", "--output-filename", str(tmp_path / "out"), env={"STEPS": "20"}) as job:
        assert job.wait() == 0
        assert sorted(job.stdout.read_text().splitlines()) == [
            f"[{rank}]<stdout>:rank {rank} done at step 20" for rank in range(3)
        ]
        for rank in range(3):
            assert f"[{rank}]<stdout>:rank {rank} done" in (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        end = job.events("job_ended")[-1]
        assert end["exit_code"] == 0
        check_agreement(job.steps())


def test_a_mistake_at_the_scripts_top_is_shown_once(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise ImportError('no data set')\n")
    flags = ("-np", "3", "--on-change", "in-place")
    patient = (str(PROGRAMS / "patient.py"),)
    with Job(tmp_path, None, *flags, command=[sys.executable, str(program)], elasticrun=patient) as job:
        assert job.wait() == 1
        assert job.said().count("Traceback (most recent call last):") == 1
        assert job.said().count("<stderr>:ImportError: no data set") == 1
        last = job.said().rstrip().splitlines()[-1]
        assert last.startswith("elasticrun: job failed: ImportError: no data set (train.py:1), worker localhost[")
        assert last.endswith("]; all workers failed before their first round (exit code 1)")
        assert "last output of" not in job.said(), "it can still be seen"


def test_workers_that_leave_and_come_back_by_themselves_are_told_of_as_that(tmp_path: Path) -> None:
    program = tmp_path / "again.py"
    program.write_text("import elastic_driver as hvd\nfor _ in range(3):\n    hvd.init()\n    hvd.shutdown()\n")
    with Job(tmp_path, None, "-np", "2", command=[sys.executable, str(program)]) as job:
        assert job.wait() == 0, job.said()
        for number in (2, 3):
            line = f"elasticrun: round {number}: 2 -> 2 workers, all workers called shutdown() and init() again\n"
            assert line in job.said()
        assert "had resumed" not in job.said()
        assert "elastic_driver: round" not in job.said()


def test_signals_ignored_at_the_start_stay_ignored(tmp_path: Path) -> None:
    """As nohup leaves SIGHUP, and a shell SIGINT in its background jobs."""
    ignored = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        job = Job(tmp_path, None, "-np", "1", elasticrun=AFRESH)
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    with job:
        worker = job.wait_for_steps(1)[0]["pid"]
        for pid in (job.process.pid, worker):
            status = Path(f"/proc/{pid}/status").read_text()
            mask = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)  # type: ignore[index]
            assert all(mask & 1 << number - 1 for number in ignored)
        for number in ignored:
            job.process.send_signal(number)
        job.wait_for_steps(1, after=time.time())
        assert "stopping all workers" not in job.said()
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "interrupted by SIGTERM" in job.said()


@pytest.mark.faults
def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    program = tmp_path / "deaf.py"
    program.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport elastic_driver as hvd\n"
        "hvd.init()\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    )
    command = [sys.executable, str(program)]
    with Job(tmp_path, None, "-np", "2", "--grace-time", "1000", command=command) as job:
        job.wait_for("both ready", lambda: job.stdout.read_text().count("ready") == 2)
        job.process.send_signal(signal.SIGINT)
        job.wait_for("the answer to the first", lambda: "stopping all workers" in job.said())
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert not job.leftovers()


@pytest.mark.faults
def test_a_killed_driver_leaves_nothing_running(tmp_path: Path) -> None:
    with Job(tmp_path, ONE_EACH, "-np", "2") as job:
        job.wait_for_steps(2)
        job.process.kill()
        job.process.wait()
        end = time.monotonic() + PATIENCE_S
        while job.leftovers():
            assert time.monotonic() < end, job.leftovers()
            time.sleep(0.05)


@pytest.mark.faults
def test_trainings_below_a_shell_end_with_a_killed_driver_whose_guard_is_stopped(tmp_path: Path) -> None:
    """Nobody but the kernel is left to end them, by what init() asked for. All from the shell on is deaf to SIGTERM."""
    shell = f"trap '' TERM; {sys.executable} {PROGRAM}; sleep 1000"
    with Job(tmp_path, None, "-np", "2", command=["sh", "-c", shell], elasticrun=AFRESH) as job:
        trainings = pids(job.wait_for_steps(2), 2)
        children = psutil.Process(job.process.pid).children(recursive=True)
        guard = next(child for child in children if any("guard.py" in word for word in child.cmdline()))
        guard.suspend()
        try:
            job.process.kill()
            job.process.wait()
            _, alive = psutil.wait_procs(
                [psutil.Process(pid) for pid in trainings if psutil.pid_exists(pid)], PATIENCE_S
            )
            assert not alive
        finally:
            guard.resume()
        psutil.wait_procs([guard], PATIENCE_S)
