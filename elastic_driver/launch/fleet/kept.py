"""Facts of the agents and hosts that a later driver of the job needs, and the keeper of such facts.

Owns the facts of the fleet. Each has a name, unique among those of its kind; a later fact replaces an earlier one of
the same name. How they are stored and read back is up to :mod:`elastic_driver.journal` and the driver. Times are in the
job's clock. Keys are in hexadecimal digits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from elastic_driver.launch.fleet.link import AgentFacts
from elastic_driver.rendezvous.agent_messages import Hello
from elastic_driver.system.process_name import is_of_this_boot, lives

F = TypeVar("F", contravariant=True)


@dataclass(frozen=True, slots=True)
class AgentKept:
    """An agent that was admitted.

    Attributes:
        agent: its number.
        key: with which it reconnects.
        host, peer, ours, local, joined, hello: see AgentFacts; no hello of one that was given up.
        ending: whether it was ordered to end.
        given_up: whether it may reconnect only to be notified of that.
    """

    agent: str
    key: str = field(repr=False)
    host: str
    peer: str
    ours: str
    local: bool
    joined: bool
    ending: bool
    given_up: bool
    hello: Hello | None = field(repr=False)

    @property
    def name(self) -> str:
        """The agent's number."""
        return self.agent

    @property
    def facts(self) -> AgentFacts:
        """The facts of an agent that was not given up."""
        assert self.hello is not None
        return AgentFacts(self.hello, self.host, self.peer, self.ours, self.local, self.joined)


@dataclass(frozen=True, slots=True)
class TicketUse:
    """The use of a ticket: see User.

    Attributes:
        agent, key, address, pid: as there.
        until: a second use revokes the first until then.
        reported: whether a second use was reported.
    """

    agent: str
    key: str = field(repr=False)
    address: str
    pid: int
    until: float
    reported: bool


@dataclass(frozen=True, slots=True)
class TicketKept:
    """A ticket that is valid, or was used: see Ticket. ``number`` is that of its identity."""

    number: str
    key: str = field(repr=False)
    host: str
    limit_s: float
    until: float
    addresses: frozenset[str]
    use: TicketUse | None

    @property
    def name(self) -> str:
        """The ticket's number."""
        return self.number


@dataclass(frozen=True, slots=True)
class RevokedKept:
    """A host that is excluded for the rest of the job, since its ticket was used twice; ``why`` for the user."""

    host: str
    why: str

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host


@dataclass(frozen=True, slots=True)
class LeaverKept:
    """A host that is leaving, or has left, and is not dialled again before its machine is gone.

    Attributes:
        host: its canonical name.
        gone_at: when that will be; None if not known.
    """

    host: str
    gone_at: float | None

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host


@dataclass(frozen=True, slots=True)
class AdmittedKept:
    """An agent whose host has passed the network check."""

    agent: str

    @property
    def name(self) -> str:
        """The agent's number."""
        return self.agent


@dataclass(frozen=True, slots=True)
class MachineKept:
    """The last machine known under a host's name.

    Attributes:
        host: its name.
        incarnation: see Host.
        agent: of a host that has joined; "" for a listed one.
        addresses: of a listed host.
    """

    host: str
    incarnation: int
    agent: str
    addresses: frozenset[str]

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host


FleetFact = AgentKept | TicketKept | RevokedKept | LeaverKept | AdmittedKept | MachineKept


class Keeper(Protocol[F]):
    """Persists facts for a later driver. Used on the event loop."""

    def keep(self, fact: F) -> None:
        """Record a fact, which replaces the one of the same name. Never blocks."""

    def drop(self, kind: type[F], name: str) -> None:
        """Remove a fact. Harmless if there is none."""

    def when_kept(self, callback: Callable[[], object]) -> None:
        """Call this when everything recorded until now is on disk: at once if nothing is pending."""


class NullKeeper:
    """The keeper of a job that no other driver can take over."""

    def keep(self, fact: object) -> None:
        """Do nothing."""

    def drop(self, kind: type[object], name: str) -> None:
        """Do nothing."""

    def when_kept(self, callback: Callable[[], object]) -> None:
        """Call this at once."""
        callback()


def may_come_back(agent: AgentKept) -> bool:
    """Return whether an agent may be alive and looking for its driver; on this machine its process shows that."""
    if agent.given_up or agent.hello is None:
        return False
    if not agent.local:
        return True
    process = agent.hello.owner
    return not process or (is_of_this_boot(process) and lives(process))


NOTHING = NullKeeper()


async def on_disk(keeper: Keeper[F]) -> None:
    """Wait until everything recorded until now is on disk."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    keeper.when_kept(lambda: None if done.done() else done.set_result(None))
    await done
