"""TLS between a plain transport and a protocol, in pieces of a bounded size.

Owns the handshake, records, flow control and closing of one connection, and the order in which connections are served.
:mod:`~elastic_driver.rendezvous.certificate` owns certificates; the protocol decides whom to trust.

The event loops have their own TLS. It processes everything that a peer has sent in one turn of the loop, and OpenSSL
answers each KeyUpdate in it: a stranger that sends megabytes of them stops the loop for seconds. Here an untrusted peer
(:meth:`TlsTransport.trust`) is read in pieces of 4 KiB, and all such peers together get eight pieces a turn. When very
many connect at once their handshakes are served in the order of arrival, except those of peers that have hung up
meanwhile: a peer that gives up after some seconds and retries does not delay the others. Otherwise a
:class:`TlsTransport` behaves like asyncio's transports, and supports half-close as TCP does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

# Read from a stranger at once: a ClientHello, or 150 KeyUpdates, which take 3 ms.
_PIECE = 4 << 10
# Pieces a turn, for all strangers: 4 ms of handshakes, or 20 ms of KeyUpdates.
_PIECES_A_TURN = 8
# A peer needs two or three pieces to authenticate. While one of these waits for its turn, the peer is not to blame.
_FIRST_PIECES = 8
# Which lane is served first, in a cycle of four pieces: no lane waits for all of another. Begun handshakes go before
# new ones: if all were begun at once, a slow driver would finish none before its peers give up.
_NEW, _BEGUN, _SHAKEN, _OTHERS = range(4)
_ORDERS = (
    (_BEGUN, _NEW, _SHAKEN, _OTHERS),
    (_SHAKEN, _BEGUN, _NEW, _OTHERS),
    (_BEGUN, _NEW, _SHAKEN, _OTHERS),
    (_OTHERS, _SHAKEN, _BEGUN, _NEW),
)
# How long a handshake that timed out while waiting for its turn is extended.
_AGAIN_S = 0.1
# tcpi_state, the first byte of Linux's struct tcp_info.
_ESTABLISHED = 1
# Read from a trusted peer at once, as the event loops do.
_READ = 256 << 10
# Delivered at once. Above 128 KiB glibc maps each buffer again, which takes longer than decrypting it.
_PLAIN = 64 << 10
# Encryption stops at this much data that the socket has not sent: of a stranger, which may not read at all, and of
# others.
_HIGH_WATER, _TRUSTED_HIGH_WATER = 64 << 10, 256 << 10
# Encrypted, and written to the socket, at once.
_CHUNK = 64 << 10


class Turns:
    """State shared by the connections of a loop: the turns of strangers, and buffers.

    Attributes:
        read: buffer for the socket's data; valid until the loop reads again.
        plain: buffer for decrypted data.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes: tuple[deque[TlsLayer], ...] = (deque(), deque(), deque(), deque())
        self._is_scheduled = False
        self.read = memoryview(bytearray(_READ))
        self.plain = memoryview(bytearray(_PLAIN))

    def wait(self, layer: TlsLayer) -> None:
        """Call the layer's :meth:`~TlsLayer.take_turn` once, not before the next turn of the loop."""
        self._lanes[layer.lane].append(layer)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        try:
            for number in range(_PIECES_A_TURN):
                layer = next(filter(None, (_next(self._lanes[lane]) for lane in _ORDERS[number % 4])), None)
                if layer is None:
                    break
                layer.take_turn()
        finally:
            self._is_scheduled = any(self._lanes)
            if self._is_scheduled:
                self._loop.call_soon(self._turn)


def _next(lane: deque[TlsLayer]) -> TlsLayer | None:
    """Return the next layer. Peers that have hung up are skipped: otherwise short-lived ones would delay the others."""
    while lane:
        layer = lane.popleft()
        if not layer.is_closing and not layer.is_given_up():
            return layer
    return None


