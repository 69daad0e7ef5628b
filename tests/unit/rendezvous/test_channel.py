"""A channel takes each message once and in order, over one connection after another, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.channel import BEAT_S, Channel, FrameConnection
from elastic_driver.rendezvous.frames import Frame, Message, _messages
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually


class Wire:
    """A connection in memory: frames are kept until they are delivered, or lost."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def write(self, first: int, seen: int, packed: list[bytes]) -> None:
        self.frames.append(Frame(first, seen, tuple(_messages(b"".join(packed)))))


def numbered(number: int) -> Message:
    return Message("m", {"n": number}, b"x" * (number % 7))


@given(st.integers())
def test_each_message_once_and_in_order_over_connections_that_break(seed: int) -> None:
    rng = random.Random(seed)

    async def play() -> None:
        taken: dict[str, list[int]] = {"a": [], "b": []}
        ends = {name: Channel(lambda message, name=name: taken[name].append(message.fields["n"])) for name in "ab"}
        wires: dict[str, Wire] = {}
        sent = {"a": 0, "b": 0}

        def connect() -> None:
            for name in "ab":
                ends[name].detach()
                wires[name] = Wire()
            ends["a"].attach(wires["a"], ends["b"].seen)
            ends["b"].attach(wires["b"], ends["a"].seen)

        def deliver(name: str) -> None:
            wire = wires[name]
            if wire.frames:
                ends["b" if name == "a" else "a"].received(wire.frames.pop(0))

        connect()
        for _ in range(60):
            name = rng.choice("ab")
            match rng.randrange(4):
                case 0:
                    sent[name] += 1
                    ends[name].send(numbered(sent[name]))
                case 1:
                    await asyncio.sleep(0)
                case 2:
                    deliver(name)
                case 3 if rng.random() < 0.3:
                    connect()
        connect()
        for name in "ab":
            ends[name].flush()
            while wires[name].frames:
                deliver(name)
        assert taken["b"] == list(range(1, sent["a"] + 1))
        assert taken["a"] == list(range(1, sent["b"] + 1))
        for end in ends.values():
            end.detach()

    asyncio.run(play())


def test_what_is_sent_in_one_turn_is_one_frame() -> None:
    async def play() -> None:
        channel, wire = Channel(lambda message: None), Wire()
        channel.attach(wire, 0)
        wire.frames.clear()
        for number in range(100):
            channel.send(numbered(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [len(frame.messages) for frame in wire.frames] == [100]
        channel.detach()

    asyncio.run(play())


def test_what_is_too_much_for_one_frame_goes_in_several() -> None:
    async def play() -> None:
        taken: list[int] = []
        wire = Wire()
        ours, theirs = Channel(lambda message: None), Channel(lambda message: taken.append(message.fields["n"]))
        for number in range(5):
            ours.send(Message("m", {"n": number}, bytes(600 << 10)))
        ours.attach(wire, 0)
        theirs.attach(Wire(), 0)
        for frame in wire.frames:
            theirs.received(frame)
        assert [len(frame.messages) for frame in wire.frames] == [2, 2, 1]
        assert taken == [0, 1, 2, 3, 4]
        ours.detach()
        theirs.detach()

    asyncio.run(play())


def test_what_is_not_seen_is_counted_until_it_is() -> None:
    async def play() -> None:
        seen: list[int] = []
        channel = Channel(lambda message: None, on_seen=lambda: seen.append(channel.unseen_bytes))
        channel.send(Message("m", {}, b"x" * 1000))
        channel.attach(Wire(), 0)
        assert channel.unseen_bytes > 1000
        channel.received(Frame(0, 1, ()))
        assert channel.unseen_bytes == 0
        assert seen == [0]
        channel.detach()

    asyncio.run(play())


@pytest.mark.parametrize("frame", [Frame(3, 0, (numbered(3),)), Frame(1, 5, ()), Frame(0, 1, ())])
def test_what_cannot_be_is_refused(frame: Frame) -> None:
    async def play() -> None:
        channel = Channel(lambda message: None)
        channel.attach(Wire(), 0)
        try:
            with pytest.raises(RendezvousProtocolError):
                channel.received(frame)
        finally:
            channel.detach()

    asyncio.run(play())


def test_an_end_that_has_seen_the_future_is_no_peer() -> None:
    async def play() -> None:
        with pytest.raises(RendezvousProtocolError):
            Channel(lambda message: None).attach(Wire(), 1)

    asyncio.run(play())


def test_each_end_says_that_it_lives_for_as_long_as_the_other_does() -> None:
    async def play() -> None:
        channel, wire = Channel(lambda message: None), Wire()
        channel.attach(wire, 0)
        before = len(wire.frames)
        await asyncio.sleep(3 * BEAT_S)
        assert len(wire.frames) > before
        channel.detach()

    asyncio.run(play())


class Socket:
    """What the kernel tells of a connection: whatever the test says. Acknowledgements come all the time."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.in_flight = self.sacked = self.arrived = 0

    def setsockopt(self, *option: int) -> None:
        """As a socket's."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        words = [0] * 24
        words[4:6] = self.in_flight, self.sacked
        return (bytes(8) + struct.pack("=24I3Q", *words, 0, 0, self.arrived) + bytes(64))[:size]


class Transport(asyncio.Transport):
    """Of a connection without a network."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.kept

    def __init__(self, kept: Socket) -> None:
        super().__init__()
        self.kept = kept


def test_what_is_sent_and_does_not_arrive_counts_though_the_other_end_is_heard() -> None:
    async def main(loop: VirtualLoop) -> None:
        kept = Socket()
        connection = FrameConnection(on_frame=lambda _: None, on_lost=lambda _: None)
        connection.connection_made(Transport(kept))

        async def passes(looks: int) -> float:
            for _ in range(looks):
                await asyncio.sleep(0.5)
                connection.unheard_s  # noqa: B018
            return connection.unheard_s

        assert await passes(10) == 0
        kept.in_flight = 3
        assert await passes(4) == 2.0
        kept.arrived = 100  # some of it
        assert await passes(1) == 0
        assert await passes(2) == 1.0
        kept.sacked = 1  # what was sent later
        assert await passes(1) == 0
        assert await passes(2) == 1.0
        # What waits for the other end's buffers is not on the way.
        kept.in_flight = 0
        assert await passes(20) == 0
        # Who was stopped has not looked.
        kept.in_flight = 1
        assert await passes(2) == 1.0
        loop.stand_still(100)
        assert await passes(1) == 2.0

    run_virtually(main)
