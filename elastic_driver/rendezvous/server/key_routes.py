"""The key-value store of a round: answers what can be answered, and parks the rest. Polls nothing.

Owns who waits for which key, or for how many. The keys themselves, and the fencing, are the store's
(:mod:`~elastic_driver.rendezvous.server.store`). Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from elastic_driver.errors import RendezvousProtocolError, StaleRoundError
from elastic_driver.rendezvous.routes import WORKER, Answer, Deferred, Route, RouteRequest, Routes, error_body, integer
from elastic_driver.rendezvous.server.parked import KeyWaiter, Waiter, Waiters
from elastic_driver.rendezvous.server.store import RoundStore
from elastic_driver.system.job_clock import CallLater

# How long an exchange waits where the request does not say; below what middleboxes let a connection idle.
_EXCHANGE_S = 30.0


class Upstream(Protocol):
    """Where the keys of all hosts are, of which this process has those of one."""

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """A worker here has set a key."""

    def want(self, round_id: int, scope: str, key: str, count: int) -> None:
        """A worker here waits for a key, or for this many keys (then ``key`` is ""): see :meth:`KeyRoutes.take`.

        Called again for each worker that waits.
        """


class KeyRoutes:
    """See above.

    Args:
        call_later: measures how long requests wait for keys. The loop's, when not given; but that fires at once when
            the process goes on after it was stopped, before it has read the keys that have come meanwhile.
        upstream: has the keys of all hosts, when these are the keys of one host's workers.

    Attributes:
        store: the keys of the current round.
    """

    def __init__(self, *, call_later: CallLater | None = None, upstream: Upstream | None = None) -> None:
        self.store = RoundStore()
        self._call_later = call_later
        self._upstream = upstream
        self._waiters = Waiters()

    @property
    def routes(self) -> Routes:
        """What workers ask: a key, or all of a scope."""
        return (
            Route("GET", "rounds/*/kv/*/*", WORKER, self._get),
            Route("PUT", "rounds/*/kv/*/*", WORKER, self._set),
            Route("POST", "rounds/*/exchange/*", WORKER, self._exchange),
        )

    @property
    def parked(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def begin_round(self, round_id: int) -> None:
        """Fences the past: its keys are dropped, and whoever waits for one is answered 409 at once.

        Raises:
            ValueError: the round is not above the current one.
        """
        self.store.begin_round(round_id)
        for waiter in self._waiters.all():
            waiter.answer(409, error_body(StaleRoundError(waiter.round_id, round_id)))

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Takes keys that workers of other hosts have set, and answers who waits for them. Those of the past it drops.

        Raises:
            RendezvousProtocolError: the store is full.
        """
        if round_id == self.store.round_id:
            for key, value in entries:
                self.store.put(round_id, scope, key, value)
                self._release_key(scope, key, value)
            self._release_count(round_id, scope)

    # --- for those who speak for a worker --------------------------------------------------------------------------

    def set_key(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Sets a key, and answers who waits for it, or for as many keys in its scope as there are now.

        Raises:
            StaleRoundError: the round is not the current one.
            RendezvousProtocolError: the store is full, or there is no key or no scope.
        """
        if not key or not scope:
            raise RendezvousProtocolError("cannot store a value without a scope and a key")
        self.store.put(round_id, scope, key, value)
        if self._upstream is not None:
            self._upstream.put(round_id, scope, key, value)
        self._release_key(scope, key, value)
        self._release_count(round_id, scope)

    def key_when_there(self, round_id: int, scope: str, key: str) -> asyncio.Future[bytes]:
        """A key's value as soon as it has one. Whoever waits no longer cancels the future.

        The future raises StaleRoundError when the round is over.

        Raises:
            StaleRoundError: the round is not the current one.
        """
        value = self.store.get(round_id, scope, key)
        waiter = KeyWaiter(round_id, scope, key, self._waiters)
        if value is not None:
            waiter.future.set_result(value)
            return waiter.future
        self._waiters.add(waiter)
        if self._upstream is not None:
            self._upstream.want(round_id, scope, key, 0)
        return waiter.future

    # --- routes ----------------------------------------------------------------------------------------------------

    def _get(self, request: RouteRequest) -> Answer | Deferred:
        round_text, scope, key = request.path
        round_id = integer(round_text, "round")
        value = self.store.get(round_id, scope, key)
        if value is not None:
            return 200, value
        if self._upstream is not None:
            self._upstream.want(round_id, scope, key, 0)
        return self._park(Waiter(round_id, scope, key=key), request.wait_s(0.0))

    def _set(self, request: RouteRequest) -> Answer:
        round_text, scope, key = request.path
        self.set_key(integer(round_text, "round"), scope, key, request.body)
        return 204, b""

    def _exchange(self, request: RouteRequest) -> Answer | Deferred:
        round_text, scope = request.path
        round_id = integer(round_text, "round")
        count, wait_s = integer(request.query.get("count", ""), "count"), request.wait_s(_EXCHANGE_S)
        self.set_key(round_id, scope, request.query.get("key", ""), request.body)
        if self.store.count(round_id, scope) >= count:
            return 200, self.store.packed(round_id, scope)
        if self._upstream is not None:
            self._upstream.want(round_id, scope, "", count)
        return self._park(Waiter(round_id, scope, count=count), wait_s)

    def _park(self, waiter: Waiter, wait_s: float) -> Answer | Deferred:
        if wait_s <= 0:
            return waiter.too_late(self.store)
        waiter.wait(self._waiters, self.store, wait_s, self._call_later or asyncio.get_running_loop().call_later)
        return waiter

    def _release_key(self, scope: str, key: str, value: bytes) -> None:
        for waiter in self._waiters.of_key(scope, key):
            waiter.answer(200, value)

    def _release_count(self, round_id: int, scope: str) -> None:
        for waiter in self._waiters.of_count(scope, lambda: self.store.count(round_id, scope)):
            waiter.answer(200, self.store.packed(round_id, scope))
