"""A process that ends when its holder ends or closes a pipe: it reads the pipe to its end.

Owns the held process's side, from its start. It ignores signals: a scheduler or a terminal sends them to all processes
of a job at once, and its holder decides what follows. Imports little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

from elastic_driver.words import ExitCode

ENV_HELD = "ELASTIC_DRIVER_BESIDE"
"""Set for a process that is held by its standard input."""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")


def is_held(environ: Mapping[str, str]) -> bool:
    """Return whether this process is held."""
    return bool(environ.get(ENV_HELD))


def ignore_signals(more: tuple[str, ...] = ()) -> None:
    """Make this process, and its children, ignore the signals that its holder gets, too.

    Args:
        more: names of other signals.
    """
    for name in (*_IGNORED, *more):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


class Leash:
    """Ends this process at the end of the pipe, unless another action is set.

    Args:
        descriptor: the one that is read to its end.
        ends: ends this process.
    """

    def __init__(
        self, descriptor: int = 0, *, ends: Callable[[], object] = lambda: os._exit(ExitCode.OTHER_DRIVER)
    ) -> None:
        self._descriptor, self._ends = descriptor, ends
        self._lock = threading.Lock()
        self._on_end: Callable[[], object] | None = None
        threading.Thread(target=self._read, name="elasticrun-leash", daemon=True).start()

    @contextlib.contextmanager
    def taken_by(self, on_end: Callable[[], object]) -> Iterator[None]:
        """Within the context, call this in another thread at the end of the pipe, instead of ending this process."""
        with self._lock:
            self._on_end = on_end
        try:
            yield
        finally:
            with self._lock:
                self._on_end = None

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._descriptor, 4096):
                pass
        with self._lock:
            (self._on_end or self._ends)()
