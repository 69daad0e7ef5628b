"""Keeps agents on the wanted hosts: dials, retries with back-off, and reports each failure once.

Owns the tries for each host. What it means that a host has an agent is up to the fleet. An unready host has not failed:
it may be booting, or its name may not be known yet, so it is tried for as long as it is wanted. Used on the event loop
only.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_driver.errors import LaunchError, SettingsError
from elastic_driver.launch.dial.dialler import DialFailure, Dialled, Dialler
from elastic_driver.launch.fleet.changes import Changes
from elastic_driver.launch.fleet.kept import NOTHING, FleetFact, Keeper, RevokedKept, on_disk
from elastic_driver.launch.fleet.names import HostNames
from elastic_driver.launch.fleet.tickets import Ticket, Tickets
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Bootstrap
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import counted

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# A person has to change something there: a key, a package. It is retried now and then in case one has.
_PERMANENT_PAUSE_S = 30.0
# A started agent dials in within a second; a machine that is booting takes longer.
_DIAL_IN_S = 60.0
# Hosts dialled at a time. A silent host occupies a place for ssh's time limit.
_SIDE_BY_SIDE = 64


@dataclass(frozen=True, slots=True)
class AgentReach:
    """How agents reach the driver.

    Attributes:
        urls: returns the driver's URLs for the agent of a host; "" means this machine. May make the driver listen.
        agent_timeout_s, job: see Bootstrap.
        fingerprint: returns that of the driver's certificate.
        host_timeout_s: see AgentLink.
        owner: the driver's process, as in Bootstrap.
        host, node_rank: of the driver's own machine in a job of nodes: its name, and see Bootstrap.
        more: names under which no host is listed, but for which this machine is to have an agent.
    """

    urls: Callable[[str], Awaitable[tuple[str, ...]]]
    agent_timeout_s: float
    host_timeout_s: float
    fingerprint: Callable[[], Awaitable[str]]
    job: str
    owner: str
    host: str = ""
    node_rank: int = -1
    more: tuple[str, ...] = ()


class DiallingListener(Protocol):
    """Receives events of dialling. Called on the event loop; hosts have their canonical names."""

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """Called while there is no agent on this host yet, once for each reason."""

    def none_can_be_dialled(self, reasons: str) -> None:
        """Called when another try can help on none of the wanted hosts."""

    def command_ended(self, host: str) -> None:
        """Called when the command that started the host's agent has ended, after the agent had connected."""

    def warn(self, text: str) -> None:
        """Warn the user."""


