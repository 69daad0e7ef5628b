"""How a connection becomes an agent's: its protocol changes, and the server has nothing to do with it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic_driver.rendezvous.credentials import Identity
from elastic_driver.rendezvous.proof import Session
from elastic_driver.rendezvous.routes import AGENT, Deferred, Route
from elastic_driver.rendezvous.server.connection import Connection


class Upgrade(Deferred):
    """The connection is of another protocol from now on.

    Args:
        protocol: makes it, of the session in which the peer has proven itself.
    """

    __slots__ = ("_protocol",)

    def __init__(self, protocol: Callable[[Session], asyncio.Protocol]) -> None:
        self._protocol = protocol

    def begin(self, connection: Connection) -> None:
        """See Deferred."""
        connection.upgrade(self._protocol)


def agent_route(take: Callable[[Identity, Session], asyncio.Protocol]) -> Route:
    """The route by which agents come.

    Args:
        take: takes over the connection of an agent that has proven itself: gives the protocol that it gets.
    """
    return Route("GET", "agent", AGENT, lambda request: Upgrade(lambda session: take(request.identity, session)))