class TlsLayer(asyncio.BufferedProtocol):
    """The protocol of a plain transport; the decrypted data goes to the protocol above.

    The upper protocol's ``connection_made`` is called after the handshake, its ``connection_lost`` only after that.

    Args:
        context: of a server or a client.
        protocol: makes the protocol above.
        turns: shared by all connections of the loop.
        handshake_s: time limit of the handshake.
        server_side: whether this is the server's end.
        server_hostname: the server that a client asks for.
        on_shaken: called once when the handshake is over: with None before ``connection_made``, or with the reason of
            its failure once the connection is gone.

    Attributes:
        is_shaken: whether the handshake has succeeded.
        object: OpenSSL's end; deleted with the connection.
        transport: the transport of the protocol above.
        socket: the plain transport below.
        protocol: the protocol above, after the handshake.
        waits: whether received data waits for its turn.
        is_paused: whether the protocol has paused reading.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        turns: Turns,
        *,
        handshake_s: float,
        server_side: bool,
        server_hostname: str | None = None,
        on_shaken: Callable[[Exception | None], None],
    ) -> None:
        self._turns = turns
        self._make_protocol = protocol
        self._handshake_s = handshake_s
        self._on_shaken = on_shaken
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self.is_shaken = False
        self.socket: asyncio.Transport
        self.protocol: asyncio.Protocol
        self.transport = TlsTransport(self)
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None  # the first one, which is reported to the protocol
        # Reading.
        self._is_trusted = False
        self._pieces = 0  # pieces that had their turn
        self.waits = False  # data in _incoming waits for its turn
        self.is_paused = False
        self._is_reading = True
        self._peer_ended = False  # it has sent close_notify
        # Writing.
        self._unsent: deque[memoryview] = deque()  # not encrypted yet
        self._unsent_bytes = 0
        self._is_blocked = False  # the socket's buffer is full
        self._told_to_pause = False
        self._eof_written = False  # nothing more will be written
        self._end_sent = False  # close_notify was sent
        self._is_closing = False

    # --- the transport below ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the plain transport and start the handshake."""
        self.socket = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.socket.set_write_buffer_limits(_HIGH_WATER)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._handshake_s, self._handshake_is_late)
        if not self.object.server_side:
            self._work()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared buffer, cut for an untrusted peer."""
        return self._turns.read if self._is_trusted else self._turns.read[:_PIECE]

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt the received bytes, now or in a later turn."""
        if self._is_closing or self._peer_ended:
            return
        self._incoming.write(self._turns.read[:nbytes])
        if self._is_trusted and not self.is_paused:
            self._work()
        else:
            self._wait()

    def eof_received(self) -> bool:
        """Close after what was written; returns True because the layer closes the transport itself."""
        if not (self._peer_ended or self._is_closing):
            if not self.is_shaken:
                self._fail(ConnectionResetError("the connection was closed during its TLS handshake"))
            else:
                self._error = self._error or ConnectionResetError("the connection was cut off without a TLS close")
                self.close()
        return True

    def pause_writing(self) -> None:
        """Pause the protocol above while the socket's buffer is full."""
        self._is_blocked = True
        if self.is_shaken and not self._told_to_pause:
            self._told_to_pause = True
            self._tell(self.protocol.pause_writing)
        self._read_or_not()

    def resume_writing(self) -> None:
        """Send unsent data, and resume the protocol above."""
        self._is_blocked = False
        self._send()
        if self._told_to_pause and not self._is_blocked:
            self._told_to_pause = False
            self._tell(self.protocol.resume_writing)
        self._read_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss to the protocol above, or to ``on_shaken``."""
        self._cancel_timer()
        self._is_closing = True
        self._drop_unsent()
        error = self._error or exc
        if self.is_shaken:
            self._tell(self.protocol.connection_lost, error)
        else:
            self._on_shaken(error or ConnectionAbortedError("the connection was cut during its TLS handshake"))
        # Layer, transport and protocol form a cycle. OpenSSL's 40 KB must not wait for the garbage collector, which
        # runs rarely in a large process: short-lived connections would fill the memory.
        del self.object, self._incoming, self._outgoing

    # --- its turn --------------------------------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        """Whether the peer still needs turns to authenticate, and reads its data."""
        return self._pieces < _FIRST_PIECES and not self._is_blocked

    @property
    def lane(self) -> int:
        """The lane in which it waits for its turn."""
        if self._pieces >= _FIRST_PIECES:
            return _OTHERS
        return _SHAKEN if self.is_shaken else _BEGUN if self._pieces else _NEW

    def is_given_up(self) -> bool:
        """Return whether a client has hung up before its handshake began, and cut it. Nothing is read while it
        waits.
        """
        if self._pieces or not self.object.server_side or _is_open(self.socket):
            return False
        self._error = self._error or ConnectionResetError("the connection was closed before its TLS handshake")
        self.abort()
        return True

    def take_turn(self) -> None:
        """Process the received data. Called by :class:`Turns`."""
        self.waits = False
        self._pieces += 1
        self._work()
        self._read_or_not()

    def _wait(self) -> None:
        """Take a turn later, and read nothing until then."""
        if not self.waits and not self.is_paused:
            self.waits = True
            self._turns.wait(self)
        self._read_or_not()

    def _read_or_not(self) -> None:
        # OpenSSL answers KeyUpdates: a peer that sends them but does not read is not read from. A trusted peer always
        # is, since two ends that each wait for the other to read would deadlock.
        is_held = self.waits or self.is_paused or (self._is_blocked and not self._is_trusted)
        if is_held != self._is_reading or self.socket.is_closing():
            return
        self._is_reading = not is_held
        if is_held:
            self.socket.pause_reading()
        else:
            self.socket.resume_reading()

    # --- TLS -------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Process the received data."""
        if self._is_closing or self.is_paused:
            return
        try:
            if not self.is_shaken:
                self.object.do_handshake()
                self._begin()
            self._receive()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._send()

    def _begin(self) -> None:
        """Connect the protocol above, after the handshake."""
        self._cancel_timer()
        self.is_shaken = True
        self._on_shaken(None)
        self.protocol = self._make_protocol()
        self._tell(self.protocol.connection_made, self.transport)

    def _receive(self) -> None:
        """Decrypt and deliver all received data; if the protocol pauses, the rest waits.

        Raises:
            ssl.SSLError: the data is not TLS, or was changed. The data before it was delivered.
        """
        plain, size, more = self._turns.plain, 0, True
        error: ssl.SSLError | None = None
        while more and not (self._is_closing or self.is_paused):
            count = 0
            try:
                count = int(self.object.read(len(plain) - size, plain[size:]))  # a number, since it is given a buffer
                self._peer_ended = not count
            except ssl.SSLZeroReturnError:  # what 0 becomes after this end has closed
                self._peer_ended = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as caught:
                error = caught
            size += count
            # Checked first, since that costs less than an exception.
            more = count > 0 and self._has_more
            if size and (not more or size == len(plain)):
                data, size = bytes(plain[:size]), 0
                self._tell(self.protocol.data_received, data)
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame, which would hold it
        if self._peer_ended and not self._is_closing and not self._tell(self.protocol.eof_received):
            self.close()

    @property
    def _has_more(self) -> bool:
        """Whether received data was not yet decrypted or delivered."""
        return self._incoming.pending > 0 or self.object.pending() > 0

    def _send(self) -> None:
        """Encrypt written data, as far as the socket has room; then close what has to be closed."""
        if self.socket.is_closing():
            return
        self._flush()
        try:
            while self._unsent and not self._is_blocked:
                data = self._unsent[0]
                count = self.object.write(data[:_CHUNK])
                self._unsent_bytes -= count
                if count == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = data[count:]
                self._flush()
        except ssl.SSLWantReadError:  # the rest of a TLS message has to arrive first
            if self._is_closing:  # when nothing is read any more
                self.abort()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        if self._unsent or self.socket.is_closing():  # the protocol may have aborted in pause_writing()
            return
        # OpenSSL looks for the peer's close_notify here, and must not find data.
        if self._is_closing or (self._eof_written and not self._has_more):
            self._send_end()
        if self._is_closing:
            self.socket.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self.socket.write(self._outgoing.read())

    def _send_end(self) -> None:
        if self._end_sent:
            return
        self._end_sent = True
        with contextlib.suppress(ssl.SSLError):  # the peer has not closed its side, which is not awaited
            self.object.unwrap()
        self._flush()

    def _fail(self, error: Exception) -> None:
        """Close after the alert that says why; at once if the peer does not read."""
        self._error = self._error or error.with_traceback(None)  # a traceback would hold OpenSSL's end
        if self._is_blocked or self.socket.is_closing():
            self.abort()
            return
        self._is_closing = True
        self._drop_unsent()
        self._flush()
        self.socket.close()

    def _handshake_is_late(self) -> None:
        if self.waits and self.is_new:  # the peer is not to blame
            self._timer = asyncio.get_running_loop().call_later(_AGAIN_S, self._handshake_is_late)
            return
        self._error = self._error or TimeoutError(f"the TLS handshake took more than {self._handshake_s:g} s")
        self.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _tell(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call the protocol above. An exception there ends this connection only."""
        try:
            return method(*arguments)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": "a protocol over TLS has failed",
                    "exception": error,
                    "transport": self.transport,
                    "protocol": method.__self__,  # type: ignore[attr-defined]
                }
            )
            self._error = self._error or error
            self.abort()
            return None

    # --- for the transport above -----------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether a transport was connected."""
        return self._timer is not None or self.is_shaken

    @property
    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_closing or self.socket.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes written that the system has not sent."""
        return self._unsent_bytes + int(self.socket.get_write_buffer_size())

    def trust(self) -> None:
        """Trust the peer, which has authenticated: read from it without limits or turns."""
        self._is_trusted = True
        self.socket.set_write_buffer_limits(_TRUSTED_HIGH_WATER)
        self._read_or_not()

    def pause(self) -> None:
        """Deliver nothing until :meth:`resume`."""
        self.is_paused = True
        self._read_or_not()

    def resume(self) -> None:
        """Deliver received data again, from the next turn on."""
        if self.is_paused and not self.is_closing:
            self.is_paused = False
            if self._has_more:
                self._wait()
            else:
                self._read_or_not()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data. Never blocks."""
        if self._eof_written:
            raise RuntimeError("cannot write after write_eof()")
        if not data or self.is_closing:
            return
        view = memoryview(data if isinstance(data, bytes) else bytes(data))
        self._unsent.append(view)
        self._unsent_bytes += len(view)
        self._send()

    def write_eof(self) -> None:
        """Close this direction after what was written."""
        if not self._eof_written and not self.is_closing:
            self._eof_written = True
            self._send()

    def close(self) -> None:
        """Close after what was written."""
        if not self.is_shaken:
            self.abort()
        elif not self._is_closing:
            self._is_closing = True
            self._send()

    def abort(self) -> None:
        """Cut the connection."""
        self._is_closing = True
        self._drop_unsent()
        self.socket.abort()


def _is_open(transport: asyncio.Transport) -> bool:
    """Return whether the other end of a TCP connection has not closed it, even with unread data."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    with contextlib.suppress(OSError):
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED)
    return False


class TlsTransport(asyncio.Transport):
    """The transport for the protocol above a :class:`TlsLayer`."""

    def __init__(self, layer: TlsLayer) -> None:
        super().__init__()
        self._layer = layer

    def trust(self) -> None:
        """Trust the peer, which has authenticated: read its data as it arrives."""
        self._layer.trust()

    @property
    def is_new(self) -> bool:
        """Whether the peer still needs turns to authenticate."""
        return self._layer.is_new

    @property
    def waits(self) -> bool:
        """Whether received data waits for its turn."""
        return self._layer.waits

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a TLS object, or the plain transport's information."""
        tls: ssl.SSLObject | None = getattr(self._layer, "object", None)
        match name:
            case "ssl_object" if tls is not None:
                return tls
            case "sslcontext" if tls is not None:
                return tls.context
            case "peercert" if tls is not None:
                return tls.getpeercert()
            case "cipher" if tls is not None:
                return tls.cipher()
            case _:
                return self._layer.socket.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol above."""
        self._layer.protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol above."""
        return self._layer.protocol

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._layer.is_closing

    def close(self) -> None:
        """Close after what was written."""
        self._layer.close()

    def abort(self) -> None:
        """Cut the connection."""
        self._layer.abort()

    def is_reading(self) -> bool:
        """Return whether received data is delivered."""
        return not self._layer.is_paused and not self._layer.is_closing

    def pause_reading(self) -> None:
        """Deliver nothing until :meth:`resume_reading`."""
        self._layer.pause()

    def resume_reading(self) -> None:
        """Deliver received data again."""
        self._layer.resume()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits beyond which data is held back unencrypted."""
        self._layer.socket.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the limits of the plain transport."""
        return self._layer.socket.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the system has not sent."""
        return self._layer.unsent_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data. Never blocks."""
        self._layer.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send several pieces of data as one."""
        self._layer.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """Return True: TLS 1.3 can close one direction."""
        return True

    def write_eof(self) -> None:
        """Close this direction. The other stays open, as in TLS 1.3."""
        self._layer.write_eof()
