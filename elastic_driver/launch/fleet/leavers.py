"""Hosts that have left by themselves but are still listed: when their names may be used again.

Owns how long a name is not used, and persists that for a later driver: until its machine is gone, at the time that the
machine announced, or until the name means another machine, which has replaced it. The fleet knows which hosts are
listed, and which have an agent. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from elastic_driver.launch.fleet.kept import NOTHING, FleetFact, Keeper, LeaverKept
from elastic_driver.system.tasks import Tasks

# As often as a discovery script is run.
_LOOK_S = 1.0
# Look-ups block threads that others need, for seconds if names do not resolve; and many hosts may leave together.
_AT_ONCE = 4


@dataclass(eq=False, slots=True)
class _Leaver:
    """A name, since its agent reported that it is leaving.

    Attributes:
        gone_at: when its machine will be gone; infinite if not known.
    """

    gone_at: float = math.inf


class Leavers:
    """The names of hosts that have left, not to be used for now.

    Args:
        addresses_of: returns the addresses to which a name resolves now. May block.
        tasks: runs the look-ups.
        on_another: called when a name means another machine.
        keeper: persists the names.
        clock: the job's time, seconds; None for that of the running loop.
    """

    def __init__(
        self,
        addresses_of: Callable[[str], Sequence[str]],
        tasks: Tasks,
        on_another: Callable[[], None],
        *,
        keeper: Keeper[FleetFact] = NOTHING,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._addresses_of = addresses_of
        self._tasks = tasks
        self._on_another = on_another
        self._keeper = keeper
        self._now = clock or (lambda: asyncio.get_running_loop().time())
        self._leavers: dict[str, _Leaver] = {}
        self._side_by_side = asyncio.Semaphore(_AT_ONCE)

    def take_over(self, leavers: Iterable[LeaverKept]) -> None:
        """Restore the names of the earlier driver. To be called before anything else."""
        for leaver in leavers:
            self._leavers[leaver.host] = _Leaver(math.inf if leaver.gone_at is None else leaver.gone_at)

    def __contains__(self, name: str) -> bool:
        """Return whether this name must not be used."""
        return name in self._leavers

    def leaves(self, name: str, within_s: float | None) -> None:
        """Record that its agent reports to be leaving. Of several announced times the earliest counts."""
        leaver = self._leavers.setdefault(name, _Leaver())
        if within_s is not None:
            leaver.gone_at = min(leaver.gone_at, self._now() + within_s)
        self._keeper.keep(LeaverKept(name, None if leaver.gone_at == math.inf else leaver.gone_at))

    def keep(self, listed: Container[str], present: Container[str]) -> None:
        """Forget the names that are not listed, and those without an agent whose machine is gone.

        After the announced time another machine has the name, or this one has been spared.
        """
        now = self._now()
        for name, leaver in list(self._leavers.items()):
            if name not in listed or (name not in present and leaver.gone_at <= now):
                self.forget(name)

    def forget(self, name: str) -> None:
        """Let the name be used again."""
        del self._leavers[name]
        self._keeper.drop(LeaverKept, name)

    def left(self, name: str, address: str) -> None:
        """Watch the name of a host whose agent is gone: it may mean another machine earlier than announced."""
        leaver = self._leavers[name]
        if leaver.gone_at < math.inf:
            self._tasks.start(self._look_for_another(name, leaver, address))

    async def _look_for_another(self, name: str, leaver: _Leaver, address: str) -> None:
        # A machine with several addresses may have connected from one to which its name does not resolve.
        old = {address, *await self._look_up(name)}
        while self._leavers.get(name) is leaver and self._now() < leaver.gone_at:
            await asyncio.sleep(_LOOK_S)
            new = await self._look_up(name)
            if new and old.isdisjoint(new):
                leaver.gone_at = -math.inf
                self._on_another()

    async def _look_up(self, name: str) -> Sequence[str]:
        async with self._side_by_side:
            return await asyncio.get_running_loop().run_in_executor(None, self._addresses_of, name)
