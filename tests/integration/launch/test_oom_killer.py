"""A job in a cgroup that runs out of memory, as containers do: whom the OOM killer takes is said to be that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.jobs import Job

pytestmark = pytest.mark.integration

MEMORY = Path("/sys/fs/cgroup/memory")
TAKES_ALL = "kept = []\nwhile True:\n    kept.append(b'x' * (1 << 20))\n"


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[Path]:
    folder = MEMORY / f"elastic_driver-{tmp_path.name}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(400 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a cgroup with a limit of memory (version 1): {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def test_who_was_killed_for_want_of_memory_is_said_to_be_that(cgroup: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TAKES_ALL)
    enter = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
    command = [sys.executable, str(script)]
    with Job(tmp_path, None, "-np", "1", command=command, prefix=("sh", "-c", enter, "sh")) as job:
        how = "killed by SIGKILL (out of memory: the kernel's OOM killer)"
        job.wait_for("how the worker ended", lambda: how in job.said())
        assert job.wait_for("its event", lambda: job.events("worker_exited"))[0]["returncode"] == -9
