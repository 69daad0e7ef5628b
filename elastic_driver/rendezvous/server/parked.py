"""Requests that are not answered at once: for missing keys, or with a pending answer.

Owns their time limits, and how their answers get to the connection. Polls nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from elastic_driver.errors import StaleRoundError
from elastic_driver.rendezvous.routes import Answer, Deferred, RawAnswer, error_body, written
from elastic_driver.rendezvous.server.connection import Connection
from elastic_driver.rendezvous.server.keys import Keys
from elastic_driver.rendezvous.server.store import RoundStore
from elastic_driver.system.job_clock import CallLater, Timer


class ParkedRequest(Deferred):
    """A parked key-value request (a KeyWaiter).

    Attributes:
        round_id: the round in which it waits.
        scope: the scope in which it waits.
        key: the key it waits for; None in an exchange, which waits for a number of keys.
        count: that number, in an exchange.
    """

    __slots__ = ("_connection", "_keys", "_timer", "count", "key", "round_id", "scope")

    def __init__(self, round_id: int, scope: str, *, key: str | None = None, count: int = 0) -> None:
        self.round_id, self.scope, self.key, self.count = round_id, scope, key, count
        self._connection: Connection | None = None
        self._keys: Keys[Any] | None = None
        self._timer: Timer | None = None

    def wait(self, keys: Keys[Any], wait_s: float, call_later: CallLater) -> None:
        """Wait until :meth:`answer` or the time limit."""
        self._keys = keys
        keys.add(self)
        self._timer = call_later(wait_s, lambda: self.answer(*self.too_late(keys.store)))

    def begin(self, connection: Connection) -> None:
        """Park the request on its connection."""
        self._connection = connection
        connection.park(self)

    def answer(self, status: int, body: bytes) -> None:
        """End the wait with an answer."""
        self.drop()
        if self._connection is not None:
            self._connection.answer(self, status, body)

    def too_late(self, store: RoundStore) -> RawAnswer:
        """Return the answer for a timeout, which lists what is missing."""
        if self.key is not None:
            return 404, error_body(f"scope {self.scope!r} has no key {self.key!r}")
        present = [key for key, _ in store.entries(self.round_id, self.scope)]
        text = f"{self.count - len(present)} of {self.count} are missing in scope {self.scope!r}"
        if len(present) <= 20:
            text += f" (present: {', '.join(present)})"
        elif self.count <= 100_000:
            absent = sorted(set(range(self.count)) - {int(key) for key in present if key.isdecimal() and len(key) < 9})
            text += f" (missing: {', '.join(map(str, absent[:20]))}{', …' if len(absent) > 20 else ''})"
        return 408, error_body(text)

    def drop(self) -> None:
        """End the wait without an answer."""
        if self._timer is not None:
            self._timer.cancel()
        if self._keys is not None:
            self._keys.remove(self)


class AwaitedKey:
    """A wait of this process itself for a key (a KeyWaiter).

    Attributes:
        round_id, scope, key, count: as in KeyWaiter.
        future: the value.
    """

    __slots__ = ("count", "future", "key", "round_id", "scope")

    def __init__(self, round_id: int, scope: str, key: str, keys: Keys[Any]) -> None:
        self.round_id, self.scope, self.key, self.count = round_id, scope, key, 0
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(lambda _: keys.remove(self))

    def answer(self, status: int, body: bytes) -> None:
        """Resolve the future with the value, or fail it because the round is over."""
        if self.future.done():
            return
        if status == 200:
            self.future.set_result(body)
        else:
            self.future.set_exception(StaleRoundError(self.round_id, self.round_id + 1))


class PendingAnswer(Deferred):
    """A parked request whose answer is pending.

    Args:
        future: the answer; canceled on a timeout or when the peer no longer waits.
        pending: all pending answers.
        failure: returns status and body for an exception.
        wait_s: how long to wait for it; None for as long as the peer waits.

    Attributes:
        future: the answer.
    """

    __slots__ = ("_connection", "_failure", "_pending", "_timer", "_wait_s", "future")

    def __init__(
        self,
        future: asyncio.Future[Answer],
        pending: set[PendingAnswer],
        failure: Callable[[BaseException], RawAnswer],
        wait_s: float | None,
    ) -> None:
        self.future = future
        self._pending = pending
        self._failure = failure
        self._wait_s = wait_s
        self._timer: asyncio.TimerHandle | None = None
        self._connection: Connection

    def begin(self, connection: Connection) -> None:
        """Park the request on its connection, answering 204 on a timeout. An answer that is ready is sent at once."""
        self._connection = connection
        connection.park(self)
        if self.future.done():
            self._answer(self.future)
            return
        self._pending.add(self)
        if self._wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self.future.cancel)
        self.future.add_done_callback(self._answer)

    def drop(self) -> None:
        """Cancel the answer: the peer no longer waits."""
        self.future.cancel()

    def _answer(self, future: asyncio.Future[Answer]) -> None:
        self._pending.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if future.cancelled():
            self._connection.answer(self, 204)
        elif (error := future.exception()) is not None:
            self._connection.answer(self, *self._failure(error))
        else:
            self._connection.answer(self, *written(future.result()), is_json=True)