class Dialling:
    """Keeps an agent on each wanted host. Its hosts have their canonical names.

    Args:
        tickets: issues tickets.
        reach: how agents reach the driver.
        names: knows which host is this machine.
        local: starts agents on this machine.
        remote: starts agents on other machines; None if they join by themselves.
        changes: counts the events of hosts that have no agent yet.
        tasks: runs the tries; an error in one ends the job.
        listener: receives the events.
        keeper: persists tickets, and hosts that are kept out.

    Attributes:
        side_by_side: held during each try.
    """

    def __init__(
        self,
        *,
        tickets: Tickets,
        reach: AgentReach,
        names: HostNames,
        local: Dialler,
        remote: Dialler | None,
        changes: Changes,
        tasks: Tasks,
        listener: DiallingListener,
        keeper: Keeper[FleetFact] = NOTHING,
    ) -> None:
        self.keeper = keeper
        self.tickets = tickets
        self._reach = reach
        self._names = names
        self._local, self._remote = local, remote
        self._changes = changes
        self.tasks = tasks
        self._listener = listener
        self._hosts: dict[str, _DialledHost] = {}
        self._former: set[_DialledHost] = set()  # no longer wanted, but their commands have not ended
        self._told: dict[str, DialFailure] = {}
        self._hopeless: set[str] = set()  # hosts where another try cannot help
        self._revoked: dict[str, DialFailure] = {}  # hosts kept out for as long as the job lasts
        self.side_by_side = asyncio.Semaphore(_SIDE_BY_SIDE)
        self._warned_of_tickets = False

    def take_over(self, revoked: Iterable[RevokedKept]) -> None:
        """Restore the hosts that the earlier driver has excluded. To be called before anything else."""
        self._revoked = {each.host: DialFailure(each.why, permanent=True) for each in revoked}

    def __contains__(self, host: str) -> bool:
        """Return whether an agent is wanted on this host."""
        return host in self._hosts

    def begin(self, host: str, *, has_agent: bool) -> None:
        """Keep an agent on this host from now on; dial it if it has none."""
        dialler = self._local if self._names.is_local(host) else self._remote
        dialled = self._hosts[host] = _DialledHost(host, dialler, self)
        revoked = self._revoked.get(host)
        if revoked is not None:
            dialled.bar(revoked)
            self.unready(host, revoked)
        elif not has_agent:
            dialled.begin()

    def not_in(self, wanted: Container[str]) -> list[str]:
        """Return the hosts that are not among those wanted now."""
        return [host for host in self._hosts if host not in wanted]

    def end(self, host: str, *, when: Callable[[], bool] | None = None) -> None:
        """Stop dialling this host, and end the command that started its agent, as soon as the condition holds."""
        dialled = self._hosts.pop(host)
        self._hopeless.discard(host)
        self._told.pop(host, None)
        self._former.add(dialled)
        self.tasks.start(self._end(dialled, when))

    async def _end(self, dialled: _DialledHost, when: Callable[[], bool] | None) -> None:
        while when is not None and not when():
            await self._changes.wait(self._changes.count)
        await dialled.close()
        self._former.discard(dialled)

    def came(self, host: str) -> None:
        """Record that the host has an agent, whether dialled or joined by itself."""
        self._told.pop(host, None)
        self._hopeless.discard(host)
        if host in self._hosts:
            self._hosts[host].came()

    def gone(self, host: str) -> None:
        """Dial again, since the host's agent is gone."""
        if host in self._hosts:
            self._hosts[host].gone()

    def turned_away(self, host: str, why: str) -> None:
        """Record that the agent started there was rejected."""
        if host in self._hosts:
            self._hosts[host].turned_away(why)

    def bar(self, host: str, failure: DialFailure) -> None:
        """Exclude this host for the rest of the job."""
        self._revoked[host] = failure
        self.keeper.keep(RevokedKept(host, failure.reason))
        if host in self._hosts:
            self._hosts[host].bar(failure)

    def is_first_try(self, host: str) -> bool:
        """Return whether an agent may connect from there soon: no try has failed yet."""
        dialled = self._hosts.get(host)
        return dialled is not None and dialled.dials and not dialled.tries

    def remarks(self, present: Container[str]) -> list[str]:
        """Return which hosts have no agent, and why. Those in ``present`` have one."""
        return [
            f"host {name} is not ready: {dialled.failure.reason} (tried {counted(dialled.tries, 'time')})"
            if dialled.failure is not None
            else f"host {name} is not ready: its agent has not connected yet"
            if dialled.dials
            else f"host {name} has not joined yet (elasticrun join)"
            for name, dialled in self._hosts.items()
            if dialled.failure is not None or name not in present
        ]

    async def close(self) -> None:
        """Stop dialling, and end the commands that started agents. Blocks until they have ended."""
        await asyncio.gather(*(dialled.close() for dialled in (*self._hosts.values(), *self._former)))

    def abandon(self) -> None:
        """Leave the agents to another driver: :meth:`close` ends none of their commands."""
        for dialled in (*self._hosts.values(), *self._former):
            dialled.abandon()

    # --- results of tries ------------------------------------------------------------------------------------------

    def unready(self, host: str, failure: DialFailure) -> None:
        """Record and report a failed try."""
        if host not in self._hosts:
            return  # it is no longer wanted
        if self._told.get(host) != failure:
            self._told[host] = failure
            self._listener.host_unready(host, failure)
        self._changes.report()
        (self._hopeless.add if failure.permanent else self._hopeless.discard)(host)
        if len(self._hopeless) == len(self._hosts):
            reasons = (f"{name}: {dialled.failure.reason}" for name, dialled in self._hosts.items() if dialled.failure)
            self._listener.none_can_be_dialled("; ".join(reasons))

    def shows_ticket(self, host: str) -> None:
        """Warn that tickets are on a command line there. Most hosts of a job are alike, so this is reported once."""
        if not self._warned_of_tickets:
            self._warned_of_tickets = True
            self._listener.warn(
                f"host {host}: the rsh agent does not forward standard input, so the agent's ticket is on its "
                "command line, where every user of the job's machines can read it (--launcher-bootstrap; "
                "docs/reference/launch-tickets.md)"
            )

    def ended(self, host: str) -> None:
        """Report that the command that started an agent has ended."""
        self._listener.command_ended(host)

    async def bootstrap(self, host: str, ticket: Ticket) -> Bootstrap:
        """Return the bootstrap of an agent of this host, with its ticket."""
        local = self._names.is_local(host)
        return Bootstrap(
            urls=await self._reach.urls("" if local else host),
            identity=str(ticket.identity),
            key=ticket.key.hex(),
            host=host,
            agent_timeout_s=self._reach.agent_timeout_s,
            fingerprint="" if local else await self._reach.fingerprint(),
            owner=self._reach.owner if local else "",
            job=self._reach.job,
            node_rank=self._reach.node_rank if local else -1,
        )


