"""elasticrun on a terminal, which a test types on and reads."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import forked
from tests.support.processes.jobs import AFRESH, PATIENCE_S


class Terminal:
    """elasticrun on a terminal of its own. The test is who sits before it.

    Attributes:
        process: it.
        seen: all that it has shown.
    """

    def __init__(self, *words: str, stdin: int | None = None, env: Mapping[str, str] | None = None) -> None:
        self.ours, self.theirs = os.openpty()
        self.resize(30, 90, tell=False)
        self.before = termios.tcgetattr(self.theirs)
        self.seen = b""
        self._looked_at = 0
        stdin = self.theirs if stdin is None else stdin
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(env or {})}
        self.process: subprocess.Popen[bytes] | forked.ForkedProcess
        if forked.starts_afresh():
            command, out = [sys.executable, *AFRESH, *words], self.theirs
            self.process = subprocess.Popen(
                command, stdin=stdin, stdout=out, stderr=out, env=env, start_new_session=True
            )
        else:
            command = [str(PROGRAMS / "session_elasticrun.py"), *words]
            self.process = forked.start_driver(
                command, env, self.theirs, self.theirs, Path.cwd(), stdin=stdin, workers=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, rows: int, columns: int, *, tell: bool = True) -> None:
        """Gives the terminal another size."""
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:  # it is no shell's job, so the kernel does not
            self.process.send_signal(signal.SIGWINCH)

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self.ours, text.encode())

    def sees(self, text: str, *, pressing: str = "") -> None:
        """Blocks until this is shown, behind what it has seen last.

        Args:
            text: what.
            pressing: keys that are pressed each second meanwhile.
        """
        limit = time.monotonic() + PATIENCE_S
        while (at := self.seen.find(text.encode(), self._looked_at)) < 0:
            left_s = limit - time.monotonic()
            if select.select([self.ours], [], [], min(1.0, left_s) if pressing else left_s)[0]:
                self.seen += os.read(self.ours, 65536)
            else:
                assert pressing, self.seen.decode()
                assert time.monotonic() < limit, self.seen.decode()
                self.type(pressing)
        self._looked_at = at + len(text)

    def sees_match(self, pattern: bytes) -> None:
        """Blocks until something like this is shown."""
        while re.search(pattern, self.seen) is None:
            assert select.select([self.ours], [], [], PATIENCE_S)[0], self.seen.decode()
            self.seen += os.read(self.ours, 65536)

    def ends(self) -> int:
        """Its exit code. Blocks until it has ended; reads on meanwhile."""
        process = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready = select.select([self.ours, process], [], [], PATIENCE_S)[0]
                assert ready, self.seen.decode()
                if self.ours in ready:
                    self.seen += os.read(self.ours, 65536)
                elif process in ready:
                    return self.process.wait()
        finally:
            os.close(process)
