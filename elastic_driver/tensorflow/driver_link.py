"""The chief's link to its driver: which servers there are, whenever that changes.

Owns the requests of this process. Gives levels, not edges: each answer is the whole list. Imports no TensorFlow.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Self

from elastic_driver.errors import RendezvousClosedError, RendezvousError, SettingsError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.environment import ENV_OWNER, ENV_RENDEZVOUS
from elastic_driver.rendezvous.messages import Server, Servers, ServersRequest
from elastic_driver.worker.rounds.owner import Owner

__all__ = ["DriverLink", "Server", "Servers"]

_PAUSE_S = 1.0


class DriverLink:
    """See above. May be used by several threads.

    Args:
        client: asks the driver.
    """

    def __init__(self, client: RendezvousClient) -> None:
        self._client = client
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the one below
        self._left: dict[str, None] = {}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self | None:
        """That of this process; None when it is no chief of elasticrun.

        Raises:
            SettingsError: it is one, and the variables are not as elasticrun sets them.
        """
        environ = os.environ if environ is None else environ
        credential = Credential.of_chief(environ)
        if credential is None:
            return None
        url = environ.get(ENV_RENDEZVOUS, "")
        if not url:
            raise SettingsError(f"cannot ask the driver: {ENV_RENDEZVOUS} is not set, although elasticrun sets it")
        return cls(RendezvousClient(url, credential, owner=Owner(environ.get(ENV_OWNER, ""))))

    def wait(self, after_version: int, wait_s: float = 30.0) -> Servers | None:
        """Blocks until there are other servers than those of a version, or for about ``wait_s``.

        What it takes to reach the driver is tried again for as long as that takes.

        Args:
            after_version: of the last answer; 0 for the first.
            wait_s: how long, seconds; 30 at most.

        Returns:
            All servers; None when there were no others.

        Raises:
            RendezvousClosedError: this process is the job's chief no more, or the link is closed.
        """
        while not self._closed.is_set():
            try:
                return self._ask(after_version, wait_s)
            except RendezvousClosedError:
                raise
            except RendezvousError:
                self._closed.wait(_PAUSE_S)
        raise RendezvousClosedError("cannot ask the driver: this link is closed")

    def left(self, address: str) -> None:
        """Says that a worker was taken out, and gets no closures any more: its server is stopped, if it is to leave.

        Told with the next request too, where it cannot be told now.
        """
        with self._lock:
            self._left[address] = None
        try:
            self._ask(-1, 0.0)
        except RendezvousClosedError:
            return  # nobody waits for it any more
        except RendezvousError:
            return  # the next request says it again

    def close(self) -> None:
        """Ends every call, also those blocked in other threads, with RendezvousClosedError. Idempotent."""
        self._closed.set()
        self._client.close()

    def _ask(self, version: int, wait_s: float) -> Servers | None:
        with self._lock:
            left = tuple(self._left)
        servers = self._client.servers(ServersRequest(version, left), wait_s=wait_s)
        with self._lock:
            for address in left:
                self._left.pop(address, None)
        return servers
