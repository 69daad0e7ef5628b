"""What is said of other processes of this machine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from elastic_driver.system import process_name
from elastic_driver.system.process_name import (
    ProcessName,
    is_below,
    is_stopped,
    lives,
    name_of,
    name_of_this_process,
    pid_in,
    send,
)

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


def test_a_process_is_known_by_more_than_its_number() -> None:
    name = name_of_this_process()
    this = ProcessName.parse(name)
    assert this is not None
    assert (str(this), this.pid, pid_in(name), this.is_of_this_place) == (name, os.getpid(), os.getpid(), True)
    assert lives(name)
    assert not lives(str(replace(this, started=this.started - 1)))
    assert not lives(str(replace(this, pid=4194999)))
    elsewhere = replace(this, place="other pid:[1]", pid=4194999)
    assert not elsewhere.is_of_this_place
    assert lives(str(elsewhere)), "of another container's processes nobody here can tell"


@pytest.mark.parametrize("text", ["", "boot pid:[1]", "boot pid:[1] 12 x", "boot pid:[1] x 12", "12"])
def test_what_is_no_name_of_a_process(text: str) -> None:
    assert ProcessName.parse(text) is None
    assert pid_in(text) is None
    assert not lives(text)


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_only_the_process_of_that_name_gets_a_signal(has_pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not has_pidfds:
        monkeypatch.setattr(process_name, "pidfd_open", refused)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        name = ProcessName.of(other.pid)
        for wrong in (replace(name, started=name.started + 1), replace(name, place="elsewhere"), "nobody"):
            assert not send(str(wrong), signal.SIGKILL)
        assert lives(str(name))
        other.send_signal(signal.SIGSTOP)
        assert send(str(name), signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL
        assert not send(str(name), signal.SIGKILL)


def test_a_zombie_does_not_live() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = str(ProcessName.of(process.pid))
        assert lives(name)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(name)


def test_a_process_that_cannot_be_looked_up_now_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that runs out of descriptors must not take its driver for dead."""
    name = name_of(os.getpid())

    def full(_: int) -> tuple[str, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(process_name, "look_up", full)
    assert lives(name)
    monkeypatch.undo()
    with subprocess.Popen(["sleep", "3600"]) as child:
        name = name_of(child.pid)
        assert lives(name)
        child.kill()
    assert not lives(name)


def test_a_signal_reaches_a_process_where_only_its_descriptor_may_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(process_name, "pidfd_send_signal", refused)
    with subprocess.Popen(["sleep", "3600"]) as child:
        assert send(name_of(child.pid), signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
