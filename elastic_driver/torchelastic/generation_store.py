"""The Store of one generation, in which torch's agents agree on ranks, and wait for each other at the end.

Owns the handling of these waits if the generation breaks meanwhile, or the service is restarted. torch's agent fails on
any error there, although neither the loss of another node nor a restart of the service should make it fail. The service
persists nothing, so after its restart each agent repeats its writes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

from elastic_driver.errors import RendezvousClosedError, RendezvousError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.store_client import StoreClient
from elastic_driver.rendezvous.store_messages import CHANGING, StoreOp, number_in
from elastic_driver.torch_private.agents import ASSIGNED_RANKS, COUNT_AT_BARRIER, LAST_AT_BARRIER, ROLE_INFO
from elastic_driver.torchelastic.store import HTTPStore

# How often a wait checks whether the generation is broken, seconds.
_LOOK_S = 0.25


class GenerationStore(HTTPStore):
    """The Store of one generation. Used by torch's agent, in Python, and by the heartbeat's thread.

    Args:
        client: a client of the service.
        scope: the scope of the generation's keys.
        size: the number of the generation's nodes.
        is_broken: returns whether the generation is broken.
    """

    def __init__(self, client: RendezvousClient, scope: str, size: int, is_broken: Callable[[], bool]) -> None:
        super().__init__(scope=scope, client=client, is_kept=False)  # torch's agent uses it only in Python
        self._size = size
        self._is_broken = is_broken
        self._own_role: bytes | None = None
        self._one = threading.Lock()  # guards the fields below: one request at a time
        self._changes: list[tuple[StoreOp, Sequence[bytes]]] = []
        self._is_anew = False  # the service was restarted, and not all changes have been repeated

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        if key.startswith(ROLE_INFO):
            self._own_role = value.encode() if isinstance(value, str) else value
        super().set(key, value)

    def clone(self) -> GenerationStore:
        """Return another Store of the same keys."""
        return GenerationStore(self._connections, self._scope, self._size, self._is_broken)

    def look(self) -> None:
        """Repeat this agent's writes if the service was restarted: other agents may be waiting for them."""
        try:
            self._asked(StoreOp.COUNT, (), 0.0)
        except RendezvousError:
            return  # the next call of torch's agent raises it, too

    def _asked(self, op: StoreOp, parts: Sequence[bytes], wait_s: float) -> Sequence[bytes] | None:
        with self._one:
            while True:
                try:
                    if self._is_anew:
                        self._say_again()
                    answer = super()._asked(op, parts, wait_s)
                except RendezvousClosedError:
                    if self._connections.is_closed:
                        raise
                    self._is_anew = True
                    continue
                if op in CHANGING:
                    self._changes.append((op, parts))
                return answer

    def _say_again(self) -> None:
        self._client = StoreClient(self._connections, self._scope)
        for op, parts in self._changes:
            answer = super()._asked(op, parts, 0.0)
            if op is StoreOp.ADD and answer is not None and number_in(answer[0], "the sum") == self._size:
                self._lets_others_go_on(parts[0].decode(errors="replace"))
        self._is_anew = False

    def _lets_others_go_on(self, key: str) -> None:
        """Complete the barrier of a key if a repeated write reached its full count: torch's code does not see that."""
        if key.endswith(COUNT_AT_BARRIER):
            last = key.removesuffix(COUNT_AT_BARRIER) + LAST_AT_BARRIER
            super()._asked(StoreOp.SET, (last.encode(), b"1"), 0.0)

    def _translated(self, op: StoreOp, parts: Sequence[bytes], wait_s: float) -> Sequence[bytes] | None:
        while True:
            answer = super()._translated(op, parts, min(wait_s, _LOOK_S))
            if answer is not None or wait_s <= _LOOK_S:
                return answer
            wait_s -= _LOOK_S
            if self._is_broken():
                return self._instead(op, parts)

    def _instead(self, op: StoreOp, parts: Sequence[bytes]) -> Sequence[bytes] | None:
        """Return an answer that lets torch's agent continue until it checks for a restart; None lets it time out."""
        if op is not StoreOp.GET or self._own_role is None:
            return None
        role = json.loads(self._own_role)
        names = [part.decode(errors="replace") for part in parts]
        if all(name.startswith(ROLE_INFO) for name in names):
            return [json.dumps(role | {"rank": rank}).encode() for rank in range(len(names))]
        if len(names) == 1 and names[0].startswith(ASSIGNED_RANKS):
            # One worker more than there are: their rendezvous cannot complete, so they do not train before they stop.
            size = role["local_world_size"] + 1
            return [json.dumps([0, size, 0, size]).encode()]
        return None
