"""The key-value store of the rendezvous: bytes under round, scope and key. Pure: its callers do the waiting.

Owns fencing: only the current round has keys, and a request for another round is rejected.
"""

from __future__ import annotations

from elastic_driver.errors import RendezvousProtocolError, StaleRoundError
from elastic_driver.rendezvous.entries import pack_entries

# A round of 4,096 workers keeps 3 scopes of 4,096 keys; ten times that is no longer a rendezvous.
MAX_KEYS = 200_000
MAX_BYTES = 1 << 30


class RoundStore:
    """The keys of the current round.

    Args:
        max_keys: limit for all scopes together.
        max_bytes: limit for all values together.

    Attributes:
        round_id: the current round; 0 before the first.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, max_bytes: int = MAX_BYTES) -> None:
        self.round_id = 0
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._packed: dict[str, bytes] = {}  # of scopes unchanged since the last request
        self._keys = 0
        self._bytes = 0

    def begin_round(self, round_id: int) -> None:
        """Drop the keys of earlier rounds; requests for them are rejected from now on.

        Raises:
            ValueError: the round is not above the current one.
        """
        if round_id <= self.round_id:
            raise ValueError(f"cannot begin round {round_id}: round {self.round_id} has begun already")
        self.round_id = round_id
        self._scopes = {}
        self._packed = {}
        self._keys = self._bytes = 0

    def check_round(self, round_id: int) -> None:
        """Raise StaleRoundError unless this is the current round."""
        if round_id != self.round_id:
            raise StaleRoundError(round_id, self.round_id)

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Set a key, replacing its value.

        Raises:
            StaleRoundError: the round is not the current one.
            RendezvousProtocolError: the store is full.
        """
        self.check_round(round_id)
        entries = self._scopes.get(scope, {})
        present = entries.get(key)
        if present == value:
            return  # a retry, because the answer was lost
        keys, size = self._keys + (present is None), self._bytes + len(value) - len(present or b"")
        if keys > self._max_keys or size > self._max_bytes:
            raise RendezvousProtocolError(
                f"cannot store {scope}/{key}: the store is full ({self._keys} keys, {self._bytes} bytes;"
                f" {self._max_keys} and {self._max_bytes} are allowed)"
            )
        self._keys, self._bytes = keys, size
        entries[key] = value
        self._scopes[scope] = entries
        self._packed.pop(scope, None)

    def get(self, round_id: int, scope: str, key: str) -> bytes | None:
        """Return the value, or None if the key is not set. Raises StaleRoundError for another round."""
        self.check_round(round_id)
        entries = self._scopes.get(scope)
        return None if entries is None else entries.get(key)

    def count(self, round_id: int, scope: str) -> int:
        """Return how many keys the scope has. Raises StaleRoundError for another round."""
        self.check_round(round_id)
        return len(self._scopes.get(scope, ()))

    def entries(self, round_id: int, scope: str) -> list[tuple[str, bytes]]:
        """Return the entries of a scope: integer keys in their order, then the others as text.

        Raises:
            StaleRoundError: the round is not the current one.
        """
        self.check_round(round_id)
        return sorted(self._scopes.get(scope, {}).items(), key=_order)

    def packed(self, round_id: int, scope: str) -> bytes:
        """Return :meth:`entries` as one body, encoded once until the scope changes: N workers ask for N keys.

        Raises:
            StaleRoundError: the round is not the current one.
        """
        self.check_round(round_id)
        body = self._packed.get(scope)
        if body is None:
            body = pack_entries(self.entries(round_id, scope))
            if scope in self._scopes:
                self._packed[scope] = body
        return body


def _order(entry: tuple[str, bytes]) -> tuple[int, int, str]:
    key = entry[0]
    # isdecimal accepts other scripts' digits too, and so does int(), but int() rejects 4,300 of them.
    return (0, int(key), key) if key.isascii() and key.isdecimal() and len(key) <= 18 else (1, 0, key)
