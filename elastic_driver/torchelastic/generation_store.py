"""The Store of the agents of one generation: where torch's agent agrees on ranks, and waits for the others at the end.

Owns what becomes of those waits when the generation is broken meanwhile. torch's agent takes an error there for its own
end; but a node that is lost at that moment is to end nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.store_messages import StoreOp
from elastic_driver.torch_private.agents import ASSIGNED_RANKS, ROLE_INFO
from elastic_driver.torchelastic.store import HTTPStore

# How often it looks whether its generation is broken.
_LOOK_S = 0.25


class GenerationStore(HTTPStore):
    """See above.

    Args:
        client: asks the service.
        scope: of the generation.
        is_broken: whether the generation is.
    """

    def __init__(self, client: RendezvousClient, scope: str, is_broken: Callable[[], bool]) -> None:
        super().__init__(scope=scope, client=client, is_kept=False)  # torch's agent uses it in Python
        self._is_broken = is_broken
        self._own_role: bytes | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """See HTTPStore."""
        if key.startswith(ROLE_INFO):
            self._own_role = value.encode() if isinstance(value, str) else value
        super().set(key, value)

    def clone(self) -> GenerationStore:
        """See HTTPStore."""
        return GenerationStore(self._connections, self._scope, self._is_broken)

    def _translated(self, op: StoreOp, parts: Sequence[bytes], wait_s: float) -> Sequence[bytes] | None:
        while True:
            answer = super()._translated(op, parts, min(wait_s, _LOOK_S))
            if answer is not None or wait_s <= _LOOK_S:
                return answer
            wait_s -= _LOOK_S
            if self._is_broken():
                return self._instead(op, parts)

    def _instead(self, op: StoreOp, parts: Sequence[bytes]) -> Sequence[bytes] | None:
        """What lets torch's agent go on to where it looks whether to start its workers anew; None for a time-out."""
        if op is not StoreOp.GET or self._own_role is None:
            return None
        role = json.loads(self._own_role)
        names = [part.decode(errors="replace") for part in parts]
        if all(name.startswith(ROLE_INFO) for name in names):
            return [json.dumps(role | {"rank": rank}).encode() for rank in range(len(names))]
        if len(names) == 1 and names[0].startswith(ASSIGNED_RANKS):
            # One more than there are: they never meet, so that they train nothing until they are stopped.
            size = role["local_world_size"] + 1
            return [json.dumps([0, size, 0, size]).encode()]
        return None
