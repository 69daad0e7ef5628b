"""Which agents may dial in, and with which key.

Owns tickets, the join token's key, and the keys that agents have made. Knows nothing of hosts and connections. Persists
tickets for a later driver; the fleet does so for agents.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_driver.launch.fleet.kept import NOTHING, AgentKept, FleetFact, Keeper, TicketKept, TicketUse
from elastic_driver.rendezvous.credentials import KEY_BYTES, Identity, Role

_NUMBER_BYTES = 16
# Agents given up are remembered, so that they can be notified. Beyond so many, an agent that returns is a stranger.
_MOST_GIVEN_UP = 1000
# Used tickets are remembered, too, beyond their start limit, so that a later use can be logged.
_MOST_USED = 1000


@dataclass(frozen=True, slots=True)
class Ticket:
    """Admits one agent's first connection.

    It may be in a command line, which every user of the machine can read. So a second use counts as well: see
    :meth:`Tickets.take`.

    Attributes:
        identity: the agent's identity in the authentication.
        key: its key.
        host: its host's name in the job.
        limit_s: how long it is valid, and for how long after its use a second use revokes that, seconds.
        until: when it expires, by the clock.
        addresses: from which it may be used; empty for any.
    """

    identity: Identity
    key: bytes = field(repr=False)
    host: str
    limit_s: float
    until: float
    addresses: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class User:
    """The user of a ticket, according to the first messages.

    Attributes:
        agent: the number that it has given itself.
        key: SHA-256 of the key that it has made. Only its maker knows that key.
        address: from which it connects.
        pid: of its process, according to itself.
    """

    agent: str
    key: bytes = field(repr=False)
    address: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} at {self.address}"


@dataclass(frozen=True, slots=True)
class SecondUse:
    """The presentation of a ticket that another agent has used before.

    Attributes:
        host: for which it was issued.
        first, second: the first user, and the one that presents it now.
        revokes: whether the first use is void, too: it is not known which of the two is the agent.
        is_first: whether no earlier second use of this ticket was reported.
    """

    host: str
    first: User
    second: User
    revokes: bool
    is_first: bool


@dataclass(slots=True)
class _Used:
    ticket: Ticket
    user: User
    until: float  # until then a second use revokes the first, by the clock
    reported: bool = False


class Tickets:
    """Gives the server the keys with which agents authenticate.

    Args:
        clock: seconds.
        join_key: of agents that join by themselves; None if none may.
        keeper: persists tickets.
    """

    def __init__(
        self, clock: Callable[[], float], *, join_key: bytes | None = None, keeper: Keeper[FleetFact] = NOTHING
    ) -> None:
        self._clock = clock
        self._join_key = join_key
        self._keeper = keeper
        self._tickets: dict[str, Ticket] = {}
        self._used: OrderedDict[str, _Used] = OrderedDict()
        self._agents: dict[str, bytes] = {}
        self._given_up: OrderedDict[str, bytes] = OrderedDict()

    def take_over(self, agents: Iterable[AgentKept], tickets: Iterable[TicketKept]) -> None:
        """Restore the agents and tickets of the earlier driver. To be called before anything else."""
        for agent in agents:
            (self._given_up if agent.given_up else self._agents)[agent.agent] = bytes.fromhex(agent.key)
        for each in tickets:
            ticket = _ticket_of(each)
            if each.use is None:
                self._tickets[each.number] = ticket
            else:
                use = each.use
                user = User(use.agent, bytes.fromhex(use.key), use.address, use.pid)
                self._used[each.number] = _Used(ticket, user, use.until, use.reported)

    def issue(self, host: str, limit_s: float, addresses: frozenset[str] = frozenset()) -> Ticket:
        """Issue a new ticket for an agent on this host."""
        now = self._clock()
        for number in [number for number, ticket in self._tickets.items() if ticket.until < now]:
            self._drop(number)
        number = secrets.token_hex(_NUMBER_BYTES)
        ticket = Ticket(
            Identity(Role.TICKET, number=number),
            secrets.token_bytes(KEY_BYTES),
            host,
            limit_s,
            now + limit_s,
            addresses,
        )
        self._tickets[number] = ticket
        self._keep(ticket)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Withdraw a ticket that has not been used yet."""
        if ticket.identity.number in self._tickets:
            self._drop(ticket.identity.number)

    def take(self, identity: Identity, user: User) -> Ticket | SecondUse | None:
        """Consume the ticket of a user that has proven to have it.

        An agent that has missed the answer may present it again. Any other agent is a second user: it may have read the
        ticket somewhere, and may even have been the first of the two.

        Args:
            identity: of the ticket.
            user: presents it. A ticket presented from a wrong address is not consumed.

        Returns:
            The ticket; None if it has expired, was withdrawn, or is not valid for this address.
        """
        number, now = identity.number, self._clock()
        used = self._used.get(number)
        ticket = self._tickets.get(number) if used is None else used.ticket
        if ticket is None or (ticket.addresses and user.address.partition("%")[0] not in ticket.addresses):
            return None
        if used is None:
            if now > ticket.until:
                self._drop(number)
                return None
            del self._tickets[number]
            self._remember(_Used(ticket, user, now + ticket.limit_s))
            return ticket
        in_time = now <= used.until and not used.reported
        if in_time and (user.agent, user.key) == (used.user.agent, used.user.key):
            return ticket
        is_first, used.reported = not used.reported, True
        self._keep(ticket, used)
        return SecondUse(ticket.host, used.user, user, revokes=in_time, is_first=is_first)

    def _remember(self, used: _Used) -> None:
        self._used[used.ticket.identity.number] = used
        self._keep(used.ticket, used)
        while len(self._used) > _MOST_USED and next(iter(self._used.values())).until < self._clock():
            number, _ = self._used.popitem(last=False)
            self._keeper.drop(TicketKept, number)

    def _keep(self, ticket: Ticket, used: _Used | None = None) -> None:
        use = None
        if used is not None:
            user = used.user
            use = TicketUse(user.agent, user.key.hex(), user.address, user.pid, used.until, used.reported)
        self._keeper.keep(
            TicketKept(
                ticket.identity.number,
                ticket.key.hex(),
                ticket.host,
                ticket.limit_s,
                ticket.until,
                ticket.addresses,
                use,
            )
        )

    def _drop(self, number: str) -> None:
        del self._tickets[number]
        self._keeper.drop(TicketKept, number)

    def admit(self, agent: str, key: bytes) -> None:
        """Let this agent reconnect from now on, with this key."""
        self._agents[agent] = key

    def give_up(self, agent: str) -> None:
        """Let this agent reconnect only to be notified that it was given up."""
        key = self._agents.pop(agent, None)
        if key is not None:
            self._given_up[agent] = key
            while len(self._given_up) > _MOST_GIVEN_UP:
                forgotten, _ = self._given_up.popitem(last=False)
                self._keeper.drop(AgentKept, forgotten)

    def key_of(self, identity: Identity) -> bytes | None:
        """Return the key with which an identity has to authenticate; None if it is unknown."""
        match identity.role:
            case Role.TICKET:
                used = self._used.get(identity.number)
                if used is not None:
                    return used.ticket.key
                ticket = self._tickets.get(identity.number)
                return None if ticket is None or self._clock() > ticket.until else ticket.key
            case Role.JOINER:
                return self._join_key
            case Role.AGENT:
                return self._agents.get(identity.number) or self._given_up.get(identity.number)
            case _:
                return None


def _ticket_of(kept: TicketKept) -> Ticket:
    return Ticket(
        Identity(Role.TICKET, number=kept.number),
        bytes.fromhex(kept.key),
        kept.host,
        kept.limit_s,
        kept.until,
        kept.addresses,
    )
