"""The values of torch Stores, and what each request does to them. Pure: the route does the waiting.

Owns scopes, size limits, and recent answers: a request that is repeated, because its answer was lost, gets the same
answer and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError
from elastic_driver.rendezvous.store_messages import (
    CHANGING,
    MOST_PIECES,
    MOST_VALUE_BYTES,
    StoreOp,
    StoreReply,
    StoreRequest,
    number_in,
)

# gloo at 1,000 ranks has 1,000 keys in each of its groups; all jobs of a service share this limit.
MAX_KEYS = 2_000_000
MAX_BYTES = 4 << 30
# A client that was silent while this many others changed something has long received its answers.
_MAX_CLIENTS = 65_536
# Overhead of a kept answer beyond its parts.
_ANSWER_BYTES = 256


@dataclass(slots=True)
class _Scope:
    values: dict[bytes, bytes] = field(default_factory=dict)
    queues: dict[bytes, deque[bytes]] = field(default_factory=dict)

    def has(self, key: bytes) -> bool:
        return key in self.values or key in self.queues  # empty queues are removed


@dataclass(slots=True)
class _Client:
    """The answers and pieces that are kept for one client's retries."""

    done: int = 0
    answers: dict[int, StoreReply] = field(default_factory=dict)
    pieces: dict[int, dict[int, bytes]] = field(default_factory=dict)  # of requests sent in pieces
    rest: dict[int, list[bytes]] = field(default_factory=dict)  # of answers sent in pieces


@dataclass(frozen=True, slots=True)
class Changed:
    """The keys changed by a request that others may wait for.

    Attributes:
        scope: the scope.
        keys: keys with a new value or a longer queue.
    """

    scope: str
    keys: tuple[bytes, ...]


