"""The route of torch Stores: answers the requests that can be answered, and parks the rest. Polls nothing.

Owns which request waits for which keys. :mod:`~elastic_driver.rendezvous.server.values` owns the values and what
requests do to them. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.messages import PIECE_BYTES
from elastic_driver.rendezvous.routes import RouteRequest
from elastic_driver.rendezvous.server.values import Changed, Values
from elastic_driver.rendezvous.store_messages import StoreOp, StoreReply, StoreRequest, pieces_of
from elastic_driver.system.job_clock import CallLater, Timer

# Below the idle timeouts of middleboxes; a Store repeats the request until its own timeout.
POLL_S = 30.0

Answer = tuple[int, bytes]


class _Waiter:
    """A request for keys that are not all set."""

    __slots__ = ("answer", "has_hung_up", "lacking", "request", "timer")

    def __init__(self, request: StoreRequest, has_hung_up: Callable[[], bool], answer: asyncio.Future[Answer]) -> None:
        self.request = request
        self.has_hung_up = has_hung_up
        self.answer = answer
        self.lacking: set[bytes] = set()
        self.timer: Timer | None = None


class StoreRoute:
    """Serves torch Stores.

    Args:
        values: the contents of the Stores.
        call_later: times the waits; None for the running loop's.
        on_use: called with the scope of each request.
    """

    def __init__(
        self, values: Values, *, call_later: CallLater | None = None, on_use: Callable[[str], object] | None = None
    ) -> None:
        self._values = values
        self._call_later = call_later
        self._on_use = on_use
        self._waiting: dict[tuple[str, bytes], dict[_Waiter, None]] = {}
        self._popping: dict[tuple[int, int], _Waiter] = {}  # by client and number: a retry replaces the earlier one

    @property
    def parked(self) -> int:
        """Return how many requests wait."""
        return len({waiter for waiters in self._waiting.values() for waiter in waiters})

    def answer(self, asked: RouteRequest) -> Answer | Awaitable[Answer]:
        """Answer a request, at once or later; 204 if its keys are not set in time.

        Raises:
            RendezvousError: it cannot be decoded or served.
        """
        request = StoreRequest.from_bytes(asked.body)
        values = self._values
        values.check(request)
        if self._on_use is not None:
            self._on_use(request.scope)
        match request.op:
            case StoreOp.PIECE:
                return self._said(values.take_piece(request))
            case StoreOp.REST:
                return self._said(values.rest(request))
            case StoreOp.WHOLE:
                inner = values.whole(request)
                if isinstance(inner, StoreReply):
                    return self._sized(request, inner)
                request = inner
                values.check(request)
            case _:
                pass  # a complete request
        answered = values.answered(request)
        if answered is not None:
            return self._sized(request, answered)
        lacking = values.lacks(request)
        if not lacking and not _is_too_late(request, asked.has_hung_up):
            return self._carry_out(request)
        if not lacking or request.wait_s <= 0:
            return 204, b""
        return self._park(request, asked.has_hung_up, lacking)

    def _carry_out(self, request: StoreRequest) -> Answer:
        reply, changed = self._values.carry_out(request)
        if changed is not None:
            self._release(changed)
        return self._sized(request, reply)

    def _said(self, reply: StoreReply) -> Answer:
        return 200, reply.to_bytes()

    def _sized(self, request: StoreRequest, reply: StoreReply) -> Answer:
        body = reply.to_bytes()
        if len(body) > PIECE_BYTES and request.client:
            body = self._values.keep_rest(request, pieces_of(body)).to_bytes()
        return 200, body

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _park(self, request: StoreRequest, has_hung_up: Callable[[], bool], lacking: list[bytes]) -> Awaitable[Answer]:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(request, has_hung_up, loop.create_future())
        if request.op is StoreOp.POP and request.client:
            # Its connection broke without this end noticing: the value is for the retry.
            older = self._popping.get((request.client, request.number))
            if older is not None:
                self._drop(older)
                older.answer.cancel()
            self._popping[request.client, request.number] = waiter
        self._wait_for(waiter, lacking)
        call_later = self._call_later or loop.call_later
        waiter.timer = call_later(min(request.wait_s, POLL_S), lambda: self._end(waiter, (204, b"")))
        waiter.answer.add_done_callback(lambda _: self._drop(waiter))  # also when the client no longer waits
        return waiter.answer

    def _wait_for(self, waiter: _Waiter, lacking: list[bytes]) -> None:
        waiter.lacking.update(lacking)
        for key in lacking:
            self._waiting.setdefault((waiter.request.scope, key), {})[waiter] = None

    def _release(self, changed: Changed) -> None:
        for key in changed.keys:
            for waiter in tuple(self._waiting.get((changed.scope, key), ())):
                if waiter.answer.done() or len(waiter.lacking) > 1:
                    self._no_longer(waiter, key)
                    continue
                lacking = self._values.lacks(waiter.request)  # all keys: some may have been deleted meanwhile
                if lacking:
                    self._no_longer(waiter, key)
                    self._wait_for(waiter, lacking)
                    continue
                self._drop(waiter)
                if _is_too_late(waiter.request, waiter.has_hung_up):
                    self._end(waiter, (204, b""))
                    continue
                try:
                    answer = self._carry_out(waiter.request)
                except RendezvousProtocolError as error:  # the waiter's error, not that of the request that set the key
                    if not waiter.answer.done():
                        waiter.answer.set_exception(error)
                else:
                    self._end(waiter, answer)

    def _end(self, waiter: _Waiter, answer: Answer) -> None:
        if not waiter.answer.done():
            waiter.answer.set_result(answer)

    def _no_longer(self, waiter: _Waiter, key: bytes) -> None:
        waiter.lacking.discard(key)
        name = (waiter.request.scope, key)
        waiters = self._waiting.get(name)
        if waiters is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self._waiting[name]

    def _drop(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        for key in tuple(waiter.lacking):
            self._no_longer(waiter, key)
        name = (waiter.request.client, waiter.request.number)
        if self._popping.get(name) is waiter:
            del self._popping[name]


def _is_too_late(request: StoreRequest, has_hung_up: Callable[[], bool]) -> bool:
    """Return whether the request would take a value that no client is left to receive."""
    return request.op is StoreOp.POP and has_hung_up()
