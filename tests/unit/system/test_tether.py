"""What keeps a process from being tied keeps it from nothing else. tests/faults/test_orphans.py has the rest."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess

import pytest

from elastic_driver.system.tether import Tether, tie_this_process

pytestmark = pytest.mark.unit


def test_a_process_that_cannot_look_at_its_descriptors_is_not_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: str) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "listdir", no_proc)
    tie_this_process()


def test_an_end_that_another_thread_closes_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fcntl.fcntl

    def closed_meanwhile(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_GETOWN:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return known(descriptor, command, argument)

    tether = Tether()
    ends = tether.ends()
    with subprocess.Popen(["sleep", "120"], start_new_session=True) as child:
        ends.tie(child.pid)
        monkeypatch.setattr(fcntl, "fcntl", closed_meanwhile)
        try:
            tie_this_process()
        finally:
            monkeypatch.undo()
            ends.close()  # else its end would be this process's, were it tied after all
            tether.close()
            child.kill()
