"""Admission of agents: the first messages on each connection of an agent, until its link continues on it.

Owns the checks before an agent belongs to the job: its identity, its protocol and version, and the key with which it
reconnects. What its host means to the job is up to the fleet. A new agent is welcomed once a later driver would know
it, too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from typing import Protocol

from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.hosts import is_host_name, parse_labels
from elastic_driver.launch.fleet.hello_limits import excess
from elastic_driver.launch.fleet.kept import NOTHING, FleetFact, Keeper
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.tickets import SecondUse, Ticket, Tickets, User
from elastic_driver.rendezvous.agent_messages import (
    PROTOCOL,
    AgentMessage,
    Hello,
    Refused,
    Welcome,
    decoded,
    version_of,
)
from elastic_driver.rendezvous.channel import FrameConnection
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.frames import MAX_FRAME, Frame, Message
from elastic_driver.version import __version__
from elastic_driver.words import NO_BARS

# From the exchange to the hello, which is sent in one piece.
_HELLO_S = 10.0
_HELLO_BYTES = 1 << 20
# Of a value in which nodes differ. Commands may be long.
_SHOWN = 300
_NUMBER = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[0-9a-f]{64}")


class RefusedError(Exception):
    """An agent cannot be admitted; the message is one sentence.

    Args:
        why: the sentence.
        is_over: whether the job is over.
    """

    def __init__(self, why: str, *, is_over: bool = False) -> None:
        super().__init__(why)
        self.is_over = is_over


@dataclass(frozen=True, slots=True)
class WelcomeFacts:
    """The facts that every welcome contains.

    Attributes:
        job_id, poll_s, cwd, umask, warm, preload, prefix_timestamp, agent_timeout_s, warm_first, spot_notices, epoch,
            driver, driver_timeout_s, place, etcd, etcd_cluster, bars: see Welcome.
        alike: settings that must be the same on all nodes, by how they are given; None if the job is not one of nodes.
    """

    job_id: str
    poll_s: float
    cwd: str
    umask: int
    warm: bool
    preload: tuple[str, ...] | None
    prefix_timestamp: bool
    agent_timeout_s: float
    alike: Mapping[str, str] | None = None
    warm_first: bool = False
    spot_notices: str = ""
    epoch: int = 0
    driver: str = ""
    driver_timeout_s: float = 0.0
    place: str = ""
    etcd: EtcdPlace | None = None
    etcd_cluster: str = ""
    bars: str = NO_BARS


class Host(Protocol):
    """Admits agents to the job; the fleet implements it."""

    def known(self, agent: str) -> AgentLink | None:
        """Return the link of an agent that was admitted before; None if it was given up, or never admitted."""

    def arrives(self, facts: AgentFacts) -> AgentLink:
        """Admit a new agent that has authenticated and passed the checks. Raises RefusedError."""

    def settled(self, link: AgentLink) -> None:
        """Handle a new agent that has its connection now."""

    def turned_away(self, host: str, why: str) -> None:
        """Handle an agent started on this host that can never be admitted."""

    def revoked(self, host: str, why: str) -> None:
        """Handle a ticket used twice: neither agent may be in the job, nor any other dialled on this host."""

    def warn(self, text: str) -> None:
        """Warn the user."""

    def node_refused(self, why: str) -> None:
        """Handle a node that knows this job's secret, but cannot be admitted as it is."""

    def superseded(self, epoch: int) -> None:
        """Handle an agent that is back and obeys a driver of a higher epoch, which has the job."""


class Admission:
    """Makes the protocols to which the server hands over the connections of agents.

    Args:
        tickets: which agents may connect.
        welcome_facts: for all agents.
        host: admits them.
        keeper: persists them.
    """

    def __init__(
        self, tickets: Tickets, welcome_facts: WelcomeFacts, host: Host, keeper: Keeper[FleetFact] = NOTHING
    ) -> None:
        self._keeper = keeper
        self._tickets = tickets
        self._welcome_facts = welcome_facts
        self._host = host
        self._arrivals: set[Arrival] = set()
        self._is_abandoned = False  # whether the job continues without this driver

    def take_over(self, identity: Identity) -> asyncio.Protocol:
        """Return the protocol to which to hand over a connection on which this peer has authenticated."""
        arrival = Arrival(
            identity,
            self._tickets,
            self._welcome_facts,
            self._host,
            self._arrivals.discard,
            self._keeper,
            is_abandoned=lambda: self._is_abandoned,
        )
        self._arrivals.add(arrival)
        return arrival.connection

    def abandon(self) -> None:
        """Cut off all new agents from now on, without a message: they will find the driver that has the job."""
        self._is_abandoned = True
        for arrival in tuple(self._arrivals):
            arrival.connection.abort("the job continues without this driver")

    def close(self) -> None:
        """Cut connections that have not sent a hello."""
        for arrival in tuple(self._arrivals):
            arrival.connection.abort("the job has ended")


