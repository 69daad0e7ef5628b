"""Shutting the connections of another process: who hangs in one gets an error at once, and can still tidy up.

A rank whose peer is lost may wait for it in a collective for half an hour, and nothing that its process offers ends
that wait. Its sockets can be had from outside by who may trace it, as its ancestor may unless the system says
otherwise. Where it may not, nothing is done.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterable
from typing import Any

from elastic_driver.launch.processes.sockets import connections


def sever(pids: Iterable[int], ends: Collection[tuple[str, int]] | None = None) -> int:
    """Shuts connected TCP sockets of these processes. Blocks for less than a millisecond each.

    What is on this machine only (unix sockets, pipes) is left alone: that is how they speak to their agent.

    Args:
        pids: which processes.
        ends: addresses and ports; only connections that have one of them as an end are shut. None for all.

    Returns:
        How many were shut.
    """
    return sum(_sever(pid, ends) for pid in pids)


def _sever(pid: int, ends: Collection[tuple[str, int]] | None) -> int:
    number = 0
    for _, sock in connections(pid):
        with contextlib.suppress(OSError):
            number += _shut(sock, ends)
    return number


def _shut(sock: socket.socket, ends: Collection[tuple[str, int]] | None) -> bool:
    peer = sock.getpeername()  # raises for one that is not connected: nobody waits for anybody there
    if ends is not None and _end(peer) not in ends and _end(sock.getsockname()) not in ends:
        return False
    sock.shutdown(socket.SHUT_RDWR)
    return True


def _end(address: tuple[Any, ...]) -> tuple[str, int]:
    """Address and port; an IPv4 address that stands as an IPv6 one is the same."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
