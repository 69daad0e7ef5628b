"""Jobs that a real srun starts, on a cluster of one node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters.slurm import Slurm, why_no_slurm
from tests.support.processes.launched_jobs import PROGRAM, answers, environment, nothing_left

pytestmark = [pytest.mark.integration, pytest.mark.mpi]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if why := why_no_slurm():
        pytest.skip(why)
    with Slurm() as cluster:
        yield cluster


def srun(slurm: Slurm, folder: Path, size: int, what: str, *flags: str, **more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    words = ["srun", "-n", str(size), "--overcommit", "--kill-on-bad-exit=1", *flags]
    return subprocess.Popen(
        [*words, sys.executable, str(PROGRAM), what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(folder, **(slurm.environ | more)),
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = job.communicate(timeout=120)
    return job.returncode, said


@pytest.mark.parametrize("flags", [(), ("--mpi=pmi2",)])
def test_tasks_of_a_step_are_a_job(slurm: Slurm, tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, said = finish(srun(slurm, tmp_path, 3, "meet", *flags))
    assert code == 0, said
    assert answers(tmp_path, "ranks") == {rank: [[rank, rank, 0]] for rank in range(3)}
    assert answers(tmp_path, "sizes") == {rank: [[3, 3, 1]] for rank in range(3)}
    assert not any(values[0][0] for values in answers(tmp_path, "mpi").values())


def test_two_steps_at_once(slurm: Slurm, tmp_path: Path) -> None:
    jobs = {name: srun(slurm, tmp_path / name, 2, "meet", TOKEN=name) for name in ("one", "two")}
    for name, job in jobs.items():
        code, said = finish(job)
        assert code == 0, said
        assert answers(tmp_path / name, "token") == {0: [name], 1: [name]}


def test_a_task_that_dies_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    with nothing_left(tmp_path):
        code, said = finish(srun(slurm, tmp_path, 2, "train", DIES="1"))
    assert code != 0, said
    assert 1 in answers(tmp_path, "trains")
