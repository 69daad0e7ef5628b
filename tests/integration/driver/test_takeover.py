"""A driver is killed, and the same command again takes its job over: real processes, which do not notice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.journal.entries import Closed
from elastic_driver.journal.past import read_job
from elastic_driver.launch.agent.control import agents_here
from elastic_driver.words import ExitCode
from tests.support.processes.jobs import PROGRAM, Job, check_agreement

pytestmark = [pytest.mark.integration, pytest.mark.faults]

FLAGS = ("-np", "2", "--min-np", "1", "--on-change", "in-place")
HOSTS = "localhost:1\n127.0.0.1:1\n"


class Drivers:
    """A job in a folder, which several drivers have one after another. Use as a context manager.

    Args:
        folder: of the job.
        flags: of each driver.
    """

    def __init__(self, folder: Path, *flags: str, **env: str) -> None:
        self.folder = folder
        self.kept = folder / "kept"
        self._flags = (*FLAGS, *flags, "--journal", str(self.kept))
        folders = {"XDG_RUNTIME_DIR": str(folder / "runtime"), "XDG_STATE_HOME": str(folder / "state")}
        self._env = {"LAST": str(folder / "last"), **folders} | env
        (folder / "runtime").mkdir(mode=0o700)
        self._jobs = contextlib.ExitStack()

    def __enter__(self) -> Drivers:
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.close()

    def start(self, *flags: str, hosts: str = HOSTS, command: list[str] | None = None) -> Job:
        """The command, with these flags more."""
        return self._jobs.enter_context(Job(self.folder, hosts, *self._flags, *flags, command=command, env=self._env))

    def end_at(self, step: int) -> None:
        """The training ends with this step."""
        new = self.folder / "last.new"
        new.write_text(str(step))
        new.replace(self.folder / "last")


def kill(job: Job) -> float:
    """Kills a driver. Returns when it was dead."""
    job.process.kill()
    job.process.wait()
    return time.time()


def last_step(job: Job) -> int:
    return max(int(line["step"]) for line in job.steps())


def trains_beyond(job: Job, step: int) -> None:
    job.wait_for(f"steps beyond {step}", lambda: last_step(job) > step)


@dataclass
class TakenOver:
    """A job whose driver was killed in training, and that another has ended.

    Attributes:
        job: with its second driver.
        exit_code: of that.
        before, after: its steps until the first driver was dead, and since then.
        said: by the second driver.
        kept: the folder of its journal.
    """

    job: Job
    exit_code: int
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    said: str
    kept: Path


@pytest.fixture(scope="class")
def taken_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TakenOver]:
    folder = tmp_path_factory.mktemp("job")
    with Drivers(folder) as drivers:
        first = drivers.start()
        first.wait_for_steps(2)
        dead = kill(first)
        trains_beyond(first_log(first), last_step(first) + 20)
        second = drivers.start()
        second.wait_for("it has taken over", lambda: second.events("took_over"))
        trains_beyond(second, last_step(second) + 20)
        drivers.end_at(last_step(second) + 50)
        code = second.wait()
        lines = second.steps()
        while agents_of(folder):  # the last to end, as they are no children of the driver's
            time.sleep(0.02)
        yield TakenOver(
            second,
            code,
            [line for line in lines if line["time"] <= dead],
            [line for line in lines if line["time"] > dead],
            second.said(),
            drivers.kept,
        )


def agents_of(folder: Path) -> dict[str, Any]:
    """The agents of its jobs that are there."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "runtime")
    try:
        return dict(agents_here())
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def first_log(job: Job) -> Job:
    """A job whose driver may be dead: its workers' steps are waited for all the same."""
    job.process.poll = lambda: None  # type: ignore[method-assign]
    return job


class TestTakenOver:
    def test_the_job_ends_well(self, taken_over: TakenOver) -> None:
        assert taken_over.exit_code == 0, taken_over.said
        assert isinstance(read_job(taken_over.kept), Closed)

    def test_no_step_is_lost_or_done_twice(self, taken_over: TakenOver) -> None:
        lines = [*taken_over.before, *taken_over.after]
        for rank in range(2):
            steps = [line["step"] for line in lines if line["rank"] == rank]
            assert steps == list(range(1, len(steps) + 1))
        check_agreement(lines)

    def test_the_workers_are_the_same_processes_in_the_same_round(self, taken_over: TakenOver) -> None:
        for name in ("pid", "worker", "rank", "size"):
            before = {(line["rank"], line[name]) for line in taken_over.before}
            assert before == {(line["rank"], line[name]) for line in taken_over.after}, name
        assert len(taken_over.job.events("round_formed")) == 1

    def test_the_event_log_is_one(self, taken_over: TakenOver) -> None:
        """Each thing is told of once, and its clock goes on."""
        events = taken_over.job.events()
        kinds = [event["event"] for event in events]
        once = ("job_started", "took_over", "job_ended")
        assert [kinds.count(kind) for kind in (*once, "worker_started")] == [1, 1, 1, 2]
        times = [event["at_s"] for event in events]
        assert times == sorted(times)

    def test_so_is_that_of_the_history(self, taken_over: TakenOver) -> None:
        [kept] = (taken_over.job.folder / "state/elasticrun/history").glob("*/events.jsonl")

        def without_time_of_day(path: Path) -> list[dict[str, Any]]:
            lines = map(json.loads, path.read_text().splitlines())
            return [{name: value for name, value in line.items() if name != "time"} for line in lines]

        events, written = without_time_of_day(kept), without_time_of_day(taken_over.job.event_log)
        assert [event["event"] for event in events].count("job_started") == 1
        assert [event for event in events if event not in written] == []
        assert [event for event in written[written.index(events[0]) :] if event not in events] == []
        facts = json.loads((kept.parent / "job.json").read_text())
        assert (facts["exit_code"], facts["workers"]) == (0, 2)
        page = json.loads((kept.parent / "page.json").read_text())
        assert page["frame"]["job"]["began"] == pytest.approx(facts["began"], abs=1), "the job's, not the driver's"

    def test_it_says_so(self, taken_over: TakenOver) -> None:
        assert "2 workers on 2 hosts kept training, no step is lost" in taken_over.said
        (event,) = taken_over.job.events("took_over")
        assert event["pids"] == {line["worker"]: line["pid"] for line in taken_over.before}
        assert (event["epoch"], event["workers"], event["hosts"], event["round_id"]) == (2, 2, 2, 1)
        assert 0 < event["away_s"] <= event["time"] - taken_over.before[-1]["time"] + 1


