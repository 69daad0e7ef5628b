"""How the members of a round find each other: by the driver's key-value store.

Owns what a round needs of a rendezvous client. Knows nothing of the values exchanged.
"""

from __future__ import annotations

from typing import Protocol

from elastic_driver.errors import RendezvousTimeoutError
from elastic_driver.worker.rounds.watch import WatchClient


class RoundClient(WatchClient, Protocol):
    """The part of a rendezvous client that a context uses, from two threads at once."""

    def exchange(
        self, round_id: int, scope: str, key: int, count: int, value: bytes, *, timeout_s: float
    ) -> list[bytes]:
        """Put a value, wait for all, and return all in order of their keys."""

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Set a key."""

    def get(self, round_id: int, scope: str, key: str, *, wait_s: float) -> bytes | None:
        """Wait for a key and return its value; None if it is not set in time."""


class RoundMeeting:
    """A Meeting over the driver's key-value store."""

    def __init__(self, client: RoundClient | None, round_id: int, timeout_s: float) -> None:
        self._client, self._round_id, self._timeout_s = client, round_id, timeout_s

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        assert self._client is not None
        return self._client.exchange(self._round_id, scope, key, count, value, timeout_s=self._timeout_s)

    def share(self, scope: str, value: bytes | None) -> bytes:
        assert self._client is not None
        if value is not None:
            self._client.put(self._round_id, scope, "0", value)
            return value
        value_of_root = self._client.get(self._round_id, scope, "0", wait_s=self._timeout_s)
        if value_of_root is None:
            raise RendezvousTimeoutError(f"rank 0 of round {self._round_id} did not join within {self._timeout_s:g} s")
        return value_of_root

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Set a key of the round, once.

        Raises:
            RendezvousError: the round is over, or the driver cannot be reached.
        """
        assert self._client is not None
        self._client.put(self._round_id, scope, key, value)

    def get(self, scope: str, key: str, *, timeout_s: float) -> bytes:
        """Return the value of a key of the round. Blocks until it is set.

        Raises:
            RendezvousTimeoutError: it was not set in this time.
            RendezvousError: the round is over, or the driver cannot be reached.
        """
        assert self._client is not None
        value = self._client.get(self._round_id, scope, key, wait_s=timeout_s)
        if value is None:
            raise RendezvousTimeoutError(f"{key} of round {self._round_id} was not set within {timeout_s:g} s")
        return value
