"""The endpoint: the one address that all nodes of a job are given, and the choice of the driver's node.

Owns the test whose address it is, and the port there: of several nodes on one machine the one that gets the port is the
driver. Reports nothing, and waits for nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Self

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.hosts import with_number
from elastic_driver.launch.local.locality import addresses_of, is_local_host

# The default of torchrun's rendezvous (c10d), for an endpoint without a port.
DEFAULT_PORT = 29400
LOOPBACK = "127.0.0.1"
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address where the nodes meet.

    Attributes:
        host: a name or an address, without brackets.
        port: the driver's port.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``host``, ``host:port``, ``[ipv6]`` or ``[ipv6]:port``.

        Raises:
            SettingsError: it is none of these.
        """
        text = text.strip()
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            has_port, port = rest[:1], rest[1:]
            is_sound = bool(bracket) and has_port in ("", ":")
        elif text.count(":") > 1:
            host, has_port, port, is_sound = text, "", "", True  # an IPv6 address as it is
        else:
            host, has_port, port = text.partition(":")
            is_sound = True
        is_sound = is_sound and bool(host) and not any(letter.isspace() or letter in "/@#?" for letter in host)
        is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
        if not is_sound or (has_port and not is_port):
            raise SettingsError(
                f"cannot read {text[:200]!r} as the endpoint of the nodes (--rdzv-endpoint): expected HOST:PORT, with "
                "an IPv6 address in brackets, and a port from 1 to 65535"
            )
        return cls(host, int(port) if has_port else DEFAULT_PORT)

    def __str__(self) -> str:
        return with_number(self.host, self.port)

    @property
    def url(self) -> str:
        """The URL of the driver there."""
        return f"https://{self}"

    @property
    def only_here(self) -> bool:
        """Whether no other machine can reach it: it is loopback, and not just a name that may resolve to it here."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def is_ours(self) -> bool | None:
        """Return whether it is an address of this machine, or resolves only to such; None while it does not resolve.

        There are no reverse lookups. A name that does not resolve yet is this machine's if it begins with the machine's
        own
        name: a pod's name in its headless service may resolve only when the pod is ready. Blocks for up to 6 s.
        """
        if is_local_host(self.host):
            return True
        try:
            ipaddress.ip_address(_bare(self.host))
        except ValueError:
            if addresses_of(self.host):
                return False
            return True if _first_label(self.host) == _first_label(socket.gethostname()) else None
        return False

    @property
    def own_address(self) -> str:
        """The address at which other machines reach it, if it is this machine's; "" for none. Blocks for up to 3 s."""
        found = (address for address in addresses_of(self.host) if not ipaddress.ip_address(_bare(address)).is_loopback)
        return next((address for address in found if is_local_host(address)), "")

    def claim(self) -> socket.socket | None:
        """Take the port on this machine. Return a socket that listens on loopback; None if the port is in use.

        Raises:
            SettingsError: the system denies this user the port, or another program has it on the endpoint's own
                address.
        """
        listener = self._listen(LOOPBACK)
        if listener is None:
            return None
        # The process that has loopback is the driver. It must also get the port where the others look for it.
        for address in () if self.only_here else addresses_of(self.host):
            if is_local_host(address) and address != LOOPBACK:  # a machine's name may resolve to that
                probe = self._listen(address)
                if probe is None:
                    listener.close()
                    raise SettingsError(
                        f"cannot be the driver: port {self.port} of {address} is in use by another program"
                    )
                probe.close()
        return listener

    def _listen(self, address: str) -> socket.socket | None:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Connections that an earlier job left in TIME_WAIT do not prevent this.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(socket.getaddrinfo(address, self.port, type=socket.SOCK_STREAM)[0][4])
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise SettingsError(f"cannot listen on {address} port {self.port}: {in_words(error)}") from error
        except BaseException:
            sock.close()
            raise
        return sock


def _bare(address: str) -> str:
    """Return an address without its zone."""
    return address.partition("%")[0]


def _first_label(name: str) -> str:
    return name.lower().partition(".")[0]
