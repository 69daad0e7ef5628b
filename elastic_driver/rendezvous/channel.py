"""A channel: messages between an agent and the driver, each delivered once and in order, across reconnects.

Owns message numbers, the messages that the other end has not received or kept yet, and when a frame is written. Its
owner connects, authenticates, and decides that the other end is lost. Used on the event loop only.

All messages sent in one turn of the loop share a frame. When a connection breaks, both ends keep what was not
acknowledged; on the next connection each reports the last number it has received, and the other resumes from there.

Each end acknowledges two numbers. A *received* message (``seen``) is not sent to that end again. A *kept* message
survives that end's death. A message sent with ``lasts`` is forgotten only once it is kept, so that it can be sent
again, over another channel, to the successor of an end that has died (:meth:`Channel.unkept`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from elastic_driver.errors import RendezvousProtocolError, in_words
from elastic_driver.rendezvous.frames import MAX_FRAME, Frame, FrameReader, Message, messages_in, pack_frame

# How often each end acknowledges, which also shows that it is alive.
BEAT_S = 0.5
# After this long without a word, only the other end's kernel is trusted to show that it lives: our beats would fill its
# buffers.
_QUIET_S = 5.0
# This many received bytes are acknowledged at once: the other end may be waiting for that.
_SEEN_BYTES = 16 << 10
# Messages are joined into one frame up to this size.
_JOIN_BYTES = 1 << 20
# Linux's struct tcp_info: eight bytes, then 24 32-bit numbers, then 64-bit ones. Of the 32-bit numbers tcpi_unacked is
# the 5th, tcpi_sacked the 6th and tcpi_last_ack_recv the 13th; tcpi_bytes_acked is the third of the 64-bit ones.
_IN_FLIGHT_AT, _LAST_ACK_AT, _BYTES_ACKED_AT = 8 + 4 * 4, 8 + 4 * 12, 8 + 4 * 24 + 8 * 2
_INFO_BYTES = _BYTES_ACKED_AT + 8
_LOOPBACK = "127.0.0.1"
# Each look counts for this much at most: after a freeze of this process the count must not jump.
_MOST_A_LOOK_S = 1.0


class FrameConnection(asyncio.Protocol):
    """A connection that carries frames.

    Args:
        on_frame: handles a frame. A RendezvousProtocolError that it raises ends the connection.
        on_lost: called once, with the reason, when the connection is gone.
        most: largest frame accepted, in bytes.

    Attributes:
        reader: decodes the incoming bytes.
        heard_at: when bytes last arrived, by the loop's clock.
    """

    def __init__(
        self, *, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None], most: int = MAX_FRAME
    ) -> None:
        self.reader = FrameReader(most=most)
        self.heard_at = asyncio.get_running_loop().time()
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._arrived: object = None  # the acknowledgements of the other end at the last look
        self._looked_at = self.heard_at
        self._in_vain_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, and turn on keepalive probes."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The other end's kernel answers these even while its process is stopped.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 120)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        """Decode the data and handle its frames."""
        if self._lost:
            return
        self.heard_at = asyncio.get_running_loop().time()
        try:
            for frame in self.reader.feed(data):
                self._on_frame(frame)
                if self._lost:
                    return
        except RendezvousProtocolError as error:
            self.abort(str(error))

    def eof_received(self) -> bool:
        """Close the connection when the other end does."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss to the owner."""
        self._tell("the connection was closed" if exc is None else f"the connection broke: {in_words(exc)}")

    def write(self, first: int, seen: int, kept: int, packed: list[bytes]) -> None:
        """Write one frame. Never blocks."""
        if self._transport is not None and not self._lost:
            self._transport.write(pack_frame(first, seen, kept, packed))

    @property
    def ends(self) -> tuple[str, str]:
        """Addresses of the other end and of this one; "" without one. A Unix socket has the loopback address."""
        names = [
            None if self._transport is None else self._transport.get_extra_info(of) for of in ("peername", "sockname")
        ]
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            return _LOOPBACK, _LOOPBACK
        peer, ours = (str(name[0]) if isinstance(name, tuple) else "" for name in names)
        # An IPv4 peer of a dual-stack socket looks like this.
        return peer.removeprefix("::ffff:"), ours.removeprefix("::ffff:")

    @property
    def unacknowledged_s(self) -> float:
        """Seconds since the other end's kernel last acknowledged anything; 0 where the kernel does not report it."""
        info = self._info(_LAST_ACK_AT + 4)
        return 0.0 if info is None else float(struct.unpack_from("=I", info, _LAST_ACK_AT)[0]) / 1000

    @property
    def unheard_s(self) -> float:
        """Seconds for which this connection has failed in at least one direction; 0 where the kernel does not report
        it.

        Either nothing arrived and nothing was acknowledged; or nothing of what was sent has arrived, although the other
        end may still be heard (it retransmits unacknowledged data, ever more rarely). Read this every half second:
        the second case is measured from read to read.
        """
        now = asyncio.get_running_loop().time()
        return max(min(now - self.heard_at, self.unacknowledged_s), self._look_at_arrivals(now))

    def _look_at_arrivals(self, now: float) -> float:
        """Return for how many seconds data has been in flight with none of it arriving.

        Data that waits for room in the other end's buffers is not in flight.
        """
        since, self._looked_at = self._looked_at, now
        before, info = self._arrived, self._info(_INFO_BYTES)
        if info is None:
            return 0.0
        in_flight, sacked = struct.unpack_from("=II", info, _IN_FLIGHT_AT)
        self._arrived = struct.unpack_from("=Q", info, _BYTES_ACKED_AT), sacked
        if in_flight and self._arrived == before:
            self._in_vain_s += min(now - since, _MOST_A_LOOK_S)
        else:
            self._in_vain_s = 0.0
        return self._in_vain_s

    def _info(self, size: int) -> bytes | None:
        """Return this many bytes of the kernel's TCP_INFO; None if it has fewer."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        except OSError:
            return None
        return info if len(info) == size else None

    def abort(self, why: str) -> None:
        """Cut the connection at once."""
        self._tell(why)
        if self._transport is not None:
            self._transport.abort()

    def finish(self, why: str) -> None:
        """Close the connection after what is already written."""
        self._tell(why)
        if self._transport is not None:
            self._transport.close()

    def _tell(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(why)


class Carrier(Protocol):
    """The part of a connection that a channel uses. FrameConnection has it."""

    def write(self, first: int, seen: int, kept: int, packed: list[bytes]) -> None:
        """Write one frame."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message that was sent, or waits for a connection."""

    number: int
    packed: bytes
    lasts: bool


