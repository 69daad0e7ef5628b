"""The settings of a terminal that a worker is used through, on pseudo-terminals."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from elastic_driver.system.terminal import Terminal

pytestmark = pytest.mark.unit


@pytest.fixture
def terminal() -> Iterator[int]:
    ours, theirs = os.openpty()
    yield theirs
    os.close(ours)
    os.close(theirs)


def test_each_key_comes_as_it_is_pressed_until_the_settings_are_put_back(terminal: int) -> None:
    before = termios.tcgetattr(terminal)
    one = Terminal(terminal)
    for _ in range(2):
        one.pass_keys()
        one.pass_keys()
        changed = termios.tcgetattr(terminal)
        assert not changed[3] & (termios.ICANON | termios.ECHO)
        assert changed[3] & termios.ISIG, "Ctrl-Z and Ctrl-\\ stay signals"
        assert changed[6][termios.VINTR] == b"\0", "Ctrl-C does not"
        one.restore()
        assert termios.tcgetattr(terminal) == before
    one.close()


def test_what_a_shell_has_put_back_meanwhile_is_changed_anew(terminal: int) -> None:
    """As after a stop: the shell gives the terminal back with its own settings."""
    before = termios.tcgetattr(terminal)
    one = Terminal(terminal)
    one.pass_keys()
    changed = termios.tcgetattr(terminal)
    termios.tcsetattr(terminal, termios.TCSANOW, before)
    one.pass_keys()
    assert termios.tcgetattr(terminal) == changed
    one.close()
    assert termios.tcgetattr(terminal) == before


@pytest.mark.parametrize("in_use", [False, True])
def test_settings_are_put_back_for_a_process_that_was_killed(terminal: int, in_use: bool) -> None:
    """Unless somebody else uses the terminal already. As descriptor 0, where a driver has it."""
    before = termios.tcgetattr(terminal)
    source = (
        "import os\n"
        "from elastic_driver.system.terminal import Terminal\n"
        "one = Terminal(0)\n"
        "one.pass_keys()\n"
        "print(one._guard.pid, flush=True)\n"
        "os.read(3, 1)\n"
        "os.abort()\n"
    )
    waits, goes_on = os.pipe()
    os.dup2(waits, 200)
    script = f"exec {sys.executable} -c '{source}' 3<&200"
    with subprocess.Popen(
        ["/bin/bash", "-c", script], stdin=terminal, stdout=subprocess.PIPE, pass_fds=(200,), start_new_session=True
    ) as process:
        for descriptor in (waits, 200):
            os.close(descriptor)
        assert process.stdout is not None
        guard = os.pidfd_open(int(process.stdout.readline()))
        assert termios.tcgetattr(terminal) != before
        theirs = before
        if in_use:
            theirs = termios.tcgetattr(terminal)
            theirs[3] |= termios.ECHO
            termios.tcsetattr(terminal, termios.TCSANOW, theirs)
        os.close(goes_on)
    _wait_for(guard)
    assert termios.tcgetattr(terminal) == theirs


def _wait_for(pidfd: int) -> None:
    import select

    assert select.select([pidfd], [], [], 150)[0]
    os.close(pidfd)
