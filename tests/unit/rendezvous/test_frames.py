"""Frames and messages: what is written is read; what is none is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.agent_messages import (
    PROTOCOL,
    AgentMessage,
    Bootstrap,
    Dying,
    Heard,
    Hello,
    KillAll,
    Labels,
    Output,
    Ready,
    Reply,
    Start,
    Value,
    VitalsSeen,
    decoded,
    version_of,
    worker_named,
)
from elastic_driver.rendezvous.frames import Frame, FrameReader, Message, pack_frame
from elastic_driver.rendezvous.messages import NextRoundRequest, RoundAssignment
from elastic_driver.vitals import Traffic, Vitals, Waiting
from elastic_driver.words import Backend, ReadyCause

SAYINGS: tuple[AgentMessage, ...] = (
    Start("a[0]#0", ["python", "x.py"], {"A": "b", "ü": "ñ"}, "0", 3),
    KillAll(),
    Output("a[0]#0", "stderr", b"\0\xffline\n" * 3000),
    Dying("a[0]#0", None, "is dumping core", ["last", "words"]),
    Value(3, "scope", "0", b""),
)


def frames(*batches: tuple[AgentMessage, ...]) -> bytes:
    first, data = 1, b""
    for batch in batches:
        data += pack_frame(first, 7, 5, [each.message().pack() for each in batch])
        first += len(batch)
    return data


def read(data: bytes, sizes: random.Random | None = None) -> list[Frame]:
    reader, found, at = FrameReader(most=1 << 20), [], 0
    while at < len(data):
        size = len(data) if sizes is None else sizes.randint(1, 50)
        found += list(reader.feed(data[at : at + size]))
        at += size
    return found


@given(st.integers())
def test_what_is_written_is_read_whatever_the_pieces(seed: int) -> None:
    data = frames(SAYINGS[:2], (), (SAYINGS[0], *SAYINGS[3:]))
    found = read(data, random.Random(seed))
    assert [frame.first for frame in found] == [1, 3, 3]
    assert all((frame.seen, frame.kept) == (7, 5) for frame in found)
    assert [decoded(message) for frame in found for message in frame.messages] == [
        *SAYINGS[:2],
        SAYINGS[0],
        *SAYINGS[3:],
    ]


def test_every_message_travels() -> None:
    (frame,) = read(frames(SAYINGS))
    assert tuple(decoded(message) for message in frame.messages) == SAYINGS
    assert [type(decoded(message)) for message in frame.messages] == [type(each) for each in SAYINGS]


@given(st.binary(max_size=400))
def test_rubbish_is_refused_or_waited_for(data: bytes) -> None:
    reader = FrameReader(most=1 << 16)
    with contextlib.suppress(RendezvousProtocolError):
        for frame in reader.feed(data):
            assert len(data) >= 20 + sum(len(message.pack()) for message in frame.messages)


def test_a_frame_that_is_too_long_is_refused_at_its_head() -> None:
    with pytest.raises(RendezvousProtocolError, match="length"):
        list(FrameReader(most=1000).feed((1001).to_bytes(4, "big")))


@given(st.binary(max_size=200))
def test_a_body_that_is_no_messages_is_refused(body: bytes) -> None:
    with contextlib.suppress(RendezvousProtocolError):
        for frame in FrameReader().feed(pack_frame(1, 0, 0, [body])):
            for message in frame.messages:
                decoded(message)


@pytest.mark.parametrize(
    "message",
    [
        Message("no_such_message", {}),
        Message("start", {}),
        Message("kill_all", {"extra": 1}),
        Message("labels", {"labels": {"a": 1}}),
    ],
)
def test_messages_that_are_none(message: Message) -> None:
    with pytest.raises(RendezvousProtocolError):
        decoded(message)


@pytest.mark.parametrize("key", ["", "a", "a[0]", "a[x]#0", "a[0]#" + "9" * 5000])
def test_names_of_no_workers(key: str) -> None:
    with pytest.raises(RendezvousProtocolError):
        worker_named(key)


def test_a_bootstrap_is_one_line_and_one_word() -> None:
    given_ = Bootstrap(("https://[::1]:5",), "ticket ab", "cd", "host", labels=("spot",), fingerprint="ef", job="j")
    assert Bootstrap.from_json(given_.to_json()) == given_
    assert b"\n" not in given_.to_json()
    word = given_.to_word()
    assert Bootstrap.from_word(word) == given_
    assert word.replace("-", "").replace("_", "").isalnum()
    assert "cd" not in repr(given_)
    for rubbish in ("", "{", "bm8", "eyJhIjogMX0", word[:-9]):
        with pytest.raises(RendezvousProtocolError):
            Bootstrap.from_word(rubbish)


def test_a_hello_of_another_protocol_says_so_whatever_else_is_in_it() -> None:
    """Or nobody could be told that the versions differ."""
    hello = Hello("a", 99, "9.9", False, 0, "ab", "h", 0, "m", "b", 4, "py", 1, "o", "::1", [os.devnull])
    assert decoded(hello.message()) == hello
    other = Message("hello", {"protocol": 99, "version": "9.9" + "x" * 100, "news": {}})
    assert version_of(other) == f"elastic_driver 9.9{'x' * 37} (protocol 99)"
    for message in (Message("hello", {"protocol": PROTOCOL}), Message("hello", {}), Message("bye", {"protocol": 99})):
        assert version_of(message) == ""


def test_a_blob_stands_beside_the_fields() -> None:
    for message in (Message("kill_all", {}, b"x"), Message("output", {"worker": "a[0]#0", "stream": "stdout"}, b"x")):
        if message.name == "output":
            assert decoded(message) == Output("a[0]#0", "stdout", b"x")
        else:
            with pytest.raises(RendezvousProtocolError, match="unknown 'blob'"):
                decoded(message)


def test_variables_stand_for_bytes_and_other_texts_are_for_people() -> None:
    start = Start("a[0]#0", ["\udcff"], {"\udcff": "\udcff"}, "0", 3)
    assert decoded(start.message()) == start
    assert decoded(Labels({"a\ud800": "\ud800\u20ac"}).message()) == Labels({"a?": "?\u20ac"})


FULL = Vitals(
    at_s=12.5,
    pid=7,
    state="T",
    traced=True,
    pulse_s=0.125,
    rank=5,
    traffic=(Traffic("allreduce", 11, 12),),
    waiting=(Waiting("allreduce 'é'", 1.5, (0, 3)),),
    own_s=0.0625,
    awaits="a connection to 10.9.9.9:443",
)


def test_looks_at_workers_travel_as_rows() -> None:
    seen = VitalsSeen({"a[0]#0": FULL, "a[1]#0": Vitals(1.0, 2)})
    (frame,) = read(frames((seen,)))
    assert decoded(frame.messages[0]) == seen
    assert len(frame.messages[0].fields["workers"]["a[0]#0"]) == len(dataclasses.fields(Vitals))


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 1 << 53},
        {"cpu_s": float(1 << 60)},
        {"rank": -2},
        {"state": "TT"},
        {"traffic": (Traffic("x", 1, 1),) * 17},
        {"waiting": (Waiting("x", 1.0, (1,)),) * 17},
        {"waiting": (Waiting("x", 1.0, (1,) * 65),)},
        {"waiting": (Waiting("x" * 257, 1.0, (1,)),)},
    ],
)
def test_more_than_an_agent_says_is_refused(change: dict[str, Any]) -> None:
    seen = VitalsSeen({"a[0]#0": dataclasses.replace(FULL, **change)})
    with pytest.raises(RendezvousProtocolError, match=next(iter(change))):
        decoded(seen.message())


READY = Ready(NextRoundRequest(WorkerId("a", 0, 0), 3, 12, ReadyCause.START, "", (Backend.NATIVE,), 5))
PLACE = Reply("a[0]#0", RoundAssignment(1, SlotInfo(0, 2, 0, 2, 0, 1), sync=True, commits=0, backend=Backend.NATIVE))


@pytest.mark.parametrize(
    ("message", "change", "why"),
    [
        (READY, {"request": b""}, "request is not an object"),
        (READY, {"request": {}}, "request.worker is missing"),
        (READY, {"request": {"news": 1}}, "unknown 'news'"),
        (READY, {"request": {"commits": -1}}, "request.commits is not within"),
        (READY, {"worker": "a[0]#0"}, "unknown 'worker'"),
        (PLACE, {"reply": {"is": "Notice"}}, "unknown kind"),
        (PLACE, {"reply": None}, "unknown kind"),
        (Heard({"a[0]#0": (1, True)}, [], []), {"workers": {"a[0]#0": [1]}}, "not an array of 2"),
        (Heard({"a[0]#0": (1, True)}, [], []), {"workers": {"a[0]#0": [1, 1]}}, "not of type bool"),
    ],
)
def test_what_stands_in_a_message_is_read_as_strictly(message: AgentMessage, change: dict[str, Any], why: str) -> None:
    sent = message.message()
    assert decoded(sent) == message
    fields: dict[str, Any] = dict(sent.fields)
    for name, value in change.items():
        fields[name] = fields[name] | value if isinstance(value, dict) and value and name in fields else value
    with pytest.raises(RendezvousProtocolError, match=why):
        decoded(dataclasses.replace(sent, fields=fields))
