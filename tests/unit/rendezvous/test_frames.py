"""Frames and messages: what is written is read; what is not the peer's, or not the next, is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.agent_messages import (
    Bootstrap,
    Dying,
    Hello,
    KillAll,
    Labels,
    Output,
    Said,
    Start,
    Value,
    said,
    worker_named,
)
from elastic_driver.rendezvous.agreement import Agreement
from elastic_driver.rendezvous.frames import Frame, FrameReader, FrameWriter, Message
from elastic_driver.rendezvous.proof import Session

KEY = bytes(range(32))
SAYINGS: tuple[Said, ...] = (
    Start("a[0]#0", ["python", "x.py"], {"A": "b", "ü": "ñ"}, "0", 3),
    KillAll(),
    Output("a[0]#0", "stderr", b"\0\xffline\n" * 3000),
    Dying("a[0]#0", None, "dumps its core", ["last", "words"]),
    Value(3, "scope", "0", b""),
)


def frames(*batches: tuple[Said, ...], key: bytes = KEY) -> bytes:
    writer, first, data = FrameWriter(key), 1, b""
    for batch in batches:
        data += writer.frame(first, 7, [each.message().pack() for each in batch])
        first += len(batch)
    return data


def read(data: bytes, sizes: random.Random | None = None, key: bytes = KEY) -> list[Frame]:
    reader, found, at = FrameReader(key, most=1 << 20), [], 0
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
    assert all(frame.seen == 7 for frame in found)
    assert [said(message) for frame in found for message in frame.messages] == [*SAYINGS[:2], SAYINGS[0], *SAYINGS[3:]]


def test_every_message_travels() -> None:
    (frame,) = read(frames(SAYINGS))
    assert tuple(said(message) for message in frame.messages) == SAYINGS
    assert [type(said(message)) for message in frame.messages] == [type(each) for each in SAYINGS]


def test_nothing_can_be_read_on_the_way() -> None:
    data = frames((Start("a[0]#0", ["x"], {"PASSWORD": "hunter2"}, "0", 0),))
    assert b"hunter2" not in data
    assert b"PASSWORD" not in data


@pytest.mark.parametrize("at", [0, 4, 11, 12, 19, 20, 40, -1])
def test_a_changed_byte_is_refused(at: int) -> None:
    data = bytearray(frames(SAYINGS))
    data[at] ^= 1
    data += bytes(1 << 16)  # in case the length has grown
    with pytest.raises(RendezvousProtocolError):
        read(bytes(data))


def test_no_frame_is_taken_twice_left_out_or_sent_back() -> None:
    session = Session(KEY, "agent 1", "a", "b")
    up, down = session.frames(up=True), session.frames(up=False)
    one = FrameWriter(up).frame(1, 0, [])
    assert list(FrameReader(up).feed(one))
    reader = FrameReader(up)
    list(reader.feed(one))
    with pytest.raises(RendezvousProtocolError):
        list(reader.feed(one))
    with pytest.raises(RendezvousProtocolError):
        list(FrameReader(down).feed(one))
    writer = FrameWriter(up)
    writer.frame(1, 0, [])
    with pytest.raises(RendezvousProtocolError):
        list(FrameReader(up).feed(writer.frame(2, 0, [])))
    assert session.frames(up=True, secret=bytes(32)) != up


@given(st.binary(max_size=400))
def test_rubbish_is_refused_or_waited_for(data: bytes) -> None:
    reader = FrameReader(KEY, most=1 << 16)
    with contextlib.suppress(RendezvousProtocolError):
        assert list(reader.feed(data)) == []


def test_a_frame_that_is_too_long_is_refused_at_its_head() -> None:
    with pytest.raises(RendezvousProtocolError, match="length"):
        list(FrameReader(KEY, most=1000).feed((1001).to_bytes(4, "big")))


@given(st.binary(max_size=200))
def test_a_body_that_is_no_messages_is_refused(body: bytes) -> None:
    writer = FrameWriter(KEY)
    with contextlib.suppress(RendezvousProtocolError):
        for frame in FrameReader(KEY).feed(writer.frame(1, 0, [body])):
            for message in frame.messages:
                said(message)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([each.message() for each in SAYINGS]), st.data())
def test_a_wrong_field_is_refused(message: Message, data: st.DataObject) -> None:
    fields = dict(message.fields)
    name = data.draw(st.sampled_from([*fields, "another"]))
    fields[name] = data.draw(values)
    changed = Message(message.name, fields, message.blob)
    try:
        assert said(changed).message().fields == changed.fields
    except RendezvousProtocolError:
        return


@pytest.mark.parametrize(
    "message",
    [
        Message("no_such_message", {}),
        Message("start", {}),
        Message("kill_all", {"extra": 1}),
        Message("stop", {"worker": "a[0]#0", "grace_s": True}),
        Message("dying", {"worker": "a[0]#0", "returncode": 1.5, "how": "", "last_lines": []}),
        Message("labels", {"labels": {"a": 1}}),
    ],
)
def test_messages_that_are_none(message: Message) -> None:
    with pytest.raises(RendezvousProtocolError):
        said(message)


@pytest.mark.parametrize("key", ["", "a", "a[0]", "a[x]#0", "a[0]#" + "9" * 5000])
def test_names_of_no_workers(key: str) -> None:
    with pytest.raises(RendezvousProtocolError):
        worker_named(key)


def test_a_bootstrap_is_one_line_and_one_word() -> None:
    given_ = Bootstrap(("http://[::1]:5",), "ticket ab", "cd", "host", labels=("spot",), fingerprint="ef", job="j")
    assert Bootstrap.from_json(given_.to_json()) == given_
    assert b"\n" not in given_.to_json()
    word = given_.to_word()
    assert Bootstrap.from_word(word) == given_
    assert word.replace("-", "").replace("_", "").isalnum()
    assert "cd" not in repr(given_)
    for rubbish in ("", "{", "bm8", "eyJhIjogMX0", word[:-9]):
        with pytest.raises(RendezvousProtocolError):
            Bootstrap.from_word(rubbish)


def test_both_ends_agree_and_nobody_else() -> None:
    one, other, third = Agreement(), Agreement(), Agreement()
    agreed = one.with_(other.public)
    assert agreed == other.with_(one.public)
    assert agreed.secret != agreed.again
    assert agreed != third.with_(one.public)
    for rubbish in ("", "zz", "00", "00" * 32):
        with pytest.raises(RendezvousProtocolError):
            one.with_(rubbish)


def test_a_hello_of_another_protocol_can_still_be_read() -> None:
    """Or nobody could be told that the versions differ."""
    hello = Hello("a", 99, "9.9", False, 0, "", "h", 0, "m", "b", 4, "py", 1, "o", "::1", [os.devnull])
    assert said(hello.message()) == hello


def test_a_hello_without_labels_is_one_that_others_can_read_too() -> None:
    hello = Hello("a", 1, "1", False, 0, "", "h", 2, "m", "b", 4, "py", 1, "o", "::1", [])
    assert "labels" not in hello.message().fields
    labelled = dataclasses.replace(hello, labels="rack=1 spot")
    assert labelled.message().fields["labels"] == "rack=1 spot"
    assert (said(hello.message()).labels, said(labelled.message())) == ("", labelled)  # type: ignore[attr-defined]
    wrong = labelled.message()
    wrong.fields["labels"] = ["rack=1"]
    with pytest.raises(RendezvousProtocolError, match="field 'labels' is missing or wrong"):
        said(wrong)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400, 2**53])
def test_a_number_that_is_none_is_no_message(number: float) -> None:
    """An event log can hold none of them."""
    with pytest.raises(RendezvousProtocolError, match="field 'took_s' is missing or wrong"):
        said(Message("warmed", {"pid": 1, "took_s": number}))


def test_texts_for_people_are_made_sound_and_others_left_as_they_are() -> None:
    half = Message("labels", {"labels": {"a\ud800": "\ud800\u20ac"}})
    assert said(half) == Labels({"a\ud800": "\ud800\u20ac"})
    assert said(half, sound=True) == Labels({"a?": "?\u20ac"})
