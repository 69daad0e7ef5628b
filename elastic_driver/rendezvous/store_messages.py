"""The requests of a torch Store to the rendezvous, and their answers: bytes both ways, in ``POST /v1/store``.

Owns shapes and validation. Pure: knows no socket, clock or random source. All integers are little-endian:

    request  op (1 byte), instance (8), client (8), number (8), done (8), wait_s (double) | length (2), scope | parts
    reply    instance (8), pieces (4) | parts
    parts    count (4), then for each: length (4), bytes

``instance`` distinguishes one start of the server from the next, whose store is empty. ``client`` and ``number``
identify a request, so that a retry after a lost answer is not carried out twice; all numbers below ``done`` have been
answered. Messages above :data:`PIECE_BYTES` are sent in pieces, so that nothing else has to wait for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.messages import PIECE_BYTES

MOST_VALUE_BYTES = 100 << 20
"""Limit of a value. TCPStore accepts 8 MB."""
MOST_PIECES = -(-2 * MOST_VALUE_BYTES // PIECE_BYTES)
"""Limit of a request or answer: compare_set sends two values."""
MOST_PARTS = 65_536
"""Limit of a request. A group of 10,000 ranks waits for as many keys."""

_REQUEST = struct.Struct("<BQQQQdH")
_REPLY = struct.Struct("<QI")
_COUNT = struct.Struct("<I")


class StoreOp(IntEnum):
    """The operations; each comment lists the parts of the request: the parts of the answer."""

    SET = 1  # key, value, key, value, ...: all at once
    GET = 2  # keys: their values, once all are set
    WAIT = 3  # keys: nothing, once all are set
    CHECK = 4  # keys: b"1" if all are set, else b"0"
    ADD = 5  # key, number: the sum
    COMPARE_SET = 6  # key, expected value, new value: the current value
    APPEND = 7  # key, value
    DELETE = 8  # key: b"1" if it was set, else b"0"
    COUNT = 9  # : the number of keys
    KEYS = 10  # : all keys
    PUSH = 11  # key, value: appends it to the queue
    POP = 12  # key: the first item of the queue, once there is one
    LENGTH = 13  # key: length of the queue
    DROP = 14  # : forgets the scope
    PIECE = 15  # number of a piece, and that piece of this request
    WHOLE = 16  # number of pieces: the answer to the request sent in pieces
    REST = 17  # number of a piece: that piece of the answer to this request


CHANGING = frozenset(
    {
        StoreOp.SET,
        StoreOp.ADD,
        StoreOp.COMPARE_SET,
        StoreOp.APPEND,
        StoreOp.DELETE,
        StoreOp.PUSH,
        StoreOp.POP,
        StoreOp.DROP,
    }
)
"""Operations that must not be carried out twice."""


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A request.

    Attributes:
        op: the operation.
        scope: the scope of the keys; scopes are independent.
        parts: as listed at StoreOp.
        wait_s: how long it may wait, in seconds.
        instance: the server's instance as the client knows it; 0 for the first request.
        client: random number of the client.
        number: number of the request, from 1 for each client.
        done: all of this client's numbers below it have been answered.
    """

    op: StoreOp
    scope: str
    parts: Sequence[bytes] = ()
    wait_s: float = 0.0
    instance: int = 0
    client: int = 0
    number: int = 0
    done: int = 0

    def to_bytes(self) -> bytes:
        """Encode the request."""
        scope = self.scope.encode()
        head = _REQUEST.pack(self.op, self.instance, self.client, self.number, self.done, self.wait_s, len(scope))
        return b"".join((head, scope, *_packed(self.parts)))

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """Decode. Raises RendezvousProtocolError for anything that is not such a request."""
        try:
            op, instance, client, number, done, wait_s, length = _REQUEST.unpack_from(body)
            end = _REQUEST.size + length
            scope = body[_REQUEST.size : end].decode()
            kind = StoreOp(op)
        except (struct.error, ValueError) as error:  # UnicodeDecodeError is one
            raise RendezvousProtocolError(f"cannot read the store request: {error}") from None
        if not (math.isfinite(wait_s) and wait_s >= 0):
            raise RendezvousProtocolError(f"cannot wait for {wait_s} s")
        parts = _unpacked(body, end, most=MOST_PARTS)
        return cls(kind, scope, parts, wait_s, instance, client, number, done)


@dataclass(frozen=True, slots=True)
class StoreReply:
    """An answer.

    Attributes:
        instance: the server's instance.
        parts: as listed at StoreOp.
        pieces: 0; or the number of pieces in which a large answer has to be fetched.
    """

    instance: int
    parts: Sequence[bytes] = ()
    pieces: int = 0

    def to_bytes(self) -> bytes:
        """Encode the answer."""
        return b"".join((_REPLY.pack(self.instance, self.pieces), *_packed(self.parts)))

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """Decode. Raises RendezvousProtocolError for anything that is not such an answer."""
        try:
            instance, pieces = _REPLY.unpack_from(body)
        except struct.error as error:
            raise RendezvousProtocolError(f"cannot read the store's answer: {error}") from None
        return cls(instance, _unpacked(body, _REPLY.size), pieces)


def pieces_of(body: bytes) -> list[bytes]:
    """Split a body that is too large for one message."""
    view = memoryview(body)
    return [bytes(view[start : start + PIECE_BYTES]) for start in range(0, len(body), PIECE_BYTES)]


def number_in(part: bytes, what: str) -> int:
    """Parse a whole number in a part or a value.

    Raises:
        RendezvousProtocolError: it is not one, or is too large for torch.
    """
    try:
        number = int(part) if len(part) <= 20 else 1 << 64  # Python's int has no limit
    except ValueError:
        raise RendezvousProtocolError(f"cannot read {what}: {part[:40]!r} is not a whole number") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise RendezvousProtocolError(f"cannot use {what}: it has more than 64 bits")
    return number


def _packed(parts: Sequence[bytes]) -> list[bytes]:
    packed = [_COUNT.pack(len(parts))]
    for part in parts:
        packed += (_COUNT.pack(len(part)), part)
    return packed


def _unpacked(body: bytes, offset: int, *, most: int | None = None) -> tuple[bytes, ...]:
    parts: list[bytes] = []
    try:
        (count,) = _COUNT.unpack_from(body, offset)
        if most is not None and count > most:
            raise RendezvousProtocolError(f"cannot read a request of {count} parts: at most {most} are allowed")
        offset += 4
        for _ in range(count):
            (length,) = _COUNT.unpack_from(body, offset)
            offset += 4
            part = body[offset : offset + length]
            if len(part) != length:
                raise RendezvousProtocolError("cannot read parts: truncated")
            parts.append(part)
            offset += length
    except struct.error:
        raise RendezvousProtocolError("cannot read parts: truncated") from None
    if offset != len(body):
        raise RendezvousProtocolError("cannot read parts: trailing bytes")
    return tuple(parts)
