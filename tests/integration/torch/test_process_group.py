"""DDP, ZeRO and FSDP2 in place: over the round's process group, through losses, growth and shrinking.

In jobs whose driver is the test, where the workers alone matter; in real ones, where it matters what the driver says
and when.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed_program import build, check_nothing_is_left

from elastic_driver.hosts import WorkerId
from elastic_driver.words import NoticeKind
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.paths import PROGRAMS
from tests.support.processes import forked
from tests.support.processes.backends import FIRST
from tests.support.processes.jobs import Job

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = PROGRAMS / "distributed_program.py"
BOTH = "localhost:2\n127.0.0.1:2\n"
ONE = "localhost:2\n"
FOUR = workers_on(a=2, b=2)
STAYING, LOST = FOUR[:2], FOUR[2:]


@contextlib.contextmanager
def job(folder: Path, kind: str, hosts: str, *flags: str) -> Iterator[Job]:
    command = [sys.executable, str(PROGRAM), kind]
    with Job(folder, hosts, "-np", "2", *(flags or ("--min-np", "2")), command=command) as running:
        yield running


def pid_of(running: Job, rank: int, size: int) -> int:
    return int([line["pid"] for line in running.steps() if (line["rank"], line["size"]) == (rank, size)][-1])


@functools.cache
def expected_losses(steps: int) -> list[float]:
    """Of one process, by step. Not of this one: torch's first step of an optimizer imports for three seconds."""
    code, said = forked.run([str(PROGRAM), f"losses-{steps}"])
    assert code == 0, said
    losses: list[float] = json.loads(said)
    return losses


def check_losses(lines: Sequence[dict[str, Any]]) -> None:
    """Each step was what it would have been in one process, whatever became of the ranks."""
    expected = expected_losses(1 << max(line["step"] for line in lines).bit_length())
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-3, abs=1e-6), line


def survivors(running: Job, size: int) -> set[int]:
    return {line["pid"] for line in running.steps() if line["size"] == size}


@contextlib.contextmanager
def training(kind: str, workers: Sequence[WorkerId] = FOUR) -> Iterator[FakeJob]:
    """Workers that train together until the test has seen enough."""
    with FakeJob(backend=FIRST[0], auto=False) as running:
        spawn(running, kind, workers)
        running.plan(workers)
        yield running


def spawn(running: FakeJob, kind: str, workers: Sequence[WorkerId]) -> None:
    for worker in workers:
        env = {"STEP_LOG": "/dev/stdout", "HOROVOD_HOSTNAME": worker.hostname}
        running.spawn(worker, kind, env=env, file=PROGRAM)


def wait_for_steps(running: FakeJob, workers: Sequence[WorkerId]) -> None:
    """Until they all have done some in a round of their own."""

    def has_some(worker: WorkerId) -> bool:
        lines = running.processes[worker].lines
        return sum(line["size"] == len(workers) for line in lines) >= 5

    running.wait_for(lambda: all(map(has_some, workers)), f"steps at size {len(workers)}")


def steps_of(running: FakeJob) -> list[dict[str, Any]]:
    return [line for process in running.processes.values() for line in process.lines]


def lose_host(running: FakeJob, number: signal.Signals = signal.SIGKILL) -> None:
    """One of its workers by this signal, and the other as its host is not used any more."""
    running.processes[LOST[1]].popen.send_signal(number)
    running.plan(STAYING, removed=LOST)
    running.notify(NoticeKind.ABORT, "host b lost")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("ddp", marks=pytest.mark.release),  # its stopped rank is below
        pytest.param("ddp-plain", marks=pytest.mark.release),
        "fsdp",
        pytest.param("fsdp-pairs", marks=pytest.mark.release),
        "zero",
    ],
)
def test_a_lost_host(kind: str) -> None:
    with training(kind) as running:
        wait_for_steps(running, FOUR)
        lose_host(running)
        wait_for_steps(running, STAYING)
        check_losses(steps_of(running))


