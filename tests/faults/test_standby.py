"""Booted workers that stand by, and who is taken for frozen though it trains in no round."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.jobs import Job, check_agreement

pytestmark = pytest.mark.faults

THREE = "localhost:1\n127.0.0.1:1\n127.0.0.2:1\n"
FLAGS = ("-np", "2", "--min-np", "1", "--standby", "1")


def stands_by(job: Job, worker: str) -> None:
    job.wait_for(f"{worker} stands by", lambda: f"worker {worker} stands by" in job.said())


def pid_of(job: Job, worker: str) -> int:
    started: list[dict[str, Any]] = [line for line in job.events("worker_started") if line["worker"] == worker]
    return int(started[-1]["pid"])


@dataclass
class History:
    """What was seen of one job: a member dies, then a standby freezes, then two are told to leave."""

    steps_before: list[dict[str, Any]]
    steps_after: list[dict[str, Any]]
    rounds_at: dict[str, list[int]]
    hung: list[str]
    ended: dict[str, int]
    started: list[str]
    steps: list[dict[str, Any]]
    said: str


def sizes_of_rounds(job: Job) -> list[int]:
    return [line["size"] for line in job.events("round_formed")]


@pytest.fixture(scope="class")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A host that is added is where the next one waits."""
    rounds_at: dict[str, list[int]] = {}
    cooldown = ("--blacklist-cooldown-range", "1000", "1000")
    with Job(tmp_path_factory.mktemp("history"), THREE, *FLAGS, *cooldown, "--heartbeat-timeout", "4") as job:
        stands_by(job, "127.0.0.2[0]")
        before = job.wait_for_steps(2)
        os.kill(pid_of(job, "127.0.0.1[0]#0"), signal.SIGKILL)
        at = time.time()  # no step of its comes after that
        after = job.wait_for_steps(2, after=at)
        rounds_at["a death"] = sizes_of_rounds(job)
        job.set_hosts(THREE + "127.0.0.3:1\n")
        stands_by(job, "127.0.0.3[0]")
        rounds_at["a newcomer"] = sizes_of_rounds(job)
        os.kill(pid_of(job, "127.0.0.3[0]#0"), signal.SIGSTOP)
        job.wait_for("its end", lambda: job.events("worker_hung"))
        job.wait_for_steps(2, after=time.time())
        rounds_at["a frozen standby"] = sizes_of_rounds(job)
        for host, number in (("127.0.0.4", signal.SIGTERM), ("127.0.0.5", signal.SIGUSR1)):
            job.set_hosts(f"{THREE}127.0.0.3:1\n127.0.0.4:1\n" + ("127.0.0.5:1\n" if host == "127.0.0.5" else ""))
            stands_by(job, f"{host}[0]")
            os.kill(pid_of(job, f"{host}[0]#0"), number)
            job.wait_for(
                "its end", lambda host=host: f"{host}[0]#0" in {e["worker"] for e in job.events("worker_exited")}
            )
        job.wait_for_steps(2, after=time.time())
        return History(
            before,
            after,
            rounds_at | {"those who left": sizes_of_rounds(job)},
            [event["worker"] for event in job.events("worker_hung")],
            {event["worker"]: event["returncode"] for event in job.events("worker_exited")},
            [event["worker"] for event in job.events("worker_started")],
            job.steps(),
            job.said(),
        )


class TestHistory:
    """To stand by costs the others nothing, whatever becomes of who does."""

    def test_a_standby_is_in_the_round_that_drops_the_dead(self, history: History) -> None:
        assert {line["size"] for line in history.steps_before} == {2}
        assert {line["worker"] for line in history.steps_after} == {"localhost[0]#0", "127.0.0.2[0]#0"}
        assert history.rounds_at["a death"] == [2, 2], "never smaller"
        check_agreement(history.steps)

    def test_a_host_that_is_added_is_where_the_next_one_waits(self, history: History) -> None:
        assert history.rounds_at["a newcomer"] == [2, 2]

    def test_a_frozen_standby_is_found_before_it_is_needed(self, history: History) -> None:
        assert history.hung == ["127.0.0.3[0]#0"]
        assert history.rounds_at["a frozen standby"] == [2, 2]

    @pytest.mark.parametrize("host", ["127.0.0.4", "127.0.0.5"], ids=["SIGTERM", "SIGUSR1"])
    def test_a_standby_that_is_told_to_leave_is_blamed_for_nothing(self, history: History, host: str) -> None:
        assert history.ended[f"{host}[0]#0"] == 0
        assert f"host {host} gets no new workers" not in history.said
        assert history.rounds_at["those who left"] == [2, 2]
        assert len([worker for worker in history.started if worker.startswith(host)]) == 1, "its place stays free"


def test_a_planned_change_takes_the_standby(tmp_path: Path) -> None:
    with Job(tmp_path, THREE, *FLAGS) as job:
        stands_by(job, "127.0.0.2[0]")
        job.set_hosts("localhost:1\n127.0.0.2:1\n")
        job.wait_for("the second round", lambda: len(job.events("round_resumed")) == 2)
        after = job.wait_for_steps(2, after=time.time())
        assert {line["worker"] for line in after} == {"localhost[0]#0", "127.0.0.2[0]#0"}
        steps = [line["step"] for line in job.steps() if line["rank"] == 0]
        assert steps == list(range(1, len(steps) + 1)), "no step is lost or repeated"


