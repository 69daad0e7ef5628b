"""Ports of this host held for rank 0 of a generation of workers, from their choice until the next generation.

Scripts for torchrun have rank 0 listen at MASTER_PORT (torch's TCPStore), seconds after the port was chosen. No other
program must take it in between, so a socket is bound to it all the time, and never listens. A program that asks for any
free port then gets another; rank 0 can bind it, too, since both its socket and ours allow that (SO_REUSEADDR), and
listen, since no other socket does.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

from elastic_driver.errors import in_words
from elastic_driver.rendezvous.agent_messages import AgentMessage, HoldPort, LetGo, PortHeld, PortLevel


class _Held(NamedTuple):
    """A held port.

    Attributes:
        socket: is bound to it.
        round_id: the round of the generation.
    """

    socket: socket.socket
    round_id: int

    @property
    def port(self) -> int:
        """The port's number."""
        port: int = self.socket.getsockname()[1]
        return port


class HeldPorts:
    """Holds and releases ports on the driver's orders. Used on the event loop only.

    Args:
        send: sends the driver a message.
    """

    def __init__(self, send: Callable[[AgentMessage], None]) -> None:
        self._send = send
        self._held: dict[int, _Held] = {}  # by generation

    def take(self, message: AgentMessage) -> bool:
        """Carry out an order. Returns whether the message was one."""
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
        """Return the held ports, for another driver."""
        return [PortLevel(generation, held.round_id, held.port) for generation, held in self._held.items()]

    def holds(self, port: int) -> bool:
        """Return whether a port is held for workers."""
        return any(held.port == port for held in self._held.values())

    def close(self) -> None:
        """Release all ports."""
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
    """Return a socket that holds a port on all addresses of this machine.

    Args:
        ports: first and last port allowed; empty for any.

    Raises:
        OSError: none is free.
        OverflowError: these are not ports.
        ValueError: these are not ports.
    """
    # From the end opposite to the one at which workers that listen by themselves begin.
    low, high = ports or (0, 0)
    with contextlib.suppress(OSError):
        return _first_free(socket.AF_INET6, range(high, low - 1, -1))
    return _first_free(socket.AF_INET, range(high, low - 1, -1))


def _first_free(family: socket.AddressFamily, ports: Iterable[int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # both IPv4 and IPv6, as the store listens
        for port in ports:
            try:
                sock.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            # Only now: with it, bind would accept a port held for another job, or one that connections still use.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return sock
        raise OSError(errno.EADDRINUSE, "no port in --port-range is free")
    except BaseException:
        sock.close()
        raise
