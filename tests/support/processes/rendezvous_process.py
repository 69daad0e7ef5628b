"""``elasticrun rendezvous`` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 150.0


class RendezvousProcess:
    """A running one.

    Attributes:
        port: where it listens.
        lines: what it has said.
    """

    def __init__(self, *flags: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self._flags, self._env = flags, env
        self.lines: list[str] = []
        self._said = threading.Condition()
        self.port = port
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "elastic_driver", "rendezvous", "--port", str(self.port), *self._flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(self._env or {})}
        )
        self._began = len(self.lines)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        listens = self.until("listens at")
        self.port = int(re.search(r":(\d+); ", listens)[1])  # type: ignore[index]
        self._fingerprint = listens.rpartition("; its certificate: ")[2]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip())
                self._said.notify_all()
        with self._said:
            self.lines.append("(end)")
            self._said.notify_all()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Of this process, and not of one that is started in its place."""
        return f"https://{self.endpoint}#{self._fingerprint}"

    def until(self, text: str, *, after: int | None = None) -> str:
        """Blocks until it has said a line with this text, since its start or since the line of this number."""
        begin = self._began if after is None else after

        def found() -> str | None:
            return next((line for line in self.lines[begin:] if text in line), None)

        with self._said:
            self._said.wait_for(lambda: found() or "(end)" in self.lines[begin:], PATIENCE_S)
            line = found()
        assert line is not None, f"{text!r} was not said: {self.lines}"
        return line

    def kill(self) -> None:
        """Ends it without a word."""
        self.process.kill()
        self._wait()

    def start_again(self) -> None:
        """At the same port."""
        self._start()

    def stop(self) -> int:
        """Ends it, and gives its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def a_rendezvous(*flags: str, env: dict[str, str] | None = None) -> Iterator[RendezvousProcess]:
    """One that is stopped at the end, and has had no error of its own."""
    rendezvous = RendezvousProcess(*flags, env=env)
    try:
        yield rendezvous
    finally:
        code = rendezvous.stop()
    assert code == 0, rendezvous.lines
