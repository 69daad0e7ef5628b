"""Shuts down the connections of another process: a thread that hangs in one gets an error, and can still clean up.

A rank whose peer is lost may wait for it in a collective for half an hour, and nothing in its own process ends that
wait. A process that may trace it can get its sockets from outside; its ancestor may, unless the system forbids it. If
not, nothing is done.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterable
from typing import Any

from elastic_driver.launch.processes.sockets import connections


def sever(pids: Iterable[int], ends: Collection[tuple[str, int]] | None = None) -> int:
    """Shut down connected TCP sockets of these processes. Blocks for less than a millisecond each.

    Connections within this machine that are not TCP (unix sockets, pipes) are left alone: workers use them to reach
    their agent.

    Args:
        pids: of the processes.
        ends: addresses and ports; only connections with one of them as an end are shut down. None for all.

    Returns:
        How many were shut down.
    """
    return sum(_sever(pid, ends) for pid in pids)


def _sever(pid: int, ends: Collection[tuple[str, int]] | None) -> int:
    number = 0
    for _, sock in connections(pid):
        with contextlib.suppress(OSError):
            number += _shut(sock, ends)
    return number


def _shut(sock: socket.socket, ends: Collection[tuple[str, int]] | None) -> bool:
    peer = sock.getpeername()  # raises for one that is not connected, on which nothing waits
    if ends is not None and _end(peer) not in ends and _end(sock.getsockname()) not in ends:
        return False
    sock.shutdown(socket.SHUT_RDWR)
    return True


def _end(address: tuple[Any, ...]) -> tuple[str, int]:
    """Return address and port; an IPv4 address mapped to IPv6 is the same."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