class Values:
    """The contents of all Stores.

    Args:
        instance: distinguishes this start of the server from others; not 0.
        max_keys: limit for all scopes together, each item of a queue counted.
        max_bytes: limit for all keys, values and pieces of requests together.
        max_kept: limit of the bytes of answers kept until their clients acknowledge them.
    """

    def __init__(
        self, instance: int, *, max_keys: int = MAX_KEYS, max_bytes: int = MAX_BYTES, max_kept: int = MAX_BYTES
    ) -> None:
        self.instance = instance
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._max_kept = max_kept
        self._scopes: dict[str, _Scope] = {}
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        self._keys = 0
        self._bytes = 0
        self._kept = 0  # bytes of kept answers

    @property
    def scopes(self) -> list[str]:
        """The scopes that hold something."""
        return list(self._scopes)

    def check(self, request: StoreRequest) -> None:
        """Check that the request is meant for this store.

        Raises:
            RendezvousClosedError: the server was restarted since the client's first request.
        """
        if request.instance not in (0, self.instance):
            raise RendezvousClosedError("the rendezvous was restarted: the contents of this store are lost")

    # --- requests in pieces ------------------------------------------------------------------------------------------

    def take_piece(self, request: StoreRequest) -> StoreReply:
        """Keep a piece of a request that is too large for one message."""
        client = self._client(request)
        if len(request.parts) != 2:
            raise RendezvousProtocolError("cannot read a piece: expected a number and bytes")
        place = number_in(request.parts[0], "the number of a piece")
        if not 0 <= place < MOST_PIECES:
            raise RendezvousProtocolError(f"cannot accept a request of more than {MOST_PIECES} pieces")
        pieces = client.pieces.setdefault(request.number, {})
        if place not in pieces:
            self._make_room(0, len(request.parts[1]))
            pieces[place] = request.parts[1]
        return StoreReply(self.instance)

    def whole(self, request: StoreRequest) -> StoreRequest | StoreReply:
        """Return the request whose pieces have arrived; or its answer, if it has been answered."""
        client = self._client(request)
        answered = client.answers.get(request.number)
        if answered is not None:
            return answered
        pieces = client.pieces.get(request.number, {})
        count = number_in(request.parts[0] if request.parts else b"", "the number of pieces")
        if sorted(pieces) != list(range(count)):
            raise RendezvousProtocolError(f"cannot read a request of {count} pieces: {len(pieces)} have arrived")
        inner = StoreRequest.from_bytes(b"".join(pieces[place] for place in range(count)))
        if (inner.client, inner.number) != (request.client, request.number):
            raise RendezvousProtocolError("cannot read a request in pieces: its content names another request")
        return inner

    def keep_rest(self, request: StoreRequest, pieces: list[bytes]) -> StoreReply:
        """Keep an answer that is too large for one message, until the client has fetched all of it.

        Raises:
            RendezvousProtocolError: there is no room for it now.
        """
        client = self._client(request)
        self._forget_rest(client, request.number)
        self._make_room_for_answer(sum(map(len, pieces)))
        client.rest[request.number] = pieces
        return StoreReply(self.instance, (), len(pieces))

    def rest(self, request: StoreRequest) -> StoreReply:
        """Return a piece of such an answer."""
        pieces = self._client(request).rest.get(request.number, [])
        place = number_in(request.parts[0] if request.parts else b"", "the number of a piece")
        if not 0 <= place < len(pieces):
            raise RendezvousProtocolError(f"there is no piece {place} of the answer to request {request.number}")
        return StoreReply(self.instance, (pieces[place],))

    # --- requests ----------------------------------------------------------------------------------------------------

    def answered(self, request: StoreRequest) -> StoreReply | None:
        """Return the earlier answer to this request; None if it has not been answered, or changes nothing.

        Raises:
            RendezvousProtocolError: its client has acknowledged the answer: this is a late duplicate.
        """
        return self._client(request).answers.get(request.number) if request.op in CHANGING else None

    def lacks(self, request: StoreRequest) -> list[bytes]:
        """Return the keys that must be set before the request can be answered."""
        scope = self._scopes.get(request.scope)
        if request.op is StoreOp.POP:
            key = request.parts[0] if request.parts else b""
            return [] if scope is not None and key in scope.queues else [key]
        if request.op not in (StoreOp.GET, StoreOp.WAIT):
            return []
        if scope is None:
            return list(dict.fromkeys(request.parts))
        there = scope.values.__contains__ if request.op is StoreOp.GET else scope.has
        return [key for key in dict.fromkeys(request.parts) if not there(key)]

    def carry_out(self, request: StoreRequest) -> tuple[StoreReply, Changed | None]:
        """Carry out a request. None of its keys may be missing.

        Raises:
            RendezvousProtocolError: it cannot be carried out, and nothing has changed.
        """
        keeps = request.op in CHANGING and bool(request.client)
        if keeps:
            self._client(request)  # drops the answers that it has acknowledged
            self._make_room_for_answer(_ANSWER_BYTES)
            self._kept -= _ANSWER_BYTES
        parts, changed = self._do(request)
        reply = StoreReply(self.instance, parts)
        if keeps:
            client = self._client(request)
            client.answers[request.number] = reply
            self._kept += _size(reply)
            self._forget_pieces(client, request.number)
        return reply, None if changed is None else Changed(request.scope, changed)

    def drop(self, scope: str) -> None:
        """Forget a scope."""
        dropped = self._scopes.pop(scope, None)
        if dropped is None:
            return
        for key, value in dropped.values.items():
            self._count(-1, -len(key) - len(value))
        for key, queue in dropped.queues.items():
            self._count(-len(queue), -sum(len(key) + len(value) for value in queue))

    def _do(self, request: StoreRequest) -> tuple[tuple[bytes, ...], tuple[bytes, ...] | None]:
        """Return the answer's parts, and the keys that others may wait for."""
        parts = request.parts
        match request.op:
            case StoreOp.GET:
                values = self._scope(request.scope).values
                return tuple(values[key] for key in parts), None
            case StoreOp.WAIT:
                return (), None
            case StoreOp.CHECK:
                scope = self._scope(request.scope)
                return (b"1" if all(scope.has(key) for key in parts) else b"0",), None
            case StoreOp.SET:
                if len(parts) % 2:
                    raise RendezvousProtocolError("cannot set keys: the last one has no value")
                self._set(request.scope, list(zip(parts[::2], parts[1::2], strict=True)))
                return (), tuple(parts[::2])
            case StoreOp.ADD:
                key, amount = self._named(parts, 2)
                now = self._scope(request.scope).values.get(key, b"0")
                total = number_in(now, f"the value of {_shown(key)}") + number_in(amount, "the amount to add")
                value = str(total).encode()
                number_in(value, "the sum")
                self._set(request.scope, [(key, value)])
                return (value,), (key,)
            case StoreOp.COMPARE_SET:
                return self._compare_set(request.scope, *self._named(parts, 3))
            case StoreOp.APPEND:
                key, more = self._named(parts, 2)
                self._set(request.scope, [(key, self._scope(request.scope).values.get(key, b"") + more)])
                return (), (key,)
            case StoreOp.DELETE:
                (key,) = self._named(parts, 1)
                value_was = self._scope(request.scope).values.pop(key, None)
                if value_was is not None:
                    self._count(-1, -len(key) - len(value_was))
                self._forget_empty(request.scope)
                return (b"0" if value_was is None else b"1",), None
            case StoreOp.COUNT:
                return (str(len(self._scope(request.scope).values)).encode(),), None
            case StoreOp.KEYS:
                return tuple(self._scope(request.scope).values), None
            case StoreOp.PUSH:
                key, value = self._named(parts, 2)
                self._check_size(value)
                self._make_room(1, len(key) + len(value))
                self._scopes.setdefault(request.scope, _Scope()).queues.setdefault(key, deque()).append(value)
                return (), (key,)
            case StoreOp.POP:
                (key,) = self._named(parts, 1)
                queues = self._scope(request.scope).queues
                value = queues[key].popleft()
                if not queues[key]:
                    del queues[key]
                self._count(-1, -len(key) - len(value))
                self._forget_empty(request.scope)
                return (value,), None
            case StoreOp.LENGTH:
                (key,) = self._named(parts, 1)
                return (str(len(self._scope(request.scope).queues.get(key, ()))).encode(),), None
            case StoreOp.DROP:
                self.drop(request.scope)
                return (), None
            case StoreOp.PIECE | StoreOp.WHOLE | StoreOp.REST:
                raise RendezvousProtocolError("cannot accept a request in pieces within another")

    def _compare_set(
        self, scope: str, key: bytes, expected: bytes, new: bytes
    ) -> tuple[tuple[bytes, ...], tuple[bytes, ...] | None]:
        """Compare and set as TCPStore does: a missing key is set if nothing is expected; otherwise the expected value
        is returned.
        """
        now = self._scope(scope).values.get(key)
        if now == expected or (now is None and not expected):
            self._set(scope, [(key, new)])
            return (new,), (key,)
        return (expected if now is None else now,), None

    # --- contents ----------------------------------------------------------------------------------------------------

    def _scope(self, name: str) -> _Scope:
        """Return the scope for reading; an empty one is not stored."""
        return self._scopes.get(name) or _Scope()

    def _set(self, scope: str, entries: list[tuple[bytes, bytes]]) -> None:
        values = self._scope(scope).values
        keys = size = 0
        for key, value in dict(entries).items():
            self._check_size(value)
            before = values.get(key)
            keys += before is None
            size += len(value) - len(before) if before is not None else len(key) + len(value)
        self._make_room(keys, size)
        if entries:
            self._scopes.setdefault(scope, _Scope()).values.update(entries)

    def _make_room(self, keys: int, size: int) -> None:
        if self._keys + keys > self._max_keys or self._bytes + size > self._max_bytes:
            raise RendezvousProtocolError(
                f"cannot store the values: the store is full ({self._keys} keys, {self._bytes} bytes; "
                f"{self._max_keys} and {self._max_bytes} are allowed)"
            )
        self._count(keys, size)

    def _make_room_for_answer(self, size: int) -> None:
        if self._kept + size > self._max_kept:
            raise RendezvousProtocolError(
                f"cannot answer now: {self._kept} bytes of answers await acknowledgment; {self._max_kept} are allowed"
            )
        self._kept += size

    def _count(self, keys: int, size: int) -> None:
        self._keys += keys
        self._bytes += size

    def _forget_empty(self, name: str) -> None:
        scope = self._scopes.get(name)
        if scope is not None and not scope.values and not scope.queues:
            del self._scopes[name]

    @staticmethod
    def _check_size(value: bytes) -> None:
        if len(value) > MOST_VALUE_BYTES:
            raise RendezvousProtocolError(
                f"cannot store a value of {len(value)} bytes: at most {MOST_VALUE_BYTES} are allowed"
            )

    @staticmethod
    def _named(parts: object, count: int) -> tuple[bytes, ...]:
        assert isinstance(parts, tuple)
        if len(parts) != count:
            raise RendezvousProtocolError(f"cannot read the store request: expected {count} parts")
        return parts

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client(self, request: StoreRequest) -> _Client:
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = _Client()
            if len(self._clients) > _MAX_CLIENTS:
                _, oldest = self._clients.popitem(last=False)
                for number in tuple(oldest.pieces):
                    self._forget_pieces(oldest, number)
                self._forget_answers(oldest, None)
        else:
            self._clients.move_to_end(request.client)
        if request.number < client.done:
            raise RendezvousProtocolError(
                f"request {request.number} has been answered, and its answer was acknowledged"
            )
        if request.done > client.done:
            client.done = request.done
            self._forget_answers(client, client.done)
            for number in [number for number in client.pieces if number < client.done]:
                self._forget_pieces(client, number)
        return client

    def _forget_answers(self, client: _Client, before: int | None) -> None:
        """Forget the answers to requests with lower numbers; None for all."""
        for number in [number for number in client.answers if before is None or number < before]:
            self._kept -= _size(client.answers.pop(number))
        for number in [number for number in client.rest if before is None or number < before]:
            self._forget_rest(client, number)

    def _forget_rest(self, client: _Client, number: int) -> None:
        self._kept -= sum(map(len, client.rest.pop(number, [])))

    def _forget_pieces(self, client: _Client, number: int) -> None:
        pieces = client.pieces.pop(number, {})
        self._count(0, -sum(map(len, pieces.values())))


def _size(reply: StoreReply) -> int:
    return _ANSWER_BYTES + sum(map(len, reply.parts))


def _shown(key: bytes) -> str:
    return repr(key[:100].decode(errors="replace"))
