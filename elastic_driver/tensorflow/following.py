"""Following a listing of servers: workers are added and removed until those that run are those that are listed.

Owns who is being added or removed at present: one thread an address, so that one that does not answer, or has a long
closure in hand, holds nobody up. Knows nothing of TensorFlow: what has the workers is a protocol here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from elastic_driver.errors import shortage
from elastic_driver.tensorflow.listings import Ended, Leave, Listing, Source

_log = logging.getLogger(__name__)

# How long a server may take to answer, in one try of many.
_ADD_S = 30.0
# After an error, until the next try.
_PAUSE_S = (1.0, 30.0)
# So long before its machine is gone a worker's closure is cancelled, to be run again elsewhere.
_LAST_MOMENT_S = 1.0


class Workers(Protocol):
    """Who has the workers."""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""

    def addresses(self) -> frozenset[str]:
        """Of the workers that are not stopped."""

    def add(self, address: str, timeout_s: float) -> Any:
        """Adds one. Raises TimeoutError: it does not answer."""

    def remove(self, address: str, timeout_s: float | None, *, forget: bool) -> Any:
        """Removes one, whose server is about to go. Raises ValueError: there is none."""


class Following:
    """See above. Ends with :meth:`close`, or with what has the workers. A context manager, too.

    Args:
        workers: has them.
        source: tells the servers.
        drain_timeout_s: how long a worker that is to leave may take to end its closure, where nobody says.
        left: told of each that was listed as leaving, when it takes no closures any more.
    """

    def __init__(
        self,
        workers: Workers,
        source: Source,
        *,
        drain_timeout_s: float,
        left: Callable[[str], object] = lambda address: None,
    ) -> None:
        self._workers = workers
        self._source = source
        self._drain_timeout_s = drain_timeout_s
        self._left = left
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._listing: Listing | None = None
        self._said: set[str] = set()  # of those that are listed as leaving: that they have left
        self._keepers: dict[str, threading.Event] = {}  # wakes a keeper that pauses
        self._unkept: deque[str] = deque()  # those that no thread could be started for
        self._thread = threading.Thread(target=self._run, name="elastic-tf-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follows no more; the workers stay as they are. Does not wait for who is being added or removed."""
        self._stop.set()
        with self._lock:
            for wake in self._keepers.values():
                wake.set()

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_over(self) -> bool:
        return self._stop.is_set() or self._workers.is_closed

    def _run(self) -> None:
        pause = _PAUSE_S[0]
        try:
            while not self._is_over:
                try:
                    listing = self._source.next(self._stop)
                except Ended:
                    return
                except Exception as error:
                    if pause == _PAUSE_S[0]:
                        _log.warning("cannot learn of the workers' servers, and go on with those there are: %s", error)
                    self._stop.wait(pause)
                    pause = min(2 * pause, _PAUSE_S[1])
                    continue
                if pause != _PAUSE_S[0]:
                    _log.warning("the workers' servers can be learnt again")
                pause = _PAUSE_S[0]
                if listing is not None:
                    with self._lock:
                        self._listing = listing
                        self._said &= {address for address, leave in listing.items() if leave is not None}
                if listing is not None or self._unkept:
                    self._apply()
        finally:
            self._source.close()

    def _apply(self) -> None:
        with self._lock:
            listing = self._listing or {}
            there = self._workers.addresses()
            before, self._unkept = self._unkept, deque()
            for address in sorted({*listing, *there}):
                wake = self._keepers.get(address)
                if wake is not None:
                    wake.set()
                elif not self._is_as_wanted(address, there) and (self._unkept or not self._start_keeper(address)):
                    self._unkept.append(address)
            if self._unkept and not before:
                _log.warning("no thread can be started for %d workers: others see to them later", len(self._unkept))

    def _start_keeper(self, address: str) -> bool:
        """Under the lock. Returns whether there could be a thread for it."""
        wake = threading.Event()
        try:
            threading.Thread(
                target=self._keep, args=(address, wake), name=f"elastic-tf-keep-{address}", daemon=True
            ).start()
        except (RuntimeError, OSError, MemoryError) as error:
            if not shortage(error):
                raise
            return False
        self._keepers[address] = wake
        return True

    def _is_as_wanted(self, address: str, there: frozenset[str] | None = None) -> bool:
        is_there = address in (self._workers.addresses() if there is None else there)
        is_heard = is_there or (self._listing or {}).get(address) is None or address in self._said
        return self._is_wanted(address) == is_there and is_heard

    def _is_wanted(self, address: str) -> bool:
        listing = self._listing or {}
        return address in listing and listing[address] is None

    def _keep(self, address: str, wake: threading.Event) -> None:
        """Adds and removes until it is as wanted; then sees to another that no thread could be started for."""
        pause = _PAUSE_S[0]
        while True:
            with self._lock:
                if self._is_over or self._is_as_wanted(address):
                    del self._keepers[address]
                    if self._is_over or not self._unkept:
                        return
                    address, wake, pause = self._unkept.popleft(), threading.Event(), _PAUSE_S[0]
                    self._keepers[address] = wake
                    continue
                wake.clear()
                wanted, leave = self._is_wanted(address), (self._listing or {}).get(address)
            try:
                if wanted:
                    self._workers.add(address, _ADD_S)
                else:
                    self._remove(address, leave)
            except Exception as error:
                if self._is_over:
                    continue
                # One that does not answer yet is nothing to worry about: it is listed, so it is about to come.
                level = logging.INFO if isinstance(error, TimeoutError) else logging.WARNING
                _log.log(level, "worker %s: %s", address, str(error).partition("\n")[0])
                wake.wait(pause)
                pause = min(2 * pause, _PAUSE_S[1])
            else:
                pause = _PAUSE_S[0]

    def _remove(self, address: str, leave: Leave | None) -> None:
        limit = self._drain_timeout_s
        if leave is not None and leave.within_s is not None:
            limit = max(0.0, leave.within_s - _LAST_MOMENT_S)
        began = time.monotonic()
        try:
            self._workers.remove(address, limit, forget=True)
        except ValueError:
            pass  # it has gone by itself, or never came
        else:
            _log.info("worker %s left after %.1f s", address, time.monotonic() - began)
        if leave is not None:
            self._left(address)
            with self._lock:
                self._said.add(address)
