"""The agents' side of a driver, and the addresses at which they reach it.

Owns where the driver listens: at a socket of this machine from its start; on TCP only once needed, on loopback for
readers and pages, on the machine's other addresses for other hosts. Decides nothing about hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import is_loopback, with_number
from elastic_driver.journal.entries import WaysKept
from elastic_driver.launch.fleet.addresses import Addresses
from elastic_driver.launch.fleet.admission import Admission
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.kept import NOTHING, Keeper
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.launch.fleet.worker import Variables
from elastic_driver.launch.words import OutputSink
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.system import local_socket
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import in_seconds

# Seconds between two tries of a port that another program has, and how long a driver waits for one at first.
_AGAIN_S = 0.5
_FIRST_S = 2.0


class Server(Protocol):
    """The interface of the driver's server that is used here."""

    async def open(self, host: str, ports: int | Sequence[int]) -> int:
        """Listen on an address, on the first free port of these. Return the port. Raises SettingsError."""

    async def adopt(self, listener: socket.socket) -> int:
        """Take over a listening socket. Return its port."""


def url_of(address: str, port: int, *, scheme: str = "http") -> str:
    """Return the URL of a server at an address."""
    return f"{scheme}://{with_number(address, port)}"


class DriverAddresses:
    """The addresses at which the driver is reached.

    All TCP addresses have the same port, if it is free.

    Args:
        loopback: the address for readers and pages on this machine.
        addresses: returns this machine's addresses that others may reach, best first. Raises SettingsError for none.
        certificate: the certificate of the driver's server; its fingerprint identifies the server.
        ports: the ports to try; 0 for any.
        listener: a socket that listens on loopback already; None to make one.
        opens: whether to listen on loopback from the start.
        is_wide: whether to listen for other machines from the start.
        before: the previous driver's addresses: agents look for this one there.
        limit_s: how long to retry one of its ports that another program has.
        folder: the folder for the socket; None for one of its own.
        keeper: stores the addresses.
        say: reports what prevents listening.
    """

    def __init__(
        self,
        loopback: str,
        *,
        addresses: Callable[[], Sequence[str]],
        certificate: OwnCertificate,
        ports: Sequence[int] = (0,),
        listener: socket.socket | None = None,
        opens: bool = False,
        is_wide: bool = False,
        before: WaysKept | None = None,
        limit_s: float = 0.0,
        folder: Path | None = None,
        keeper: Keeper[WaysKept] = NOTHING,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        before = before or WaysKept()
        self._before = before
        self._limit_s = limit_s
        self.folder = Path(before.socket).parent if before.socket else folder
        self._keeper = keeper
        self._say = say
        self._loopback = loopback
        self._addresses = addresses
        self.certificate = certificate
        self._spare_ports = ports
        self._listener = listener
        self._opens = opens or before.loopback_port > 0
        self._is_wide = is_wide or bool(before.ports)
        self._server: Server | None = None
        self._socket: Path | None = None
        self._port = 0  # the first one in use
        self._loopback_port = 0  # 0 until it listens there
        self._ports: dict[str, int] = {}
        self._loopback_opening, self._opening = _Opening(self._open_loopback), _Opening(self._open)
        self._turn = asyncio.Lock()  # one search for a port at a time: the next reuses the result

    async def begin(self, server: Server, socket: Path) -> None:
        """Register the server, which listens at its socket, and listen elsewhere if due.

        Raises:
            SettingsError: it should listen on TCP, and cannot.
        """
        self._server, self._socket = server, socket
        self._keep()
        openings = ((self._opens, self._loopback_opening), (self._is_wide, self._opening))
        for opening in (opening for is_due, opening in openings if is_due):
            # A port that another program has is retried for as long as agents look for this driver. Processes of this
            # machine do not wait for that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S if self._before.socket else None):
                    await opening.wait()

    def moved(self, socket: Path) -> None:
        """Record that the server listens at another socket from now on."""
        if socket != self._socket:
            self._socket = socket
            self._keep()

    def _keep(self) -> None:
        ports, certificate = {**self._before.ports, **self._ports}, self.certificate.made
        self._keeper.keep(
            WaysKept(
                str(self._socket),
                self._loopback_port or self._before.loopback_port,
                ports,
                *(("", "") if certificate is None else (certificate.fingerprint, certificate.pem.decode())),
            )
        )

    @property
    def here(self) -> str:
        """The URL for processes of this machine: that of a socket."""
        assert self._socket is not None, "begin() was called"
        return local_socket.url_of(self._socket)

    @property
    def url(self) -> str:
        """The URL for tools that follow the job: on loopback, if the driver listens there by now; else :attr:`here`."""
        if not self._loopback_port:
            return self.here
        # --rendezvous-address may be any; browsers and readers of this machine need no TLS.
        scheme = "http" if is_loopback(self._loopback) else "https"
        return url_of(self._loopback, self._loopback_port, scheme=scheme)

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses for agents of other machines, as URLs; empty until the driver listens for them."""
        return tuple(url_of(address, port, scheme="https") for address, port in self._ports.items())

    async def to(self, host: str) -> tuple[str, ...]:
        """Return the URLs that an agent of this host tries, in order; of this machine for "".

        Raises:
            SettingsError: the driver cannot listen on any address that others reach.
        """
        if not host:
            return (self.here,)
        await self.open()
        by_route = await asyncio.get_running_loop().run_in_executor(None, _address_towards, host)
        first = [address for address in self._ports if address == by_route]
        ordered = first + [address for address in self._ports if address not in first]
        return tuple(url_of(address, self._ports[address], scheme="https") for address in ordered)

    async def open_loopback(self) -> str:
        """Listen on loopback, if not done yet. Return the URL there.

        Raises:
            SettingsError: no port is free.
        """
        await self._loopback_opening.wait()
        return self.url

    async def open(self) -> None:
        """Listen for other machines, if not done yet.

        Raises:
            SettingsError: no address is reachable for others.
        """
        await self._opening.wait()

    async def _open_loopback(self) -> None:
        assert self._server is not None
        if self._listener is not None:
            self._loopback_port = self._port = await self._server.adopt(self._listener)
        else:
            self._loopback_port = await self._listen(self._loopback, self._before.loopback_port)
        self._keep()

    async def _open(self) -> None:
        await self.certificate.make()
        failed: SettingsError | None = None
        for address in self._addresses():
            try:
                self._ports[address] = await self._listen(address, self._before.ports.get(address, 0))
            except SettingsError as error:  # it may have disappeared this moment
                failed = error
        if not self._ports:
            raise failed or SettingsError("this machine has no address that other hosts can reach")
        self._keep()

    async def _listen(self, address: str, before: int) -> int:
        assert self._server is not None
        async with self._turn:
            if before:
                port = await self._listen_again(self._server, address, before)
            else:
                ports = (self._port, *self._spare_ports) if self._port else self._spare_ports
                port = await self._server.open(address, ports)
            self._port = self._port or port
        return port

    async def _listen_again(self, server: Server, address: str, port: int) -> int:
        """Listen where the previous driver did, and nowhere else: agents know no other port."""
        loop = asyncio.get_running_loop()
        until, said = loop.time() + self._limit_s, False
        while True:
            try:
                return await server.open(address, (port,))
            except SettingsError as error:
                if loop.time() >= until:
                    raise
                if not said:
                    said = True
                    self._say(
                        f"{error}; agents look for this driver there, so it retries for {in_seconds(self._limit_s)} "
                        "(--driver-timeout)"
                    )
            await asyncio.sleep(_AGAIN_S)


class _Opening:
    """Opens something once for all who need it; after a failure, the next caller retries.

    Args:
        open_: opens it. Raises SettingsError on failure.
    """

    def __init__(self, open_: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._open = open_
        self._task: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Block until it is open. A caller that stops waiting does not affect the others.

        Raises:
            SettingsError: it cannot be opened now.
        """
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception())):
            self._task = asyncio.create_task(self._open())
            self._task.add_done_callback(_expect_failure)
        await asyncio.shield(self._task)