PAIRS = ("--min-np", "2", "--np-multiple", "2", "--ranks-per-host-multiple", "2")


@pytest.mark.release  # planned changes without a driver are below, and those of a driver's in driver/test_jobs.py
@pytest.mark.parametrize(("kind", "flags"), [("ddp", ()), ("fsdp-bare", ()), ("fsdp-pairs", PAIRS)])
def test_growth_and_shrinking(tmp_path: Path, kind: str, flags: tuple[str, ...]) -> None:
    """Of sharded states without copies, who leaves hands over what only he has. Groups come and go as a whole."""
    with job(tmp_path, kind, ONE, *flags) as running:
        running.wait_for_steps(2)
        first = survivors(running, 2)
        running.set_hosts(BOTH)
        lines = running.wait_for_steps(4)
        assert first <= survivors(running, 4)
        running.set_hosts(ONE)
        running.wait_for_steps(2, after=max(line["time"] for line in lines))
        check_losses(running.steps())
        steps: dict[int, list[int]] = {}
        for line in running.steps():
            steps.setdefault(line["pid"], []).append(line["step"])
        for pid in first:
            assert steps[pid] == list(range(len(steps[pid]))), "no step is lost, and none is done twice"


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp-bare", pytest.param("fsdp-pairs", marks=pytest.mark.release)])
def test_planned_changes(kind: str) -> None:
    """Copies of sharded states are made anew; without them, what only those have who leave is handed over."""
    with training(kind, STAYING) as running:
        wait_for_steps(running, STAYING)
        spawn(running, kind, LOST)
        running.plan(FOUR)
        running.notify(NoticeKind.HOSTS_UPDATED, "host b added")
        wait_for_steps(running, FOUR)
        running.plan(STAYING, removed=LOST)
        running.notify(NoticeKind.HOSTS_UPDATED, "host b removed or reduced")
        for worker in LOST:
            running.wait_end(worker)
        done = len(steps_of(running))
        running.wait_for(lambda: len(steps_of(running)) > done + 10, "more steps")
        check_losses(steps_of(running))
        for worker in STAYING:
            steps = [line["step"] for line in running.processes[worker].lines]
            assert steps == list(range(len(steps))), "no step is lost, and none is done twice"


@pytest.mark.parametrize("kind", ["zero", pytest.param("zero-bare", marks=pytest.mark.release)])
def test_momentum_goes_with_its_parameters(kind: str) -> None:
    """Of an optimizer whose state is divided among three workers, then two, then three; none goes twice."""
    three = workers_on(a=1, b=1, c=1)
    two, gone, back = three[:2], three[2], WorkerId("c", 0, 1)
    with training(kind, three) as running:
        wait_for_steps(running, three)
        running.plan(two, removed=[gone])
        running.notify(NoticeKind.HOSTS_UPDATED, "host c removed or reduced")
        running.wait_end(gone)
        wait_for_steps(running, two)
        spawn(running, kind, [back])
        running.plan([*two, back])
        running.notify(NoticeKind.HOSTS_UPDATED, "host c added")
        running.wait_for(lambda: len(running.processes[back].lines) > 10, "steps of the newcomer")
        lines = steps_of(running)
        check_losses(lines)
        for worker in two:
            steps = [line["step"] for line in running.processes[worker].lines]
            assert steps == list(range(len(steps))), "no step is lost, and none is done twice"
    for size in (2, 3):
        states: dict[int, list[int]] = {}
        for line in lines:
            if line["size"] == size:
                states.setdefault(line["step"], []).append(line["states"])
        whole = [sum(here) for here in states.values() if len(here) == size]
        assert set(whole) == {len(list(build().parameters()))}, "each parameter's is on one rank"
    assert all(line["steps"] == line["step"] + 1 for line in lines), "the scheduler goes with it"


