"""Ranks of jobs without a driver, for tests: started as mpirun does, or by it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import forked
from tests.support.processes.carriers import carriers_of

PROGRAM = PROGRAMS / "launched_program.py"
PATIENCE_S = 200.0
_jobs = itertools.count()
# Of launchers that the tests themselves may run under.
_FOREIGN = ("OMPI_", "PMI", "MPI_LOCAL", "SLURM_", "HYDI_", "ELASTIC_DRIVER_RENDEZVOUS")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a rank that nobody has started yet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))
    return kept | {"ANSWERS": str(folder)} | more


def place_in(job: str, rank: int, size: int, local_size: int = 0) -> dict[str, str]:
    """What Open MPI's mpirun tells a rank."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size or size),
        "PMIX_NAMESPACE": job,
    }


def new_job() -> str:
    """The name of a job that there was never before."""
    return f"{os.getpid()}-{next(_jobs)}-{time.monotonic_ns()}"


class Ranks:
    """The ranks of one job, started by the test. A context manager; afterwards none of them lives.

    Args:
        folder: for their answers.
        size: how many there are.
        what: they do (launched_program.py).
        job: its name; else one that there was never before.
        only: those that come.
        fresh: whether each is a Python of its own, as those of mpirun are. Else they are forked from a process that has
            imported what they need, and cannot be found by their environment.
        torch: whether they use it.
        more: of their environment.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        what: str,
        *,
        job: str = "",
        only: Sequence[int] = (),
        fresh: bool = False,
        torch: bool = False,
        **more: str,
    ) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.job = job or new_job()
        self.errors: dict[int, Path] = {}
        self.processes: dict[int, subprocess.Popen[bytes] | forked.ForkedProcess] = {}
        for rank in only or range(size):
            self.errors[rank] = folder / f"{rank}.stderr"
            place = place_in(self.job, rank, size) | more
            if not fresh:
                env = forked.environment() | environment(folder, **place)
                env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")  # what it is forked from has found all
                command = [str(PROGRAM), what]
                self.processes[rank] = forked.start(command, env, torch=torch, output=self.errors[rank])
                continue
            with self.errors[rank].open("wb") as errors:
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, str(PROGRAM), what],
                    stdin=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment(folder, **place),
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            if isinstance(process, forked.ForkedProcess):
                process.stdin.close()
                process.stdout.close()

    def wait(self) -> list[int]:
        """Their exit codes, by rank."""
        end = time.monotonic() + PATIENCE_S
        for rank, process in self.processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} does not end: {self.said(rank)}") from None
        return [self.processes[rank].returncode for rank in sorted(self.processes)]

    def said(self, rank: int) -> str:
        """On its standard error."""
        return self.errors[rank].read_text(errors="replace")

    def answers(self, key: str) -> dict[int, list[Any]]:
        """What each rank has answered under a name."""
        return answers(self.folder, key)


def answers(folder: Path, key: str) -> dict[int, list[Any]]:
    """What each rank has answered under a name, in its order."""
    found: dict[int, list[Any]] = {}
    for file in folder.glob("*.jsonl"):
        values = [line[key] for line in map(json.loads, file.read_text().splitlines()) if key in line]
        if values:
            found[int(file.stem)] = values
    return dict(sorted(found.items()))


def flavours() -> dict[str, list[str]]:
    """The implementations of MPI that are installed, and how each is started."""
    found = {}
    for name, flags in (("openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpich", [])):
        path = shutil.which(f"mpirun.{name}")
        if path is not None:
            found[name] = [path, *flags]
    return found


def why_no_mpi(flavour: str) -> str:
    """Why there are no jobs of this one; "" if there are."""
    return "" if flavour in flavours() else f"needs mpirun.{flavour} (scripts/install-mpi)"


def mpi_environment(flavour: str) -> dict[str, str]:
    """With which mpi4py, whose wheel knows both, uses this one."""
    if flavour == "openmpi":
        return {"MPI4PY_MPIABI": "openmpi"}
    folder = Path(sys.prefix, "lib", "mpich")
    return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}


@functools.cache
def why_no_mpi4py(flavour: str) -> str:
    """Why mpi4py cannot be used with this one; "" if it can."""
    environ = os.environ | mpi_environment(flavour)
    done = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, text=True, env=environ)
    return "" if done.returncode == 0 else "needs mpi4py (scripts/install-mpi; .venv-mpi/bin/python -m pytest)"


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Whatever has this folder in its environment has ended at the end, soon."""
    yield
    end = time.monotonic() + PATIENCE_S
    while left := carriers_of("ANSWERS", str(folder).__eq__):
        if time.monotonic() > end:
            for process in left:
                process.kill()
            raise AssertionError(f"left running: {left}")
        psutil.wait_procs(left, timeout=1)
