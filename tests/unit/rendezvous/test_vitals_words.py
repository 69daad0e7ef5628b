"""Looks at workers on the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.vitals_words import vitals_from_json, vitals_to_json
from elastic_driver.vitals import Traffic, Vitals, Waiting

pytestmark = pytest.mark.unit

FULL = Vitals(
    at_s=12.5,
    pid=7,
    state="T",
    traced=True,
    cpu_s=1.25,
    io_bytes=2,
    rss_bytes=3,
    pulse_s=0.125,
    round_id=4,
    rank=5,
    steps=6,
    submitted=7,
    finished=8,
    waits_s=0.5,
    waited_s=9.5,
    commits=10,
    committed_s=0.25,
    traffic=(Traffic("allreduce", 11, 12),),
    waiting=(Waiting("allreduce 'é'", 1.5, (0, 3)),),
    can_dump=True,
    own_s=0.0625,
    wakes=9,
    awaits="a connection to 10.9.9.9:443",
    peer="10.9.9.9",
)


def test_what_is_sent_arrives() -> None:
    looks = {"a[0]#0": FULL, "a[1]#0": Vitals(1.0, 2)}
    assert vitals_from_json(vitals_to_json(looks)) == looks


def test_an_agent_of_an_earlier_version_says_less() -> None:
    (row,) = json.loads(vitals_to_json({"a": FULL})).values()
    (read,) = vitals_from_json(json.dumps({"a": row[:-3]}).encode()).values()
    assert read == replace(FULL, wakes=0, awaits="", peer="")


@pytest.mark.parametrize("place", range(21))
@pytest.mark.parametrize("wrong", [-2, 1 << 60, "x" * 300, [[]], {"a": 1}, float("nan"), float("inf")])
def test_each_field_is_checked(place: int, wrong: Any) -> None:
    (row,) = json.loads(vitals_to_json({"a": FULL})).values()
    row[place] = wrong
    with pytest.raises(RendezvousProtocolError, match="cannot read message vitals"):
        vitals_from_json(json.dumps({"a": row}).encode())


@pytest.mark.parametrize("rows", [[], {"a": []}, {"a": None}, {"a": [1] * 20}, {"a": [1] * 21}, {"a": [1] * 22}])
def test_other_shapes_are_refused(rows: Any) -> None:
    with pytest.raises(RendezvousProtocolError):
        vitals_from_json(json.dumps(rows).encode())


def test_more_than_any_agent_says_is_refused() -> None:
    (row,) = json.loads(vitals_to_json({"a": FULL})).values()
    for place, rows in ((17, [["allreduce", 1, 1]] * 17), (18, [["x", 1.0, [1]]] * 17), (18, [["x", 1.0, [1] * 65]])):
        with pytest.raises(RendezvousProtocolError):
            vitals_from_json(json.dumps({"a": [*row[:place], rows, *row[place + 1 :]]}).encode())


def test_texts_can_be_written() -> None:
    (row,) = json.loads(vitals_to_json({"a": FULL})).values()
    row[18] = [["\ud800", 1.0, [1]]]
    read = vitals_from_json(json.dumps({"a": row}).encode())
    assert read["a"].waiting[0].name == "?"


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_rubbish_is_refused(data: bytes) -> None:
    try:
        vitals_from_json(data)
    except RendezvousProtocolError:
        return
    assert json.loads(data) == {}
