"""Ports of this machine for tests that have to know one: below those that the system gives to others."""

from __future__ import annotations

import contextlib
import random
import socket

_LOWEST, _END = 22000, 32000


def free_port() -> int:
    """A port that nobody has."""
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """So many in a row that nobody has, at any address.

    Drawn: those of a test beside this one, of this run or another, may be free still when this one looks.
    """
    for _ in range(1000):
        low = random.randrange(_LOWEST, _END - count)
        ports = range(low, low + count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in ports:
                held.enter_context(socket.socket()).bind(("", port))
            return ports
    raise AssertionError("no ports are free")
