"""DDP and FSDP2 in place, in real jobs: over the round's process group, through losses, growth and shrinking."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from distributed_program import expected_losses
from jobs import FORKING, SUPPORT, Job

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = SUPPORT / "distributed_program.py"
BOTH = "localhost:2\n127.0.0.1:2\n"
ONE = "localhost:2\n"


@contextlib.contextmanager
def job(folder: Path, kind: str, hosts: str, *flags: str) -> Iterator[Job]:
    command = [sys.executable, str(PROGRAM), kind]
    with Job(folder, hosts, "-np", "2", *(flags or ("--min-np", "2")), command=command, elasticrun=FORKING) as running:
        yield running


def pid_of(running: Job, rank: int, size: int) -> int:
    return int([line["pid"] for line in running.steps() if (line["rank"], line["size"]) == (rank, size)][-1])


def check_losses(running: Job) -> None:
    """Each step was what it would have been in one process, whatever became of the ranks."""
    lines = running.steps()
    expected = expected_losses(max(line["step"] for line in lines) + 1)
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-3, abs=1e-6), line


def survivors(running: Job, size: int) -> set[int]:
    return {line["pid"] for line in running.steps() if line["size"] == size}


@pytest.mark.parametrize("kind", ["ddp", "ddp-plain", "fsdp"])
def test_a_lost_host(tmp_path: Path, kind: str) -> None:
    with job(tmp_path, kind, BOTH) as running:
        running.wait_for_steps(4)
        before = survivors(running, 4)
        os.kill(pid_of(running, 3, 4), signal.SIGKILL)
        running.wait_for_steps(2)
        assert survivors(running, 2) <= before, "the processes live through it"
        check_losses(running)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_growth_and_shrinking(tmp_path: Path, kind: str) -> None:
    with job(tmp_path, kind, ONE) as running:
        running.wait_for_steps(2)
        first = survivors(running, 2)
        running.set_hosts(BOTH)
        lines = running.wait_for_steps(4)
        assert first <= survivors(running, 4)
        running.set_hosts(ONE)
        running.wait_for_steps(2, after=max(line["time"] for line in lines))
        check_losses(running)
        steps: dict[int, list[int]] = {}
        for line in running.steps():
            steps.setdefault(line["pid"], []).append(line["step"])
        for pid in first:
            assert steps[pid] == list(range(len(steps[pid]))), "no step is lost, and none is done twice"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stopped_rank(tmp_path: Path, kind: str) -> None:
    """Nothing is heard of it on any connection; the driver misses its heartbeats, and the others are freed."""
    with job(tmp_path, kind, BOTH, "--heartbeat-timeout", "5", "--min-np", "2") as running:
        running.wait_for_steps(4)
        os.kill(pid_of(running, 3, 4), signal.SIGSTOP)
        running.wait_for_steps(2)
        check_losses(running)


def test_pieces_that_are_lost_with_all_copies_end_the_job(tmp_path: Path) -> None:
    with job(tmp_path, "fsdp-bare", BOTH) as running:
        running.wait_for_steps(4)
        os.kill(pid_of(running, 3, 4), signal.SIGKILL)
        assert running.wait() != 0
        assert "pieces of the sharded state are lost, and no copy of them is left" in running.said()


def test_pieces_that_are_lost_are_loaded_where_the_program_can(tmp_path: Path) -> None:
    with job(tmp_path, "fsdp-load", BOTH) as running:
        running.wait_for_steps(4)
        os.kill(pid_of(running, 3, 4), signal.SIGKILL)
        lines = running.wait_for_steps(2)
        assert min(line["step"] for line in lines) == 0
        check_losses(running)


def test_planned_shrinking_needs_no_copies(tmp_path: Path) -> None:
    """Who leaves hands over what only he has."""
    with job(tmp_path, "fsdp-bare", BOTH) as running:
        running.wait_for_steps(4)
        running.set_hosts(ONE)
        running.wait_for_steps(2)
        check_losses(running)


def test_an_error_of_the_users_own_is_no_lost_peer(tmp_path: Path) -> None:
    with job(tmp_path, "ddp-error", BOTH, "--reset-limit", "1", "--min-np", "2") as running:
        running.wait_for("the failure", lambda: running.events("worker_exited"))
        assert running.wait() != 0
        assert "RuntimeError: an error of the user's own" in running.stderr.read_text() + running.stdout.read_text()


def test_a_default_group_of_the_programs_own_is_left_alone() -> None:
    done = subprocess.run([sys.executable, SUPPORT / "two_groups_program.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "well"), done.stderr


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nothing_is_left_of_fifty_rounds(tmp_path: Path, kind: str) -> None:
    with job(tmp_path, f"{kind}-resets", ONE) as running:
        assert running.wait() == 0, running.said()
        lines = running.steps()
    for rank in range(2):
        mine = [line for line in lines if line["rank"] == rank]
        rounds = [line for line in mine if "fds" in line]
        # A rank may learn of the other's error before it comes to its own: which of them does so more often is chance.
        assert len(rounds) > 12
        early, late = rounds[10], rounds[-1]
        assert late["fds"] <= early["fds"] + 10  # what is being freed in the background, at most
        assert late["threads"] <= early["threads"] + 10
        assert late["rss"] <= early["rss"] + (40 << 20)
        assert mine[-1]["groups"] == 1
        assert mine[-1]["left"] <= 4, "of two objects a round, those of the last two rounds"
        assert mine[-1]["hook"] <= 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each rank")
def test_a_lost_rank_over_nccl(tmp_path: Path) -> None:
    with job(tmp_path, "ddp-cuda", ONE, "--min-np", "1") as running:
        running.wait_for_steps(2)
        os.kill(pid_of(running, 1, 2), signal.SIGKILL)
        running.wait_for_steps(1)
        check_losses(running)