class Channel:
    """One end of a channel.

    Args:
        take: called once with each message of the other end.
        on_seen: called when the other end has received or kept something.

    Attributes:
        seen: number of the last message received here.
        unseen_bytes: bytes sent that the other end has not received yet.
        unkept_bytes: bytes sent with ``lasts`` that the other end has received but not kept yet.
    """

    def __init__(self, take: Callable[[Message], None], *, on_seen: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._on_seen = on_seen
        self._connection: Carrier | None = None
        self._last = 0  # number of the last message sent
        self._unseen: deque[_Sent] = deque()
        self.unseen_bytes = 0
        self._unkept: deque[_Sent] = deque()  # seen there, with lasts
        self.unkept_bytes = 0
        self._fresh: list[bytes] = []  # the last of _unseen, which no connection has carried yet
        self._flushing: asyncio.Handle | None = None
        self.seen = 0
        self._unkept_from = 0  # number of the first message received here that is not kept; 0 for none
        self._taken_bytes = 0  # received since the last acknowledgement
        self._beat: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def last(self) -> int:
        """Number of the last message sent or queued."""
        return self._last

    @property
    def kept(self) -> int:
        """Number of the last message kept here; all before it are kept too."""
        return self._unkept_from - 1 if self._unkept_from else self.seen

    def is_seen(self, number: int) -> bool:
        """Return whether the other end has received the message of this number."""
        return not self._unseen or self._unseen[0].number > number

    @property
    def has_unkept(self) -> bool:
        """Whether :meth:`unkept` returns anything."""
        return bool(self._unkept) or any(each.lasts for each in self._unseen)

    def unkept(self) -> list[Message]:
        """Return, in order, the messages sent with ``lasts`` that the other end has not kept, received or not."""
        sent = (*self._unkept, *(each for each in self._unseen if each.lasts))
        return [message for each in sent for message in messages_in(each.packed)]

    def send(self, message: Message, *, lasts: bool = False) -> None:
        """Send a message, now or on the next connection. Never blocks.

        Args:
            message: the message.
            lasts: whether it must survive the other end's death (:meth:`unkept`).
        """
        packed = message.pack()
        self._last += 1
        self._unseen.append(_Sent(self._last, packed, lasts))
        self.unseen_bytes += len(packed)
        if self._connection is not None:
            self._fresh.append(packed)
            self._flush_soon()

    def keep(self, *, unkept_from: int) -> None:
        """Set which received messages are kept, and acknowledge them at once. Until the first call all of them are.

        Args:
            unkept_from: number of the first message that is not kept, nor are those after it; 0 for none.
        """
        before = self.kept
        self._unkept_from = unkept_from
        if self.kept > before:
            self._flush_soon()

    def attach(self, connection: Carrier, seen_there: int, kept_there: int | None = None) -> None:
        """Resume over a new connection.

        Args:
            connection: one on which both ends have authenticated.
            seen_there: number of the last message that the other end has received.
            kept_there: number of the last message that it has kept; None for an end that keeps all it receives.

        Raises:
            RendezvousProtocolError: the numbers are impossible.
        """
        kept_there = seen_there if kept_there is None else kept_there
        self._check(seen_there, kept_there)
        self._connection = connection
        self._forget(seen_there, kept_there)
        self._fresh = [each.packed for each in self._unseen]
        self._heard_at = self._loop.time()
        self.flush()
        self._schedule_beat()

    def detach(self) -> None:
        """Drop the connection; messages sent from now on wait for the next one."""
        self._connection = None
        self._fresh = []
        for handle in (self._flushing, self._beat):
            if handle is not None:
                handle.cancel()
        self._flushing = self._beat = None

    def received(self, frame: Frame) -> None:
        """Handle a frame: its acknowledgements, and its numbered messages.

        Raises:
            RendezvousProtocolError: a message is missing, or the other end acknowledges one that was not sent, or keeps
                one that it has not received.
        """
        self._heard_at = self._loop.time()
        self._check(frame.seen, frame.kept)
        self._forget(frame.seen, frame.kept)
        if frame.first == 0:
            return
        if frame.first != self.seen + 1:
            raise RendezvousProtocolError(f"cannot accept message {frame.first}: expected message {self.seen + 1}")
        for message in frame.messages:
            self.seen += 1
            self._taken_bytes += 64 + len(message.blob)
            self._take(message)
        if self._taken_bytes >= _SEEN_BYTES:
            self._flush_soon()

    def flush(self) -> None:
        """Write the messages sent in this turn of the loop."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._connection is None:
            return
        fresh, self._fresh = self._fresh, []
        first = self._last - len(fresh) + 1
        if not fresh:
            self._connection.write(0, self.seen, self.kept, [])
        start = size = 0
        for index, packed in enumerate(fresh):
            size += len(packed)
            if size >= _JOIN_BYTES or index == len(fresh) - 1:
                self._connection.write(first + start, self.seen, self.kept, fresh[start : index + 1])
                start, size = index + 1, 0
        self._taken_bytes = 0

    def _flush_soon(self) -> None:
        if self._flushing is None and self._connection is not None:
            self._flushing = self._loop.call_soon(self.flush)

    def _schedule_beat(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self._beat = self._loop.call_later(BEAT_S, self._on_beat)

    def _on_beat(self) -> None:
        if self._loop.time() - self._heard_at < _QUIET_S:
            self.flush()
        self._beat = self._loop.call_later(BEAT_S, self._on_beat)

    def _check(self, seen: int, kept: int) -> None:
        if seen > self._last:
            raise RendezvousProtocolError(
                f"cannot accept an acknowledgment of message {seen}: the last one sent was {self._last}"
            )
        if kept > seen:
            raise RendezvousProtocolError(
                f"cannot accept that message {kept} was kept: the last one acknowledged was {seen}"
            )

    def _forget(self, seen: int, kept: int) -> None:
        """Forget kept messages, and received ones that were sent without ``lasts``."""
        before = self.unseen_bytes, self.unkept_bytes
        while self._unseen and self._unseen[0].number <= seen:
            each = self._unseen.popleft()
            self.unseen_bytes -= len(each.packed)
            if each.lasts:
                self._unkept.append(each)
                self.unkept_bytes += len(each.packed)
        while self._unkept and self._unkept[0].number <= kept:
            self.unkept_bytes -= len(self._unkept.popleft().packed)
        if (self.unseen_bytes, self.unkept_bytes) != before and self._on_seen is not None:
            self._on_seen()
