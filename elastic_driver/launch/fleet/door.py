"""The door: who may dial in as an agent, and with which key.

Owns tickets, the join token's key, and the keys that agents have agreed on. Knows nothing of hosts and connections.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_driver.rendezvous.credentials import KEY_BYTES, Identity, Role

_NUMBER_BYTES = 16
# Agents that were given up are remembered, to be told so. One that comes after that many others is a stranger.
_MOST_GIVEN_UP = 1000


@dataclass(frozen=True, slots=True)
class Ticket:
    """Good for one agent's first connection.

    Attributes:
        identity: as whom the agent proves itself.
        key: with what.
        host: its host's name in the job.
        until: by the clock.
        addresses: from where it may come; empty for from anywhere.
    """

    identity: Identity
    key: bytes = field(repr=False)
    host: str
    until: float
    addresses: frozenset[str] = frozenset()


class Door:
    """Gives keys to the server, which has agents prove themselves.

    Args:
        clock: seconds.
        join_key: of agents that somebody else starts; None when none may come.
    """

    def __init__(self, clock: Callable[[], float], *, join_key: bytes | None = None) -> None:
        self._clock = clock
        self._join_key = join_key
        self._tickets: dict[str, Ticket] = {}
        self._agents: dict[str, bytes] = {}
        self._given_up: OrderedDict[str, bytes] = OrderedDict()

    def issue(self, host: str, limit_s: float, addresses: frozenset[str] = frozenset()) -> Ticket:
        """A new ticket for an agent on this host."""
        now = self._clock()
        for number in [number for number, ticket in self._tickets.items() if ticket.until < now]:
            del self._tickets[number]
        number = secrets.token_hex(_NUMBER_BYTES)
        ticket = Ticket(
            Identity(Role.TICKET, number=number), secrets.token_bytes(KEY_BYTES), host, now + limit_s, addresses
        )
        self._tickets[number] = ticket
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """It is good for nothing any more."""
        self._tickets.pop(ticket.identity.number, None)

    def take(self, identity: Identity, address: str = "") -> Ticket | None:
        """The ticket of who has proven that he has it, for this once; None when it is none any more.

        Args:
            identity: as whom he comes.
            address: from where. From one that the ticket is not good for, nothing is taken.
        """
        ticket = self._tickets.get(identity.number)
        if ticket is None or (ticket.addresses and address.partition("%")[0] not in ticket.addresses):
            return None
        del self._tickets[identity.number]
        return ticket if self._clock() <= ticket.until else None

    def admit(self, agent: str, key: bytes) -> None:
        """From now on this agent may come back, with this key."""
        self._agents[agent] = key

    def give_up(self, agent: str) -> None:
        """This agent may only come back to be told that it was given up."""
        key = self._agents.pop(agent, None)
        if key is not None:
            self._given_up[agent] = key
            while len(self._given_up) > _MOST_GIVEN_UP:
                self._given_up.popitem(last=False)

    def key_of(self, identity: Identity) -> bytes | None:
        """With what somebody is to prove himself; None for nobody that there is."""
        match identity.role:
            case Role.TICKET:
                ticket = self._tickets.get(identity.number)
                return None if ticket is None or self._clock() > ticket.until else ticket.key
            case Role.JOINER:
                return self._join_key
            case Role.AGENT:
                return self._agents.get(identity.number) or self._given_up.get(identity.number)
            case _:
                return None
