"""What is said of other processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic_driver.system.process_name import is_below, is_stopped

pytestmark = pytest.mark.unit

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; print(os.getpid()); input()'])"


def test_who_descends_from_whom() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert is_below(grandchild, child.pid)
        assert is_below(grandchild, os.getpid())
        assert is_below(child.pid, child.pid)
        assert not is_below(child.pid, grandchild)
        assert not is_below(os.getpid(), child.pid)
        assert not is_below(1, child.pid)
        child.communicate(b"\n")
    assert not is_below(grandchild, os.getpid())


def test_a_process_that_stands_still() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
