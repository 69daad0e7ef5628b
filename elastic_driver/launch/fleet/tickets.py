"""Who may dial in as an agent, and with which key.

Owns tickets, the join token's key, and the keys that agents have made. Knows nothing of hosts and connections. Tickets
are kept for a later driver; agents are by the fleet.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_driver.launch.fleet.kept import NOTHING, AgentKept, FleetFact, Keeper, TicketKept, TicketUse
from elastic_driver.rendezvous.credentials import KEY_BYTES, Identity, Role

_NUMBER_BYTES = 16
# Agents that were given up are remembered, to be told so. One that comes after that many others is a stranger.
_MOST_GIVEN_UP = 1000
# Tickets that were used are remembered as well, beyond their start limit, so that a later use can be logged.
_MOST_USED = 1000


@dataclass(frozen=True, slots=True)
class Ticket:
    """Good for one agent's first connection.

    It may stand in a command line, where every user of the machine can read it. So a second use counts as well: see
    :meth:`Tickets.take`.

    Attributes:
        identity: as whom the agent proves itself.
        key: with what.
        host: its host's name in the job.
        limit_s: for how long it is good, and for how long after its use a second one revokes that, seconds.
        until: by the clock.
        addresses: from where it may come; empty for from anywhere.
    """

    identity: Identity
    key: bytes = field(repr=False)
    host: str
    limit_s: float
    until: float
    addresses: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class User:
    """Who uses a ticket, by its first words.

    Attributes:
        agent: the number that it has given itself.
        key: SHA-256 of the key that it has made. Only its maker knows that.
        address: from where it comes.
        pid: of its process, as it says.
    """

    agent: str
    key: bytes = field(repr=False)
    address: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} at {self.address}"


@dataclass(frozen=True, slots=True)
class SecondUse:
    """A ticket was presented that another has used before.

    Attributes:
        host: for which it was issued.
        first, second: who has used it, and who has presented it now.
        revokes: whether the first use is void, too: it is not known which of the two is the agent.
        is_first: whether no other use than the first one was reported of this ticket.
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
    until: float  # a second use revokes the first, by the clock
    reported: bool = False


class Tickets:
    """Gives keys to the server, which has agents prove themselves.

    Args:
        clock: seconds.
        join_key: of agents that somebody else starts; None when none may come.
        keeper: of tickets.
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
        """Those that the driver before has admitted and issued. To be called before all else."""
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
        """A new ticket for an agent on this host."""
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
        """Whoever has not used it by now cannot do so any more."""
        if ticket.identity.number in self._tickets:
            self._drop(ticket.identity.number)

    def take(self, identity: Identity, user: User) -> Ticket | SecondUse | None:
        """The ticket of somebody who has proven to have it, for this once.

        An agent that has not heard the answer may present it again. Whoever else does is a second user: somebody has
        read the ticket where it stood, and he may have been the first of the two.

        Args:
            identity: which ticket.
            user: who presents it. From an address that it is not good for nothing is taken.

        Returns:
            The ticket; None where it has run out, was withdrawn, or is not good for this address.
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
        """From now on this agent may come back, with this key."""
        self._agents[agent] = key

    def give_up(self, agent: str) -> None:
        """This agent may only come back to be told that it was given up."""
        key = self._agents.pop(agent, None)
        if key is not None:
            self._given_up[agent] = key
            while len(self._given_up) > _MOST_GIVEN_UP:
                forgotten, _ = self._given_up.popitem(last=False)
                self._keeper.drop(AgentKept, forgotten)

    def key_of(self, identity: Identity) -> bytes | None:
        """With what somebody is to prove himself; None for nobody that there is."""
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
