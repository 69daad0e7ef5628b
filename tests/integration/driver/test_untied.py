"""A job with a journal whose driver dies: its agents go on without it, for as long as they may, and leave nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.launch.agent.control import agents_here
from elastic_driver.launch.processes.guard import ENV_MARK
from elastic_driver.rendezvous.environment import ENV_OWNER
from elastic_driver.system.process_name import name_of_this_process
from tests.support.processes.jobs import FAULTY, PATIENCE_S, PROGRAM, Job, run_elasticrun

pytestmark = [pytest.mark.integration, pytest.mark.faults]

FLAGS = ("-np", "2", "--on-change", "in-place")
COOLDOWN = ("--blacklist-cooldown-range", "1", "2")


def wait_for(what: str, found: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < end, f"{what}: not seen"
        time.sleep(0.05)


def last_step(job: Job) -> float:
    return max(float(line["time"]) for line in job.steps())


@pytest.mark.slow
def test_workers_train_on_when_the_driver_is_killed(tmp_path: Path, runtime: Path) -> None:
    journal = ("--journal", str(tmp_path / "kept"), "--driver-timeout", "25")
    with Job(tmp_path, "localhost:2\n", *FLAGS, *journal) as job:
        (worker, *_) = (psutil.Process(line["pid"]) for line in job.wait_for_steps(2))
        ((_, here),) = agents_here().items()
        assert os.getsid(here.pid) == here.pid, "in a session of its own"
        place, pid, _ = worker.environ()[ENV_OWNER].rsplit(" ", 2)
        assert (place, int(pid)) == (name_of_this_process().rsplit(" ", 2)[0], here.pid), "workers wait for the agent"
        # A script that hangs is the driver's, and ends with it.
        job.set_script("#!/bin/sh\nexec sleep 1000\n")
        script = job.wait_for("the script", lambda: _children(job.process.pid, "sleep"))[0]
        job.process.kill()
        killed = time.time()
        job.process.wait()
        wait_for("the script's end", lambda: not _runs(script))
        # The lease is 15 s, and everybody on this machine can see that the driver is dead.
        wait_for("steps without a driver", lambda: last_step(job) > killed + 18)
        assert {line["pid"] for line in job.steps() if line["time"] > killed} == {
            line["pid"] for line in job.steps() if line["time"] < killed
        }
        ((_, alone),) = agents_here().items()
        assert (alone.pid, alone.connected) == (here.pid, False)
        # Nobody comes: nothing is left forever.
        wait_for("the end of all", lambda: not job.leftovers())
        wait_for("the agent's end", lambda: not agents_here())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_driver_that_is_told_to_end_ends_all(tmp_path: Path, runtime: Path, number: signal.Signals) -> None:
    with Job(tmp_path, None, *FLAGS, "--journal", str(tmp_path / "kept")) as job:
        job.wait_for_steps(2)
        job.process.send_signal(number)
        assert job.wait() == 128 + number
        assert not job.leftovers()
        assert agents_here() == {}


# Nobody starts another one.
_FAILS = """
from elastic_driver.driver.rounds import Rounds
from elastic_driver.system import parent
def fail(*_):
    raise ZeroDivisionError("a bug")
Rounds.publish = fail
parent.go_on_in_a_child = lambda again: None
"""


def test_a_driver_that_fails_ends_all(tmp_path: Path, runtime: Path) -> None:
    words = (*FLAGS, "--journal", str(tmp_path / "kept"), sys.executable, str(PROGRAM))
    env = {**os.environ, "STEP_LOG": str(tmp_path / "steps")}
    code, said = run_elasticrun(*words, env=env, elasticrun=(*FAULTY, _FAILS))
    assert code == 70
    assert "ZeroDivisionError: a bug" in said
    assert agents_here() == {}


def test_an_agent_that_takes_anothers_place_goes_on_too(tmp_path: Path, runtime: Path) -> None:
    """The guard of the first ends what the first has started, and nothing else: they are told apart."""
    more = (*COOLDOWN, "--durable-dir", str(tmp_path / "commits"), "--journal", str(tmp_path / "kept"))
    with Job(tmp_path, "localhost:2\n", *FLAGS, *more) as job:
        first = marks_of(job.wait_for_steps(2))
        job.wait_for("a commit on disk", lambda: [*(tmp_path / "commits").glob("commit-*.state")])
        ((_, killed),) = agents_here().items()
        os.kill(killed.pid, signal.SIGKILL)
        wait_for("another agent", lambda: [each.pid for each in agents_here().values()] not in ([], [killed.pid]))
        second = marks_of(job.wait_for_steps(2, after=time.time()))
        assert len(first) == len(second) == 1
        assert first != second
        job.process.kill()
        job.process.wait()
        at = time.time()
        wait_for("steps without a driver", lambda: last_step(job) > at + 1)
        ((_, here),) = agents_here().items()
        os.kill(here.pid, signal.SIGTERM)
        wait_for("the end of all", lambda: not job.leftovers() and not agents_here())


def marks_of(lines: list[dict[str, Any]]) -> set[str]:
    """In the environment of the workers that have done these steps."""
    return {psutil.Process(line["pid"]).environ()[ENV_MARK] for line in lines}


def _children(pid: int, name: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if child.name() == name:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
