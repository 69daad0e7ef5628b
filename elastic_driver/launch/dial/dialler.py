"""Dialling: how an agent is started on a host. The protocol of whoever can.

Owns the seam only. What is started dials in by itself (:mod:`elastic_driver.launch.agent`); that it has is seen there,
not here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.rendezvous.agent_messages import Bootstrap


@dataclass(frozen=True, slots=True)
class DialFailure:
    """Why no agent came up.

    Attributes:
        reason: one line, in the words of whoever knows: "ssh: connect to host b port 22: Connection refused".
        permanent: whether another try cannot help until somebody changes something: permission denied, a changed host
            key, no Python.
    """

    reason: str
    permanent: bool = False


class Dialled(Protocol):
    """One start of an agent.

    Attributes:
        failed: done when the command that starts the agent has ended, and why as far as it says; on the loop. The agent
            may have dialled in before, and run on.
    """

    failed: asyncio.Future[DialFailure]

    async def close(self) -> None:
        """Ends the command, if it still runs. Blocks until it is gone. The agent itself is told by its connection."""


class Dialler(Protocol):
    """Starts agents."""

    def shows_bootstrap(self, host: str) -> bool:
        """Whether others may read what the next agent on this host is given: it stands in a command line.

        A dial that has failed since nothing arrived on another way may change it from False to True. Then the host is
        dialled again at once.
        """

    async def dial(self, host: str, bootstrap: Bootstrap) -> Dialled:
        """Begins to start an agent on a host, and gives it what it needs. Does not wait for it.

        Raises:
            CommandNotFoundError: it cannot even be tried, now or later: no such program here, no such key.
            LaunchError: it cannot be tried now: too many processes or descriptors, no memory.
        """