def test_a_standby_that_froze_just_now_costs_one_heartbeat_timeout(tmp_path: Path) -> None:
    with Job(tmp_path, THREE, *FLAGS, "--heartbeat-timeout", "4") as job:
        stands_by(job, "127.0.0.2[0]")
        os.kill(pid_of(job, "127.0.0.2[0]#0"), signal.SIGSTOP)
        at = time.time()
        os.kill(pid_of(job, "127.0.0.1[0]#0"), signal.SIGKILL)
        after = job.wait_for_steps(1, after=at)
        assert {line["worker"] for line in after} == {"localhost[0]#0"}
        assert [line["worker"] for line in job.events("worker_hung")] == ["127.0.0.2[0]#0"]
        check_agreement(job.steps())


def test_a_standby_that_boots_is_told_to_leave(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nimport elastic_driver as hvd\nhvd.init()\nif hvd.rank() == 2:\n    print('boots', flush=True)\n"
        "    time.sleep(3600)\nhvd.elastic.run(lambda state: time.sleep(3600))(hvd.elastic.ObjectState())\n"
    )
    with Job(tmp_path, THREE, *FLAGS, command=[sys.executable, str(program)]) as job:
        job.wait_for("its start", lambda: "boots" in job.stdout.read_text())
        os.kill(pid_of(job, "127.0.0.2[0]#0"), signal.SIGTERM)
        ended = job.wait_for("its end", lambda: job.events("worker_exited"))
        assert [(event["worker"], event["expected"]) for event in ended] == [("127.0.0.2[0]#0", True)]
        assert "gets no new workers" not in job.said()


def test_a_standby_that_froze_is_found_when_another_was_taken(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--standby", "2", "--heartbeat-timeout", "4")
    with Job(tmp_path, THREE + "127.0.0.3:1\n", *flags) as job:
        stands_by(job, "127.0.0.2[0]")
        stands_by(job, "127.0.0.3[0]")
        os.kill(pid_of(job, "127.0.0.3[0]#0"), signal.SIGSTOP)
        os.kill(pid_of(job, "127.0.0.1[0]#0"), signal.SIGKILL)
        job.wait_for("its end", lambda: job.events("worker_hung"))
        assert [line["worker"] for line in job.events("worker_hung")] == ["127.0.0.3[0]#0"]
        assert [line["size"] for line in job.events("round_formed")] == [2, 2]


def test_the_job_ends_with_its_members(tmp_path: Path) -> None:
    program, done = tmp_path / "program.py", tmp_path / "done"
    program.write_text(
        "import os, time\nimport elastic_driver as hvd\nhvd.init()\n"
        f"def train(state):\n    while not os.path.exists({str(done)!r}):\n        time.sleep(0.02)\n"
        "    print('trained', flush=True)\n"
        "hvd.elastic.run(train)(hvd.elastic.ObjectState())\n"
    )
    with Job(tmp_path, THREE, *FLAGS, command=[sys.executable, str(program)]) as job:
        stands_by(job, "127.0.0.2[0]")
        done.touch()
        assert job.wait() == 0
        assert job.leftovers() == []
        assert job.stdout.read_text().count("trained") == 2


def test_a_process_that_has_shut_down_is_not_frozen(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nimport elastic_driver as hvd\nhvd.init()\nhvd.barrier()\nhvd.shutdown()\ntime.sleep(7)\n"
        "hvd.init()\nhvd.barrier()\nprint('rank', hvd.rank(), 'again')\n"
    )
    command = [sys.executable, str(program)]
    with Job(tmp_path, None, "-np", "2", "--heartbeat-timeout", "4", command=command) as job:
        assert job.wait() == 0, job.said()
        assert job.events("worker_hung") == []
        assert job.stdout.read_text().count("again") == 2


def test_a_process_that_takes_long_to_exit_is_not_frozen(tmp_path: Path) -> None:
    """Other libraries' exit handlers upload what they have."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, time\natexit.register(time.sleep, 7)\nimport elastic_driver as hvd\nhvd.init()\nhvd.barrier()\n"
    )
    command = [sys.executable, str(program)]
    with Job(tmp_path, None, "-np", "2", "--heartbeat-timeout", "4", command=command) as job:
        assert job.wait() == 0, job.said()
        assert job.events("worker_hung") == []


@pytest.mark.slow
def test_a_process_that_hangs_in_its_exit_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, time\natexit.register(time.sleep, 3600)\n"
        "import elastic_driver as hvd\nhvd.init()\nhvd.barrier()\n"
    )
    flags = ("-np", "1", "--start-timeout", "12")
    with Job(tmp_path, None, *flags, command=[sys.executable, str(program)]) as job:
        assert job.wait() == 1, job.said()
        assert "did not end within 12 s of its exit (--start-timeout)" in job.said()


@pytest.mark.slow
def test_a_shell_may_go_on_after_the_process_that_trained(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import elastic_driver as hvd\nhvd.init()\nhvd.barrier()\n")
    command = ["/bin/sh", "-c", f"{sys.executable} {program}; sleep 10; echo exported"]
    with Job(tmp_path, None, "-np", "1", "--start-timeout", "8", command=command) as job:
        assert job.wait() == 0, job.said()
        assert "exported" in job.stdout.read_text()