class Arrival:
    """One connection, once it carries frames; they are handed to the agent's link as soon as there is one."""

    def __init__(
        self,
        identity: Identity,
        tickets: Tickets,
        welcome_facts: WelcomeFacts,
        host: Host,
        over: Callable[[Arrival], None],
        keeper: Keeper[FleetFact],
        *,
        is_abandoned: Callable[[], bool],
    ) -> None:
        self._is_abandoned = is_abandoned
        self._keeper = keeper
        self._newcomer: AgentLink | None = None  # until it is welcomed
        self._is_gone = False
        self._identity = identity
        self._tickets = tickets
        self._welcome_facts = welcome_facts
        self._host = host
        self._over = over
        self._link: AgentLink | None = None
        self.connection = FrameConnection(on_frame=self._received, on_lost=self._lost, most=_HELLO_BYTES)
        self._timer = asyncio.get_running_loop().call_later(
            _HELLO_S, self.connection.abort, "it did not send hello in time"
        )

    def _received(self, frame: Frame) -> None:
        if self._link is not None:
            self._link.received(frame)
            return
        if self._is_abandoned():
            self.connection.abort("the job continues without this driver")
            return
        if self._newcomer is not None or len(frame.messages) != 1 or frame.first != 0:
            raise RendezvousProtocolError("cannot read frame: an agent's first message must be hello")
        try:
            hello = _hello(frame.messages[0])
            self._timer.cancel()
            self._welcome(hello)
        except RefusedError as error:
            self._say(Refused(str(error), is_over=error.is_over, epoch=self._welcome_facts.epoch))
            self.connection.finish(str(error))

    def _welcome(self, hello: Hello) -> None:
        if hello.resumes:
            is_agent = self._is_agent(hello.agent)
            if is_agent and hello.epoch > self._welcome_facts.epoch:
                # It waits for that driver, and must not be sent anything by this one.
                self._host.superseded(hello.epoch)
                self.connection.abort("it obeys another driver")
                return
            link = self._host.known(hello.agent) if is_agent else None
            if link is None:
                raise RefusedError("the driver has given up on this agent: its host was silent for too long")
            if why := excess(hello, link.facts.host):
                raise RefusedError(why)
            peer, ours = self.connection.ends
            link.comes_from(hello, peer, ours)
            seen_there = hello.seen
            if hello.driver != self._welcome_facts.driver:
                link.begin_anew()
                seen_there = 0
            self._go_on(link, seen_there)
            return
        if not _KEY.fullmatch(hello.key):
            raise RendezvousProtocolError("cannot read message hello: invalid key")
        key, ticket = bytes.fromhex(hello.key), None
        if self._identity.role is Role.TICKET:
            ticket = self._take_ticket(hello)
        if ticket is None and self._identity.role is not Role.JOINER:
            raise RefusedError(f"this ticket is no longer valid, or not valid from {self.connection.ends[0]}")
        facts = self._facts(hello, ticket)
        self._check(facts, ticket)
        earlier = self._tickets.key_of(Identity(Role.AGENT, number=hello.agent))
        if earlier is not None and not compare_digest(earlier, key):
            raise RefusedError("the job already has an agent with this id")
        link = self._host.arrives(facts)
        self._tickets.admit(hello.agent, key)
        self._newcomer = link
        self._keeper.when_kept(partial(self._take_in, link, hello))

    def _take_in(self, link: AgentLink, hello: Hello) -> None:
        """Welcome a new agent, which is persisted now."""
        self._newcomer = None
        if link.is_lost:
            self.connection.abort("its agent has started over, or the job has ended")
        elif self._is_gone:
            link.lose("its agent disconnected before it was admitted")
        else:
            self._go_on(link, hello.seen)
            self._host.settled(link)

    def _take_ticket(self, hello: Hello) -> Ticket | None:
        """Return the ticket that is presented; None if it is not valid, or not from here: then it is not consumed.

        Raises:
            RefusedError: it is a second use.
        """
        digest = sha256(bytes.fromhex(hello.key)).digest()
        taken = self._tickets.take(self._identity, User(hello.agent, digest, self.connection.ends[0], hello.pid))
        if not isinstance(taken, SecondUse):
            return taken
        host, twice = taken.host, f"{taken.first}, then by {taken.second}"
        if taken.revokes:
            self._host.revoked(
                host,
                f"host {host}: its agent's ticket was used twice within the start limit, by {twice}; both were "
                "rejected, and the host is excluded from the job (the ticket leaked through a command line or log, or "
                "the launcher starts the agent twice)",
            )
        elif taken.is_first:
            self._host.warn(
                f"host {host}: its agent's ticket was used again after the start limit, by {twice}; the second was "
                "rejected, and the job continues (the ticket leaked through a command line or log)"
            )
        raise RefusedError("this ticket has already been used by another agent")

    def _is_agent(self, agent: str) -> bool:
        return self._identity == Identity(Role.AGENT, number=agent)

    def _go_on(self, link: AgentLink, seen_there: int) -> None:
        welcome_facts = self._welcome_facts
        self._say(
            Welcome(
                seen=link.seen,
                host=link.facts.host,
                job_id=welcome_facts.job_id,
                poll_s=welcome_facts.poll_s,
                cwd=welcome_facts.cwd,
                umask=welcome_facts.umask,
                warm=welcome_facts.warm,
                warm_first=welcome_facts.warm_first,
                preload=None if welcome_facts.preload is None else list(welcome_facts.preload),
                prefix_timestamp=welcome_facts.prefix_timestamp,
                agent_timeout_s=welcome_facts.agent_timeout_s,
                spot_notices=welcome_facts.spot_notices,
                epoch=welcome_facts.epoch,
                driver=welcome_facts.driver,
                driver_timeout_s=welcome_facts.driver_timeout_s,
                place=welcome_facts.place,
                etcd=welcome_facts.etcd,
                etcd_cluster=welcome_facts.etcd_cluster,
                kept=link.kept,
                bars=welcome_facts.bars,
            )
        )
        connection = self.connection
        connection.reader.most = MAX_FRAME
        self._link = link
        self._over(self)
        link.attach(connection, seen_there)

    def _facts(self, hello: Hello, ticket: Ticket | None) -> AgentFacts:
        peer, ours = self.connection.ends
        host = ticket.host if ticket is not None else hello.host or hello.machine
        return AgentFacts(hello, host, peer, ours, local=False, joined=ticket is None)

    def _check(self, facts: AgentFacts, ticket: Ticket | None) -> None:
        hello = facts.hello
        if not _NUMBER.fullmatch(hello.agent):
            raise RendezvousProtocolError("cannot read message hello: invalid agent id")
        why = ""
        if hello.protocol != PROTOCOL or hello.version != __version__:
            why = (
                f"host {facts.host} runs elastic_driver {hello.version} (protocol {hello.protocol}; {hello.python}), "
                f"the driver runs {__version__} (protocol {PROTOCOL}): install the same version on both"
            )
        elif facts.joined and hello.slots < 1:
            why = f"host {facts.host} offers no slots: pass --slots to elasticrun join"
        elif not is_host_name(facts.host):
            why = f"{facts.host[:80]!r} is not a valid host name: pass another with --host"
        elif why := excess(hello, facts.host):
            pass
        elif facts.joined:
            try:
                parse_labels(hello.labels.split())
            except SettingsError as error:
                why = f"host {facts.host}: {error}"
            why = why or _difference(hello.alike, self._welcome_facts.alike, facts.host)
        if why:
            if ticket is not None:
                self._host.turned_away(facts.host, why)
            elif hello.alike:
                self._host.node_refused(why)
            raise RefusedError(why)

    def _say(self, message: AgentMessage) -> None:
        self.connection.write(0, 0, 0, [message.message().pack()])

    def _lost(self, why: str) -> None:
        self._timer.cancel()
        self._is_gone = True
        self._over(self)
        if self._link is not None:
            self._link.broken(self.connection, why)


def _hello(message: Message) -> Hello:
    """Parse an agent's first message. Raises RefusedError for another protocol, or RendezvousProtocolError."""
    try:
        hello = decoded(message)
    except RendezvousProtocolError:
        if other := version_of(message):
            ours = f"the driver runs {__version__} (protocol {PROTOCOL})"
            raise RefusedError(f"this agent runs {other}, {ours}: install the same version on both") from None
        raise
    if not isinstance(hello, Hello):
        raise RendezvousProtocolError("cannot read frame: an agent's first message must be hello")
    return hello


def _difference(theirs: Mapping[str, str], alike: Mapping[str, str] | None, host: str) -> str:
    """Return why a host cannot be a node of this job; "" if it can. A host that is not a node may join."""
    if not theirs:
        return ""
    if alike is None:
        return f"node {host} was started as one of several (--nnodes), but the job that it tried to join was not"
    for name, value in alike.items():
        if theirs.get(name) != value:
            return (
                f"all nodes must be started with the same options: node {host} has {name} "
                f"{theirs.get(name, '(nothing)')[:_SHOWN]}, and the job {value[:_SHOWN]}"
            )
    return ""
