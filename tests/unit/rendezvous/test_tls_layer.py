"""The TLS layer over a transport that is none, against OpenSSL's client without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_driver.rendezvous.certificate import Certificate, client_context, server_context
from elastic_driver.rendezvous.server.connection import Connection
from elastic_driver.rendezvous.server.peer_connection import ServerLimits, has_hung_up, has_unread
from elastic_driver.rendezvous.tls import TlsLayer, TlsTransport, Turns
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually
from tests.support.network.tls_client import TlsClient

CERTIFICATE = Certificate.new()
CONTEXT = server_context(CERTIFICATE)
PIECE, A_TURN = 4096, 8


class Wire(asyncio.Transport):
    """The plain transport of an end: keeps what is written. ``takes`` is whether the system takes it."""

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.out = bytearray()
        self.takes = True
        self.kept = 0
        self.high = 1 << 16
        self.reads = True
        self.closing = self.aborted = self.is_gone = False
        self.is_full = False
        self.socket: socket.socket | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self.socket
        return ("192.0.2.1", 7) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.kept

    def write(self, data: Any) -> None:
        assert not self.closing
        self.out += data
        if not self.takes:
            self.kept += len(data)
            if self.kept > self.high and not self.is_full:
                self.is_full = True
                self.protocol.pause_writing()

    def drain(self) -> None:
        self.kept = 0
        if self.is_full:
            self.is_full = False
            self.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True


class Above(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.got = bytearray()
        self.keeps_open = False
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.transport: TlsTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsTransport)
        self.transport = transport
        self.told.append("made")

    def data_received(self, data: bytes) -> None:
        self.got += data
        self.on_data(data)

    def eof_received(self) -> bool:
        self.told.append("eof")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told += ["lost", type(exc)]


class End:
    """A layer between a wire and a protocol; a server's, unless its context is a client's."""

    def __init__(
        self, turns: Turns | None = None, *, handshake_s: float = 60.0, context: ssl.SSLContext = CONTEXT
    ) -> None:
        self.above = Above()
        self.shaken: list[type] = []
        self.turns = turns or Turns()
        self.layer = TlsLayer(
            context,
            lambda: self.above,
            self.turns,
            handshake_s=handshake_s,
            server_side=context is CONTEXT,
            on_shaken=lambda error: self.shaken.append(type(error)),
        )
        self.wire = Wire(self.layer)
        self.layer.connection_made(self.wire)

    def read(self, data: bytes) -> bytes:
        """As a loop's transport reads once; gives what is left."""
        room = self.layer.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        self.layer.buffer_updated(count)
        return data[count:]

    async def feed(self, data: bytes) -> None:
        """As a loop reads all of it."""
        while data and not self.wire.closing:
            if self.wire.reads:
                data = self.read(data)
            else:
                await asyncio.sleep(0)
        await idle()

    def eof(self) -> None:
        if not self.wire.closing and not self.layer.eof_received():
            self.wire.close()

    def lose(self) -> None:
        if not self.wire.is_gone:
            self.wire.is_gone = self.wire.closing = True
            self.layer.connection_lost(None)

    def sent(self) -> bytes:
        data, self.wire.out = bytes(self.wire.out), bytearray()
        return data

    async def shake(self, client: TlsClient) -> None:
        await self.feed(client.take())
        await self.feed(client.take(self.sent()))
        assert self.above.told == ["made"]
        assert self.shaken == [type(None)]


async def idle() -> None:
    """Lets the loop have the few turns that a piece takes."""
    for _ in range(3):
        await asyncio.sleep(0)


