"""Whole jobs on a kernel, or in a container, that refuses system calls which the project uses where it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes.refused_calls import NUMBERS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not NUMBERS, reason="the numbers of this machine's system calls are not known"),
]
WORKER = """
import subprocess, sys
import numpy as np
import elastic_driver as hvd

hvd.init()
left = subprocess.Popen(["sleep", "3600"], start_new_session=True)
print("left", left.pid, "sum", hvd.allreduce(np.ones(1 << 20, np.float32), op=hvd.Sum)[0], flush=True)
"""


def elasticrun(refused: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.processes.refused_calls", refused, "--"]
    command += [sys.executable, "-m", "elastic_driver", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment(folder), check=False)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}


@pytest.mark.parametrize("refused", ["pidfd_open,pidfd_send_signal,pidfd_getfd", "memfd_create,process_vm_readv"])
def test_a_job_runs_without_them_and_leaves_nothing_behind(refused: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = elasticrun(refused, "-np", "2", sys.executable, str(script), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "left" in line]
    assert [line[-1] for line in lines] == ["2.0", "2.0"]
    assert [pid for line in lines if lives(pid := int(line[-3]))] == []


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_check_build_says_what_is_lost(tmp_path: Path) -> None:
    done = elasticrun("memfd_create,pidfd_getfd", "--check-build", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[ ] memfd_create: Function not implemented: ranks of this host use the network" in done.stdout
    assert "[ ] pidfd_getfd: Function not implemented: the agent cannot close connections" in done.stdout
    assert "[X] pidfd_open\n" in done.stdout
