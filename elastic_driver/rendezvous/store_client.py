"""A torch Store's side of the wire, without torch: one call for each thing that can be asked.

Owns the numbers by which the server tells a request that comes again from another, pieces, and how long is waited
altogether. Every request is repeated until it is answered, by the client below. May be used by several threads at once,
and after a fork in the child too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.messages import PIECE_BYTES
from elastic_driver.rendezvous.store_messages import StoreOp, StoreReply, StoreRequest, pieces_of

# The server lets nothing wait for longer in one request.
_POLL_S = 30.0


class StoreClient:
    """See above.

    Args:
        client: the connections.
        scope: whose keys; other scopes have others.
    """

    def __init__(self, client: RendezvousClient, scope: str) -> None:
        self._client = client
        self._scope = scope
        self._begin_process()

    def _begin_process(self) -> None:
        """A forked child is another client: its parent goes on with the numbers."""
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._name = int.from_bytes(os.urandom(8), "little") or 1
        self._number = 0
        self._under_way: set[int] = set()
        self._instance = 0

    def ask(self, op: StoreOp, parts: Sequence[bytes], *, wait_s: float = 0.0) -> Sequence[bytes] | None:
        """Asks, and blocks until there is an answer.

        Args:
            op: what.
            parts: see StoreOp.
            wait_s: how long it may wait for keys.

        Returns:
            The parts of the answer; None when keys have not come in time.

        Raises:
            RendezvousClosedError: the server was started anew, and is empty; or the client below is closed.
            RendezvousProtocolError: it cannot be done.
            RendezvousError: the server cannot be reached.
        """
        if os.getpid() != self._pid:
            self._begin_process()
        with self._lock:
            self._number += 1
            number = self._number
            self._under_way.add(number)
        deadline = time.monotonic() + wait_s
        try:
            while True:
                left_s = min(max(0.0, deadline - time.monotonic()), _POLL_S)
                reply = self._once(op, parts, number, left_s)
                if reply is not None:
                    return reply.parts
                if time.monotonic() >= deadline:
                    return None
        finally:
            with self._lock:
                self._under_way.discard(number)

    def _once(self, op: StoreOp, parts: Sequence[bytes], number: int, wait_s: float) -> StoreReply | None:
        body = self._request(op, parts, number, wait_s)
        if len(body) > PIECE_BYTES:
            pieces = pieces_of(body)
            for place, piece in enumerate(pieces):
                self._send(self._request(StoreOp.PIECE, (str(place).encode(), piece), number))
            body = self._request(StoreOp.WHOLE, (str(len(pieces)).encode(),), number)
        reply = self._send(body, wait_s)
        if reply is not None and reply.pieces:
            whole = []
            for place in range(reply.pieces):
                piece_reply = self._send(self._request(StoreOp.REST, (str(place).encode(),), number))
                assert piece_reply is not None  # nothing of it waits
                whole.append(piece_reply.parts[0])
            reply = StoreReply.from_bytes(b"".join(whole))
        return reply

    def _request(self, op: StoreOp, parts: Sequence[bytes], number: int, wait_s: float = 0.0) -> bytes:
        with self._lock:
            done, instance = min(self._under_way), self._instance
        return StoreRequest(op, self._scope, parts, wait_s, instance, self._name, number, done).to_bytes()

    def _send(self, body: bytes, wait_s: float = 0.0) -> StoreReply | None:
        answer = self._client.ask_store(body, wait_s=wait_s)
        if answer is None:
            return None
        reply = StoreReply.from_bytes(answer)
        with self._lock:
            self._instance = self._instance or reply.instance
        return reply
