"""elasticrun as process 1 of a namespace of processes, as in a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

# Says its number and that of a process whose parent has died; ends when it is told to, or that one is gone altogether.
_PROGRAM = """
import os, signal, subprocess, sys, time
from elastic_driver.system.first_process import leave_first_place
leave_first_place()
what = sys.argv[1]
if what == "orphan":
    orphan = subprocess.run(["sh", "-c", "sleep 0.1 >&- & echo $!"], stdout=subprocess.PIPE, check=True).stdout.decode()
    while os.path.exists(f"/proc/{int(orphan)}"):
        time.sleep(0.01)
    sys.exit(7)
if what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
counted = 0
def count(*_):
    global counted
    counted += 1
signal.signal(signal.SIGTERM, count)
print(os.getpid(), flush=True)
while not counted:
    signal.pause()
sys.exit(counted)
"""


@pytest.fixture
def in_container() -> list[str]:
    """Words before a command that has it run as process 1."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        words[1:1] = ["--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of processes here")
    return words


@pytest.mark.parametrize(("what", "code"), [("orphan", 7), ("die", 128 + signal.SIGKILL)])
def test_orphans_are_reaped_and_the_end_is_told(in_container: list[str], what: str, code: int) -> None:
    done = subprocess.run([*in_container, sys.executable, "-c", _PROGRAM, what], timeout=150, check=False)
    assert done.returncode == code


def test_signals_are_passed_on_once(in_container: list[str]) -> None:
    command = [*in_container, sys.executable, "-c", _PROGRAM, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 1
        [first] = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        assert process.wait(150) == 1


def test_elasticrun_is_not_process_1(in_container: list[str], tmp_path: Path) -> None:
    flags = ["-np", "1", sys.executable, "-c", "import os; print(os.getppid(), open('/proc/1/cmdline').read())"]
    command = [*in_container, sys.executable, "-m", "elastic_driver", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "elastic_driver" in done.stdout
    assert not done.stdout.startswith("1 ")
