"""The sockets of this process that are somebody else's: finding them, ending them, comparing their ends.

What Gloo of torch's connects has no handle here, and nothing in torch ends what waits on it; shutting its sockets down
does. They are looked up in /proc, and held by a second descriptor while something is done to them, so that a number
that stands for something else by now is never touched.
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
"""A connection by its addresses: this process's, and the other one's."""


def own_sockets() -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of this process's sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield int(name), int(target[8:-1])


def duplicate(descriptor: int, inode: int) -> socket.socket | None:
    """A second descriptor of that socket; None when the number stands for something else by now."""
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
    """Whether it takes connections by TCP."""
    return candidate.family in (socket.AF_INET, socket.AF_INET6) and bool(
        candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def end_of(name: tuple[Any, ...]) -> str:
    """One end of a connection, from what the socket calls it."""
    return f"{name[0]}:{name[1]}"


def pack_ends(ends: list[Ends]) -> bytes:
    """For the other members."""
    return json.dumps(ends).encode()


def unpack_ends(value: bytes) -> list[Ends]:
    """What another member has packed."""
    return [(own, far) for own, far in json.loads(value)]


def check_ends(group: Group, ends_of: Sequence[Sequence[Ends]]) -> None:
    """Sees to it that the connections of this member are those of the others to it, one with each and no more.

    torch's Gloo takes who comes first. Who sits between two members, or in the place of one, has other ends.

    Raises:
        HorovodInternalError: it is not so.
    """
    owners = {(far, own): index for index, ends in enumerate(ends_of) for own, far in ends}
    indices = [owners.get(end, -1) for end in ends_of[group.index]]
    others = [index for index in range(len(group.members)) if index != group.index]
    if -1 in indices:
        stranger = ends_of[group.index][indices.index(-1)][1]
        raise HorovodInternalError(
            f"cannot use the connections of torch's Gloo: {stranger} is connected to rank {group.members[group.index]} "
            "and belongs to no rank of this job; the native extension would have sent it away"
        )
    if sorted(indices) != others:
        lacking = [group.members[index] for index in others if indices.count(index) != 1]
        raise HorovodInternalError(
            f"cannot use the connections of torch's Gloo: there is not one, and no more, with rank {lacking[0]}"
        )


def shut(connection: socket.socket) -> None:
    """Ends what waits on it, here and at the other end."""
    with contextlib.suppress(OSError):  # the peer was quicker
        connection.shutdown(socket.SHUT_RDWR)
