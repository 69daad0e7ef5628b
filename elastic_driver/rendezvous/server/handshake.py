"""A peer of an encrypted port that has not shaken hands yet.

Owns what such a peer is to the server: a stranger like others, so that whoever is silent on thousands of connections
does not take all descriptors. Once hands are shaken it is a :class:`Connection`.
"""

from __future__ import annotations

import asyncio
from ssl import SSLContext

from elastic_driver.rendezvous.server.connection import Connection, Service, descriptor_of, has_unread
from elastic_driver.rendezvous.tls import TlsLayer, Turns


class Handshake(TlsLayer):
    """The TLS of a connection to the server. Implements :class:`Guest` as long as hands are not shaken.

    Args:
        service: of the server.
        context: of the server's certificate.
        turns: of the loop.
    """

    def __init__(self, service: Service, context: SSLContext, turns: Turns) -> None:
        super().__init__(
            context,
            lambda: Connection(service),
            turns,
            handshake_s=service.limits.request_s,
            server_side=True,
            on_shaken=lambda error: service.guests.lost(self),
        )
        self._service = service

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See TlsLayer."""
        super().connection_made(transport)
        self._service.guests.arrived(self)

    @property
    def descriptor(self) -> int:
        """See Guest."""
        return descriptor_of(self.transport)

    @property
    def has_unread(self) -> bool:
        """See Guest."""
        return has_unread(self.transport)

    def refuse(self, status: int, text: str) -> None:
        """See Guest. There is no way yet to say anything."""
        self.abort()

    def say_goodbye(self, text: str) -> None:
        """See Guest."""
        self.abort()

    def abort(self) -> None:
        """See Guest."""
        self._service.guests.left(self)
        super().abort()

    def check_time(self, now: float) -> None:
        """See Guest: the layer has a time of its own."""
