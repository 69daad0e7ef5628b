"""The terminal of this process while another program is used through it: passes every key as it is pressed.

Owns the terminal's settings, and a process that restores them when this one is killed.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

_GUARD = Path(__file__).with_name("terminal_guard.py")
_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6


class Terminal:
    """Changes the settings of a terminal, and restores them.

    Args:
        descriptor: of the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None  # its settings, while they are changed
        self._raw: list[Any] = []  # the changed settings
        self._guard: subprocess.Popen[bytes] | None = None

    def in_foreground(self) -> bool:
        """Return whether this process may read from it. Always true if it is not a job of a shell."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # it is not the terminal of this session
            return True

    def size(self) -> tuple[int, int]:
        """Return its rows and columns; zeros if unknown."""
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return 0, 0
        return size.lines, size.columns

    def pass_keys(self) -> None:
        """Deliver each key as it is pressed, even Ctrl-C. Ctrl-Z and Ctrl-\\ stay signals. Only in the foreground."""
        if not self.in_foreground():
            return
        with contextlib.suppress(termios.error, OSError):
            before = termios.tcgetattr(self._descriptor)
            if self._before is not None and before == self._raw:
                return  # else this process was stopped, and its shell has restored its own
            raw = termios.tcgetattr(self._descriptor)
            raw[_IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON | termios.ISTRIP)
            raw[_OFLAG] &= ~termios.OPOST
            raw[_LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
            raw[_CC][termios.VINTR] = b"\0"
            raw[_CC][termios.VMIN], raw[_CC][termios.VTIME] = 1, 0
            self._start_guard(before, raw)
            self._set(raw)
            self._before, self._raw = before, raw

    def restore(self) -> None:
        """Restore its settings. Harmless when repeated."""
        before, self._before = self._before, None
        if before is not None and self.in_foreground():  # else its shell has restored its own
            self._set(before)

    def close(self) -> None:
        """Restore its settings, for good."""
        self.restore()
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()

    def _set(self, attributes: list[Any]) -> None:
        # A job that has just lost the foreground would be stopped for this.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
        try:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, attributes)
        except (termios.error, OSError):  # it hung up
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_guard(self, before: list[Any], raw: list[Any]) -> None:
        """Tell the guard what to restore; without a guard a killed process leaves the terminal as it is."""
        with contextlib.suppress(OSError):
            if self._guard is None:
                self._guard = subprocess.Popen(
                    (sys.executable, "-I", "-S", str(_GUARD)),
                    stdin=subprocess.PIPE,
                    stdout=self._descriptor,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            assert self._guard.stdin is not None
            data = marshal.dumps((before, raw))
            self._guard.stdin.write(len(data).to_bytes(4) + data)
            self._guard.stdin.flush()