def looping(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test in a loop of its own, where nothing goes wrong that nobody looks at."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        noise: list[object] = []

        async def inside() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
            await test(**arguments)

        asyncio.run(inside())
        assert noise == []

    return run


@looping
async def test_any_split_of_what_a_client_sends_says_the_same() -> None:
    probe = End()
    client = TlsClient()
    hello = client.take()
    await probe.feed(hello)
    rest = client.take(probe.sent()) + client.say(b"words") + client.end()
    for first in range(1, len(hello), 11):
        await split(first, None)
    for second in range(1, len(rest)):
        await split(None, second)


async def split(in_first: int | None, in_second: int | None) -> None:
    end, client = End(), TlsClient()
    hello = client.take()
    await end.feed(hello[:in_first])
    await end.feed(hello[in_first:] if in_first else b"")
    rest = client.take(end.sent()) + client.say(b"words") + client.end()
    await end.feed(rest[:in_second])
    await end.feed(rest[in_second:] if in_second else b"")
    assert (bytes(end.above.got), end.above.told) == (b"words", ["made", "eof"])
    client.take(end.sent())
    assert client.ended
    end.lose()
    assert end.above.told == ["made", "eof", "lost", type(None)]


@looping
async def test_byte_for_byte_too() -> None:
    end, client = End(), TlsClient()
    for flight in (client.take(), None, client):
        data = flight if isinstance(flight, bytes) else client.take(end.sent())
        if flight is client:
            data += client.say(b"words")
        for index in range(len(data)):
            await end.feed(data[index : index + 1])
    assert bytes(end.above.got) == b"words"


@looping
async def test_any_cut_is_told_once_and_is_no_end() -> None:
    client = TlsClient()
    end = End()
    hello = client.take()
    await end.feed(hello)
    size = len(client.take(end.sent()) + client.say(b"words"))
    for cut in (*range(0, len(hello), 23), *range(len(hello), len(hello) + size + 1)):
        client, end = TlsClient(), End()
        hello = client.take()
        await end.feed(hello[:cut])
        rest = client.take(end.sent()) + client.say(b"words") if cut >= len(hello) else b""
        await end.feed(rest[: cut - len(hello)] if cut > len(hello) else b"")
        end.eof()
        await idle()
        assert end.wire.closing
        end.lose()
        if end.above.told:
            assert end.shaken == [type(None)]
            assert end.above.told == ["made", "lost", ConnectionResetError]
            assert bytes(end.above.got) in (b"", b"words")
        else:
            assert end.shaken == [ConnectionResetError]


@looping
async def test_any_changed_byte_is_told_once_and_hands_over_nothing() -> None:
    for place in range(0, 140, 3):
        client, end = TlsClient(), End()
        await end.feed(client.take())
        rest = bytearray(client.take(end.sent()) + client.say(b"words"))
        if place >= len(rest):
            break
        rest[place] ^= 1
        await end.feed(bytes(rest))
        end.eof()
        end.lose()
        assert bytes(end.above.got) == b""
        assert end.above.told.count("lost") == end.above.told.count("made")
        assert len(end.shaken) == 1


@looping
async def test_what_came_before_rubbish_is_handed_over() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    await end.feed(client.say(b"words") + b"\x17\x03\x03\x00\x20" + bytes(32) + client.say(b"more"))
    assert bytes(end.above.got) == b"words"
    assert end.wire.closing
    assert not end.wire.aborted, "it is told why"
    with pytest.raises(ssl.SSLError, match=r"(?i)bad.record.mac"):
        client.take(end.sent())
    end.lose()
    assert end.above.told == ["made", "lost", ssl.SSLError]


@looping
async def test_a_handshake_has_a_limit() -> None:
    end = End(handshake_s=0.0)
    await end.feed(TlsClient().take()[:5])
    while not end.wire.aborted:
        await asyncio.sleep(0)
    end.lose()
    assert (end.shaken, end.above.told) == ([TimeoutError], [])


def test_of_a_handshake_that_is_over_nobody_is_late() -> None:
    async def main(loop: VirtualLoop) -> None:
        end = End(handshake_s=10.0)
        await end.shake(TlsClient())
        await asyncio.sleep(11.0)
        assert not end.wire.aborted
        end.lose()

    run_virtually(main)


@looping
async def test_who_waits_for_its_turn_is_not_late() -> None:
    turns = Turns()
    ends = [End(turns, handshake_s=0.0) for _ in range(10 * A_TURN)]
    for end in ends:
        end.read(TlsClient().take())
    while not all(end.wire.out or end.wire.aborted for end in ends):
        await asyncio.sleep(0)
    assert all(end.wire.out for end in ends)
    while not all(end.wire.aborted for end in ends):
        await asyncio.sleep(0)
    for end in ends:
        end.lose()


@looping
async def test_nor_is_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    end, client = End(), TlsClient()
    connection = Connection(Mock(limits=ServerLimits(), web=None))
    monkeypatch.setattr(end, "above", connection)
    later = asyncio.get_running_loop().time() + 3600
    await end.feed(client.take())
    await end.feed(client.take(end.sent()))
    end.read(client.say(b"GET / HTTP/1.1\r\n"))
    connection.check_time(later)
    client.take(end.sent())
    assert not client.ended
    await idle()
    connection.check_time(later)
    client.take(end.sent())
    assert client.got.startswith(b"HTTP/1.1 408 ")


@looping
async def test_strangers_are_read_from_in_small_pieces_and_wait_for_their_turns() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    assert len(end.layer.get_buffer(-1)) == PIECE
    rest = end.read(client.say(b"x" * 9000))
    assert not end.wire.reads
    assert not end.above.got, "not in the turn in which it came"
    await idle()
    assert end.wire.reads
    await end.feed(rest)
    assert bytes(end.above.got) == b"x" * 9000
    end.above.transport.trust()
    assert len(end.layer.get_buffer(-1)) == 256 << 10
    assert end.read(client.say(b"y" * 9000)) == b""
    assert end.above.got.endswith(b"y"), "at once"


@looping
async def test_all_strangers_together_get_few_pieces_a_turn_and_neither_kind_starves() -> None:
    turns = Turns()
    shaken, clients = [End(turns) for _ in range(20)], [TlsClient() for _ in range(20)]
    for end, client in zip(shaken, clients, strict=True):
        await end.shake(client)
    fresh = [End(turns) for _ in range(20)]
    for end in fresh:
        end.read(TlsClient().take())
    for end, client in zip(shaken, clients, strict=True):
        end.read(client.say(b"words"))
    counts = []
    for _ in range(5):
        await asyncio.sleep(0)
        counts.append((sum(bool(end.wire.out) for end in fresh), sum(bool(end.above.got) for end in shaken)))
    assert counts == [(4, 4), (8, 8), (12, 12), (16, 16), (20, 20)]


@looping
async def test_a_handshake_that_has_begun_is_ended_before_others_begin() -> None:
    """Else a driver that is slow with each would have begun all of them, and ended none, when their peers give up."""
    turns, done = Turns(), []
    ends, clients = [End(turns) for _ in range(5 * A_TURN)], [TlsClient() for _ in range(5 * A_TURN)]
    for end, client in zip(ends, clients, strict=True):
        end.read(client.take())
    while len(done) < len(ends):
        await asyncio.sleep(0)
        for end, client in zip(ends, clients, strict=True):
            if end.wire.out and not end.layer.waits:
                end.read(client.take(end.sent()))
            if end.above.told and end not in done:
                done.append(end)
        begun = sum(end.layer._pieces > 0 for end in ends)
        assert begun - len(done) <= 2 * A_TURN
    assert done == ends, "in the order in which they came"


@looping
async def test_who_has_hung_up_before_its_handshake_began_has_none() -> None:
    turns = Turns()
    ends = [End(turns) for _ in range(5 * A_TURN)]
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        for end in ends:
            far = sockets.enter_context(socket.create_connection(listening.getsockname()))
            end.wire.socket = sockets.enter_context(listening.accept()[0])
            far.sendall(b"more than was read")
            end.read(TlsClient().take())
            if end is not ends[-1]:
                far.close()
        await asyncio.sleep(0)
        assert ends[-1].wire.out, "as if it had been the first"
        for end in ends[:-1]:
            assert end.wire.aborted
            end.lose()
            assert end.shaken == [ConnectionResetError]


@looping
async def test_who_floods_after_its_handshake_waits_for_those_who_prove_themselves() -> None:
    turns = Turns()
    others, clients = [End(turns) for _ in range(A_TURN)], [TlsClient() for _ in range(A_TURN)]
    for end, client in zip(others, clients, strict=True):
        await end.shake(client)
        while end.layer.is_new:
            await end.feed(client.say(b"x"))
        end.above.got.clear()
    fresh, quiet = End(turns), TlsClient()
    await fresh.shake(quiet)
    for end, client in zip(others, clients, strict=True):
        end.read(client.say(b"flood"))
    fresh.read(quiet.say(b"answer"))
    await asyncio.sleep(0)
    assert fresh.above.got
    assert sum(bool(end.above.got) for end in others) == A_TURN - 1


@looping
async def test_who_is_gone_has_no_turn() -> None:
    turns = Turns()
    ends = [End(turns) for _ in range(5 * A_TURN)]
    for end in ends:
        end.read(TlsClient().take())
    for end in ends[:-1]:
        end.layer.abort()
        end.lose()
    await asyncio.sleep(0)
    assert ends[-1].wire.out


@looping
async def test_what_waits_of_a_peer_shields_it_for_its_first_turns_only() -> None:
    """The oldest strangers are cut where there are too many, unless it is the loop that has not come to them."""
    end, client = End(), TlsClient()
    near, far = socket.socketpair()
    with near, far:
        end.wire.socket = near
        end.read(client.take())
        assert has_unread(end.layer.transport), "though the kernel has nothing of it"
        await idle()
        assert not has_unread(end.layer.transport)
        far.send(b"x")
        assert has_unread(end.layer.transport)
        far.send(b"x")
        await end.feed(client.take(end.sent()))
        while end.layer.is_new:
            await end.feed(client.say(b"x"))
        end.read(client.say(b"x"))
        assert not has_unread(end.layer.transport)


@looping
async def test_who_does_not_read_is_not_shielded_by_what_nobody_reads_of_it() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    near, far = socket.socketpair()
    with near, far:
        end.wire.socket = near
        end.wire.takes = False
        end.above.transport.write(b"x" * 100_000)
        far.send(b"x")
        assert not end.wire.reads
        assert not has_unread(end.layer.transport)
        end.wire.drain()
        assert has_unread(end.layer.transport)


@looping
async def test_one_that_has_hung_up_is_known_by_that_before_all_it_sent_is_read() -> None:
    end = End()
    near, far = socket.socketpair()
    with near, far:
        end.wire.socket = near
        far.send(b"x")
        assert not has_hung_up(end.layer.transport)
        far.close()
        assert has_hung_up(end.layer.transport)
    assert has_hung_up(end.layer.transport), "its socket is closed here"
    assert has_hung_up(None)


def test_a_flood_of_key_updates_takes_a_piece_a_turn(tmp_path: Path) -> None:
    @looping
    async def run() -> None:
        turns = Turns()
        flooding, client = End(turns), TlsClient(tmp_path / "keys")
        await flooding.shake(client)
        other, quiet = End(turns), TlsClient()
        await other.shake(quiet)
        flood = client.key_updates(1000) + client.forged(b"behind")
        rest, pieces = flooding.read(flood), 1
        while rest:
            other.read(quiet.say(b"x"))
            assert other.wire.reads is False
            await asyncio.sleep(0)
            assert len(other.above.got) == pieces, "answered in each turn"
            assert flooding.wire.reads
            rest, pieces = flooding.read(rest), pieces + 1
        await idle()
        assert bytes(flooding.above.got) == b"behind"
        assert pieces == -(-len(flood) // PIECE)
        client.take(flooding.sent())

    run()


def test_who_floods_and_does_not_read_is_not_read_from(tmp_path: Path) -> None:
    @looping
    async def run() -> None:
        end, client = End(), TlsClient(tmp_path / "keys")
        await end.shake(client)
        end.wire.takes = False
        rest = client.key_updates(5000)
        while end.wire.reads and rest:
            rest = end.read(rest)
            await idle()
        assert end.wire.kept < (64 << 10) + 2 * PIECE
        assert rest
        assert end.above.told == ["made", "pause"]
        end.wire.drain()
        assert end.wire.reads
        assert end.above.told == ["made", "pause", "resume"]

    run()


def test_what_is_written_amid_a_message_of_tls_waits_for_its_rest(tmp_path: Path) -> None:
    @looping
    async def run() -> None:
        end, client = End(), TlsClient(tmp_path / "keys")
        await end.shake(client)
        end.above.transport.trust()
        first, second = client.pieces()
        await end.feed(first)
        end.above.transport.write(b"answer" * 10_000)
        assert not end.wire.closing
        assert end.above.transport.get_write_buffer_size() == 60_000
        await end.feed(second)
        client.take(end.sent())
        assert bytes(client.got) == b"answer" * 10_000
        assert end.above.transport.get_write_buffer_size() == 0
        await end.feed(client.pieces()[0])
        end.above.transport.write(b"answer")
        end.above.transport.close()
        assert end.wire.aborted, "nobody waits for that rest"

    run()


@looping
async def test_what_the_socket_does_not_take_is_not_encrypted() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    transport = end.above.transport
    client.take(end.sent())
    end.wire.takes = False
    whole = bytes(range(256)) * 8000
    transport.write(whole[:1000])
    transport.writelines([whole[1000:500_000], memoryview(whole[500_000:])])
    assert end.above.told == ["made", "pause"]
    assert end.wire.kept < 256 << 10
    assert transport.get_write_buffer_size() >= len(whole)
    client.take(end.sent())
    turns = 0
    while len(client.got) < len(whole):
        end.wire.drain()
        client.take(end.sent())
        turns += 1
    assert bytes(client.got) == whole
    assert turns > 10
    end.wire.drain()
    assert end.above.told == ["made", *["pause", "resume"] * (end.above.told.count("pause"))]
    assert transport.get_write_buffer_size() == 0


@looping
async def test_what_is_changed_after_it_was_written_goes_as_it_was() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    end.wire.takes = False
    data = bytearray(b"a" * 500_000)
    end.above.transport.write(data)
    data[:] = b"b" * len(data)
    while len(client.got) < len(data):
        end.wire.drain()
        client.take(end.sent())
    assert set(client.got) == {ord("a")}


@looping
@pytest.mark.parametrize("trusted", [False, True])
async def test_reading_can_be_paused(trusted: bool) -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    transport = end.above.transport
    if trusted:
        transport.trust()
    transport.pause_reading()
    assert not transport.is_reading()
    assert not end.wire.reads
    transport.resume_reading()
    assert end.wire.reads
    end.above.on_data = lambda _: transport.pause_reading()
    await end.feed(client.say(b"one"))
    assert not end.wire.reads
    end.read(client.say(b"two"))  # what a loop had read already
    await idle()
    assert bytes(end.above.got) == b"one"
    transport.resume_reading()
    await idle()
    assert bytes(end.above.got) == b"onetwo"
    assert not end.wire.reads, "paused again"


@looping
async def test_what_was_read_at_once_stops_where_the_protocol_pauses_and_goes_on_where_it_stopped() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    transport = end.above.transport
    transport.trust()
    end.above.on_data = lambda _: transport.pause_reading()
    # Records that no piece handed over ends with: the rest of one stays inside OpenSSL.
    whole = b"".join(client.say(b"x" * size) for size in (10_000, 16_384) * 3)
    assert end.read(whole) == b""
    sizes = [len(end.above.got)]
    while len(end.above.got) < 79_152:
        assert not end.wire.reads
        transport.resume_reading()
        await idle()
        sizes.append(len(end.above.got))
    assert sizes == [65_536, 79_152]


@looping
async def test_reading_can_be_paused_as_soon_as_hands_are_shaken() -> None:
    end, client = End(), TlsClient()
    made = end.above.connection_made

    def pause(transport: asyncio.BaseTransport) -> None:
        made(transport)
        end.above.transport.pause_reading()

    end.above.connection_made = pause  # type: ignore[method-assign]
    await end.feed(client.take())
    end.read(client.take(end.sent()) + client.say(b"early"))
    await idle()
    assert (end.above.told, bytes(end.above.got)) == (["made"], b"")
    end.above.transport.resume_reading()
    await idle()
    assert bytes(end.above.got) == b"early"


@looping
async def test_who_is_told_to_pause_may_cut_or_close() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    end.wire.takes = False
    end.above.pause_writing = lambda: end.above.transport.abort()  # type: ignore[method-assign]
    end.above.transport.write(b"x" * 500_000)
    assert end.wire.aborted, "and nothing was written after it"

    end, client = End(), TlsClient()
    await end.shake(client)
    end.wire.takes = False
    end.above.pause_writing = lambda: end.above.transport.close()  # type: ignore[method-assign]
    end.above.transport.write(b"x" * 500_000)
    while not end.wire.closing:
        end.wire.drain()
    client.take(end.sent())
    assert (len(client.got), client.ended) == (500_000, True)


@looping
async def test_an_end_that_is_written_amid_what_was_read_loses_nothing_of_it() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    transport = end.above.transport
    transport.trust()
    end.above.keeps_open = True
    end.above.on_data = lambda _: transport.write_eof()
    assert end.read(b"".join(client.say(b"x" * size) for size in (10_000, 16_384) * 3)) == b""
    assert len(end.above.got) == 79_152
    assert not end.wire.closing
    client.take(end.sent())
    assert client.ended


@looping
async def test_close_comes_behind_what_was_written() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    end.above.transport.trust()
    end.wire.takes = False
    end.above.transport.write(b"x" * 500_000)
    end.above.transport.close()
    assert end.above.transport.is_closing()
    assert not end.wire.closing
    end.above.transport.write(b"too late")
    await end.feed(client.say(b"nobody reads this"))
    while not end.wire.closing:
        end.wire.drain()
    client.take(end.sent())
    assert (bytes(client.got), client.ended) == (b"x" * 500_000, True)
    assert not end.wire.aborted
    assert not end.above.got
    end.lose()
    assert end.above.told[-2:] == ["lost", type(None)]


@looping
async def test_abort_says_nothing_more() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    end.wire.takes = False
    end.above.transport.write(b"x" * 500_000)
    end.above.transport.abort()
    assert end.wire.aborted
    assert end.above.transport.get_write_buffer_size() == end.wire.kept
    end.lose()
    assert end.above.told[-2:] == ["lost", type(None)]


@looping
async def test_each_direction_ends_by_itself() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    end.above.keeps_open = True
    assert end.above.transport.can_write_eof()
    end.above.transport.write(b"last")
    end.above.transport.write_eof()
    with pytest.raises(RuntimeError, match="write_eof"):
        end.above.transport.write(b"more")
    client.take(end.sent())
    assert (bytes(client.got), client.ended) == (b"last", True)
    await end.feed(client.say(b"heard"))
    assert bytes(end.above.got) == b"heard"
    await end.feed(client.end())
    assert end.above.told == ["made", "eof"]
    assert not end.wire.closing
    end.above.transport.close()
    assert end.wire.closing

    end, client = End(), TlsClient()
    await end.shake(client)
    end.above.keeps_open = True
    await end.feed(client.end())
    end.eof()
    assert not end.wire.closing
    end.above.transport.write(b"still")
    client.take(end.sent())
    assert bytes(client.got) == b"still"


@looping
async def test_the_end_of_who_asks_for_no_half_is_answered() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    await end.feed(client.end())
    assert end.wire.closing
    client.take(end.sent())
    assert client.ended


@looping
async def test_a_client_s_layer_speaks_first_and_shows_what_it_was_shown() -> None:
    client, server = End(context=client_context()), End()
    for _ in range(4):
        await server.feed(client.sent())
        await client.feed(server.sent())
    assert client.above.told == server.above.told == ["made"]
    shown = client.above.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert sha256(shown).hexdigest() == CERTIFICATE.fingerprint
    client.above.transport.write(b"there")
    server.above.transport.write(b"back")
    await server.feed(client.sent())
    await client.feed(server.sent())
    assert (bytes(server.above.got), bytes(client.above.got)) == (b"there", b"back")


@looping
async def test_a_client_is_told_of_an_end_that_speaks_no_tls() -> None:
    client = End(context=client_context())
    await client.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert client.wire.closing
    client.lose()
    assert (client.shaken, client.above.told) == ([ssl.SSLError], [])


@looping
async def test_what_is_known_of_a_connection() -> None:
    end, client = End(), TlsClient()
    await end.shake(client)
    transport = end.above.transport
    assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    assert transport.get_extra_info("sslcontext") is CONTEXT
    assert transport.get_extra_info("cipher")[1] == "TLSv1.3"
    assert transport.get_extra_info("peercert") is None
    assert transport.get_extra_info("peername") == ("192.0.2.1", 7)
    assert transport.get_extra_info("other", 5) == 5
    following = Above()
    transport.set_protocol(following)
    assert transport.get_protocol() is following
    await end.feed(client.say(b"words"))
    assert bytes(following.got) == b"words"


@looping
@pytest.mark.parametrize("rubbish", [b"", b"GET / HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize("shakes", [False, True])
async def test_openssl_s_memory_goes_with_the_connection(shakes: bool, rubbish: bytes) -> None:
    end, client = End(), TlsClient()
    await end.feed(client.take())
    if shakes:
        await end.feed(client.take(end.sent()))
    await end.feed(rubbish)
    if shakes:
        end.above.transport.pause_reading()
    held = weakref.ref(end.layer.object)
    end.eof()
    end.lose()
    assert held() is None, "without a garbage collector"
    if shakes:
        end.above.transport.resume_reading()
        end.above.transport.write(b"late")
        end.above.transport.close()
        end.above.transport.abort()
        assert end.above.transport.get_extra_info("ssl_object") is None
        assert end.above.told == ["made", "lost", ssl.SSLError if rubbish else ConnectionResetError]


def test_a_protocol_that_fails_loses_its_connection_and_no_other() -> None:
    noise: list[dict[str, Any]] = []

    def fail(data: bytes) -> None:
        raise ValueError(data)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        turns = Turns()
        ends, clients = [End(turns) for _ in range(3)], [TlsClient() for _ in range(3)]
        for end, client in zip(ends, clients, strict=True):
            await end.shake(client)
        ends[1].above.on_data = fail
        for end, client in zip(ends, clients, strict=True):
            end.read(client.say(b"words"))
        await idle()
        assert [bytes(end.above.got) for end in ends] == [b"words"] * 3
        assert [end.wire.aborted for end in ends] == [False, True, False]
        ends[1].lose()
        assert ends[1].above.told == ["made", "lost", ValueError]

    asyncio.run(run())
    assert [type(context["exception"]) for context in noise] == [ValueError]


@looping
async def test_what_was_read_in_vain_leaves_no_garbage() -> None:
    """Most reads of a stream end amid a record. A circle of each would keep what was handed over with it."""
    end, client = End(), TlsClient()
    await end.shake(client)
    end.above.transport.trust()
    record = client.say(b"x" * 16_000)
    gc.collect()
    gc.disable()
    try:
        for start in range(0, len(record), 100):
            end.read(record[start : start + 100])
        assert len(end.above.got) == 16_000
        assert gc.collect() == 0
    finally:
        gc.enable()
