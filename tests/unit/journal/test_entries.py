"""What a journal says: its form, and what a replay makes of it."""

from __future__ import annotations

import dataclasses
import json
import time
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
    WorkerDying,
    WorkerReady,
    WorkerRunning,
)
from elastic_driver.core.standing import JobActivity
from elastic_driver.journal.entries import (
    BooksKept,
    Closed,
    Dropped,
    Entry,
    FactTable,
    Kept,
    Snapshot,
    Stepped,
    Took,
    decode,
    describe,
    encode,
    encode_first,
    told,
)
from elastic_driver.journal.file import HEADER, RecordFile, has_job
from elastic_driver.journal.folder import JOURNAL, JournalError
from elastic_driver.journal.past import Recorded, away_s, read_job
from elastic_driver.launch.fleet.kept import LeaverKept
from elastic_driver.rendezvous.agent_messages import PROTOCOL
from elastic_driver.reporting.goodput import GoodputKept
from elastic_driver.system.process_name import boot_id
from elastic_driver.words import Backend, Ending, ReadyCause
from tests.support.fakes.job_facts import SECRET, a_took, all_kinds, job_of_one
from tests.support.fakes.membership_job import Job, worker_id
from tests.support.forms import check_form

pytestmark = pytest.mark.unit

VERSION = HEADER.decode().split()[-1]
FORM = Path(__file__).parent / f"entries_version_{VERSION}.txt"
TOOK = a_took(version="1.2.3", epoch=3, clock=5.0)
FACTS = job_of_one()


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
    with pytest.raises(CodecError, match="its length is wrong"):
        decode(b"\x01" + zlib.compress(b"[" + b" " * 2000 + b"]"))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"core": document.VERSION + 1}, "whose jobs have format"),
        ({"protocol": PROTOCOL - 1}, "agents speak protocol"),
    ],
)
def test_another_version_is_refused_by_name_before_the_rest_is_read(other: dict[str, int], why: str) -> None:
    written = json.loads(encode([dataclasses.replace(TOOK, **other)])[1:])  # type: ignore[arg-type]
    written[0]["a new field"] = 1
    with pytest.raises(CodecError, match=rf"elastic_driver 1\.2\.3 wrote it, .*{why}"):
        decode(b"\x00" + json.dumps(written).encode())


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


@pytest.mark.parametrize("heard", [None, 0, 1, 2], ids=lambda heard: f"{heard}")
def test_a_replay_finds_the_turns_that_the_books_do_not_have(tmp_path: Path, heard: int | None) -> None:
    """A member dies, and the other goes on in a round of its own: three steps."""
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1")
    began, times = job.now, []
    entries: list[Entry] = [TOOK, Snapshot(began, FACTS, job.state)]
    worker = worker_id("a[0]")
    for event in (
        WorkerDying(worker_id("b[0]"), -9, "killed by SIGKILL", 0.5),
        WorkerReady(worker, 1, 0, ReadyCause.INTERNAL_ERROR, "", (Backend.NATIVE,), uncommitted_s=1.5),
        WorkerRunning(worker, 2, 0),
    ):
        job.now += 1.0
        commands = job.feed(event)
        entries.append(Stepped(job.now, event, told(commands)))
        times.append(job.now)
    (books,) = (fact for fact in all_kinds() if isinstance(fact, BooksKept))
    at = None if heard is None else times[heard]
    books = dataclasses.replace(books, clock=job.now, goodput=GoodputKept.of_new(), heard=at)
    put(tmp_path, [*entries, Kept(books)])
    found = read_job(tmp_path)
    assert isinstance(found, Recorded)
    told_of = [(turned.at, turned.standing.doing, turned.rounds) for turned in found.turns]
    all_turns = [
        (began, JobActivity.TRAINING, ()),
        (times[0], JobActivity.FORMING, ()),
        (times[1], JobActivity.FORMING, (0.5,)),
        (times[2], JobActivity.TRAINING, ()),
    ]
    assert told_of == (all_turns if heard is None else all_turns[heard + 2 :])

    put(tmp_path, [*entries, Kept(dataclasses.replace(books, goodput=None))])
    found = read_job(tmp_path)
    assert isinstance(found, Recorded)
    assert len(found.turns) == len(all_turns), "they are in no book"


def test_a_version_that_decides_otherwise_is_refused(tmp_path: Path) -> None:
    _, entries = history()
    last = entries[-1]
    assert isinstance(last, Stepped)
    put(tmp_path, [*entries[:-1], dataclasses.replace(last, told=last.told + 1)])
    with pytest.raises(JournalError, match=r"at event 2, this elastic_driver decides differently than .* 1\.2\.3"):
        read_job(tmp_path)


