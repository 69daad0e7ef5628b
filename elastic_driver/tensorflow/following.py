"""Following a source of listings: workers are added and removed until the running ones are the listed ones.

Owns the threads that add and remove workers: one per address, so that a server that does not answer, or a worker with a
long closure, delays no other. Knows nothing of TensorFlow: the cluster is a protocol here.
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

# How long a server may take to answer in one try, seconds; tries are repeated.
_ADD_S = 30.0
# The shortest and longest pause after an error, seconds.
_PAUSE_S = (1.0, 30.0)
# How long before its machine is gone a worker's closure is canceled, to run again elsewhere, seconds.
_LAST_MOMENT_S = 1.0


class Workers(Protocol):
    """The cluster that has the workers."""

    @property
    def is_closed(self) -> bool:
        """Whether the cluster is closed."""

    def addresses(self) -> frozenset[str]:
        """Return the addresses of the workers that are neither stopped nor stopping."""

    def add(self, address: str, timeout_s: float) -> Any:
        """Add a worker. Raises TimeoutError if its server does not answer."""

    def remove(self, address: str, timeout_s: float | None, *, forget: bool) -> Any:
        """Remove a worker, whose server is about to end with ``forget``. Raises ValueError if there is none."""


class Following:
    """Follows a source of listings, until :meth:`close` or the end of the cluster. Also a context manager.

    Args:
        workers: the cluster.
        source: lists the servers.
        drain_timeout_s: how long a leaving worker may take to finish its closure, unless the listing says, seconds.
        left: called with the address of each worker that was listed as leaving, once it takes no more closures.
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
        self._said: set[str] = set()  # listed as leaving, and reported by ``left``
        self._keepers: dict[str, threading.Event] = {}  # address -> wakes its thread from a pause
        self._unkept: deque[str] = deque()  # addresses for which no thread could be started
        self._thread = threading.Thread(target=self._run, name="elastic-tf-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following; the workers stay as they are. Does not wait for additions and removals in progress."""
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
                        _log.warning(
                            "cannot update the list of workers' servers, continuing with the current one: %s", error
                        )
                    self._stop.wait(pause)
                    pause = min(2 * pause, _PAUSE_S[1])
                    continue
                if pause != _PAUSE_S[0]:
                    _log.warning("the list of workers' servers is available again")
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
                _log.warning("cannot start threads for %d workers: they will be handled later", len(self._unkept))

    def _start_keeper(self, address: str) -> bool:
        """Start the thread of an address. Under the lock. Returns False if the machine lacks the resources."""
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
        """Add or remove the worker of an address as wanted, then those of addresses without a thread of their own."""
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
                # A server that does not answer yet is no reason to warn: it is listed, so it is about to start.
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
            pass  # it was removed by another call, or never added
        else:
            _log.info("worker %s left after %.1f s", address, time.monotonic() - began)
        if leave is not None:
            self._left(address)
            with self._lock:
                self._said.add(address)
