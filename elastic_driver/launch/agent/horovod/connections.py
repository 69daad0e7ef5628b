"""Where the workers of a round listen for each other, as Horovod's Gloo writes it into the rendezvous."""

from __future__ import annotations

import socket
import struct

# One record for each of the others: a sockaddr_storage, and the number of the pair.
_RECORD_BYTES = 136
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")


def endpoints_of(body: bytes) -> frozenset[tuple[str, int]]:
    """Return the addresses and ports in a value that a worker has put for its peers. Empty for anything else."""
    if not body or len(body) % _RECORD_BYTES:
        return frozenset()
    ends = set()
    for at in range(0, len(body), _RECORD_BYTES):
        family, port = _FAMILY.unpack_from(body, at)[0], _PORT.unpack_from(body, at + 2)[0]
        if family == socket.AF_INET:
            address = socket.inet_ntop(socket.AF_INET, body[at + 4 : at + 8])
        elif family == socket.AF_INET6:
            address = socket.inet_ntop(socket.AF_INET6, body[at + 8 : at + 24]).removeprefix("::ffff:")
        else:
            return frozenset()
        if port:
            ends.add((address, port))
    return frozenset(ends)
