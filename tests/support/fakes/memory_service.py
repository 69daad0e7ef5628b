"""A rendezvous server without sockets and threads: peers hand their bytes to its connections, and its time is virtual.

:class:`MemoryService` and :class:`MemoryPeer` are used as ``Service`` and ``Peer`` of rendezvous_service.py are. What
sockets do (buffers that are full, resets, limits of the system) is not here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from elastic_driver.rendezvous.credentials import Identity
from elastic_driver.rendezvous.server.unauthenticated import UnauthenticatedConnection
from elastic_driver.rendezvous.tls import Turns
from tests.support.fakes.rendezvous_service import CERTIFICATE, IDENTITY, BasePeer, BaseService
from tests.support.fakes.virtual_loop import VirtualLoop

# As much as a loop hands over at once.
_PIECE = 64 << 10
# Of virtual time: longer than any limit of the server, and shorter than the waits that nothing is to end.
_PATIENCE_S = 600.0


class MemoryTransport(asyncio.Transport):
    """Keeps what is written; its peer reads all at once.

    Attributes:
        written: what the peer has not read yet.
        ended: whether nothing more is coming.
        lost: whether the connection is gone.
    """

    def __init__(self, protocol: UnauthenticatedConnection) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol = cast("asyncio.Protocol", protocol)
        self.written = bytearray()
        self.ended = self.lost = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """None: there is no socket. To the server it is as if it were one over TLS."""
        return default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast("asyncio.Protocol", protocol)

    def pause_reading(self) -> None:
        """Nothing is read by itself."""

    def resume_reading(self) -> None:
        """See there."""

    def is_closing(self) -> bool:
        return self.lost

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        if not self.lost:
            self.ended = self.lost = True
            asyncio.get_running_loop().call_soon(lambda: self.protocol.connection_lost(None))

    abort = close


class MemoryService(BaseService):
    """See the module."""

    def _begin(self) -> None:
        self._virtual = VirtualLoop()
        self.loop = self._virtual
        self.loop.set_exception_handler(lambda _, context: self.noise.append(context))

    def _listen(self) -> None:
        self._turns = self.call(Turns)
        self.server.certificate.fingerprint = CERTIFICATE.fingerprint  # as if it had been made
        self.call(lambda: self.server.connections.make_room(100, 100, connections_each=3, descriptors_each=0))
        self.call(self.server.connections.begin)

    def wait(self, coroutine: Any) -> Any:
        """Runs the loop until the coroutine has ended."""
        return self.loop.run_until_complete(coroutine)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Runs the loop until the condition holds. Time passes only when nothing else does."""

        async def look() -> None:
            end = self.loop.time() + _PATIENCE_S
            for number in itertools.count():
                if condition():
                    return
                assert self.loop.time() < end, f"not in time: {what}"
                await asyncio.sleep(0 if number < 20 else 0.05)

        self.wait(look())

    def connect(self) -> MemoryTransport:
        """A new connection."""

        def make() -> MemoryTransport:
            newcomer = UnauthenticatedConnection(self.server, self._turns)
            transport = MemoryTransport(newcomer)
            newcomer.connection_made(transport)
            return transport

        return cast("MemoryTransport", self.call(make))

    def _end(self) -> None:
        self.loop.close()


class MemoryPeer(BasePeer):
    """A connection of a :class:`MemoryService`."""

    def __init__(self, service: MemoryService, identity: Identity = IDENTITY) -> None:
        super().__init__(identity)
        self._service = service
        self._transport = service.connect()

    def close(self) -> None:
        self.hang_up()
        self._service.call(lambda: None)  # the connection is lost

    def hang_up(self) -> None:
        """Says that nothing more is coming, and reads what there is."""

        def end() -> None:
            if not self._transport.lost and not self._transport.protocol.eof_received():
                self._transport.close()

        self._service.call(end)
        self._transport.written.clear()

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            if self._transport.lost:
                raise BrokenPipeError
            self._service.call(lambda start=start: self._transport.protocol.data_received(data[start : start + _PIECE]))

    def _line(self) -> bytes:
        written = self._transport.written
        self._service.until(lambda: b"\n" in written or self._transport.ended, "an answer")
        return self._take(written.find(b"\n") + 1 or len(written))

    def _bytes(self, count: int) -> bytes:
        written = self._transport.written
        self._service.until(lambda: len(written) >= count or self._transport.ended, "the rest of an answer")
        return self._take(min(count, len(written)))

    def _take(self, count: int) -> bytes:
        taken = bytes(self._transport.written[:count])
        del self._transport.written[:count]
        return taken


@contextmanager
def serving_in_memory(**options: Any) -> Iterator[MemoryService]:
    """A service that is stopped."""
    service = MemoryService(**options)
    try:
        yield service
    finally:
        service.stop()