@pytest.mark.release
@pytest.mark.parametrize("kind", ["compiled-outside", "compiled-ahead", "compiled-sharded"])
def test_compiled_code_lives_through_changes(kind: str) -> None:
    """A rank compiles once; if it did so ahead, before the others waited for it."""
    with training(kind) as running:
        wait_for_steps(running, FOUR)
        lose_host(running)
        wait_for_steps(running, STAYING)
        newcomer = WorkerId("c", 0, 0)
        spawn(running, kind, [newcomer])
        running.plan([*STAYING, newcomer])
        running.notify(NoticeKind.HOSTS_UPDATED, "host c added")
        running.wait_for(lambda: len(running.processes[newcomer].lines) > 5, "steps of the newcomer")
        lines = steps_of(running)
        graphs: dict[int, set[int]] = {}
        for line in lines:
            graphs.setdefault(line["pid"], set()).add(line["graphs"])
        assert list(map(len, graphs.values())) == [1] * 5, "none is compiled after the first step"
        assert all(line["graphs"] for line in lines)
        if kind == "compiled-ahead":
            assert all(line["ahead"] == line["graphs"] for line in lines)
        else:
            check_losses(lines)


def test_a_stopped_rank() -> None:
    """Nothing is heard of it on any connection, and the others are freed."""
    with training("ddp") as running:
        wait_for_steps(running, FOUR)
        lose_host(running, signal.SIGSTOP)
        wait_for_steps(running, STAYING)
        check_losses(steps_of(running))


@pytest.mark.release  # faults/test_hangs.py stops a worker of a real job, and the test above a rank of such a group
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stopped_rank_of_a_real_job(tmp_path: Path, kind: str) -> None:
    """Nothing is heard of it on any connection; the driver misses its heartbeats, and the others are freed."""
    with job(tmp_path, kind, BOTH, "--heartbeat-timeout", "5", "--min-np", "2") as running:
        running.wait_for_steps(4)
        before = survivors(running, 4)
        os.kill(pid_of(running, 3, 4), signal.SIGSTOP)
        running.wait_for_steps(2)
        assert survivors(running, 2) <= before, "the processes live through it"
        check_losses(running.steps())


def test_pieces_that_are_lost_with_all_copies_end_the_job() -> None:
    with training("fsdp-bare") as running:
        wait_for_steps(running, FOUR)
        lose_host(running)
        for worker in STAYING:
            process = running.wait_end(worker, 1)
            said = "pieces of the sharded state are lost, and no copy of them is left"
            assert any(said in text for text in process.noise), running.story()


def test_pieces_that_are_lost_are_loaded_where_the_program_can() -> None:
    with training("fsdp-load") as running:
        wait_for_steps(running, FOUR)
        lose_host(running)
        wait_for_steps(running, STAYING)
        for worker in STAYING:
            steps = [line["step"] for line in running.processes[worker].lines if line["size"] == 2]
            assert steps[0] == 0
        check_losses(steps_of(running))


def test_an_error_of_the_users_own_is_no_lost_peer() -> None:
    with training("ddp-error") as running:
        process = running.wait_end(FOUR[1], 1)
        assert any("RuntimeError: an error of the user's own" in text for text in process.noise), running.story()
        assert [request.worker for request in running.requests].count(FOUR[1]) == 1, "it asks for no other round"


def test_a_default_group_of_the_programs_own_is_left_alone() -> None:
    code, said = forked.run([str(PROGRAMS / "two_groups_program.py")])
    assert (code, said.strip()) == (0, "well")


@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("fsdp", "zero"))])
def test_nothing_is_left_of_fifty_rounds(kind: str) -> None:
    with training(f"{kind}-resets", STAYING) as running:
        running.plan_until_all_have_ended(STAYING)
        ends = [running.wait_end(worker).lines for worker in STAYING]
    for mine in ends:
        check_nothing_is_left(mine)
