"""The process that a node has beside it, and how it is let go of."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from elastic_driver.driver import node_driver
from elastic_driver.driver.node_driver import NodeDriver
from elastic_driver.words import ExitCode
from tests.support.network.machines import wait_for
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

# Says its pid, and waits: with an end of its own, or for the end of its leash.
PROGRAM = """
import os, sys, threading
from pathlib import Path
from elastic_driver.system.leash import ENV_HELD, Leash, ignore_signals, is_held
assert is_held(os.environ)
folder, how = Path(sys.argv[1]), sys.argv[2]
ignore_signals()
leash, cut = Leash(), threading.Event()
def come_up():
    new = folder / f"new{os.getpid()}"
    new.touch()
    new.rename(folder / f"pid{os.getpid()}")
if how == "takes it":
    with leash.taken_by(cut.set):
        come_up()
        cut.wait()
    (folder / "let go").touch()
    os._exit(0)
come_up()
while not (folder / "end").exists():
    cut.wait(0.01)
os._exit(int((folder / "end").read_text()))
"""


def program(folder: Path, how: str = "", has_ended: Callable[[], bool] = lambda: False) -> NodeDriver:
    words = [sys.executable, "-c", PROGRAM, str(folder), how]
    return NodeDriver(words, {**os.environ, "PYTHONPATH": str(ROOT)}, has_ended=has_ended)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid")) for path in folder.glob("pid*")]


def the_next(folder: Path, *before: int) -> int:
    """The process that has come up beside those. Blocks until there is one."""
    return wait_for("it has come up", lambda: next((pid for pid in pids(folder) if pid not in before), 0))


def ended(pid: int) -> Callable[[], bool]:
    return lambda: not psutil.pid_exists(pid)


def test_one_that_is_lost_is_started_again(tmp_path: Path) -> None:
    """Killed, or because another driver has the job. Signals that are sent to all processes mean nothing to it."""
    with program(tmp_path):
        first = the_next(tmp_path)
        os.kill(first, signal.SIGTERM)
        os.kill(first, signal.SIGINT)
        os.kill(first, signal.SIGKILL)
        second = the_next(tmp_path, first)
        (tmp_path / "end").write_text(f"{int(ExitCode.OTHER_DRIVER)}")
        wait_for("it has ended", ended(second))
        (tmp_path / "end").unlink()
        third = the_next(tmp_path, first, second)
    assert not psutil.pid_exists(third), "it is gone with its node"


@pytest.mark.parametrize("code", [0, 2, 3])
def test_none_is_started_again_when_its_job_has_ended_unless_it_is_asked_for(tmp_path: Path, code: int) -> None:
    asked = threading.Event()

    def has_ended() -> bool:
        asked.set()
        return True

    with program(tmp_path, has_ended=has_ended) as one:
        first = the_next(tmp_path)
        (tmp_path / "end").write_text(f"{code}")
        asked.wait()
        (tmp_path / "end").unlink()
        assert pids(tmp_path) == [first]
        assert not one.is_refused
        one.again()
        the_next(tmp_path, first)
        (tmp_path / "end").write_text("0")
        one.wait(600.0)
    assert len(pids(tmp_path)) == 2


def test_one_that_ends_while_its_job_goes_on_is_started_again_unless_it_is_refused(tmp_path: Path) -> None:
    with program(tmp_path) as one:
        first = the_next(tmp_path)
        (tmp_path / "end").write_text("70")
        wait_for("it has ended", ended(first))
        (tmp_path / "end").unlink()
        the_next(tmp_path, first)
        assert not one.is_refused
        (tmp_path / "end").write_text("2")
        wait_for("it is refused", lambda: one.is_refused)
        one.again()
        one.wait(600.0)
    assert len(pids(tmp_path)) == 2


def test_it_does_what_is_to_be_done_when_it_is_let_go_of(tmp_path: Path) -> None:
    with program(tmp_path, "takes it"):
        the_next(tmp_path)
        assert not (tmp_path / "let go").exists()
    assert (tmp_path / "let go").exists()


def test_a_node_that_is_killed_lets_go_of_it(tmp_path: Path) -> None:
    node = os.fork()
    if not node:
        program(tmp_path, "takes it").__enter__()
        signal.pause()
    pid = the_next(tmp_path)
    os.kill(node, signal.SIGKILL)
    os.waitpid(node, 0)
    wait_for("it is let go of", (tmp_path / "let go").exists)
    wait_for("it has ended", ended(pid))


def test_one_that_is_stopped_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_driver, "_LETS_GO_S", 0.1)
    with program(tmp_path):
        pid = the_next(tmp_path)
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)


def test_there_may_be_no_process_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is tried again, until the node ends."""
    said: list[str] = []

    def is_said_twice() -> bool:
        said.append(capfd.readouterr().err)
        return "".join(said).count("cannot start a driver") > 1

    with NodeDriver([str(tmp_path / "nothing")], {}) as one:
        wait_for("it is said again", is_said_twice)
        assert not one.is_refused
