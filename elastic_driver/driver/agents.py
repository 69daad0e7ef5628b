"""What a driver with agents is made of, and on which ways they come to it.

Owns where the driver listens for them: on loopback only for as long as all hosts are this machine, on the machine's
other addresses from the first other host on. Decides nothing about hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastic_driver.errors import SettingsError
from elastic_driver.launch.fleet.addresses import Addresses
from elastic_driver.launch.fleet.door import Door
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.reception import Reception
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.worker import Variables
from elastic_driver.launch.words import OutputSink
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.system.tasks import Tasks


class Server(Protocol):
    """What is needed of the driver's server."""

    async def listen_too(self, host: str, *, ports: Iterable[int] = (0,)) -> int:
        """Listens on another address as well. Returns the port there."""


def url_of(address: str, port: int, *, scheme: str = "http") -> str:
    """The URL of a server at an address."""
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


class Ways:
    """The addresses by which agents reach the driver.

    Args:
        loopback: where it listens from its start.
        addresses: gives this machine's addresses that others may reach, best first. Raises SettingsError for none.
        certificate: of the driver's server. Whoever is told an address can know it by its fingerprint.
        is_wide: whether it listens for other machines from the start.
        ports: tried where the one on loopback is not free; 0 for any.
    """

    def __init__(
        self,
        loopback: str,
        *,
        addresses: Callable[[], Sequence[str]],
        certificate: OwnCertificate,
        is_wide: bool,
        ports: Iterable[int] = (0,),
    ) -> None:
        self._loopback = loopback
        self._addresses = addresses
        self.certificate = certificate
        self._is_wide = is_wide
        self._spare_ports = ports
        self._server: Server | None = None
        self._port = 0
        self._ports: dict[str, int] = {}
        self._opening: asyncio.Task[None] | None = None

    async def begin(self, server: Server, port: int) -> None:
        """The server listens on loopback.

        Raises:
            SettingsError: it is to listen for other machines, and cannot.
        """
        self._server, self._port = server, port
        if self._is_wide:
            await self.open()

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses for agents of other machines, as URLs; none before it listens for them."""
        return tuple(url_of(address, port, scheme="https") for address, port in self._ports.items())

    async def to(self, host: str) -> tuple[str, ...]:
        """The URLs that an agent of this host tries, in order; of this machine for "".

        Raises:
            SettingsError: the driver cannot listen on any address that others reach.
        """
        if not host:
            return (url_of(self._loopback, self._port, scheme="https"),)
        await self.open()
        by_route = await asyncio.get_running_loop().run_in_executor(None, _address_towards, host)
        first = [address for address in self._ports if address == by_route]
        ordered = first + [address for address in self._ports if address not in first]
        return tuple(url_of(address, self._ports[address], scheme="https") for address in ordered)

    async def open(self) -> None:
        """Listens for other machines, if it does not do so yet."""
        if self._opening is None or (self._opening.done() and not self._ports):
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        assert self._server is not None
        addresses = self._addresses()
        await self.certificate.make()
        failed: SettingsError | None = None
        for address in addresses:
            try:
                self._ports[address] = await self._server.listen_too(address, ports=self._spare_ports)
            except SettingsError as error:  # it may have gone this moment
                failed = error
        if not self._ports:
            raise failed or SettingsError("this machine has no address that other hosts could reach")


def _address_towards(host: str) -> str:
    """This machine's address on the route to a host; "" when there is none. Sends nothing. May block."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


@dataclass(frozen=True, slots=True)
class AgentSide:
    """What a driver with agents has, beside the rest.

    Attributes:
        door: gives agents' keys to the server.
        reception: takes their connections over.
        fleet: of the hosts.
        addresses: of them.
        variables: what of a worker's variables it is sent.
        sink: takes the workers' output.
        stdin: whose the driver's standard input is.
        ways: on which they come.
        tasks: of the fleet and the driver.
        join_token: what hosts join with; "" when none may.
        listener: a socket that listens on the driver's port already; None to have one made.
        invitation: how hosts join, in words; "" for the usual.
    """

    door: Door
    reception: Reception
    fleet: Fleet
    addresses: Addresses
    variables: Variables = field(repr=False)
    sink: OutputSink
    stdin: StandardInput
    ways: Ways
    tasks: Tasks
    join_token: str = field(repr=False)
    listener: socket.socket | None = None
    invitation: str = ""

    @property
    def urls(self) -> list[str]:
        """Where other machines reach the driver, as people hand it on; empty as long as it does not listen for them."""
        return [str(DriverUrl(url, self.ways.certificate.fingerprint)) for url in self.ways.urls]
