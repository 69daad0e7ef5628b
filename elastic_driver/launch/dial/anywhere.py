"""An agent on any machine, including this one, for a job whose driver may later run on another.

Owns the choice. To the driver all agents are like those of other machines: an agent that is local to one driver is not
local to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic_driver.launch.dial.dialler import Dialled, Dialler
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Bootstrap


class AnywhereDialler:
    """Starts agents here and elsewhere; see :class:`~elastic_driver.launch.dial.dialler.Dialler`.

    Args:
        here: starts those of this machine.
        elsewhere: starts all others; None if they join by themselves.
        is_here: returns whether a name means this machine. May block.
        is_ambiguous: returns whether a name means a different machine on each machine.
    """

    def __init__(
        self,
        here: Dialler,
        elsewhere: Dialler | None,
        *,
        is_here: Callable[[str], bool],
        is_ambiguous: Callable[[str], bool],
    ) -> None:
        self._here = here
        self._elsewhere = elsewhere
        self._is_here = is_here
        self._is_ambiguous = is_ambiguous

    def shows_bootstrap(self, host: str) -> bool:
        """Return whether the bootstrap is in a command line, for hosts elsewhere; see Dialler."""
        return self._elsewhere is not None and self._elsewhere.shows_bootstrap(host)

    async def dial(self, host: str, bootstrap: Bootstrap) -> Dialled:
        """Start an agent here or elsewhere, by the host's name."""
        if self._is_ambiguous(host):
            raise CommandNotFoundError(
                f"cannot use host {host}: each driver resolves it to another machine; with a journal in etcd, a "
                "host name must mean the same on all machines"
            )
        is_here = await asyncio.get_running_loop().run_in_executor(None, self._is_here, host)
        dialler = self._here if is_here else self._elsewhere
        if dialler is None:
            raise CommandNotFoundError(f"host {host} must join by itself (--launcher none): run elasticrun join there")
        return await dialler.dial(host, bootstrap)
