"""Frames: the encoding of messages on the connection between an agent and the driver.

Owns the bytes. Pure: knows no socket and no clock, and gives messages no meaning. A frame carries any number of
messages; those sent in one turn of the loop share a frame:

    frame    length (4 bytes, of the rest) | first (8) | seen (8) | kept (8) | messages
    message  length of head (4) | length of blob (4) | head: JSON [name, {field: value}] | blob

All integers are unsigned, big-endian. ``first`` is the number of the first message, and the others follow it; 0 for
messages without numbers (:mod:`~elastic_driver.rendezvous.channel`). ``seen`` is the number of the last message that
the sender has received, ``kept`` that of the last one that survives the sender's death. TLS, or the kernel on one
machine, provides encryption and authentication.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_driver.codec import CodecError, from_text, to_text
from elastic_driver.errors import RendezvousProtocolError

# A worker's outcome or function may be large; its sender splits anything larger than this.
MAX_FRAME = 64 << 20
_HEAD = struct.Struct("!IQQQ")
_NUMBERS_BYTES = 24
_LENGTH = struct.Struct("!I")
_SIZES = struct.Struct("!II")


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its name, its fields (what JSON can hold), and bytes beside them."""

    name: str
    fields: dict[str, Any]
    blob: bytes = b""

    def pack(self) -> bytes:
        """Encode the message for a frame."""
        head = to_text([self.name, self.fields]).encode()
        return _SIZES.pack(len(head), len(self.blob)) + head + self.blob


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of a frame.

    Attributes:
        first: number of the first message; 0 if they have none.
        seen: number of the last message that the sender has received.
        kept: number of the last message that survives the sender's death, with all before it.
        messages: in order.
    """

    first: int
    seen: int
    kept: int
    messages: tuple[Message, ...]


def pack_frame(first: int, seen: int, kept: int, packed: Sequence[bytes]) -> bytes:
    """Encode a frame of packed messages."""
    length = _NUMBERS_BYTES + sum(map(len, packed))
    return b"".join((_HEAD.pack(length, first, seen, kept), *packed))


class FrameReader:
    """Decodes the frames of one direction of one connection.

    Args:
        most: size limit of a frame, in bytes; may be raised once the peer is identified.
    """

    def __init__(self, *, most: int = MAX_FRAME) -> None:
        self.most = most
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames completed by ``data``.

        Raises:
            RendezvousProtocolError: the data is not a frame.
        """
        rest = self._rest
        rest += data
        while len(rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest)
            if not _NUMBERS_BYTES <= length <= self.most:
                raise RendezvousProtocolError(f"cannot read frame: its length of {length} bytes is invalid")
            end = _LENGTH.size + length
            if len(rest) < end:
                return
            _, first, seen, kept = _HEAD.unpack_from(rest)
            with memoryview(rest) as view:
                body = bytes(view[_HEAD.size : end])
            del rest[:end]
            yield Frame(first, seen, kept, tuple(messages_in(body)))


def messages_in(body: bytes) -> Iterator[Message]:
    """Yield the packed messages of a body.

    Raises:
        RendezvousProtocolError: the body does not consist of messages.
    """
    at = 0
    while at < len(body):
        if len(body) - at < _SIZES.size:
            raise RendezvousProtocolError("cannot read message: it is truncated")
        head_size, blob_size = _SIZES.unpack_from(body, at)
        at += _SIZES.size
        if head_size + blob_size > len(body) - at:
            raise RendezvousProtocolError("cannot read message: it is truncated")
        try:
            head = from_text(body[at : at + head_size])
        except CodecError as error:
            raise RendezvousProtocolError(f"cannot read message: {error}") from None
        at += head_size
        match head:
            case [str() as name, dict() as fields]:
                yield Message(name, fields, body[at : at + blob_size])
            case _:
                raise RendezvousProtocolError("cannot read message: expected a name and fields")
        at += blob_size