def test_whether_there_is_a_job_is_seen_at_a_glance(tmp_path: Path) -> None:
    assert not has_job(tmp_path)
    put(tmp_path, [Closed(4, "0123", 1)])
    assert not has_job(tmp_path)
    put(tmp_path, history()[1])
    assert has_job(tmp_path)
    (tmp_path / JOURNAL).write_bytes(b"")
    assert not has_job(tmp_path)
    assert not has_job(tmp_path / JOURNAL)


def test_what_there_is(tmp_path: Path) -> None:
    assert read_job(tmp_path) is None
    put(tmp_path, [Closed(4, "0123", 1)])
    assert read_job(tmp_path) == Closed(4, "0123", 1)
    _, entries = history()
    for wrong in ([TOOK], entries[1:], [*entries[:2], TOOK], [Closed(1, "0123", 0), TOOK]):
        put(tmp_path, list(wrong))
        with pytest.raises(JournalError, match="cannot read"):
            read_job(tmp_path)


def test_facts_are_read_back_by_their_names(tmp_path: Path) -> None:
    _, entries = history()
    first, *rest = all_kinds()
    took, snapshot, *steps = entries
    assert isinstance(snapshot, Snapshot)
    second = [*(Kept(fact) for fact in rest), *steps]
    gone = [Dropped("LeaverKept", "d"), Dropped("LeaverKept", "nobody"), Kept(LeaverKept("e", 8.0))]
    put(tmp_path, [took, dataclasses.replace(snapshot, facts=(first,))], second, gone)
    found = read_job(tmp_path)
    assert isinstance(found, Recorded)
    assert list(found.facts.agents) == ["a" * 32, "b" * 32]
    assert found.facts.leavers == {"e": LeaverKept("e", 8.0)}
    assert sorted(map(repr, found.facts.all())) == sorted(
        repr(fact)
        for fact in (*all_kinds(), LeaverKept("e", 8.0))
        if fact not in (LeaverKept("d", 7.0), LeaverKept("e", None))
    )
    assert {*found.facts.tickets, *found.facts.revoked, *found.facts.machines} == {"01", "02", "c", "a"}
    agent, ways = found.facts.agents["a" * 32], found.facts.ways
    assert (agent, agent.facts.hello.agent, agent.facts.local) == (all_kinds()[0], "a" * 32, True)
    assert ways.certificate is not None
    assert (ways.certificate.fingerprint, ways.loopback_port) == ("f1", 40000)
    assert found.facts.books is not None
    assert found.job == FACTS
    assert found.job.job_key.secret == bytes.fromhex(FACTS.key)


def test_the_clock_goes_on_from_the_last_time_there_is(tmp_path: Path) -> None:
    job, entries = history()
    books = next(fact for fact in all_kinds() if isinstance(fact, BooksKept))
    for later, expected in ((job.now + 5.0, job.now + 5.0), (job.now - 0.5, job.now)):
        put(tmp_path, [*entries, Kept(dataclasses.replace(books, clock=later))])
        found = read_job(tmp_path)
        assert isinstance(found, Recorded)
        assert (found.clock, found.state, found.epoch) == (expected, job.state, TOOK.epoch)


def test_for_how_long_there_was_no_driver() -> None:
    """By the time since the machine's boot where that is the same, else by the system's; never less than 0."""
    boot, unix = time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
    here = f"{boot_id()} pid:[1] 12 34"
    for process, boot_s, unix_s, least in (
        (here, boot - 60.0, unix - 1e6, 50.0),
        ("other pid:[1] 12 34", boot - 1e6, unix - 60.0, 50.0),
        (here, boot + 1e6, unix, 0.0),
    ):
        took = dataclasses.replace(TOOK, process=process, boot_s=boot_s, unix_s=unix_s)
        assert least <= away_s(took, took.clock + 10.0) < 1e5


def test_no_secret_is_shown() -> None:
    """Neither in an error's traceback nor in a log."""
    _, entries = history()
    shown = repr([*entries, *map(Kept, all_kinds())])
    assert "0123" in shown
    assert SECRET not in shown
    assert SECRET in encode([*entries[:2], *map(Kept, all_kinds())][2:])[1:].decode(), "but it is kept"


def test_a_first_record_has_the_facts_that_hold() -> None:
    _, (took, snapshot, *_) = history()
    assert isinstance(took, Took)
    assert isinstance(snapshot, Snapshot)
    table = FactTable(all_kinds())
    for gone in (Dropped("LeaverKept", "d"), Kept(LeaverKept("e", 8.0))):
        table.texts()
        table.note(gone)
        whole = dataclasses.replace(snapshot, facts=tuple(table.facts().all()))
        (_, read) = decode(encode_first(took, snapshot, table))
        assert isinstance(read, Snapshot)
        assert (read.clock, read.job, read.state) == (snapshot.clock, snapshot.job, snapshot.state)
        assert sorted(map(repr, read.facts)) == sorted(map(repr, whole.facts))
    assert decode(encode_first(took, snapshot, FactTable())) == (took, snapshot)
