"""The words of the wire: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.entries import pack_entries, unpack_entries
from elastic_driver.rendezvous.messages import (
    DiscReport,
    DrainReply,
    JobOver,
    NextRoundRequest,
    Notice,
    Removed,
    RoundAssignment,
    RunningReport,
    WatchRequest,
    parse_next_round_reply,
)
from elastic_driver.words import Backend, NoticeKind, ReadyCause

pytestmark = pytest.mark.unit

WORKER = WorkerId("node-1.example", 3, 2)
READY = NextRoundRequest(
    WORKER,
    7,
    120,
    ReadyCause.INTERNAL_ERROR,
    "wörter",
    (Backend.NATIVE, Backend.TORCH),
    4711,
    0,
    12,
    "train.py:7",
    True,
    uncommitted_s=1.25,
)
ASSIGNMENT = RoundAssignment(
    8, SlotInfo(1, 4, 1, 2, 0, 2), sync=True, commits=120, backend=Backend.TORCH, address="10.0.0.2"
)
REQUESTS: list[tuple[Any, Any]] = [
    (NextRoundRequest.from_json, READY),
    (WatchRequest.from_json, WatchRequest(WORKER, 8, 3)),
    (WatchRequest.from_json, WatchRequest(WORKER, 8, 3, disc=DiscReport("id", "/d on a", -1, 7, "full", drivers=True))),
    (RunningReport.from_json, RunningReport(WORKER, 8, 120)),
    (RunningReport.from_json, RunningReport(WORKER, 8, 0, another=True)),
    (DrainReply.from_json, DrainReply(done=False, text="there is no host c")),
    (Notice.from_json, Notice(4, 8, NoticeKind.ABORT, "worker b[0] is gone")),
    (parse_next_round_reply, ASSIGNMENT),
    (parse_next_round_reply, Removed("host b was removed")),
    (parse_next_round_reply, JobOver("done")),
]
READERS = sorted({reader for reader, _ in REQUESTS}, key=lambda reader: str(reader.__qualname__))
IDS = [f"{type(value).__name__}" for _, value in REQUESTS]


@pytest.mark.parametrize(("reader", "value"), REQUESTS, ids=IDS)
def test_what_is_written_is_read_again(reader: Any, value: Any) -> None:
    assert reader(value.to_json()) == value


@pytest.mark.parametrize(("reader", "value"), REQUESTS, ids=IDS)
def test_each_field_is_needed_and_has_its_type(reader: Any, value: Any) -> None:
    data = json.loads(value.to_json())
    for name, good in data.items():
        others: list[Any] = [None, True, 1.5, 1, "\x00", [], {}, [[]], [None]]
        bad = [other for other in others if type(other) is not type(good) or (name, other) == ("backend", "\x00")]
        if name == "uncommitted_s":  # a whole number of seconds is one, too
            bad = [*(other for other in bad if other != 1 or other is True), -0.5, float("inf"), float("nan"), 10**400]
        for other in bad:
            if other == [] and isinstance(good, list):
                continue
            with pytest.raises(RendezvousProtocolError):
                reader(json.dumps(data | {name: other}).encode())
        rest = json.dumps({key: data[key] for key in data if key != name}).encode()
        if name == "uncommitted_s":  # who does not know of it has lost nothing that is known
            assert reader(rest).uncommitted_s == 0.0
            continue
        with pytest.raises(RendezvousProtocolError):
            reader(rest)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{}",
        b'{"worker": "a[0]#0"',
        b"[" * 100_000,
        b'{"pid": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__qualname__)
def test_rubbish_is_refused(reader: Any, body: bytes) -> None:
    with pytest.raises(RendezvousProtocolError):
        reader(body)


@pytest.mark.parametrize("key", ["", "a", "a[0]", "a[x]#0", "[0]#0", "a b[0]#0", "a[0]#0x", f"a[{'9' * 5000}]#0"])
def test_a_worker_has_its_form(key: str) -> None:
    with pytest.raises(RendezvousProtocolError):
        WatchRequest.from_json(json.dumps({"worker": key, "round_id": 1, "version": 0}).encode())


@pytest.mark.parametrize(
    "change", [{"after_round": -1}, {"commits": -1}, {"steps": -1}, {"cause": "boredom"}, {"backends": ["mpi"]}]
)
def test_ready_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(RendezvousProtocolError):
        NextRoundRequest.from_json(json.dumps(json.loads(READY.to_json()) | change).encode())


def test_detail_is_bounded_and_can_be_logged() -> None:
    data = json.loads(READY.to_json()) | {"detail": "\ud800" + "x" * 5000}
    detail = NextRoundRequest.from_json(json.dumps(data).encode()).detail
    assert len(detail) == 2000
    assert detail.encode() == b"?" + b"x" * 1999


@pytest.mark.parametrize(
    "slot", [[], [0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1, 2], [0, 1, 0, 1, 0, True], [0, 1, 0, 1, 0, "1"]]
)
def test_a_slot_has_six_integers(slot: list[Any]) -> None:
    with pytest.raises(RendezvousProtocolError):
        parse_next_round_reply(json.dumps(json.loads(ASSIGNMENT.to_json()) | {"slot": slot}).encode())


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RendezvousProtocolError, match="unknown kind 'party'"):
        parse_next_round_reply(b'{"kind": "party"}')


entries = st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=20), st.binary(max_size=50)), max_size=20)


@given(entries)
def test_entries_come_back(values: list[tuple[str, bytes]]) -> None:
    assert unpack_entries(pack_entries(values)) == values


@given(entries.filter(bool), st.data())
def test_entries_cut_short_or_too_long_are_refused(values: list[tuple[str, bytes]], data: st.DataObject) -> None:
    body = pack_entries(values)
    cut = data.draw(st.integers(0, len(body) - 1))
    for bad in (body[:cut], body + b"\0"):
        with pytest.raises(RendezvousProtocolError):
            unpack_entries(bad)


@given(st.binary(max_size=100))
def test_any_bytes_are_entries_or_refused(body: bytes) -> None:
    try:
        values = unpack_entries(body)
    except RendezvousProtocolError:
        return
    assert pack_entries(values) == body


def test_a_count_without_entries_costs_nothing() -> None:
    with pytest.raises(RendezvousProtocolError):
        unpack_entries(struct.pack("<I", 0xFFFFFFFF))


@pytest.mark.parametrize("disc", [["id"], ["id", "/d", "3", 7, "", True], [1, "/d", 3, 7, "", True], [None], [[]]])
def test_a_report_of_a_disc_that_is_none(disc: list[object]) -> None:
    data = json.loads(WatchRequest(WORKER, 8, 3).to_json())
    with pytest.raises(RendezvousProtocolError):
        WatchRequest.from_json(json.dumps(data | {"disc": disc}).encode())
