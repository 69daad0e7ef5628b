"""What a journal says: its form, and what a replay makes of it."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import pytest

from elastic_driver.codec import CodecError
from elastic_driver.core import document
from elastic_driver.core.events import (
    DrainRequested,
    EndJob,
    Report,
    StartWorker,
    StopWorker,
)
from elastic_driver.journal.entries import (
    Closed,
    Entry,
    JobFacts,
    Snapshot,
    Stepped,
    Took,
    decode,
    describe,
    encode,
    told,
)
from elastic_driver.journal.file import HEADER, RecordFile
from elastic_driver.journal.folder import JournalError
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.words import Ending
from tests.support.fakes.membership_job import Job, worker_id
from tests.support.forms import check_form

pytestmark = pytest.mark.unit

VERSION = HEADER.decode().split()[-1]
FORM = Path(__file__).parent / f"entries_version_{VERSION}.txt"
TOOK = Took(3, "1.2.3", "3.11.7", document.VERSION, "node1", "boot pid:[1] 12 34", 5.0, 100.0, 1e9)
FACTS = JobFacts("0123", ("python", "train.py", "\udcff", "x" * 4096), "/home/user")


def history() -> tuple[Job, list[Entry]]:
    """A job, and what its journal says: a snapshot in the middle, and the steps since."""
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1")
    entries: list[Entry] = [TOOK, Snapshot(job.now, FACTS, job.state)]
    for event in (DrainRequested("b", None, "as asked"), DrainRequested("b", None, "no", undo=True)):
        commands = job.feed(event)
        entries.append(Stepped(job.now, event, told(commands)))
    return job, entries


def put(folder: Path, *records: list[Entry]) -> None:
    file = RecordFile.new(folder, 1, encode(records[0]))
    for number, entries in enumerate(records[1:], 2):
        file.append(number, encode(entries))
    file.close()


def test_the_form_of_a_version_does_not_change() -> None:
    check_form(FORM, describe(), "the number in HEADER in journal/file.py")


def test_what_is_written_is_read() -> None:
    _, entries = history()
    assert list(decode(encode(entries))) == entries
    assert encode(entries)[:1] == b"\x01"
    closed = (Closed(1, "0123", 143),)
    assert encode(closed)[:1] == b"\x00"
    assert decode(encode(closed)) == closed


@pytest.mark.parametrize(
    "body", [b"", b"\x00", b"\x02[]", b"\x00{}", b"\x00[1]", b"\x01[]", b"\x01" + zlib.compress(b"[]")[:-1]]
)
def test_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        decode(body)


def test_a_body_that_swells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_driver.journal import entries

    monkeypatch.setattr(entries, "_MOST_BYTES", 1000)
    with pytest.raises(CodecError, match="another length"):
        decode(b"\x01" + zlib.compress(b"[" + b" " * 2000 + b"]"))


def test_another_version_is_refused_by_name_before_the_rest_is_read() -> None:
    other = json.loads(encode([dataclasses.replace(TOOK, core=document.VERSION + 1)])[1:])
    other[0]["a new field"] = 1
    with pytest.raises(CodecError, match=r"elastic_driver 1\.2\.3 has written it, whose jobs have the form"):
        decode(b"\x00" + json.dumps(other).encode())


def test_a_checksum_of_commands_is_of_who_is_told_what() -> None:
    stop = StopWorker(worker_id("a[0]"), "it is drained")
    assert told([stop]) == told([dataclasses.replace(stop, reason="otherwise", ending=Ending.PLANNED), Report("x")])
    others = [
        [],
        [stop, stop],
        [StopWorker(worker_id("a[1]"), "")],
        [StartWorker(worker_id("a[0]"), False)],
        [EndJob(1, "")],
        [EndJob(2, "")],
    ]
    assert len({told([stop]), *map(told, others)}) == 1 + len(others)


def test_a_replay_comes_to_the_same_state(tmp_path: Path) -> None:
    job, entries = history()
    put(tmp_path, entries[:2], *([each] for each in entries[2:]))
    found = read_job(tmp_path)
    assert isinstance(found, Recorded)
    assert (found.state, found.clock, found.took, found.job) == (job.state, job.now, TOOK, FACTS)
    assert [at for at, _ in found.events] == [job.now, job.now]


def test_a_version_that_decides_otherwise_is_refused(tmp_path: Path) -> None:
    _, entries = history()
    last = entries[-1]
    assert isinstance(last, Stepped)
    put(tmp_path, [*entries[:-1], dataclasses.replace(last, told=last.told + 1)])
    with pytest.raises(JournalError, match=r"at its event 2 this elastic_driver decides otherwise than .* 1\.2\.3"):
        read_job(tmp_path)


def test_what_there_is(tmp_path: Path) -> None:
    assert read_job(tmp_path) is None
    put(tmp_path, [Closed(4, "0123", 1)])
    assert read_job(tmp_path) == Closed(4, "0123", 1)
    _, entries = history()
    for wrong in ([TOOK], entries[1:], [*entries[:2], TOOK], [Closed(1, "0123", 0), TOOK]):
        put(tmp_path, list(wrong))
        with pytest.raises(JournalError, match="cannot read"):
            read_job(tmp_path)
