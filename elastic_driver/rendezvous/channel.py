"""A channel: messages between an agent and the driver, each taken once and in order, over one connection after another.

Owns the numbers of messages, what the other end has not taken or kept yet, and when a frame is written. Who connects,
proves itself and decides that the other end is lost is its owner's business. Used on the event loop only.

What is sent in one turn of the loop goes into one frame. When a connection breaks, both ends keep what was not taken;
on the next one each says what it has seen last, and the other goes on from there.

Each end acknowledges two numbers. What it has *taken* is not sent to it again. What it has *kept* outlives it: of that
nothing is lost when it dies. What is sent to last (``lasts``) is forgotten only when it is kept, so that it can be sent
again to whoever comes after an end that has died, over another channel (:meth:`Channel.unkept`).
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

# How often each end says what it has seen, and so that it lives.
BEAT_S = 0.5
# Of an end that says nothing for so long the kernel alone has to say that it lives: what we say would fill its buffers.
_QUIET_S = 5.0
# As much is acknowledged at once: the other end may wait for it.
_SEEN_BYTES = 16 << 10
# A frame grows no larger than this by being put together.
_JOIN_BYTES = 1 << 20
# Linux's struct tcp_info: eight bytes, then 32-bit numbers, then others. Of the first, tcpi_unacked is the 5th and
# tcpi_sacked the 6th, tcpi_last_ack_recv the 13th, of 24; tcpi_bytes_acked is the third of the others.
_IN_FLIGHT_AT, _LAST_ACK_AT, _BYTES_ACKED_AT = 8 + 4 * 4, 8 + 4 * 12, 8 + 4 * 24 + 8 * 2
_INFO_BYTES = _BYTES_ACKED_AT + 8
_LOOPBACK = "127.0.0.1"
# As much counts at most for each time that is looked: who was stopped begins anew.
_MOST_A_LOOK_S = 1.0


class FrameConnection(asyncio.Protocol):
    """One connection, once it carries frames.

    Args:
        on_frame: takes a frame. What it raises of RendezvousProtocolError ends the connection.
        on_lost: told once that the connection is gone, and why.
        most: see FrameReader.

    Attributes:
        reader: of what comes.
        heard_at: when something came last, by the loop's clock.
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
        self._arrived: object = None  # what the other end had acknowledged when last looked
        self._looked_at = self.heard_at
        self._in_vain_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The other end's kernel answers these, though its process be stopped.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 120)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
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
        """See asyncio.Protocol."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._tell("the connection was closed" if exc is None else f"the connection broke: {in_words(exc)}")

    def write(self, first: int, seen: int, kept: int, packed: list[bytes]) -> None:
        """Sends one frame. Never blocks."""
        if self._transport is not None and not self._lost:
            self._transport.write(pack_frame(first, seen, kept, packed))

    @property
    def ends(self) -> tuple[str, str]:
        """Addresses of the other end, and of this one; "" where it has none. A unix socket's ends are on loopback."""
        names = [
            None if self._transport is None else self._transport.get_extra_info(of) for of in ("peername", "sockname")
        ]
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            return _LOOPBACK, _LOOPBACK
        peer, ours = (str(name[0]) if isinstance(name, tuple) else "" for name in names)
        # An IPv4 peer of a socket that takes both looks like this.
        return peer.removeprefix("::ffff:"), ours.removeprefix("::ffff:")

    @property
    def unacknowledged_s(self) -> float:
        """For how long the other end's kernel has acknowledged nothing; 0 where that cannot be known."""
        info = self._info(_LAST_ACK_AT + 4)
        return 0.0 if info is None else float(struct.unpack_from("=I", info, _LAST_ACK_AT)[0]) / 1000

    @property
    def unheard_s(self) -> float:
        """For how long this connection has not worked both ways; 0 where that cannot be known.

        Nothing has come and nothing was acknowledged; or nothing of what was sent has arrived, though the other end
        may still be heard: what nobody acknowledges it sends again, ever more seldom. To be asked about each half
        second, since the latter is known from what has changed.
        """
        now = asyncio.get_running_loop().time()
        return max(min(now - self.heard_at, self.unacknowledged_s), self._look_at_arrivals(now))

    def _look_at_arrivals(self, now: float) -> float:
        """For how long something has been on the way, and nothing of it has arrived.

        What waits for the other end's buffers is not on the way.
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
        """So much of what the kernel tells of the connection; None when it tells less."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        except OSError:
            return None
        return info if len(info) == size else None

    def abort(self, why: str) -> None:
        """Cuts the connection, at once."""
        self._tell(why)
        if self._transport is not None:
            self._transport.abort()

    def finish(self, why: str) -> None:
        """Closes the connection behind what is written already."""
        self._tell(why)
        if self._transport is not None:
            self._transport.close()

    def _tell(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(why)


class Carrier(Protocol):
    """What a channel needs of a connection; FrameConnection is one."""

    def write(self, first: int, seen: int, kept: int, packed: list[bytes]) -> None:
        """Sends one frame."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message that was sent, or waits for a connection."""

    number: int
    packed: bytes
    lasts: bool


class Channel:
    """One end of a channel.

    Args:
        take: gets each message of the other end, once.
        on_seen: told when the other end has taken or kept something.

    Attributes:
        seen: number of the last message taken.
        unseen_bytes: what was sent and the other end has not taken yet.
        unkept_bytes: what it has taken, and not kept yet, of what was sent to last.
    """

    def __init__(self, take: Callable[[Message], None], *, on_seen: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._on_seen = on_seen
        self._connection: Carrier | None = None
        self._last = 0  # number of the last message sent
        self._unseen: deque[_Sent] = deque()
        self.unseen_bytes = 0
        self._unkept: deque[_Sent] = deque()  # of what was seen
        self.unkept_bytes = 0
        self._fresh: list[bytes] = []  # of these, the last, which no connection has carried yet
        self._flushing: asyncio.Handle | None = None
        self.seen = 0
        self._unkept_from = 0  # number of the first message that was taken here and is not kept; 0 for none
        self._taken_bytes = 0  # since the other end was told what is seen
        self._beat: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def last(self) -> int:
        """Number of the last message that was sent, or is to be."""
        return self._last

    @property
    def kept(self) -> int:
        """Number of the last message that is kept here, with all before it."""
        return self._unkept_from - 1 if self._unkept_from else self.seen

    def is_seen(self, number: int) -> bool:
        """Whether the other end has taken the message of that number."""
        return not self._unseen or self._unseen[0].number > number

    @property
    def has_unkept(self) -> bool:
        """Whether there is something of :meth:`unkept`."""
        return bool(self._unkept) or any(each.lasts for each in self._unseen)

    def unkept(self) -> list[Message]:
        """What was sent to last and the other end has not kept, in order, whether it was taken or not."""
        sent = (*self._unkept, *(each for each in self._unseen if each.lasts))
        return [message for each in sent for message in messages_in(each.packed)]

    def send(self, message: Message, *, lasts: bool = False) -> None:
        """Sends, now or on the next connection. Never blocks.

        Args:
            message: what is said.
            lasts: whether somebody has to know of it even if the other end dies. See unkept().
        """
        packed = message.pack()
        self._last += 1
        self._unseen.append(_Sent(self._last, packed, lasts))
        self.unseen_bytes += len(packed)
        if self._connection is not None:
            self._fresh.append(packed)
            self._flush_soon()

    def keep(self, *, unkept_from: int) -> None:
        """Says what is kept of what was taken here. The other end is told at once. While nothing is said, all is.

        Args:
            unkept_from: number of the first message that is not, nor are those after it; 0 for none.
        """
        before = self.kept
        self._unkept_from = unkept_from
        if self.kept > before:
            self._flush_soon()

    def attach(self, connection: Carrier, seen_there: int, kept_there: int | None = None) -> None:
        """Goes on over a new connection.

        Args:
            connection: on which both ends have proven themselves.
            seen_there: number of the last message that the other end has taken.
            kept_there: number of the last message that it has kept; None for an end that keeps what it takes.

        Raises:
            RendezvousProtocolError: it cannot have.
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
        """There is no connection any more; what is sent now waits for the next."""
        self._connection = None
        self._fresh = []
        for handle in (self._flushing, self._beat):
            if handle is not None:
                handle.cancel()
        self._flushing = self._beat = None

    def received(self, frame: Frame) -> None:
        """Takes the messages of a frame that have numbers.

        Raises:
            RendezvousProtocolError: one is missing, or the other end has seen what was not sent, or kept what it has
                not seen.
        """
        self._heard_at = self._loop.time()
        self._check(frame.seen, frame.kept)
        self._forget(frame.seen, frame.kept)
        if frame.first == 0:
            return
        if frame.first != self.seen + 1:
            raise RendezvousProtocolError(f"cannot take message {frame.first}: {self.seen + 1} comes next")
        for message in frame.messages:
            self.seen += 1
            self._taken_bytes += 64 + len(message.blob)
            self._take(message)
        if self._taken_bytes >= _SEEN_BYTES:
            self._flush_soon()

    def flush(self) -> None:
        """Writes what was sent in this turn of the loop."""
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
            raise RendezvousProtocolError(f"cannot have seen message {seen}: {self._last} was the last")
        if kept > seen:
            raise RendezvousProtocolError(f"cannot have kept message {kept}: {seen} was the last one seen")

    def _forget(self, seen: int, kept: int) -> None:
        """Forgets what is kept, and what need not be, once it is seen."""
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
