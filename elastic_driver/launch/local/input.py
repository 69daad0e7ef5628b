"""A worker's standard input: a terminal of its own, a pipe, or the standard input of the driver's process.

Owns our end of it, and the bytes for the worker that do not fit into it yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Callable

from elastic_driver.launch.processes.spawn import Given

# From <asm-generic/termbits.h>; Python's termios has no name for it. With it Backspace erases a whole character.
_IUTF8 = 0o40000
_IFLAG, _LFLAG, _CC = 0, 3, 6


class WorkerInput:
    """Passes input on to a worker. Used on the event loop.

    Args:
        kind: "pipe" or "terminal".
        taken: called with the number of bytes that the worker can read now, or never will.
        interrupted: called for a Ctrl-C that is not meant for a program that reads keys itself.
        stderr_too: whether a terminal is the worker's standard error, too.
        rows, columns: of the terminal.

    Raises:
        OSError: no terminal or no descriptor is available.
    """

    def __init__(
        self,
        kind: str,
        *,
        taken: Callable[[int], None],
        interrupted: Callable[[], None],
        stderr_too: bool = False,
        rows: int = 0,
        columns: int = 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._taken = taken
        self._interrupted = interrupted
        self._is_terminal = kind == "terminal"
        self._waiting = bytearray()
        self._ends = False
        self._waits = False
        if self._is_terminal:
            self._ours, self._theirs = os.openpty()
            attributes = termios.tcgetattr(self._theirs)
            attributes[_IFLAG] |= _IUTF8
            termios.tcsetattr(self._theirs, termios.TCSANOW, attributes)
            self.resize(rows, columns)
        else:
            self._theirs, self._ours = os.pipe()
        os.set_blocking(self._ours, False)
        self.given = Given(self._theirs, self._ours if self._is_terminal else None, stderr_too=stderr_too)

    def started(self) -> None:
        """Close the worker's end here: the worker has it now, or never will."""
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def write(self, data: bytes) -> None:
        """Pass bytes on, as far as there is room, and the rest later."""
        if self._is_terminal:
            data = self._without_interrupts(data)
        self._waiting += data
        self._pass_on()

    def end(self) -> None:
        """End the input. (A terminal's input has no end: its user types Ctrl-D.)"""
        if not self._is_terminal:
            self._ends = True
            self._pass_on()

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size, of which the kernel notifies the worker (SIGWINCH)."""
        if self._is_terminal and rows > 0 and columns > 0:
            with contextlib.suppress(OSError, struct.error):
                fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """Close all ends, since the worker has ended. Harmless when repeated."""
        self.started()
        left = len(self._waiting)
        self._waiting.clear()
        self._close_ours()
        if left:
            self._taken(left)

    def _without_interrupts(self, data: bytes) -> bytes:
        """Remove a Ctrl-C that is meant for the job only, and report it.

        A program that edits its line, or reads keys, has switched the terminal's own editing off: there Ctrl-C is meant
        for the program, as a signal or as a key. Otherwise the script computes, and its peers with it.
        """
        with contextlib.suppress(termios.error, OSError):
            attributes = termios.tcgetattr(self._ours)
            flags, key = attributes[_LFLAG], attributes[_CC][termios.VINTR]
            if flags & termios.ICANON and flags & termios.ISIG and isinstance(key, bytes) and key != b"\0":
                count = data.count(key)
                if count:
                    self._taken(count)
                    self._interrupted()
                return data.replace(key, b"")
        return data

    def _pass_on(self) -> None:
        while self._waiting and self._ours >= 0:
            try:
                count = os.write(self._ours, self._waiting)
            except (BlockingIOError, InterruptedError):
                if not self._waits:
                    self._waits = True
                    self._loop.add_writer(self._ours, self._pass_on)
                return
            except OSError:  # it is no longer read
                break
            del self._waiting[:count]
            self._taken(count)
        if self._waiting:
            self._taken(len(self._waiting))
            self._waiting.clear()
        self._wait_no_more()
        if self._ends:
            self._close_ours()

    def _wait_no_more(self) -> None:
        if self._waits:
            self._waits = False
            self._loop.remove_writer(self._ours)

    def _close_ours(self) -> None:
        if self._ours >= 0:
            self._wait_no_more()
            os.close(self._ours)
            self._ours = -1
