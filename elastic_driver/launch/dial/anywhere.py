"""An agent on any machine, this one among them, for a job whose driver may come to be on another.

Owns the choice. To the driver all agents are as those of other machines: what is local to one driver is not so to the
next.
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
        elsewhere: starts all others; None where they come by themselves.
        is_here: whether a name means this machine. May block.
        is_ambiguous: whether it means another one on each machine.
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
        """See :class:`~elastic_driver.launch.dial.dialler.Dialler`."""
        return self._elsewhere is not None and self._elsewhere.shows_bootstrap(host)

    async def dial(self, host: str, bootstrap: Bootstrap) -> Dialled:
        """See :class:`~elastic_driver.launch.dial.dialler.Dialler`."""
        if self._is_ambiguous(host):
            raise CommandNotFoundError(
                f"{host} is another machine to each driver: with a journal in etcd hosts have names that mean the same "
                "on all machines"
            )
        is_here = await asyncio.get_running_loop().run_in_executor(None, self._is_here, host)
        dialler = self._here if is_here else self._elsewhere
        if dialler is None:
            raise CommandNotFoundError(f"host {host} has to join by itself (--launcher none)")
        return await dialler.dial(host, bootstrap)
