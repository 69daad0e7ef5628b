"""A process that another one has beside it, and that ends when that does, or lets go of it: it reads a pipe to its end.

Owns the side of the one that is held, from its first moment on. Signals mean nothing to it: a scheduler, or a terminal,
sends them to all processes of a job at once, and it is its holder that decides what follows. Imports little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

from elastic_driver.words import ExitCode

ENV_HELD = "ELASTIC_DRIVER_BESIDE"
"""Is set for a process that is held by its standard input."""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")


def is_held(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of those."""
    return bool(environ.get(ENV_HELD))


def ignore_signals(more: tuple[str, ...] = ()) -> None:
    """Has this process, and what it starts, ignore what its holder gets, too.

    Args:
        more: names of other signals.
    """
    for name in (*_IGNORED, *more):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


class Leash:
    """See above. Until somebody says what is to be done at the end, this process just ends then.

    Args:
        descriptor: what is read to its end.
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
        """While this context lasts that is called, by another thread, instead of ending this process."""
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
