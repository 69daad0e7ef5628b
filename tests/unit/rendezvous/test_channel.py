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
from elastic_driver.rendezvous.frames import Frame, Message, messages_in
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually


class Wire:
    """A connection in memory: frames are kept until they are delivered, or lost."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def write(self, first: int, seen: int, kept: int, packed: list[bytes]) -> None:
        self.frames.append(Frame(first, seen, kept, tuple(messages_in(b"".join(packed)))))


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


@given(st.integers())
def test_of_what_is_sent_to_last_nothing_is_lost_with_an_end_that_dies(seed: int) -> None:
    """One end keeps what it takes some time later; connections break meanwhile; it dies, and another comes."""
    rng = random.Random(seed)

    class Keeper:
        """The end that dies: what it has kept outlives it."""

        def __init__(self, kept: list[int]) -> None:
            self.taken: list[int] = []
            self._kept = kept
            self._late: list[tuple[int, int]] = []  # numbers of messages, and what they say
            self.channel = Channel(self._take)

        def _take(self, message: Message) -> None:
            self.taken.append(message.fields["n"])
            self._late.append((self.channel.seen, self.taken[-1]))
            self.channel.keep(unkept_from=self._late[0][0])

        def keeps(self, many: int) -> None:
            self._kept += [what for _, what in self._late[:many]]
            del self._late[:many]
            self.channel.keep(unkept_from=self._late[0][0] if self._late else 0)

    async def play() -> None:
        kept: list[int] = []
        sent, lasting = 0, []
        agent, driver = Channel(lambda message: None), Keeper(kept)

        def connect() -> None:
            agent.detach()
            driver.channel.detach()
            wires.clear()
            wires.extend((Wire(), Wire()))
            # As they say hello and welcome.
            driver.channel.attach(wires[1], agent.seen)
            agent.attach(wires[0], driver.channel.seen, driver.channel.kept)

        wires: list[Wire] = []
        connect()
        for _ in range(80):
            match rng.randrange(7):
                case 0 | 1:
                    sent += 1
                    if lasts := rng.random() < 0.7:
                        lasting.append(sent)
                    agent.send(numbered(sent), lasts=lasts)
                case 2:
                    await asyncio.sleep(0)
                case 3 if wires[0].frames:
                    driver.channel.received(wires[0].frames.pop(0))
                case 4 if wires[1].frames:
                    agent.received(wires[1].frames.pop(0))
                case 5:
                    driver.keeps(rng.randrange(3))
                case 6 if rng.random() < 0.3:
                    connect()
                case 6 if rng.random() < 0.1:
                    again = [each.fields["n"] for each in agent.unkept()]
                    assert set(lasting) - set(kept) <= set(again)
                    assert again == sorted(again)
                    older, agent = agent, Channel(lambda message: None)
                    older.detach()
                    driver.channel.detach()
                    for message in older.unkept():
                        agent.send(message, lasts=True)
                    driver = Keeper(kept)
                    connect()
            assert driver.taken == sorted(set(driver.taken)), "each once, and in order"
        connect()
        agent.flush()
        for frame in wires[0].frames:
            driver.channel.received(frame)
        driver.keeps(1000)
        driver.channel.flush()
        for frame in wires[1].frames:
            agent.received(frame)
        assert set(kept) >= set(lasting)
        assert agent.unkept() == []
        assert (agent.unseen_bytes, agent.unkept_bytes) == (0, 0)
        agent.detach()
        driver.channel.detach()

    asyncio.run(play())


def test_what_is_kept_is_told_at_once() -> None:
    async def main(loop: VirtualLoop) -> None:
        channel, wire = Channel(lambda message: channel.keep(unkept_from=2)), Wire()
        channel.attach(wire, 0)
        channel.received(Frame(1, 0, 0, tuple(map(numbered, (1, 2, 3)))))
        await asyncio.sleep(2 * BEAT_S)
        assert (wire.frames[-1].seen, wire.frames[-1].kept) == (3, 1)
        wire.frames.clear()
        channel.keep(unkept_from=3)
        await asyncio.sleep(0.01)
        assert [(frame.seen, frame.kept) for frame in wire.frames] == [(3, 2)]
        channel.keep(unkept_from=3)
        await asyncio.sleep(0.01)
        assert len(wire.frames) == 1, "that is no news"
        channel.keep(unkept_from=0)
        await asyncio.sleep(0.01)
        assert wire.frames[-1].kept == 3
        channel.detach()

    run_virtually(main)


def test_what_does_not_last_is_forgotten_when_it_is_taken() -> None:
    async def play() -> None:
        calls: list[tuple[int, int]] = []
        channel = Channel(
            lambda message: None, on_seen=lambda: calls.append((channel.unseen_bytes, channel.unkept_bytes))
        )
        channel.attach(Wire(), 0)
        lasts = Message("m", {}, b"x" * 100)
        channel.send(lasts, lasts=True)
        channel.send(Message("n", {}, b"y" * 1000))
        assert channel.unkept() == [lasts]
        channel.received(Frame(0, 2, 0, ()))
        size = len(lasts.pack())
        assert calls == [(0, size)]
        assert channel.unkept() == [lasts]
        channel.received(Frame(0, 2, 1, ()))
        assert calls == [(0, size), (0, 0)]
        assert channel.unkept() == []
        channel.detach()

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
        channel.received(Frame(0, 1, 1, ()))
        assert channel.unseen_bytes == 0
        assert seen == [0]
        channel.detach()

    asyncio.run(play())


@pytest.mark.parametrize(
    "frame", [Frame(3, 0, 0, (numbered(3),)), Frame(1, 5, 0, ()), Frame(0, 1, 1, ()), Frame(0, 0, 1, ())]
)
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
