"""What a worker knows of the process that owns it, and says while it waits for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.worker.rounds import owner as owner_module
from elastic_driver.worker.rounds.owner import Owner

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from elastic_driver.system.process_name import name_of_this_process
print(name_of_this_process(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that is to be taken for the driver, and its name."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_it_is_alive_stopped_or_dead(driver: tuple[subprocess.Popen[str], str]) -> None:
    process, name = driver
    owner = Owner(name)
    assert owner.state() == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert owner.state() == "stopped"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has reaped it
    assert owner.state() is None
    process.wait()
    assert owner.state() is None


def test_of_another_process_or_place_nothing_is_known() -> None:
    name = name_of_this_process()
    assert Owner(name).state() == "running"
    place, pid, started = name.rsplit(" ", 2)
    assert int(pid) == os.getpid()
    assert Owner(f"{place} {pid} {int(started) - 1}").state() is None, "its id was given to another process"
    assert Owner(f"{place[:-2]}0] {pid} {started}").state() is None, "another namespace"
    assert Owner(f"x{place} {pid} {started}").state() is None, "another machine"
    for rubbish in ("", " ", "x", "a b c", f"{place} x {started}"):
        assert Owner(rubbish).state() is None
        assert not Owner(rubbish).is_waited_for(0.0)


def test_it_says_once_that_it_waits_and_once_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(name_of_this_process())
    since = now = 1000.0
    monkeypatch.setattr(owner_module, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(3):
        assert owner.is_waited_for(since - 75)
        assert owner.is_waited_for(since - 60), "another thread's request"
    owner.has_answered()
    owner.has_answered()
    assert owner.is_waited_for(since - 10), "a request of before the answer is late, and no news"
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "elastic_driver: the driver has not answered for 75 s, but its process is alive (running); waiting for it",
        "elastic_driver: the driver answers again after 75 s; continuing",
    ]
    now += 1
    assert owner.is_waited_for(now)
    assert "has not answered for 0 s" in capsys.readouterr().err