def _expect_failure(opening: asyncio.Task[None]) -> None:
    """Accept a failure to open, which is reported to those who wait, even if there are none any more."""
    error = None if opening.cancelled() else opening.exception()
    if error is not None and not isinstance(error, SettingsError):
        opening.get_loop().call_exception_handler({"message": "cannot open a port", "exception": error})


def _address_towards(host: str) -> str:
    """Return this machine's address on the route to a host; "" if there is none. Sends nothing. May block."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


@dataclass(frozen=True, slots=True)
class AgentSide:
    """The parts of a driver that serve agents.

    Attributes:
        tickets: provides the agents' keys to the server.
        admission: takes over the agents' connections.
        fleet: the agents of the hosts.
        addresses: the addresses of the hosts.
        variables: selects the variables of a worker that are sent to its agent.
        sink: takes the workers' output.
        stdin: the owner of the driver's standard input.
        ways: the addresses at which agents reach the driver.
        tasks: those of the fleet and the driver.
        join_token: the secret with which hosts join; "" if none may.
        meets_at: the port on loopback where the nodes of a job on this machine alone meet; 0 if there are none.
        invitation: how hosts join, in words; "" for the usual.
    """

    tickets: Tickets
    admission: Admission
    fleet: Fleet
    addresses: Addresses
    variables: Variables = field(repr=False)
    sink: OutputSink
    stdin: StandardInput
    ways: DriverAddresses
    tasks: Tasks
    join_token: str = field(repr=False)
    meets_at: int = 0
    invitation: str = ""

    @property
    def urls(self) -> list[str]:
        """The URLs at which other machines reach the driver, for people; empty while it does not listen for them."""
        return [str(DriverUrl(url, self.ways.certificate.fingerprint)) for url in self.ways.urls]
