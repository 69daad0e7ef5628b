"""Hosts that have left by themselves and are listed all the same: when their names may be used again.

Owns how long a name is left alone, and keeps that for a later driver: until its machine is gone, as the machine has
said, or until the name means another one, which has replaced it. Who is listed, and who has an agent, is the fleet's.
Used on the event loop only.
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
# Look-ups block threads that others need, for seconds where names do not resolve; and many hosts may leave together.
_AT_ONCE = 4


@dataclass(eq=False, slots=True)
class _Leaver:
    """A name, from where its agent says that it leaves.

    Attributes:
        gone_at: when its machine is gone; infinite when nobody has said.
    """

    gone_at: float = math.inf


class Leavers:
    """See above.

    Args:
        addresses_of: what a name resolves to now. May block.
        tasks: look for that.
        on_another: called when another machine has a name.
        keeper: of the names.
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
        """Those of the driver before. To be called before all else."""
        for each in leavers:
            self._leavers[each.host] = _Leaver(math.inf if each.gone_at is None else each.gone_at)

    def __contains__(self, name: str) -> bool:
        """Whether this name is left alone."""
        return name in self._leavers

    def leaves(self, name: str, within_s: float | None) -> None:
        """Its agent says so. Of several times that are said the first holds."""
        leaver = self._leavers.setdefault(name, _Leaver())
        if within_s is not None:
            leaver.gone_at = min(leaver.gone_at, self._now() + within_s)
        self._keeper.keep(LeaverKept(name, None if leaver.gone_at == math.inf else leaver.gone_at))

    def keep(self, listed: Container[str], present: Container[str]) -> None:
        """Forgets the names that are not listed, and those without an agent whose machine is gone.

        After the time that was said another machine has the name, or this one has been spared.
        """
        now = self._now()
        for name, leaver in list(self._leavers.items()):
            if name not in listed or (name not in present and leaver.gone_at <= now):
                self.forget(name)

    def forget(self, name: str) -> None:
        """It may be used again."""
        del self._leavers[name]
        self._keeper.drop(LeaverKept, name)

    def left(self, name: str, address: str) -> None:
        """Its agent is gone, which came from this address. The name may mean another machine before it is due."""
        leaver = self._leavers[name]
        if leaver.gone_at < math.inf:
            self._tasks.start(self._look_for_another(name, leaver, address))

    async def _look_for_another(self, name: str, leaver: _Leaver, address: str) -> None:
        # A machine with several addresses may have come from one that its name does not have.
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
