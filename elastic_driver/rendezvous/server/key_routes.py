"""The routes of the key-value store of a round, which answer a worker at once or when its keys are set.

Owns the routes. :mod:`~elastic_driver.rendezvous.server.keys` owns keys and waiters. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.routes import WORKER, Answer, Deferred, Route, RouteRequest, Routes, integer
from elastic_driver.rendezvous.server.keys import Keys, KeyWaiter
from elastic_driver.rendezvous.server.parked import AwaitedKey, ParkedRequest
from elastic_driver.system.job_clock import CallLater

# How long an exchange waits if the request names no time; below the idle timeouts of middleboxes.
_EXCHANGE_S = 30.0


class Upstream(Protocol):
    """Holds the keys of all hosts, where this process holds those of one host."""

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Pass on a key that a worker here has set."""

    def want(self, round_id: int, scope: str, key: str, count: int) -> None:
        """Ask for a key, or for this many keys (then ``key`` is ""), that a worker here waits for
        (:meth:`KeyRoutes.take`).

        Called again for each worker that waits.
        """


class KeyRoutes(Keys[KeyWaiter]):
    """Serves the keys of a round.

    Args:
        call_later: times the waits; None for the loop's. That fires at once when the process resumes after a stop,
            before it has read the keys that arrived meanwhile.
        upstream: holds the keys of all hosts, if this process serves one host's workers.
    """

    def __init__(self, *, call_later: CallLater | None = None, upstream: Upstream | None = None) -> None:
        super().__init__()
        self._call_later = call_later
        self._upstream = upstream

    @property
    def routes(self) -> Routes:
        """The workers' requests: a key, or all keys of a scope."""
        return (
            Route("GET", "rounds/*/kv/*/*", WORKER, self._get),
            Route("PUT", "rounds/*/kv/*/*", WORKER, self._set),
            Route("POST", "rounds/*/exchange/*", WORKER, self._exchange),
        )

    # --- for callers on behalf of a worker -------------------------------------------------------------------------

    def set_key(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Set a key, and answer its waiters and those of that many keys in its scope.

        Raises:
            StaleRoundError: the round is not the current one.
            RendezvousProtocolError: the store is full, or key or scope is empty.
        """
        if not key or not scope:
            raise RendezvousProtocolError("cannot store a value without a scope and a key")
        self.store.check_round(round_id)
        self.take(round_id, scope, [(key, value)])
        if self._upstream is not None:
            self._upstream.put(round_id, scope, key, value)

    def key_when_there(self, round_id: int, scope: str, key: str) -> asyncio.Future[bytes]:
        """Return a future of a key's value. To stop waiting, cancel the future.

        The future raises StaleRoundError when the round is over.

        Raises:
            StaleRoundError: the round is not the current one.
        """
        waiter = AwaitedKey(round_id, scope, key, self)
        value = self.find(waiter)
        if value is not None:
            waiter.future.set_result(value)
        else:
            self.add(waiter)
            self._want(waiter)
        return waiter.future

    # --- routes ----------------------------------------------------------------------------------------------------

    def _get(self, request: RouteRequest) -> Answer | Deferred:
        round_text, scope, key = request.path
        round_id = integer(round_text, "round")
        value = self.store.get(round_id, scope, key)
        if value is not None:
            return 200, value
        return self._park(ParkedRequest(round_id, scope, key=key), request.wait_s(0.0))

    def _set(self, request: RouteRequest) -> Answer:
        round_text, scope, key = request.path
        self.set_key(integer(round_text, "round"), scope, key, request.body)
        return 204, b""

    def _exchange(self, request: RouteRequest) -> Answer | Deferred:
        round_text, scope = request.path
        round_id = integer(round_text, "round")
        count, wait_s = integer(request.query.get("count", ""), "count"), request.wait_s(_EXCHANGE_S)
        self.set_key(round_id, scope, request.query.get("key", ""), request.body)
        waiter = ParkedRequest(round_id, scope, count=count)
        body = self.find(waiter)
        return self._park(waiter, wait_s) if body is None else (200, body)

    def _park(self, waiter: ParkedRequest, wait_s: float) -> Answer | Deferred:
        self._want(waiter)
        if wait_s <= 0:
            return waiter.too_late(self.store)
        waiter.wait(self, wait_s, self._call_later or asyncio.get_running_loop().call_later)
        return waiter

    def _want(self, waiter: KeyWaiter) -> None:
        if self._upstream is not None:
            self._upstream.want(waiter.round_id, waiter.scope, waiter.key or "", waiter.count)
