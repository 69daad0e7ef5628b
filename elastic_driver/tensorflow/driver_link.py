"""The chief's link to its driver, which sends the list of servers whenever it changes.

Owns the requests of this process. Level-triggered, not edge-triggered: each answer is the whole list. Does not import
TensorFlow.
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
    """The chief's link to its driver. Thread-safe.

    Args:
        client: sends requests to the driver.
    """

    def __init__(self, client: RendezvousClient) -> None:
        self._client = client
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the field below
        self._left: dict[str, None] = {}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self | None:
        """Create the link of this process; None if it is not elasticrun's chief.

        Raises:
            SettingsError: it is the chief, but its variables are not as elasticrun sets them.
        """
        environ = os.environ if environ is None else environ
        credential = Credential.of_chief(environ)
        if credential is None:
            return None
        url = environ.get(ENV_RENDEZVOUS, "")
        if not url:
            raise SettingsError(f"cannot contact the driver: {ENV_RENDEZVOUS} is not set, although elasticrun sets it")
        return cls(RendezvousClient(url, credential, owner=Owner(environ.get(ENV_OWNER, ""))))

    def wait(self, after_version: int, wait_s: float = 30.0) -> Servers | None:
        """Block until the list of servers is newer than a version, or for about ``wait_s``.

        An unreachable driver is retried for as long as it takes.

        Args:
            after_version: the version of the last answer; 0 for the first.
            wait_s: the limit of the wait, seconds; at most 30.

        Returns:
            All servers; None if there is no newer list.

        Raises:
            RendezvousClosedError: this process is no longer the job's chief, or the link is closed.
        """
        while not self._closed.is_set():
            try:
                return self._ask(after_version, wait_s)
            except RendezvousClosedError:
                raise
            except RendezvousError:
                self._closed.wait(_PAUSE_S)
        raise RendezvousClosedError("cannot contact the driver: this link is closed")

    def left(self, address: str) -> None:
        """Report that a worker was removed, and gets no more closures. The driver stops its server if it is to leave.

        If the report cannot be sent now, it is sent with the next request.
        """
        with self._lock:
            self._left[address] = None
        try:
            self._ask(-1, 0.0)
        except RendezvousClosedError:
            return  # the job no longer needs it
        except RendezvousError:
            return  # the next request repeats it

    def close(self) -> None:
        """End all calls, also those blocked in other threads, with RendezvousClosedError. Idempotent."""
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
