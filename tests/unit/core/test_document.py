"""The state as a document: strict to read, and of a form that only changes with its version."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.core import document
from elastic_driver.core.cuts import Accused, Accuser, Cuts
from elastic_driver.core.document import (
    VERSION,
    DocumentError,
    describe,
    read,
    read_command,
    read_event,
    write,
    write_command,
    write_event,
)
from elastic_driver.core.events import DiscoveryFailed, DrainRequested, EndJob, HostSilent
from elastic_driver.core.membership import explain, next_deadline
from elastic_driver.core.roster import Roster
from elastic_driver.core.state import JobPhase
from tests.support.fakes.membership_job import Job, worker_id
from tests.support.forms import check_form

pytestmark = pytest.mark.unit

FORM = Path(__file__).parent / f"document_version_{VERSION}.txt"


def busy() -> Job:
    """A job with something in every value of its state."""
    job = Job(num_proc=3, min_num_proc=1, max_num_proc=3, cooldown_range_s=(10.0, 60.0), reset_window_s=100.0)
    job.train("a:1", "b:1", "c:1", commits=2)
    job.exit("c[0]", 1, at=5.0, draw=0.5, error="ValueError: x", where="train.py:3")
    job.ready("a[0]", commits=3)
    job.ready("b[0]", commits=3)
    job.feed(DrainRequested("b", 0, "as asked"))
    job.feed(DrainRequested("a", None, "as asked"))
    job.feed(DiscoveryFailed("the script failed"), at=6.0)
    job.exit("b[0]", 1, at=7.0)
    job.feed(HostSilent("a", 5.0))
    accusers = Roster([Accuser(worker_id("a[0]"), (Accused(worker_id("b[0]"), 1),))])
    assert job.state.reset is not None
    job.state = replace(
        job.state,
        cuts=Cuts().leave_out(("c",), job.now).pause(job.now, (2.0, 60.0)),
        reset=replace(job.state.reset, accusers=accusers),
    )
    assert job.state.phase is JobPhase.RESETTING
    return job


def written() -> Any:
    job = busy()
    return json.loads(json.dumps(write(job.state, job.now)))


def test_it_comes_back_as_it_was() -> None:
    job = busy()
    assert read(written(), job.now) == job.state


def test_times_are_those_of_the_readers_clock() -> None:
    job = busy()
    state = read(written(), 1000.0)
    before = next_deadline(job.state)
    assert before is not None
    assert next_deadline(state) == before - job.now + 1000.0
    assert explain(state, 1000.0) == explain(job.state, job.now)
    # Who knows that it was away for four seconds reads at a time so much earlier.
    assert next_deadline(read(written(), 996.0)) == before - job.now + 996.0


def test_the_form_of_a_version_does_not_change() -> None:
    """A change of the state's classes is a change of the document."""
    check_form(FORM, describe(), "VERSION in core/document.py")


def test_events_and_commands_are_written_with_the_version() -> None:
    event, command = HostSilent("a", 5.0), EndJob(3, "too few slots")
    assert read_event(json.loads(json.dumps(write_event(event, 1.0))), 9.0) == event
    assert read_command(json.loads(json.dumps(write_command(command, 1.0))), 9.0) == command
    with pytest.raises(
        DocumentError, match="cannot read the event of a job: the document has other fields than version"
    ):
        read_event(write_command(command, 1.0), 1.0)
    with pytest.raises(DocumentError, match=r"event\.silent_s is not a finite number: 'x'"):
        read_event({"version": VERSION, "event": {"is": "HostSilent", "hostname": "a", "silent_s": "x"}}, 1.0)
    with pytest.raises(DocumentError, match="command is of the unknown kind 'HostSilent'"):
        read_command({"version": VERSION, "command": {"is": "HostSilent"}}, 1.0)


def test_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(DocumentError, match=rf"version {VERSION + 1}, from a newer elastic_driver"):
        read({**written(), "version": VERSION + 1, "what": "is not known yet"}, 0.0)


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = written()
    monkeypatch.setattr(document, "VERSION", VERSION + 1)
    with pytest.raises(DocumentError, match=rf"version {VERSION}; this elastic_driver reads version {VERSION + 1}"):
        read(old, 0.0)


@pytest.mark.parametrize("data", [None, [], {}, {"state": {}}, {"version": True}, {"version": "1"}, {"version": 0}])
def test_no_document(data: object) -> None:
    with pytest.raises(DocumentError, match="not a versioned document"):
        read(data, 0.0)


def change(data: Any, path: str, value: object) -> None:
    """Sets what stands at a path, or removes it when the value is ``...``."""
    *way, last = path.split(".")
    for key in way:
        data = data[int(key)] if isinstance(data, list) else data[key]
    key = int(last) if isinstance(data, list) else last
    if value is ...:
        del data[key]
    else:
        data[key] = value


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("state", ..., "has other fields than version and that"),
        ("more", 1, "has other fields than version and that"),
        ("state.workers.0.phase", "asleep", r"state\.workers\[0\]\.phase is not one of booting, ready.*: 'asleep'"),
        ("state.round", ..., r"state\.round is missing"),
        ("state.policy.num_proc_multiple", 0, "a multiple is below 1"),
        ("state.policy.ranks_per_host_multiple", -2, "a multiple is below 1"),
        ("state.round.round_id", 0, "cannot read the state of a job"),
        ("state.round.members", ["a[0]#0", "a[0]#0"], "a member twice"),
    ],
)
def test_what_is_not_of_the_form_is_refused_and_the_message_says_where(path: str, value: object, why: str) -> None:
    data = copy.deepcopy(written())
    change(data, path, value)
    with pytest.raises(DocumentError, match=why):
        read(data, 0.0)


def test_a_worker_twice_is_refused() -> None:
    data = written()
    data["state"]["workers"].append(data["state"]["workers"][0])
    with pytest.raises(DocumentError, match=r"state\.workers has an item twice"):
        read(data, 0.0)
