"""Which host names mean the driver's own machine, and which name stands for all of them.

A machine has one agent, however many names it is listed under. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

# Names looked up at a time.
_LOOKED_UP = 1024


class HostNames:
    """The names of hosts, as they are listed.

    Args:
        is_local: returns whether a name means this machine. May block.

    Attributes:
        own: the name that stands for all names of this machine: the first one used. "" before.
    """

    def __init__(self, is_local: Callable[[str], bool]) -> None:
        self._is_local = is_local
        self._local: dict[str, bool] = {}
        self.own = ""

    async def look_up(self, names: Sequence[str]) -> None:
        """Find out which of all listed names mean this machine. Blocks until that is known.

        Names of other machines that are no longer listed are forgotten: they may mean another machine next time.
        """
        loop = asyncio.get_running_loop()
        new = [name for name in names if name not in self._local]
        for at in range(0, len(new), _LOOKED_UP):
            # Concurrently: looking a name up may take seconds. Not a whole long list: nothing else is done meanwhile.
            some = new[at : at + _LOOKED_UP]
            are_local = await asyncio.gather(*(loop.run_in_executor(None, self._is_local, name) for name in some))
            self._local.update(zip(some, are_local, strict=True))
        listed = set(names)
        for name in [name for name, local in self._local.items() if not local and name not in listed]:
            del self._local[name]

    def is_local(self, name: str) -> bool:
        """Return whether a name that was looked up means this machine."""
        return self._local.get(name, False)

    def canonical(self, name: str) -> str:
        """Return the name under which a host's agent is dialled: one for all names of this machine."""
        if self.is_local(name):
            self.own = self.own or name
            return self.own
        return name
