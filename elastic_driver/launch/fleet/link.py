"""One agent as seen by the driver: the facts that it has reported, its channel, and whether it is still there.

Owns the agent's connections, one after another, and the verdict that it is lost. What its messages mean is its owner's
business. Used on the event loop only.

A verdict is needed only when a connection is gone, or nothing is acknowledged on it:

    connection closed    the agent has died, and its workers with it; or something on the way has cut it, and the agent
                         dials in again at once. So it is waited for, for AGAIN_S, and then it is lost
    nothing acknowledged the agent ends its workers after ``agent_timeout_s``; after that and MARGIN_S it is lost. The
                         same holds if nothing that is sent arrives there, though it is still heard from
    an order not obeyed  the agent is stopped: its machine acknowledges, it does nothing. See :meth:`AgentLink.overdue`

Long before the second verdict, after ``host_timeout_s`` of such silence, the owner is notified that the agent is
silent, and may give it up (:meth:`AgentLink.give_up`); it is also notified when the agent is heard from again.

A lost agent that reconnects is notified of that, and ends its workers.

Its messages are acknowledged at once, and confirmed as persisted when all of their effects would outlive this process:
then the agent forgets them. If no driver can take over, all are confirmed at once.

A driver that takes a job over has links of agents that are away: they were started before it, and have not yet reported
their state (Levels). Nothing is sent on such a link, and none of the verdicts above is given on it: the owner sets how
long it is waited for (:meth:`AgentLink.wait_for_return`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.agent_messages import AgentMessage, Hello, Levels, decoded
from elastic_driver.rendezvous.channel import Channel, FrameConnection
from elastic_driver.rendezvous.frames import Frame, Message
from elastic_driver.system.keeping import Keeping

# The remains of a killed agent are gone within a second, see docs/decisions/0009.
AGAIN_S = 1.0
MARGIN_S = 1.0
# How often the kernel is asked what was acknowledged, if nothing is due before.
_LOOK_S = 0.5
# Resolution of the kernel's times of acknowledgements, at 100 ticks a second.
_TICK_S = 0.01
# Two heartbeats: after that, nothing newer is known of what its workers do.
_GAP_S = 1.0
# Three heartbeats: an agent not heard from for so long when another one is silent may be silent for the same reason.
_DOUBT_S = 1.5
# A call so much later than due means that this process was stopped.
_LATE_S = 0.5


class LinkOwner(Protocol):
    """Receives the events of an agent. Called on the event loop.

    Attributes:
        keepings: persist the effects of the messages, as far as that takes a while.
        counts_from: since when an agent's silence counts, in the loop's time; infinite while it does not. While this
            driver is not sure to have the job, agents may have switched to another one, or may learn that no driver has
            it, and keep their workers for that reason.
    """

    keepings: Sequence[Keeping]
    counts_from: float

    def take(self, link: AgentLink, message: AgentMessage) -> None:
        """Handle a message of the agent. May raise RendezvousProtocolError, which cuts the connection."""

    def link_silent(self, link: AgentLink, silent_s: float) -> None:
        """Called when nothing has been heard from it for so long, and nothing acknowledged."""

    def link_heard(self, link: AgentLink) -> None:
        """Called when it was silent, and is heard from again."""

    def link_back(self, link: AgentLink) -> None:
        """Called when it had no connection for a moment, and has one again."""

    def link_lost(self, link: AgentLink, why: str) -> None:
        """Called when it is lost: it will send nothing more, and what it ran is dead or soon will be."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """The facts that an agent has reported, and those of its first connection.

    Attributes:
        hello: its first message.
        host: its host's name in the job.
        peer: address of its end, as the driver sees it.
        ours: address of the driver's end.
        local: whether it is on the driver's own machine.
        joined: whether it has joined by itself.
    """

    hello: Hello = field(repr=False)
    host: str
    peer: str
    ours: str
    local: bool
    joined: bool

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses of its end, as seen by itself and by the driver; empty if it is reached without a network."""
        return frozenset(address.partition("%")[0] for address in (self.peer, self.hello.address) if address)


