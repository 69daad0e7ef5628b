"""Encoding of many keys and values of the store in one body."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from elastic_driver.errors import RendezvousProtocolError


def pack_entries(entries: Sequence[tuple[str, bytes]]) -> bytes:
    """Encode keys and values: ``u32 count``, then for each ``u16 key length, key, u32 value length, value``.

    Little-endian; keys are UTF-8 and at most 65,535 bytes.
    """
    parts = [struct.pack("<I", len(entries))]
    for key, value in entries:
        name = key.encode()
        parts += (struct.pack("<H", len(name)), name, struct.pack("<I", len(value)), value)
    return b"".join(parts)


def unpack_entries(body: bytes) -> list[tuple[str, bytes]]:
    """Decode what :func:`pack_entries` has encoded.

    Raises:
        RendezvousProtocolError: the body is truncated, or has bytes left over.
    """
    entries: list[tuple[str, bytes]] = []
    try:
        (count,) = struct.unpack_from("<I", body)
        offset = 4
        for _ in range(count):
            (length,) = struct.unpack_from("<H", body, offset)
            offset += 2
            key = body[offset : offset + length].decode()
            offset += length
            (length,) = struct.unpack_from("<I", body, offset)
            offset += 4
            if offset + length > len(body):
                raise RendezvousProtocolError("cannot read entries: truncated")
            entries.append((key, body[offset : offset + length]))
            offset += length
    except (struct.error, UnicodeDecodeError) as error:
        raise RendezvousProtocolError(f"cannot read entries: {error}") from None
    if offset != len(body):
        raise RendezvousProtocolError("cannot read entries: trailing bytes")
    return entries
