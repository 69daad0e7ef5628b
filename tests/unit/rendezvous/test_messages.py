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
    DiskReport,
    DrainHostRequest,
    DrainReply,
    JobOver,
    NextRoundRequest,
    Notice,
    Removed,
    RoundAssignment,
    RunningReport,
    WatchRequest,
    parse_json,
    parse_next_round_reply,
)
from elastic_driver.version import __version__
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
    (WatchRequest.from_json, WatchRequest(WORKER, 8, 3, disk=DiskReport("id", "/d on a", -1, 7, "full", drivers=True))),
    (RunningReport.from_json, RunningReport(WORKER, 8, 120)),
    (RunningReport.from_json, RunningReport(WORKER, 8, 0, another=True)),
    (DrainHostRequest.from_json, DrainHostRequest("b", undo=False, within_s=90.0)),
    (DrainReply.from_json, DrainReply(done=False, text="there is no host c")),
    (Notice.from_json, Notice(4, 8, NoticeKind.ABORT, "worker b[0] is gone")),
    (parse_next_round_reply, ASSIGNMENT),
    (parse_next_round_reply, Removed("host b was removed")),
    (parse_next_round_reply, JobOver("done")),
]
IDS = [f"{type(value).__name__}" for _, value in REQUESTS]


@pytest.mark.parametrize(("reader", "value"), REQUESTS, ids=IDS)
def test_what_is_written_is_read_again(reader: Any, value: Any) -> None:
    assert reader(value.to_json()) == value


@pytest.mark.parametrize(
    "change",
    [
        {"after_round": -1},
        {"commits": -1},
        {"steps": -1},
        {"unreachable": [-1]},
        {"uncommitted_s": -0.5},
        {"cause": "boredom"},
        {"backends": ["mpi"]},
        {"worker": "a[0]"},
    ],
)
def test_ready_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(RendezvousProtocolError, match=f"cannot read message: NextRoundRequest.{next(iter(change))}"):
        NextRoundRequest.from_json(json.dumps(json.loads(READY.to_json()) | change).encode())


def test_a_program_need_not_say_when_a_drained_host_is_gone() -> None:
    """See docs/notices.md."""
    assert DrainHostRequest.from_json(b'{"hostname": "a", "undo": false}') == DrainHostRequest("a", undo=False)


@pytest.mark.parametrize("change", [{"news": 1}, {"steps": None}])
def test_who_speaks_another_versions_words_is_told_so(change: dict[str, Any]) -> None:
    data = json.loads(READY.to_json()) | change
    with pytest.raises(
        RendezvousProtocolError, match=f"this end runs elastic_driver {__version__}, and both ends must run"
    ):
        NextRoundRequest.from_json(json.dumps(data).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_rubbish_is_refused(body: bytes) -> None:
    for read in (parse_next_round_reply, WatchRequest.from_json, parse_json):
        if (read, body) != (parse_json, b"{}"):
            with pytest.raises(RendezvousProtocolError, match="cannot read message: "):
                read(body)


def test_detail_is_bounded_and_can_be_logged() -> None:
    data = json.loads(READY.to_json()) | {"detail": "\ud800" + "x" * 5000}
    detail = NextRoundRequest.from_json(json.dumps(data).encode()).detail
    assert len(detail) == 2000
    assert detail.encode() == b"?" + b"x" * 1999


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
