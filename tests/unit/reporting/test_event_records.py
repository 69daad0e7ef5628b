"""Each event is as its schema says, and docs/events.md says what the schema says.

``REWRITE_EVENTS=1`` writes the tables of docs/events.md anew; review the difference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from elastic_driver.core.standing import JobActivity
from elastic_driver.core.state import JobPhase
from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.sampler import Sampled
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.reporting.event_records import FORMAT, line_of, records_of
from elastic_driver.reporting.happenings import (
    ChiefEnded,
    ChiefStarted,
    ChiefStopped,
    DiscoveryRan,
    DiskReported,
    FirstFailure,
    Happening,
    HostLost,
    HostReady,
    HostsChanged,
    HostUnready,
    InternalError,
    JobEnded,
    JobStarted,
    LinkMeasured,
    LogCut,
    Member,
    MomentPassed,
    NetworkChecked,
    NoticeGiven,
    PhaseChanged,
    ProcessDying,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    ServerAnswers,
    Status,
    StoodStill,
    Summary,
    TimeBooked,
    TookOver,
    Warmed,
    WorkerDismissed,
    WorkerHung,
    WorkersDrained,
    WorkersReady,
    WorkersStopped,
    WorkerTimeBooked,
)
from elastic_driver.reporting.instant import Instant
from elastic_driver.version import __version__
from elastic_driver.words import Backend, NoticeKind, OnChange
from tests.support.fakes.event_schema import complaints, schema

pytestmark = [pytest.mark.unit]

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/events.md"
A, B = WorkerId("a", 0, 0), WorkerId("b", 1, 2)
INSTANT = Instant()
# They come all the while: no events.
SILENT = {Status, MomentPassed, DiscoveryRan, DiskReported}
# One of each kind at least, and of those with something that may be absent both.
EXAMPLES: list[Happening] = [
    Status("training"),
    MomentPassed(),
    DiscoveryRan(0.1, failed=True),
    DiskReported("f", "/f", 1, 2, ""),
    JobStarted("http://127.0.0.1:1", "77"),
    HostsChanged([Host("a", 2), Host("b", 1, ("rack=r1",))]),
    HostsChanged([]),
    HostReady("a", "10.0.0.1", 0),
    HostUnready("a", "no route to host", permanent=False),
    HostLost("a", "nothing was heard"),
    NetworkChecked(["a"], {"b": "no"}, ["c"], [LinkMeasured(("a", "b"), 0.001, 1e8)], ["slow"], 0.25),
    ProcessStarted(A, 7),
    ServerAnswers(A, 0, "10.0.0.1:1"),
    ServerAnswers(B, None, "10.0.0.1:1"),
    ChiefStarted(1, 7, 2, 3),
    ChiefStopped("a server is lost"),
    ChiefEnded(1, 7, -15, "killed by SIGTERM", expected=True),
    Warmed(7, 1.5),
    ProcessDying(A, 7, "killed by SIGKILL"),
    ProcessEnded(A, 7, "0", 1, "exited with code 1", expected=False, foretold=True),
    WorkersStopped([(A, "it goes"), (B, "it goes")]),
    WorkerHung(A, "no heartbeat"),
    WorkerSuspected(A, 0, "awaited", "why", "allreduce 'x'", "Thread", ["t.py:1 in f"], 6.0, 5.0, "least", 60.0, 0),
    WorkerSuspected(A, None, "stopped", "why", "", "", [], 2.0, 2.0, "fixed", None, 3),
    WorkerCleared(A, 0, "it goes on", 7.5),
    StragglerFound(A, 0, 0.13, 0.1, 0.77, 0.8, 20),
    StragglerGone(A, 0, "it is as fast as the others", 60.0),
    PhaseChanged(JobPhase.RUNNING, JobActivity.TRAINING, OnChange.IN_PLACE),
    WorkersReady([A, B]),
    WorkersDrained([A], undone=False),
    StoodStill(6.5),
    StoodStill(6.5, 0.5, trained=True),
    Stalled(6.0, [A]),
    StallEnded(9.0, [], resumed=True),
    TookOver(2, 1.4, 32, 4, 7, trained=True, pids={A: 7}),
    TimeBooked({"training": 9.0, "start": 1.0}, 10.0, 0.9),
    WorkerTimeBooked(A, {"training": 9.0}, 9.0),
    WorkerDismissed(A, "its host has gone"),
    *(NoticeGiven(1, kind, "b lost") for kind in NoticeKind if kind is not NoticeKind.NONE),
    RoundFormed(1, 0, "start", 0, True, Backend.NATIVE, 1.5, [Member(0, A, 7), Member(1, B, None)], reinit=False),
    RoundFormed(2, 2, "host b added", 0, False, None, 1.5, [], reinit=False),
    RoundResumed(1, 5, 0.25),
    RoundResumed(1, None, 5.25, 5.0),
    Remark("oh", warning=True),
    LogCut(20_971_520),
    FirstFailure(A, 0, "exited with code 1", ["a line"], [B]),
    FirstFailure(A, None, "exited with code 1", [], []),
    InternalError("Traceback", ["event"]),
    Sampled(2.5, 0.25, 7.9, 1 << 30, 0.9, 1 << 33, 8, {"loss": 0.31, "accuracy": None}),
    Sampled(),
    JobEnded(0, "done", Summary()),
]


def events_of(happening: Happening) -> list[dict[str, Any]]:
    return [json.loads(line_of(record, INSTANT)) for record in records_of(happening)]


def test_each_kind_of_happening_has_an_example_here() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(Happening))


def test_a_log_says_which_version_has_written_it() -> None:
    [started] = events_of(JobStarted("http://127.0.0.1:1", "77"))
    assert started["version"] == __version__


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(schema())
    assert [rule["then"]["$ref"] for rule in schema()["allOf"]] == [f"#/$defs/{name}" for name in schema()["$defs"]]
    assert schema()["$defs"]["job_started"]["properties"]["format"]["const"] == FORMAT


def test_each_event_is_as_documented_and_each_documented_one_exists() -> None:
    told: set[str] = set()
    for example in EXAMPLES:
        events = events_of(example)
        assert bool(events) == (type(example) not in SILENT), example
        assert complaints(events) == []
        for event in events:
            Draft202012Validator(schema()).validate(event)
        told |= {event["event"] for event in events}
    assert told == set(schema()["$defs"])


@pytest.mark.parametrize(
    "event",
    [
        {"time": 1.0, "at_s": 0.5, "event": "unheard_of"},
        {"time": 1.0, "at_s": 0.5, "event": "host_lost", "host": "a"},
        {"time": 1.0, "at_s": 0.5, "event": "host_lost", "host": "a", "reason": 7},
        {"time": 1.0, "at_s": 0.5, "event": "host_lost", "host": "a", "reason": "b", "more": 1},
        {"event": "host_lost", "host": "a", "reason": "b"},
        {"time": 1.0, "at_s": 0.5, "event": "round_formed"},
    ],
)
def test_what_is_not_documented_is_complained_of(event: dict[str, Any]) -> None:
    assert complaints([event])


@pytest.mark.parametrize(
    ("event", "is_valid"),
    [
        ({"time": 1.0, "at_s": 0.5, "event": "unheard_of"}, True),
        ({"time": 1.0, "at_s": 0.5, "event": "host_lost", "host": "a", "reason": "b", "more": 1}, True),
        ({"time": 1.0, "at_s": 0.5, "event": "host_lost", "host": "a"}, False),
        ({"time": "1", "event": "unheard_of"}, False),
    ],
)
def test_programs_bear_what_is_new(event: dict[str, Any], is_valid: bool) -> None:
    assert Draft202012Validator(schema()).is_valid(event) == is_valid


def _type(described: dict[str, Any]) -> str:
    kinds = described["type"] if isinstance(described["type"], list) else [described["type"]]
    names = [{"array": "list", "boolean": "true or false", "object": "object"}.get(kind, kind) for kind in kinds]
    items = described.get("items", {}).get("type")
    return " or ".join(names) + (f" of {items}s" if items else "")


def _tables() -> str:
    parts = []
    for name, event in schema()["$defs"].items():
        parts += [f"### {name}", event["description"], "", "| field | type | |", "|---|---|---|"]
        for key, field in event["properties"].items():
            optional = "" if key in event["required"] else ", or absent"
            parts.append(f"| `{key}` | {_type(field)}{optional} | {field['description']} |")
        parts.append("")
    return "\n".join(parts)


def test_the_document_says_what_the_schema_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    pattern = re.compile(r"(?<=^## All events\n\n).*", re.M | re.S)
    if os.environ.get("REWRITE_EVENTS"):
        DOCUMENT.write_text(pattern.sub(lambda _: _tables(), text), encoding="utf-8")
        return
    found = pattern.search(text)
    assert found
    assert found[0] == _tables(), "REWRITE_EVENTS=1 writes it anew"
