"""Keeping agents on the hosts that are wanted: dials, tries again with back-off, and says once why it does not work.

Owns the tries for one host (:class:`Calls`). What a host that has an agent means is the fleet's. An unready host is no
failed one: it may be booting, or its name not be known yet, so it is tried for as long as it is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from elastic_driver.errors import LaunchError, SettingsError
from elastic_driver.launch.dial.dialler import DialFailure, Dialled, Dialler
from elastic_driver.launch.fleet.door import Door, Ticket
from elastic_driver.launch.launcher import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Bootstrap
from elastic_driver.system.tasks import Tasks

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# Somebody has to change something there: a key, a package. It is looked at now and then whether somebody has.
_PERMANENT_PAUSE_S = 30.0
# An agent that was started dials in within a second; a machine that is being booted takes its time.
_DIAL_IN_S = 60.0


class CallListener(Protocol):
    """Is told how it goes. Called on the event loop."""

    def unready(self, host: str, failure: DialFailure) -> None:
        """There is no agent on this host yet: each try that fails."""

    def shows_ticket(self, host: str) -> None:
        """From now on tickets for this host stand on a command line: nothing arrives on standard input there."""

    def ended(self, host: str) -> None:
        """The command that had started the host's agent has ended, after it had come."""


class Calls:
    """Keeps an agent on one host, from :meth:`begin` to :meth:`close`.

    Args:
        host: its name in the job; for the driver's own machine the name that was seen first.
        dialler: starts agents there; None where they come by themselves.
        door: issues tickets.
        bootstrap: what the agent is given with a ticket.
        listener: is told how it goes.
        tasks: run it; an error of theirs ends the job.
        side_by_side: held over each try: logging in takes the driver's processors some time, too.

    Attributes:
        failure: of the last try; None before, and while there is an agent.
        tries: that have failed since there was an agent last.
    """

    def __init__(
        self,
        host: str,
        dialler: Dialler | None,
        *,
        door: Door,
        bootstrap: Callable[[str, Ticket], Awaitable[Bootstrap]],
        listener: CallListener,
        tasks: Tasks,
        side_by_side: asyncio.Semaphore,
    ) -> None:
        self._host = host
        self._dialler = dialler
        self._door = door
        self._bootstrap = bootstrap
        self._listener = listener
        self._tasks = tasks
        self._side_by_side = side_by_side
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
        """Whether it does anything so that an agent comes."""
        return self._dialler is not None

    def begin(self) -> None:
        """Dials from now on."""
        if self._dialler is None:
            return
        self._task = self._tasks.start(self._keep(self._dialler))

    def came(self) -> None:
        """The host has an agent, dialled or come by itself."""
        self._gone.clear()
        self._came.set()
        self.failure, self.tries = None, 0

    def gone(self) -> None:
        """It has none any more: dials again."""
        self._came.clear()
        self._gone.set()
        if self._barred is not None:
            self.failure, self.tries = self._barred, 1
        elif self._task is None:
            self.begin()

    def turned_away(self, why: str) -> None:
        """The agent that was started cannot be taken."""
        self._turned_away = why
        self._soon.set()

    def bar(self, failure: DialFailure) -> None:
        """Dials no more, for good, and ends the command that has started an agent: none that comes can be trusted."""
        self._barred = self.failure = failure
        self.tries = max(1, self.tries)
        self._tasks.start(self.close())

    async def close(self) -> None:
        """Dials no more, and ends the command that has started the agent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._dialled is not None:
            await self._dialled.close()

    async def _keep(self, dialler: Dialler) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            failure = None
            async with self._side_by_side:
                if not self._came.is_set():  # nor has one come by itself meanwhile
                    failure = await self._dial(dialler)
            if failure is None or self._came.is_set():
                self.failure, self.tries, pause_s = None, 0, _FIRST_PAUSE_S
                await self._gone.wait()
                continue
            self.failure = failure
            self.tries += 1
            self._listener.unready(self._host, failure)
            await asyncio.sleep(_PERMANENT_PAUSE_S if failure.permanent else pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _dial(self, dialler: Dialler) -> DialFailure | None:
        """One try. Returns why there is no agent; None when there is one."""
        if self._dialled is not None:  # of an agent that is gone
            await self._dialled.close()
            self._dialled = None
        self._turned_away = ""
        self._soon.clear()
        shown = dialler.shows_bootstrap(self._host)
        ticket = self._door.issue(self._host, _DIAL_IN_S, await self._addresses() if shown else frozenset())
        try:
            failure = await self._dial_with(dialler, ticket)
        finally:
            self._door.withdraw(ticket)
        if failure is not None and not shown and dialler.shows_bootstrap(self._host):
            self._listener.shows_ticket(self._host)
            return await self._dial(dialler)
        return failure

    async def _dial_with(self, dialler: Dialler, ticket: Ticket) -> DialFailure | None:
        try:
            bootstrap = await self._bootstrap(self._host, ticket)
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
            f"no agent has dialled in from there within {_DIAL_IN_S:g} s: can it reach the driver's port?"
        )

    async def _addresses(self) -> frozenset[str]:
        """Where an agent has to come from whose ticket others can read; none where that cannot be known."""
        return await asyncio.get_running_loop().run_in_executor(None, _resolve, self._host)

    def _ended(self, failed: asyncio.Future[DialFailure]) -> None:
        if not failed.cancelled() and self._came.is_set():
            self._listener.ended(self._host)


def _resolve(host: str) -> frozenset[str]:
    with contextlib.suppress(OSError, UnicodeError):
        return frozenset(str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None))
    return frozenset()
