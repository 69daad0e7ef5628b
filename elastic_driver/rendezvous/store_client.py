"""The client side of a torch Store, without torch.

Owns the request numbers by which the server recognizes a retry, pieces of large messages, and the total waiting time.
The client below retries each request until it is answered. Thread-safe, and usable in the child after a fork.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.messages import PIECE_BYTES
from elastic_driver.rendezvous.store_messages import StoreOp, StoreReply, StoreRequest, pieces_of

# The server parks no request for longer.
_POLL_S = 30.0


class StoreClient:
    """Sends the requests of one torch Store.

    Args:
        client: the connections.
        scope: the Store's scope; no other scope shares its keys.
    """

    def __init__(self, client: RendezvousClient, scope: str) -> None:
        self._client = client
        self._scope = scope
        self._begin_process()

    def _begin_process(self) -> None:
        """Become a new client in a forked child: the parent keeps its numbers."""
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._name = int.from_bytes(os.urandom(8), "little") or 1
        self._number = 0
        self._under_way: set[int] = set()
        self._instance = 0

    def ask(self, op: StoreOp, parts: Sequence[bytes], *, wait_s: float = 0.0) -> Sequence[bytes] | None:
        """Send a request, and block until it is answered.

        Args:
            op: the operation.
            parts: its parts, as listed at StoreOp.
            wait_s: how long it may wait for keys.

        Returns:
            The parts of the answer; None if keys were not set in time.

        Raises:
            RendezvousClosedError: the server was restarted, and is empty; or the client below is closed.
            RendezvousProtocolError: the request cannot be served.
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
                assert piece_reply is not None  # pieces never wait
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
