"""Ports of this host that are kept for rank 0 of a generation of workers, from their choice until the next generation.

Scripts for torchrun have rank 0 listen at MASTER_PORT (torch's TCPStore), seconds after somebody chose it. In between
the port must not become another's: so a socket is bound to it all the time, and never listens. Whoever asks for any
port gets another then; rank 0 can bind it too, since both its socket and ours allow that (SO_REUSEADDR), and listen,
since nobody else does.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

from elastic_driver.errors import in_words
from elastic_driver.rendezvous.agent_messages import HoldPort, LetGo, PortHeld, PortLevel, Said


class _Held(NamedTuple):
    """A port that is kept.

    Attributes:
        socket: is bound to it.
        round_id: of the generation.
    """

    socket: socket.socket
    round_id: int

    @property
    def port(self) -> int:
        """Which."""
        port: int = self.socket.getsockname()[1]
        return port


class HeldPorts:
    """See above. Used on the event loop only.

    Args:
        send: tells the driver something.
    """

    def __init__(self, send: Callable[[Said], None]) -> None:
        self._send = send
        self._held: dict[int, _Held] = {}  # by generation

    def take(self, message: Said) -> bool:
        """Carries out an order. Returns whether it was one."""
        match message:
            case HoldPort():
                self._hold(message)
            case LetGo(generation):
                if held := self._held.pop(generation, None):
                    held.socket.close()
            case _:
                return False
        return True

    def levels(self) -> list[PortLevel]:
        """Those that are kept, for another driver."""
        return [PortLevel(generation, held.round_id, held.port) for generation, held in self._held.items()]

    def holds(self, port: int) -> bool:
        """Whether it is kept for workers."""
        return any(held.port == port for held in self._held.values())

    def close(self) -> None:
        """Lets go of all."""
        for held in self._held.values():
            held.socket.close()
        self._held.clear()

    def _hold(self, order: HoldPort) -> None:
        generation = order.generation
        try:
            if generation not in self._held:
                self._held[generation] = _Held(bound_port(order.ports), order.round_id)
            answer = PortHeld(generation, self._held[generation].port, "")
        except (OSError, OverflowError, ValueError) as error:
            answer = PortHeld(generation, 0, in_words(error))
        self._send(answer)


def bound_port(ports: list[int]) -> socket.socket:
    """A socket that keeps a port of all addresses of this machine.

    Args:
        ports: first and last that may be taken; empty for any.

    Raises:
        OSError: none is free. OverflowError and ValueError: these are no ports.
    """
    # From the end at which workers that listen by themselves do not begin.
    low, high = ports or (0, 0)
    with contextlib.suppress(OSError):
        return _first_free(socket.AF_INET6, range(high, low - 1, -1))
    return _first_free(socket.AF_INET, range(high, low - 1, -1))


def _first_free(family: socket.AddressFamily, ports: Iterable[int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # of both kinds, as the store listens
        for port in ports:
            try:
                sock.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            # Only now: with it a port could be had that is held for another job, or that connections still have.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return sock
        raise OSError(errno.EADDRINUSE, "no port of --port-range is free")
    except BaseException:
        sock.close()
        raise