class _Limit:
    """A call after some time. A late one waits again: this process was stopped, and has not read what arrived."""

    def __init__(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._arm(delay_s)

    def cancel(self) -> None:
        self._call.cancel()

    def _arm(self, delay_s: float) -> None:
        self._due = self._loop.time() + delay_s
        self._call = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        if self._loop.time() - self._due > _LATE_S:
            self._arm(AGAIN_S)
        else:
            self._callback()


class AgentLink:
    """The driver's link to one agent, across all of its connections.

    Args:
        facts: of the agent.
        owner: receives its messages and events.
        agent_timeout_s: see Bootstrap.
        host_timeout_s: how long nothing may be heard and acknowledged before the owner is notified, seconds.
        is_away: whether it is an agent of an earlier driver, and has to reconnect.

    Attributes:
        facts: as given.
        is_away: as given, until it is back.
        levels: the state that it reported when it reconnected; None if it was started under this driver.
        is_lost: whether the verdict has been given.
        is_silent: whether its owner was notified that it is silent, and not yet that it is heard from again.
        is_doubted: likewise, for being in doubt.
    """

    def __init__(
        self,
        facts: AgentFacts,
        owner: LinkOwner,
        *,
        agent_timeout_s: float,
        host_timeout_s: float,
        is_away: bool = False,
    ) -> None:
        self.facts = facts
        self.is_away = is_away
        self.levels: Levels | None = None
        self.is_lost = False
        self.is_silent = False
        self.is_doubted = False
        self._owner = owner
        self._agent_timeout_s = agent_timeout_s
        self._host_timeout_s = host_timeout_s
        self._doubt_s = min(_DOUBT_S, host_timeout_s / 2)
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(self._take)
        # Numbers of the messages not yet persisted, in order, each with what has to be persisted before, and how much
        # of it.
        self._unkept: deque[tuple[int, list[tuple[Keeping, int]]]] = deque()
        self._waits = False  # for the first of these
        self._connection: FrameConnection | None = None
        self._verdict: _Limit | None = None
        self._return: _Limit | None = None
        self._look: asyncio.TimerHandle | None = None
        self._look_due = 0.0
        self._works_since = self._loop.time()
        self._overdue: dict[str, _Limit] = {}

    @property
    def agent(self) -> str:
        """The agent's id."""
        return self.facts.hello.agent

    @property
    def connected(self) -> bool:
        """Whether it has a connection now on which messages are sent."""
        return self._connection is not None and not self.is_away

    @property
    def seen(self) -> int:
        """Number of the last message received."""
        return self._channel.seen

    @property
    def kept(self) -> int:
        """Number of the last message that is persisted, with all before it."""
        return self._channel.kept

    @property
    def silent_s(self) -> float:
        """How long nothing has arrived from it, seconds."""
        return 0.0 if self._connection is None else self._loop.time() - self._connection.heard_at

    @property
    def unheard_s(self) -> float:
        """How long its connection has not worked both ways, seconds, see FrameConnection; 0 without a connection."""
        if self._connection is None:
            return 0.0
        return max(0.0, min(self._connection.unheard_s, self._loop.time() - self._owner.counts_from))

    @property
    def works_for_s(self) -> float:
        """How long it has worked both ways without a gap of a second; 0 while it does not, or is not there."""
        if self._connection is None or self.unheard_s > _GAP_S:
            return 0.0
        return self._loop.time() - self._works_since

    def is_in_doubt(self) -> bool:
        """Return whether it may turn out to be silent, too, and was not in doubt yet. The owner learns the outcome."""
        if self.is_silent or self.is_doubted or self.unheard_s <= self._doubt_s:
            return False
        self.is_doubted = True
        return True

    def send(self, message: AgentMessage) -> None:
        """Send it a message, now or when it has a connection again. Never blocks.

        An agent that is away is sent nothing: what it lacks is known only once it has reported its state.
        """
        if not self.is_lost and not self.is_away:
            self._channel.send(message.message())

    def wait_for_return(self, limit_s: float, due: Callable[[], None]) -> None:
        """Limit from now on how long an agent that is away is waited for. A later call replaces the limit."""
        if self._return is not None:
            self._return.cancel()
        self._return = _Limit(limit_s, due)

    def begin_anew(self) -> None:
        """Start both ends' message numbers from 1 again: it has not received the welcome of this driver yet.

        Raises:
            RendezvousProtocolError: it has, since it has reported its state.
        """
        if not self.is_away:
            raise RendezvousProtocolError("cannot start over: this agent has already obeyed this driver")
        self._channel.detach()
        self._channel = Channel(self._take)
        self._unkept.clear()

    def returned(self, levels: Levels) -> None:
        """Treat it like any other from now on: it has reported its state."""
        self.is_away, self.levels = False, levels
        if self._return is not None:
            self._return.cancel()
            self._return = None

    def comes_from(self, hello: Hello, peer: str, ours: str) -> None:
        """Update the addresses of an agent that has connected again, perhaps after its host's addresses changed."""
        told = replace(self.facts.hello, address=hello.address, addresses=hello.addresses)
        self.facts = replace(self.facts, hello=told, peer=peer, ours=ours)

    def attach(self, connection: FrameConnection, seen_there: int) -> None:
        """Continue on a new connection, on which it was welcomed.

        Raises:
            RendezvousProtocolError: it claims to have received messages that were never sent.
        """
        older, self._connection = self._connection, None
        if older is not None:
            self._channel.detach()
            older.abort("the agent has a new connection")
        is_back = self._verdict is not None
        self._cancel()
        self._connection = connection
        self._works_since = self._loop.time()
        self._channel.attach(connection, seen_there)
        self._look_in(_LOOK_S)
        self._is_heard()
        if self.is_away:
            # Its machine may acknowledge for it: then nothing else shows that it is stopped.
            self.overdue("report its state", lambda: not self.is_away)
        elif is_back:
            self._owner.link_back(self)

    def received(self, frame: Frame) -> None:
        """Handle a frame from the present connection. Raises RendezvousProtocolError."""
        if not self.is_lost:
            if (self.is_silent or self.is_doubted) and self.unheard_s <= self._doubt_s:
                self._is_heard()
            self._channel.received(frame)

    def broken(self, connection: FrameConnection, why: str) -> None:
        """Handle the end of a connection."""
        if connection is not self._connection or self.is_lost:
            return
        self._connection = None
        self._channel.detach()
        self._cancel()
        if self.is_away:
            return  # it is waited for anyhow
        self._give_verdict_soon(f"its agent disconnected ({why})")

    def _give_verdict_soon(self, why: str) -> None:
        def give() -> None:
            if self._is_excused(AGAIN_S):
                self._give_verdict_soon(why)
            else:
                self.lose(why)

        self._verdict = _Limit(AGAIN_S, give)

    def _is_excused(self, limit_s: float) -> bool:
        """Return whether its silence for so long may not be its own fault."""
        return self._loop.time() - self._owner.counts_from < limit_s

    def overdue(self, order: str, done: Callable[[], bool], *, takes_s: float = 0.0) -> None:
        """Watch an order that was given. An agent that neither carries it out in time nor sends anything is lost.

        Args:
            order: in words, with the worker that it is for; repeated before its time is up it changes nothing.
            done: returns whether it was carried out.
            takes_s: how long it may take at most, seconds.
        """
        if order in self._overdue or self.is_lost:
            return

        def look() -> None:
            del self._overdue[order]
            if done():
                return
            if self.silent_s > MARGIN_S and not self._is_excused(MARGIN_S):
                self.lose(f"its agent did not {order}: it is stopped, or its machine hangs")
            else:
                self.overdue(order, done)

        self._overdue[order] = _Limit(takes_s + self._agent_timeout_s + MARGIN_S, look)

    def lose(self, why: str) -> None:
        """Give the verdict that it is lost. Harmless when repeated."""
        if self.is_lost:
            return
        self.close(why)
        self._owner.link_lost(self, why)

    def give_up(self, why: str) -> None:
        """Cut the connection at once and give the verdict: the agent is silent, or must not be sent anything more."""
        if self._connection is not None:
            self._connection.abort(why)
        self.lose(why)

    def abandon(self) -> None:
        """Cut its connection, without a verdict: it obeys another driver."""
        connection = self._connection
        self._channel.detach()
        self.close("another driver has the job")
        if connection is not None:
            connection.abort("another driver has the job")

    def close(self, why: str) -> None:
        """Close its connection once everything has been sent; nothing more arrives from it."""
        self.is_lost = True
        self._cancel()
        if self._return is not None:
            self._return.cancel()
            self._return = None
        for timer in self._overdue.values():
            timer.cancel()
        self._overdue.clear()
        self._channel.flush()
        self._channel.detach()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish(why)

    def _look_in(self, delay_s: float) -> None:
        self._look_due = self._loop.time() + delay_s
        self._look = self._loop.call_later(delay_s, self._look_at_it)

    def _look_at_it(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if self._loop.time() - self._look_due > _LATE_S:
            self._look_in(AGAIN_S)  # as _Limit does
            return
        unheard_s = self.unheard_s
        if unheard_s > _GAP_S:
            self._works_since = self._loop.time()
        if unheard_s > self._agent_timeout_s + MARGIN_S:
            comes = self.silent_s < unheard_s
            self.give_up(f"nothing has {'reached' if comes else 'arrived from'} it for {unheard_s:.0f} s")
            return
        left_s = self._host_timeout_s - unheard_s
        self._look_in(min(_LOOK_S, left_s + _TICK_S) if left_s > 0 else _LOOK_S)
        if left_s <= 0 and not self.is_silent:
            self.is_silent, self.is_doubted = True, False
            self._owner.link_silent(self, unheard_s)
        elif unheard_s <= self._doubt_s:
            self._is_heard()

    def _is_heard(self) -> None:
        if self.is_silent or self.is_doubted:
            self.is_silent = self.is_doubted = False
            self._owner.link_heard(self)

    def _cancel(self) -> None:
        for timer in (self._verdict, self._look):
            if timer is not None:
                timer.cancel()
        self._verdict = self._look = None

    def _take(self, message: Message) -> None:
        keepings = self._owner.keepings
        before = [keeping.came for keeping in keepings]
        try:
            self._owner.take(self, decoded(message))
        finally:
            comes = [
                (keeping, keeping.came)
                for keeping, came in zip(keepings, before, strict=True)
                if keeping.came > max(came, keeping.kept)
            ]
            if comes:
                self._unkept.append((self._channel.seen, comes))
                self._look_at_kept()

    def _look_at_kept(self) -> None:
        """Confirm the messages that are persisted, and wait for those that are not."""
        while self._unkept and not self._waits:
            late = next(((keeping, count) for keeping, count in self._unkept[0][1] if keeping.kept < count), None)
            if late is None:
                self._unkept.popleft()
            else:
                self._waits = True
                late[0].when_kept(late[1], self._kept_more)
        self._channel.keep(unkept_from=self._unkept[0][0] if self._unkept else 0)

    def _kept_more(self) -> None:
        self._waits = False
        self._look_at_kept()
