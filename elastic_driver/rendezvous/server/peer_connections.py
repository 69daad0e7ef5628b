"""All connections of a server: how many there may be, and which are cut.

Owns the room for connections, and which are cut when there is none: strangers, oldest first. Each connection owns its
data.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.server.peer_connection import PeerConnection, ServerLimits

# Three connections for each of 4,096 workers, and a third as much again. Not more than that unless needed, although the
# system may allow it: workers inherit the limit, and some programs loop over all of it.
_DESCRIPTORS = 16384
# Descriptors for other uses: the discovery script, logs, libraries.
_OTHER_DESCRIPTORS = 256
CONNECTIONS_EACH = 3
"""Connections of a worker: its main thread's, its watch's, and its engine's while it connects."""
# Connections that a server always has room for.
_FEWEST = 16
# How long closing waits for peers to read their last answers.
_FLUSH_S = 1.0


class PeerConnections:
    """All connections of a server.

    Args:
        limits: the limits on one peer.
        on_full: called at the start if there will not be room for all workers, and the first time that there is none.
        on_worker_gone: called when an authenticated worker has lost its last connection.
    """

    def __init__(
        self,
        limits: ServerLimits,
        *,
        on_full: Callable[[str], None] | None = None,
        on_worker_gone: Callable[[WorkerId], None] | None = None,
    ) -> None:
        self._limits = limits
        self._on_full = on_full
        self._on_worker_gone = on_worker_gone
        self._most = 0
        self._most_strangers = limits.strangers
        self._all: set[PeerConnection] = set()
        self._strangers: dict[PeerConnection, float] = {}  # with their arrival, oldest first
        self._workers: dict[PeerConnection, WorkerId] = {}  # connections of workers, if on_worker_gone is given
        self._number_of: Counter[WorkerId] = Counter()
        self._closing = False
        self._all_lost = asyncio.Event()  # set when closing and the last connection is lost
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    # --- for the server --------------------------------------------------------------------------------------------

    def make_room(self, workers: int, at_most: int, *, connections_each: int, descriptors_each: int) -> None:
        """Raise the limit of open files to what the workers need.

        Args:
            workers: how many workers there must be room for.
            at_most: how many workers the job may grow to, as far as known.
            connections_each: connections of one worker to this server.
            descriptors_each: other descriptors of this process per worker.

        Raises:
            SettingsError: the system does not allow as many.
        """
        per_worker = connections_each + descriptors_each
        needed, wanted = (per_worker * number + _OTHER_DESCRIPTORS for number in (workers, max(workers, at_most)))
        allowed = _descriptors(max(_DESCRIPTORS, wanted))
        if allowed < needed:
            raise SettingsError(
                f"cannot serve {workers} workers: they need {needed} open files, and only {allowed} are allowed; "
                "raise the hard limit (ulimit -Hn) for this user"
            )
        room = (allowed - _OTHER_DESCRIPTORS) // per_worker
        if allowed < wanted and self._on_full is not None:
            self._on_full(
                f"there is room for only {room} workers, and the job may grow to {at_most}: they need {wanted} "
                f"open files, and only {allowed} are allowed; raise the hard limit (ulimit -Hn) for this user "
                "before the next start"
            )
        most = allowed - _OTHER_DESCRIPTORS - room * descriptors_each
        self._most = self._limits.connections or max(_FEWEST, most)
        self._most_strangers = max(1, min(self._limits.strangers, self._most // 2))

    def make_local_room(self, workers: int) -> None:
        """Set the number of workers to make room for, when all are on this machine."""
        self._most = max(_FEWEST, 2 * CONNECTIONS_EACH * workers)

    def begin(self) -> None:
        """Start cutting stalled connections. Idempotent."""
        if self._sweeper is None:
            self._sweep()

    def descriptors(self) -> list[int]:
        """Return the descriptors of all sockets."""
        return [number for number in (each.descriptor for each in self._all) if number >= 0]

    def begin_to_close(self) -> None:
        """Say goodbye on every connection, and accept no more. Idempotent."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self._all):
            connection.say_goodbye("the driver has ended")

    async def closed(self) -> None:
        """Block until all connections are gone; one that does not read its last answer is cut after a second."""
        if not self._all:
            return
        try:
            await asyncio.wait_for(self._all_lost.wait(), _FLUSH_S)
        except TimeoutError:
            for connection in tuple(self._all):
                connection.abort()
            await self._all_lost.wait()

    # --- for connections -------------------------------------------------------------------------------------------

    def arrived(self, connection: PeerConnection) -> None:
        """Add a connection; cut strangers, or refuse it, if there is no room."""
        self._all.add(connection)
        if self._closing:
            connection.abort()
            return
        now = asyncio.get_running_loop().time()
        if len(self._all) <= self._most:
            self._cut_strangers(now, self._most_strangers - 1)
        elif self._strangers:
            next(iter(self._strangers)).abort()  # at once: its descriptor is needed
        else:
            connection.refuse(503, f"the driver already has {self._most} connections; try again")
            tell, self._on_full = self._on_full, None
            if tell is not None:
                tell(
                    f"the limit of {self._most} connections is reached: new workers must wait until others "
                    "disconnect; raise the limit on open files (ulimit -Hn) before the next start"
                )
        self._strangers[connection] = now

    def met(self, connection: PeerConnection) -> None:
        """Restart the time limit of a peer that has begun to authenticate."""
        if self._strangers.pop(connection, None) is not None:
            self._strangers[connection] = asyncio.get_running_loop().time()

    def trusted(self, connection: PeerConnection, worker: WorkerId | None = None) -> None:
        """Record that the peer is known: this worker, or no worker."""
        self._strangers.pop(connection, None)
        if worker is not None and self._on_worker_gone is not None and connection not in self._workers:
            self._workers[connection] = worker
            self._number_of[worker] += 1

    def left(self, connection: PeerConnection) -> None:
        """Record that the connection is closing or gone. May be called more than once."""
        self._strangers.pop(connection, None)

    def lost(self, connection: PeerConnection) -> None:
        """Remove a connection that is gone."""
        self._strangers.pop(connection, None)
        self._all.discard(connection)
        if self._closing and not self._all:
            self._all_lost.set()
        worker = self._workers.pop(connection, None)
        if worker is None or self._on_worker_gone is None:
            return
        self._number_of[worker] -= 1
        if not self._number_of[worker]:
            del self._number_of[worker]
            self._on_worker_gone(worker)

    def _cut_strangers(self, now: float, most: int) -> None:
        """Cut the oldest strangers whose time is up, until at most ``most`` are left."""
        while len(self._strangers) > most:
            oldest, since = next(iter(self._strangers.items()))
            if now - since < self._limits.stranger_s or oldest.has_unread:
                return
            oldest.abort()

    def _sweep(self) -> None:
        """Cut stalled connections, all in one pass: a timer for each would cost more than it saves."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._cut_strangers(now, self._most_strangers)
        for connection in tuple(self._all):
            connection.check_time(now)
        interval_s = min(1.0, self._limits.request_s / 4, self._limits.idle_s / 4)
        self._sweeper = loop.call_later(interval_s, self._sweep)


def _descriptors(needed: int) -> int:
    """Raise the limit of open files as far as needed and allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # forbidden by a sandbox: use the present limit
            return soft
        return wanted
    return needed if soft == resource.RLIM_INFINITY else soft
