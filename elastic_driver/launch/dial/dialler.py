"""Dialling: the protocol of classes that start an agent on a host.

Owns the interface only. A started agent dials in by itself (:mod:`elastic_driver.launch.agent`); that it has is noticed
there, not here.
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
        reason: one line, in the words of the failing program: "ssh: connect to host b port 22: Connection refused".
        permanent: whether another try cannot help until a user changes something: permission denied, a changed host
            key, no Python.
    """

    reason: str
    permanent: bool = False


class Dialled(Protocol):
    """One start of an agent.

    Attributes:
        failed: resolves on the loop when the command that starts the agent has ended, to the reason as far as it is
            known. The agent may have dialled in before, and continue to run.
    """

    failed: asyncio.Future[DialFailure]

    async def close(self) -> None:
        """End the command, if it still runs. Blocks until it is gone. The agent itself is ended over its connection."""


class Dialler(Protocol):
    """Starts agents."""

    def shows_bootstrap(self, host: str) -> bool:
        """Return whether others may read the next bootstrap on this host, since it is in a command line.

        A dial that has failed because nothing arrived in another way may change it from False to True. Then the host is
        dialled again at once.
        """

    async def dial(self, host: str, bootstrap: Bootstrap) -> Dialled:
        """Begin to start an agent on a host, and give it its bootstrap. Does not wait for it.

        Raises:
            CommandNotFoundError: it cannot be tried, now or later: no such program here, no such key.
            LaunchError: it cannot be tried now: too many processes or descriptors, no memory.
        """
