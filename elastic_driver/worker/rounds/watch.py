"""The thread that watches the driver while a round runs.

It holds one long poll and turns notices into calls of its listener. Each request is also a heartbeat with the process's
progress. It owns no state of the round.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from elastic_driver.errors import RendezvousClosedError, RendezvousError, StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import DiskReport, Notice, WatchRequest
from elastic_driver.system.threads import name_this_thread
from elastic_driver.words import NoticeKind
from elastic_driver.worker.settings import worker_settings

_log = logging.getLogger("elastic_driver.worker")

# Between two tries while the driver does not answer. The client below has its own, shorter retries; a driver that is
# gone for good takes its workers with it (they are killed with it), so the retries have no limit.
_RETRY_S = 1.0
# Without heartbeats: the server's own limit, half a minute.
_LONG_POLL_S = 30.0


def poll_s() -> float:
    """Return how long one request may wait for its answer, in seconds, so that heartbeats are in time."""
    heartbeat_s = worker_settings().heartbeat_s
    return heartbeat_s if 0 < heartbeat_s < _LONG_POLL_S else _LONG_POLL_S


class WatchClient(Protocol):
    """The part of a rendezvous client that the thread uses."""

    def watch(self, request: WatchRequest, *, wait_s: float) -> Notice | None:
        """Block until there is a notice newer than the request's, or for that time (then None)."""

    def close(self) -> None:
        """End blocked calls, from any thread."""


class Listener(Protocol):
    """The watched round. All calls come from the watch thread and return quickly."""

    def on_hosts_updated(self, *, leave: bool, reason: str) -> None:
        """React to the notice's level: whether members have to leave at the next commit."""

    def on_abort(self, reason: str) -> None:
        """End blocked collectives now: the round is broken or over."""

    def disk(self) -> DiskReport | None:
        """Return the report on commits on disk; None for none."""

    def look(self) -> None:
        """Perform a periodic check."""

    def progress(self) -> tuple[int, bool]:
        """Return a number that grows with each operation finished, and whether one waits for other members."""


class Watch:
    """A round's watch thread. Its owner stops and joins it."""

    def __init__(self, client: WatchClient, worker: WorkerId, round_id: int, listener: Listener) -> None:
        self._client = client
        self._worker = worker
        self._round_id = round_id
        self._listener = listener
        self._poll_s = poll_s()
        self._stopped = threading.Event()
        # A daemon, because the interpreter joins other threads before it runs the atexit functions that stop this one.
        # The driver's answers and stop() wake it; stop() and the end of the round end it.
        self._thread = threading.Thread(target=self._run, name=f"elastic-watch-{round_id}", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. Closes the client; returns at once."""
        self._stopped.set()
        self._client.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        name_this_thread()
        version = 0
        reported = False
        while not self._stopped.is_set():
            try:
                self._listener.look()
                progress, waiting = self._listener.progress()
                disk = self._listener.disk()
                request = WatchRequest(self._worker, self._round_id, version, progress, waiting, disk=disk)
                notice = self._client.watch(request, wait_s=self._poll_s)
            except StaleRoundError as error:
                if not self._stopped.is_set():
                    self._listener.on_abort(f"the driver continued without this worker: {error}")
                return
            except RendezvousClosedError as error:
                if not self._stopped.is_set():
                    self._listener.on_abort(f"the driver is closed: {error}")
                return
            except RendezvousError as error:
                if self._stopped.is_set():
                    return
                if not reported:
                    _log.warning(
                        "elastic_driver: round %d: cannot watch the driver, retrying: %s", self._round_id, error
                    )
                    reported = True
                self._stopped.wait(_RETRY_S)
                continue
            reported = False
            if notice is None or notice.version <= version:
                continue
            version = notice.version
            if notice.round_id != self._round_id:
                continue  # of another round
            match notice.kind:
                case NoticeKind.NONE:
                    self._listener.on_hosts_updated(leave=False, reason=notice.reason)
                case NoticeKind.HOSTS_UPDATED:
                    self._listener.on_hosts_updated(leave=True, reason=notice.reason)
                case NoticeKind.ABORT | NoticeKind.JOB_OVER:
                    if not self._stopped.is_set():
                        self._listener.on_abort(notice.reason)
                    if notice.kind is NoticeKind.JOB_OVER:
                        return
                    # The training may be in an evaluation, and notice this only at its next collective operation.
                    # Usually it has asked for the next round before this heartbeat is due.
                    self._stopped.wait(self._poll_s)
