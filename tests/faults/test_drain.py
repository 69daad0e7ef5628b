"""Workers that leave because they are asked to: no step lost, nobody blamed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes.jobs import Job, check_agreement
from tests.support.processes.subcommands import Ran, elasticrun

pytestmark = pytest.mark.faults

TWO = "localhost:1\n127.0.0.1:1\n"
FLAGS = ("-np", "2", "--min-np", "1", "--reset-limit", "0")


def no_step_is_repeated(job: Job) -> None:
    lines = job.steps()
    for pid in {line["pid"] for line in lines}:
        steps = [line["step"] for line in lines if line["pid"] == pid]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
    check_agreement(lines)


def test_a_signal_to_a_worker_makes_it_leave(tmp_path: Path) -> None:
    hosts, flags = "localhost:1\n127.0.0.1:2\n", ("-np", "3", *FLAGS[2:])
    with Job(tmp_path, hosts, *flags, env={"COMMIT_EVERY": "3"}) as job:
        pids = {line["rank"]: line["pid"] for line in job.wait_for_steps(3)}
        left = []
        for rank, number in ((1, signal.SIGTERM), (2, signal.SIGUSR1)):
            at = time.time()
            os.kill(pids[rank], number)
            left.append((pids[rank], 0))
            job.wait_for_steps(3 - len(left), count=20, after=at)
            no_step_is_repeated(job)
            job.wait_for("its end", lambda: len(job.events("worker_exited")) == len(left))
            assert [(event["pid"], event["returncode"]) for event in job.events("worker_exited")] == left
            worker = f"127.0.0.1[{rank - 1}]"
            job.wait_to_say(f"worker {worker} is leaving at the next commit: it received {number.name}")
        job.wait_to_say("3 -> 2 workers")
        job.wait_to_say("2 -> 1 worker")
        assert "blacklisted" not in job.said()
        assert "removed from the job" not in job.said()
        assert len(job.events("worker_started")) == 3, "its place stays free"


def test_drain_and_undo_from_the_command_line(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    env = {"XDG_RUNTIME_DIR": str(runtime)}

    def drain(*words: str) -> Ran:
        return elasticrun("drain", *words, **env)

    assert drain("localhost").returncode == 2
    with Job(tmp_path, TWO, *FLAGS, env=env) as job:
        job.wait_for_steps(2)
        wrong = drain("elsewhere")
        assert (wrong.returncode, wrong.stdout) == (
            2,
            "the job has no host elsewhere; its hosts: localhost, 127.0.0.1\n",
        )
        at = time.time()
        said = drain("127.0.0.1")
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout.startswith("host 127.0.0.1 is drained: its workers leave at their next commit (job ")
        assert "step_program.py" in said.stdout
        job.wait_for_steps(1, after=at)
        job.wait_for("its worker's end", lambda: job.events("worker_exited"))
        job.wait_to_say("2 -> 1 worker, host 127.0.0.1 drained")
        assert drain("127.0.0.1").stdout.startswith("host 127.0.0.1 is already drained (job ")
        assert drain("--undo", "localhost").stdout.startswith("host localhost was not drained (job ")
        at = time.time()
        assert drain("--undo", "127.0.0.1").stdout.startswith("host 127.0.0.1 can be used again (job ")
        job.wait_for_steps(2, after=at)
        no_step_is_repeated(job)
        files = list((runtime / "elasticrun").glob("*.json"))
        assert len(files) == 1
        assert files[0].stat().st_mode & 0o777 == 0o600
    assert not list((runtime / "elasticrun").glob("*.json"))


def test_a_drained_worker_that_does_not_reach_a_commit_is_ended(tmp_path: Path) -> None:
    env = {"COMMIT_EVERY": "1000000"}
    with Job(tmp_path, TWO, "-np", "2", "--min-np", "1", "--drain-timeout", "0.5", env=env) as job:
        before = job.wait_for_steps(2)
        at = time.time()
        os.kill(next(line["pid"] for line in before if line["rank"] == 1), signal.SIGUSR1)
        job.wait_for_steps(1, after=at)
        job.wait_to_say("did not leave within 0.5 s (--drain-timeout)")
        assert "blacklisted" not in job.said()
        assert "removed from the job" not in job.said()