class _DialledHost:
    """Keeps an agent on one host, from :meth:`begin` to :meth:`close`.

    Args:
        host: its name in the job; for the driver's own machine the first name used.
        dialler: starts agents there; None if they join by themselves.
        dialling: its owner, notified of its tries.

    Attributes:
        failure: of the last try; None before, and while there is an agent.
        tries: number of failures since there was an agent last.
    """

    def __init__(self, host: str, dialler: Dialler | None, dialling: Dialling) -> None:
        self._host = host
        self._dialler = dialler
        self._dialling = dialling
        self._task: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        self._gone = asyncio.Event()
        self._soon = asyncio.Event()
        self._dialled: Dialled | None = None
        self._turned_away: str = ""
        self._barred: DialFailure | None = None
        self.failure: DialFailure | None = None
        self.tries = 0

    @property
    def dials(self) -> bool:
        """Whether it dials the host."""
        return self._dialler is not None

    def begin(self) -> None:
        """Dial from now on."""
        if self._dialler is None:
            return
        self._task = self._dialling.tasks.start(self._keep(self._dialler))

    def came(self) -> None:
        """Record that the host has an agent, whether dialled or joined by itself."""
        self._gone.clear()
        self._came.set()
        self.failure, self.tries = None, 0

    def gone(self) -> None:
        """Dial again, since the agent is gone."""
        self._came.clear()
        self._gone.set()
        if self._barred is not None:
            self.failure, self.tries = self._barred, 1
        elif self._task is None:
            self.begin()

    def turned_away(self, why: str) -> None:
        """Record that the agent started there was rejected."""
        self._turned_away = why
        self._soon.set()

    def bar(self, failure: DialFailure) -> None:
        """Stop dialling for good, and end the command that started an agent: no agent from there can be trusted."""
        self._barred = self.failure = failure
        self.tries = max(1, self.tries)
        self._dialling.tasks.start(self.close())

    def abandon(self) -> None:
        """Forget the command that started the agent."""
        self._dialled = None

    async def close(self) -> None:
        """Stop dialling, and end the command that started the agent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._dialled is not None:
            await self._dialled.close()

    async def _keep(self, dialler: Dialler) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            failure = None
            async with self._dialling.side_by_side:  # a login also uses the driver's processors
                if not self._came.is_set():  # no agent has joined by itself meanwhile
                    failure = await self._dial(dialler)
            if failure is None or self._came.is_set():
                self.failure, self.tries, pause_s = None, 0, _FIRST_PAUSE_S
                await self._gone.wait()
                continue
            self.failure = failure
            self.tries += 1
            self._dialling.unready(self._host, failure)
            await asyncio.sleep(_PERMANENT_PAUSE_S if failure.permanent else pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _dial(self, dialler: Dialler) -> DialFailure | None:
        """Try once. Returns why there is no agent; None if there is one."""
        if self._dialled is not None:  # of an agent that is gone
            await self._dialled.close()
            self._dialled = None
        self._turned_away = ""
        self._soon.clear()
        shown = dialler.shows_bootstrap(self._host)
        ticket = self._dialling.tickets.issue(self._host, _DIAL_IN_S, await self._addresses() if shown else frozenset())
        try:
            failure = await self._dial_with(dialler, ticket)
        finally:
            self._dialling.tickets.withdraw(ticket)
        if failure is not None and not shown and dialler.shows_bootstrap(self._host):
            self._dialling.shows_ticket(self._host)
            return await self._dial(dialler)
        return failure

    async def _dial_with(self, dialler: Dialler, ticket: Ticket) -> DialFailure | None:
        try:
            bootstrap = await self._dialling.bootstrap(self._host, ticket)
            # A later driver will know the ticket, and the agent will look for that driver.
            await on_disk(self._dialling.keeper)
            dialled = self._dialled = await dialler.dial(self._host, bootstrap)
        except (LaunchError, SettingsError) as error:
            return DialFailure(str(error), permanent=isinstance(error, CommandNotFoundError))
        dialled.failed.add_done_callback(self._ended)
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in (self._came, self._soon)]
        try:
            await asyncio.wait((*waits, dialled.failed), timeout=_DIAL_IN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._came.is_set():
            return None
        if self._turned_away:
            return DialFailure(self._turned_away, permanent=True)
        if dialled.failed.done():
            return dialled.failed.result()
        return DialFailure(
            f"no agent connected from there within {_DIAL_IN_S:g} s: check that it can reach the driver's port"
        )

    async def _addresses(self) -> frozenset[str]:
        """Return the addresses from which a ticket that others can read may be used; empty if unknown."""
        return await asyncio.get_running_loop().run_in_executor(None, _resolve, self._host)

    def _ended(self, failed: asyncio.Future[DialFailure]) -> None:
        if not failed.cancelled() and self._came.is_set():
            self._dialling.ended(self._host)


def _resolve(host: str) -> frozenset[str]:
    with contextlib.suppress(OSError, UnicodeError):
        return frozenset(str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None))
    return frozenset()