def test_what_has_happened_while_there_was_no_driver(tmp_path: Path) -> None:
    """A member dies: the others wait, and reset as soon as there is a driver again. That one dies just after it, and
    its books are the next one's all the same.
    """
    with Drivers(tmp_path, "--blacklist-cooldown-range", "1", "2") as drivers:
        first = drivers.start()
        lines = first.wait_for_steps(2)
        kill(first)
        os.kill(next(line["pid"] for line in lines if line["rank"] == 1), signal.SIGKILL)
        second = drivers.start(hosts="localhost:2\n")
        second.wait_for("a reset", lambda: len(second.events("round_formed")) > 1)
        kill(second)
        told = second.said()  # the next one begins the file anew
        third = drivers.start(hosts="localhost:2\n")
        drivers.end_at(last_step(third) + 100)
        assert third.wait() == 0, third.said()
        # Whoever was there when the round was whole says it; of its books those of the last 5 s may be lost.
        assert "killed by SIGKILL" in told + third.said()
        assert last_step(third) >= 100
        goodput = third.events("goodput")[-1]
        assert goodput["seconds"]["reset"] > 0
        assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_s"], abs=0.01)


TALKS = f"""
import itertools, os, runpy, threading, time
def talk():
    for number in itertools.count():
        os.write(1, b"line %d\\n" % number)
        time.sleep(0.001)
threading.Thread(target=talk, daemon=True).start()
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""


def test_no_line_of_output_is_lost_with_a_driver(tmp_path: Path) -> None:
    """Three drivers are killed while workers write all the time. A line may come twice."""
    program = tmp_path / "talks.py"
    program.write_text(TALKS)
    written = b""
    with Drivers(tmp_path) as drivers:
        for number in range(4):
            job = drivers.start(command=[sys.executable, str(program)])
            shown = job.stdout.stat().st_size
            job.wait_for("output", lambda job=job, shown=shown: job.stdout.stat().st_size > shown + 20_000)  # type: ignore[misc]
            if number < 3:
                kill(job)
            else:
                job.wait_for("a step", job.steps)  # workers write before they train
                drivers.end_at(last_step(job))
                assert job.wait() == 0, job.said()
            written += job.stdout.read_bytes() + b"\n"  # what was killed has perhaps written half a line
    for rank in range(2):
        # What the program prints may stand before it.
        found = [int(each) for each in re.findall(rb"^\[%d\]<stdout>:.*line (\d+)$" % rank, written, re.MULTILINE)]
        assert sorted(set(found)) == list(range(max(found) + 1))
        assert len(found) < 2 * len(set(found))


def test_a_driver_that_hands_over_ends_at_sigterm_and_nobody_else_does(tmp_path: Path) -> None:
    """That is its own affair: the next one was not asked to."""
    with Drivers(tmp_path) as drivers:
        first = drivers.start("--hand-over")
        first.wait_for_steps(2)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == ExitCode.OTHER_DRIVER
        leaves = "elasticrun: this driver exits and leaves the job to another driver: SIGTERM (--hand-over); "
        then = "its workers continue without a driver for at most 600 s (--driver-timeout) (exit code 75)"
        assert f"{leaves}{then}" in first.said()
        trains_beyond(first_log(first), last_step(first) + 20)
        second = drivers.start()
        second.wait_to_say("kept training, no step is lost")
        second.process.send_signal(signal.SIGTERM)
        assert second.wait() == 128 + signal.SIGTERM
        check_agreement(second.steps())


def test_a_job_whose_drivers_hand_over_can_be_ended_without_one(tmp_path: Path) -> None:
    with Drivers(tmp_path) as drivers:
        first = drivers.start("--hand-over")
        first.wait_for_steps(2)
        (job_id,) = {event["job_id"] for event in first.events("job_started")}
        kill(first)
        words = [sys.executable, "-m", "elastic_driver", "end", job_id]
        env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
        ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=150, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert isinstance(read_job(drivers.kept), Closed)


def test_a_driver_that_stands_by_takes_over_and_ends_with_its_job(tmp_path: Path) -> None:
    def stands_by(job: Job) -> None:
        job.wait_for("it stands by", lambda: "standing by: job " in job.said())

    with Drivers(tmp_path) as drivers:
        first = drivers.start()
        first.wait_for_steps(2)
        second = drivers.start("--standby-driver")
        stands_by(second)
        assert f"process {first.driver_pid()}" in second.said()
        kill(first)
        second.wait_for("it has taken over", lambda: second.events("took_over"))
        third = drivers.start("--standby-driver")
        stands_by(third)
        drivers.end_at(last_step(second) + 20)
        assert second.wait() == third.wait() == 0
        assert re.search(r"job \w+ has ended with exit code 0", third.said())
        check_agreement(second.steps())
