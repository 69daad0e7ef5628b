"""This process's sockets that belong to a library: finding them, shutting them down, comparing their ends.

Connections of torch's Gloo have no handle here, and torch cannot end what waits on them; shutting their sockets down
does. They are found in /proc, and held by a second descriptor while in use, so that a reused number is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.engine.collectives import Group

Ends: TypeAlias = tuple[str, str]
"""A connection by its addresses: this process's, and the peer's."""


def own_sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of this process's sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield int(name), int(target[8:-1])


def duplicate(descriptor: int, inode: int) -> socket.socket | None:
    """Duplicate the descriptor of that socket; return None if the number has been reused."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        if os.readlink(f"/proc/self/fd/{copy}") == f"socket:[{inode}]":
            return socket.socket(fileno=copy)
    except OSError:
        pass
    os.close(copy)
    return None


def is_listening(candidate: socket.socket) -> bool:
    """Return whether it accepts TCP connections."""
    return candidate.family in (socket.AF_INET, socket.AF_INET6) and bool(
        candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def end_of(name: tuple[Any, ...]) -> str:
    """Return one end of a connection, from the socket's name for it."""
    return f"{name[0]}:{name[1]}"


def pack_ends(ends: list[Ends]) -> bytes:
    """Encode the ends for the other members."""
    return json.dumps(ends).encode()


def unpack_ends(value: bytes) -> list[Ends]:
    """Decode another member's ends."""
    return [(own, far) for own, far in json.loads(value)]


def check_ends(group: Group, ends_of: Sequence[Sequence[Ends]]) -> None:
    """Check that this member's connections are exactly one with each other member.

    torch's Gloo accepts any peer. A man in the middle, or in a member's place, has other ends.

    Raises:
        HorovodInternalError: they are not.
    """
    owners = {(far, own): index for index, ends in enumerate(ends_of) for own, far in ends}
    indices = [owners.get(end, -1) for end in ends_of[group.index]]
    others = [index for index in range(len(group.members)) if index != group.index]
    if -1 in indices:
        stranger = ends_of[group.index][indices.index(-1)][1]
        raise HorovodInternalError(
            f"cannot use the connections of torch's Gloo: {stranger} is connected to rank "
            f"{group.members[group.index]} and belongs to no rank of this job; the native extension would have "
            "rejected it"
        )
    if sorted(indices) != others:
        lacking = [group.members[index] for index in others if indices.count(index) != 1]
        raise HorovodInternalError(
            f"cannot use the connections of torch's Gloo: expected exactly one with rank {lacking[0]}"
        )


def shut(connection: socket.socket) -> None:
    """End all waits on it, here and at the peer."""
    with contextlib.suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
