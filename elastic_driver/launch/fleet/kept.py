"""What a later driver of the job has to know of its agents and hosts, as facts, and who keeps them.

Owns the facts of the fleet. Each has a name, which is its own among those of its kind; of two with one name the later
counts. Where they are kept, and who reads them, is :mod:`elastic_driver.journal`'s and the driver's. Times are of the
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
        key: with which it comes back.
        host, peer, ours, local, joined, hello: see AgentFacts; no hello of one that was given up.
        ending: whether it was told to end.
        given_up: whether it may come back only to be told so.
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
        """See above."""
        return self.agent

    @property
    def facts(self) -> AgentFacts:
        """Of one that was not given up."""
        assert self.hello is not None
        return AgentFacts(self.hello, self.host, self.peer, self.ours, self.local, self.joined)


@dataclass(frozen=True, slots=True)
class TicketUse:
    """Who has used a ticket: see User.

    Attributes:
        agent, key, address, pid: as there.
        until: a second use revokes the first until then.
        reported: whether one was reported.
    """

    agent: str
    key: str = field(repr=False)
    address: str
    pid: int
    until: float
    reported: bool


@dataclass(frozen=True, slots=True)
class TicketKept:
    """A ticket that is good, or was used: see Ticket. ``number`` is that of its identity."""

    number: str
    key: str = field(repr=False)
    host: str
    limit_s: float
    until: float
    addresses: frozenset[str]
    use: TicketUse | None

    @property
    def name(self) -> str:
        """See above."""
        return self.number


@dataclass(frozen=True, slots=True)
class RevokedKept:
    """A host that is kept out for as long as the job lasts, since its ticket was used twice; ``why`` for the user."""

    host: str
    why: str

    @property
    def name(self) -> str:
        """See above."""
        return self.host


@dataclass(frozen=True, slots=True)
class LeaverKept:
    """A host that leaves, or has left, and is not dialled again before its machine is gone.

    Attributes:
        host: its canonical name.
        gone_at: when that is; None when nobody has said.
    """

    host: str
    gone_at: float | None

    @property
    def name(self) -> str:
        """See above."""
        return self.host


@dataclass(frozen=True, slots=True)
class AdmittedKept:
    """An agent whose host has passed the check of the network."""

    agent: str

    @property
    def name(self) -> str:
        """See above."""
        return self.agent


@dataclass(frozen=True, slots=True)
class MachineKept:
    """The machine that a host was last.

    Attributes:
        host: its name.
        incarnation: see Host.
        agent: of one that has joined; "" for one that is listed.
        addresses: of one that is listed.
    """

    host: str
    incarnation: int
    agent: str
    addresses: frozenset[str]

    @property
    def name(self) -> str:
        """See above."""
        return self.host


FleetFact = AgentKept | TicketKept | RevokedKept | LeaverKept | AdmittedKept | MachineKept


class Keeper(Protocol[F]):
    """Keeps facts where a later driver finds them. Used on the event loop."""

    def keep(self, fact: F) -> None:
        """This is so from now on. Never blocks."""

    def drop(self, kind: type[F], name: str) -> None:
        """There is no such fact any more. Harmless where there was none."""

    def when_kept(self, callback: Callable[[], object]) -> None:
        """Calls it when all that was kept until now is on disc: at once where nothing is under way."""


class KeepsNothing:
    """Of a job that no other driver takes over."""

    def keep(self, fact: object) -> None:
        """See Keeper."""

    def drop(self, kind: type[object], name: str) -> None:
        """See Keeper."""

    def when_kept(self, callback: Callable[[], object]) -> None:
        """See Keeper."""
        callback()


def may_come_back(agent: AgentKept) -> bool:
    """Whether an agent may live and look for its driver. On this machine that can be seen."""
    if agent.given_up or agent.hello is None:
        return False
    if not agent.local:
        return True
    process = agent.hello.owner
    return not process or (is_of_this_boot(process) and lives(process))


NOTHING = KeepsNothing()


async def on_disc(keeper: Keeper[F]) -> None:
    """Blocks until all that was kept until now is on disc."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    keeper.when_kept(lambda: None if done.done() else done.set_result(None))
    await done
