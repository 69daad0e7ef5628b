"""The journal of a running job: on disk, in one file, whatever happens to disk and folder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.core.events import DrainRequested, ReportResumed, WorkerDying, WorkerReady, WorkerRunning
from elastic_driver.core.membership import Policy, new_state, step
from elastic_driver.core.standing import JobActivity
from elastic_driver.core.state import State
from elastic_driver.journal import journal as module
from elastic_driver.journal.entries import BooksKept, Closed, Stepped, decode
from elastic_driver.journal.file import RecordFile, read
from elastic_driver.journal.folder import JOURNAL, LOCK, JournalFolder, JournalHeldError
from elastic_driver.journal.journal import Journal, Step
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.journal.store import FolderStore
from elastic_driver.launch.fleet.kept import AdmittedKept, LeaverKept
from elastic_driver.reporting.goodput import GoodputKept
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.job_facts import all_kinds, job_of_one
from tests.support.fakes.membership_job import Job, worker_id

pytestmark = pytest.mark.unit

FACTS = job_of_one()


class World:
    """A journal in a folder, and a job of which it tells."""

    def __init__(self, path: Path, epoch: int = 1) -> None:
        self.folder = JournalFolder.take(path, "0123")
        self.path = self.folder.path
        self.journal = Journal(FolderStore(self.folder), FACTS, epoch=epoch)
        self.state: State = new_state(Policy(num_proc=1, min_num_proc=1), 0.0)
        self.now = 0.0

    def step(self, took_s: float = 0.0, *, resumed: bool = False) -> Step:
        self.now += 1.0
        event = DrainRequested("a", None, "as asked", undo=int(self.now) % 2 == 0)
        self.state, commands = step(self.state, event, self.now)
        more = [ReportResumed(1, 0, 1.0)] if resumed else []
        return Step(self.now, event, self.state, [*commands, *more], took_s)

    async def write(self, *steps: Step) -> Exception | None:
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.journal.write(self.now, self.state, steps, done.set_result)
        return await done

    def read(self) -> Recorded:
        found = read_job(self.path)
        assert isinstance(found, Recorded)
        return found

    def inode(self) -> int:
        return (self.path / JOURNAL).stat().st_ino


def play(path: Path, test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    world = World(path / "journal")
    try:
        asyncio.run(test(world))
    finally:
        world.journal.close(0)
        world.folder.release()


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> Iterator[list[str]]:
    """So many calls of a method of files fail; each is noted."""
    calls: list[str] = []
    whole = getattr(RecordFile, name)

    def fail(*given: Any) -> Any:
        calls.append(name)
        if len(calls) <= times:
            raise OSError(28, "No space left on device")
        return whole(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_AGAIN_S", 0.0)
        patch.setattr(RecordFile, name, fail)
        yield calls


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Callable[[], None]]:
    """Delay all calls of a method of files to the end of the block. Yields a function that releases one before."""
    free, is_over, whole = threading.Semaphore(0), threading.Event(), getattr(RecordFile, name)

    def wait(*given: Any) -> Any:
        if not is_over.is_set():
            free.acquire()
        return whole(*given)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, name, wait)
        try:
            yield free.release
        finally:
            is_over.set()
            free.release(100)  # one for each call that waits


def test_it_begins_with_a_file_of_its_own_and_goes_on_in_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        assert await world.write() is None
        assert world.read().state == world.state
        inode = world.inode()
        for _ in range(3):
            assert await world.write(world.step()) is None
            assert (world.read().state, world.read().clock) == (world.state, world.now)
        assert await world.write(world.step(), world.step()) is None
        assert world.read().state == world.state
        assert len(world.read().events) == 5
        assert world.inode() == inode
        assert (world.read().took.epoch, world.read().job) == (1, FACTS)

    play(tmp_path, test)


async def kept(world: World) -> None:
    """Blocks until all facts are on disk."""
    done = asyncio.Event()
    world.journal.when_kept(done.set)
    await done.wait()


def records(world: World) -> list[list[str]]:
    """What stands in each record behind the first."""
    _, *rest = read(world.path / JOURNAL) or ()
    return [[type(entry).__name__ for entry in decode(record.body)] for record in rest]


def test_a_fact_is_on_disk_with_the_next_record_or_at_once_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        world.journal.keep(LeaverKept("a", 1.0))
        await world.write()
        assert world.read().facts.leavers == {"a": LeaverKept("a", 1.0)}, "in the first snapshot"
        assert records(world) == []

        # Nothing is being written: all that come in one turn of the loop are one record.
        world.journal.keep(LeaverKept("a", 2.0))
        world.journal.keep(LeaverKept("b", 2.0))
        await kept(world)
        assert world.read().facts.leavers == {name: LeaverKept(name, 2.0) for name in "ab"}
        assert records(world) == [["Kept", "Kept"]]

        # Something is: they wait for that, and stand before the next steps.
        with held(monkeypatch, "append"):
            writing = asyncio.ensure_future(world.write(world.step()))
            await asyncio.sleep(0)
            world.journal.drop(LeaverKept, "a")
            again = asyncio.ensure_future(world.write(world.step()))
            await asyncio.sleep(0)
        await asyncio.gather(writing, again)
        assert records(world) == [["Kept", "Kept"], ["Stepped"], ["Dropped", "Stepped"]]
        assert (list(world.read().facts.leavers), world.read().state) == (["b"], world.state)
        called: list[int] = []
        world.journal.when_kept(lambda: called.append(1))
        assert called, "at once, when nothing is under way"

    play(tmp_path, test)


def test_the_write_before_a_facts_own_does_not_count_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.write()
        called: list[int] = []
        with held(monkeypatch, "append") as release_one:
            writing = asyncio.ensure_future(world.write(world.step()))
            await asyncio.sleep(0)
            world.journal.keep(LeaverKept("a", 1.0))
            world.journal.when_kept(lambda: called.append(1))
            release_one()
            await writing
            await asyncio.sleep(0)
            assert (called, records(world)) == ([], [["Stepped"]])
        await kept(world)
        assert called == [1]

    play(tmp_path, test)


def test_facts_outlast_a_compaction_and_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.write()
        world.journal.keep(LeaverKept("a", None))
        world.journal.keep(LeaverKept("b", None))
        world.journal.drop(LeaverKept, "b")
        inode = world.inode()
        await world.write(world.step(took_s=3 * module._REPLAY_S))
        assert world.inode() != inode
        assert (list(world.read().facts.leavers), records(world)) == (["a"], [])
        with broken(monkeypatch, "append", 1):
            world.journal.keep(LeaverKept("c", None))
            await kept(world)
        assert (list(world.read().facts.leavers), records(world)) == (["a", "c"], [])
        assert world.read().state == world.state

    play(tmp_path, test)


def test_what_the_driver_before_knew_is_kept(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        facts = [AdmittedKept("1"), LeaverKept("a", None)]
        later = Journal(FolderStore(world.folder), FACTS, epoch=2, facts=facts)
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        later.write(0.0, world.state, (), done.set_result)
        assert await done is None
        found = world.read()
        assert (list(found.facts.admitted), list(found.facts.leavers)) == (["1"], ["a"])
        assert (found.took.epoch, found.took.driver) == (2, later.driver)
        assert later.driver != world.journal.driver
        later.close(0)

    play(tmp_path, test)


def test_nobody_waits_for_facts_of_a_journal_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.write()
        monkeypatch.setattr(module, "_AGAIN_S", 0.001)
        with broken(monkeypatch, "append", 1), broken(monkeypatch, "new", 10**9) as calls:
            world.journal.keep(LeaverKept("a", None))
            waiting = asyncio.ensure_future(kept(world))
            while len(calls) < 3:
                await asyncio.sleep(0.001)
            assert not waiting.done()
            world.journal.give_up()
            await waiting
            world.journal.keep(LeaverKept("b", None))
            await kept(world)

    play(tmp_path, test)


def test_who_has_lost_the_folder_is_told_by_facts_too(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.write()
        errors: asyncio.Queue[Exception] = asyncio.Queue()
        world.journal.on_error = errors.put_nowait
        (world.path / LOCK).unlink()
        with JournalFolder.take(world.path, "other"):
            called: list[int] = []
            world.journal.keep(LeaverKept("a", None))
            world.journal.when_kept(lambda: called.append(1))
            assert isinstance(await errors.get(), JournalHeldError)
            assert not called, "nothing comes of what is not on disk"

    play(tmp_path, test)


def test_it_never_appends_to_what_another_has_written(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.write(world.step())

    async def goes_on(world: World) -> None:
        await world.write(world.step())
        assert world.read().events == ()

    play(tmp_path, test)
    play(tmp_path, goes_on)


@pytest.mark.parametrize(("most", "resumed"), [(8, False), (4, True)])
def test_it_is_compacted_when_its_replay_would_take_long(tmp_path: Path, most: int, resumed: bool) -> None:
    """At once where a round has resumed, and else at twice the limit."""

    async def test(world: World) -> None:
        await world.write()
        sizes = []
        for _ in range(12):
            await world.write(world.step(took_s=module._REPLAY_S / 4 - 1e-9, resumed=resumed))
            records = read(world.path / JOURNAL) or ()
            sizes.append(sum(isinstance(entry, Stepped) for record in records for entry in decode(record.body)))
        assert sizes[: most + 1] == [*range(1, most + 1), 0]

    play(tmp_path, test)


@pytest.mark.parametrize("heard", [None, 0, 1], ids=lambda heard: f"{heard}")
def test_a_compaction_keeps_the_turns_that_the_books_do_not_have(tmp_path: Path, heard: int | None) -> None:
    """A member dies, and the other goes on in a round of its own: each of these steps makes a new snapshot."""
    a, b = worker_id("a[0]"), worker_id("b[0]")
    events = (
        WorkerDying(b, -9, "killed by SIGKILL", 0.5),
        WorkerReady(a, 1, 0, ReadyCause.INTERNAL_ERROR, "", (Backend.NATIVE,), uncommitted_s=1.5),
        WorkerRunning(a, 2, 0),
    )

    async def test(world: World) -> None:
        job = Job(num_proc=2, min_num_proc=1)
        job.train("a:1", "b:1")
        world.state = job.state
        await world.write()
        times: list[float] = []
        for event in events:
            job.now += 1.0
            commands = job.feed(event)
            world.state, world.now = job.state, job.now
            if heard is not None and len(times) == heard + 1:
                world.journal.keep(replace(books(), clock=job.now, goodput=GoodputKept.of_new(), heard=times[heard]))
            await world.write(Step(job.now, event, job.state, commands, took_s=2 * module._REPLAY_S))
            times.append(job.now)
        found = world.read()
        assert found.events == ()
        turns = [
            (times[0], JobActivity.FORMING, ()),
            (times[1], JobActivity.FORMING, (0.5,)),
            (times[2], JobActivity.TRAINING, ()),
        ]
        told_of = [(turned.at, turned.standing.doing, turned.rounds) for turned in found.turns]
        assert told_of == (turns if heard is None else turns[heard + 1 :])

    play(tmp_path, test)


def books() -> BooksKept:
    (found,) = (fact for fact in all_kinds() if isinstance(fact, BooksKept))
    return found


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 4000)

    async def test(world: World) -> None:
        await world.write()
        largest = 0
        for _ in range(400):
            await world.write(world.step())
            largest = max(largest, (world.path / JOURNAL).stat().st_size)
        assert largest < 800_000
        assert len(world.read().events) < 300
        assert world.read().state == world.state

    play(tmp_path, test)


@pytest.mark.parametrize("name", ["append", "new"])
def test_after_an_error_it_is_another_file_with_all_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def test(world: World) -> None:
        if name == "append":
            await world.write()
            old = (world.path / JOURNAL).read_bytes()
        with broken(monkeypatch, name, 1 if name == "append" else 3):
            assert await world.write(world.step()) is None
        assert world.journal.trouble == ""
        found = world.read()
        assert found.state == world.state
        assert found.events == (), "it is a snapshot"
        if name == "append":
            assert (world.path / JOURNAL).read_bytes() != old

    play(tmp_path, test)


def test_while_it_fails_it_says_why_and_nobody_is_told_that_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        monkeypatch.setattr(module, "_AGAIN_S", 0.001)
        with broken(monkeypatch, "new", 10**9) as calls:
            writing = asyncio.ensure_future(world.write(world.step()))
            while len(calls) < 5:
                await asyncio.sleep(0.001)
            assert world.journal.trouble == "No space left on device"
            assert not writing.done()
            assert read_job(world.path) is None
            world.journal.give_up()
            await writing
        assert read_job(world.path) is None

    play(tmp_path, test)


@pytest.mark.parametrize("what", ["folder", "lock", "journal", "renamed"])
def test_what_was_removed_is_made_anew_with_all_that_there_is(tmp_path: Path, what: str) -> None:
    async def test(world: World) -> None:
        await world.write(world.step())
        await world.write(world.step())
        if what == "renamed":
            world.path.rename(world.path.with_name("other"))
        for name in (LOCK, JOURNAL) if what == "folder" else (what,) if what != "renamed" else ():
            (world.path / name).unlink()
        if what == "folder":
            world.path.rmdir()
        assert await world.write(world.step()) is None
        assert world.read().state == world.state
        assert world.folder.is_ours
        with pytest.raises(JournalHeldError):
            JournalFolder.take(world.path, "other")

    play(tmp_path, test)


def test_who_has_lost_the_folder_writes_nothing_into_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.write()
        (world.path / LOCK).unlink()
        with JournalFolder.take(world.path, "other"):
            (world.path / JOURNAL).unlink()
            error = await world.write(world.step())
            assert isinstance(error, JournalHeldError)
            assert "job other is driven by process" in str(error)
            assert not (world.path / JOURNAL).exists()
            assert "is driven by process" in world.journal.close(0)

    play(tmp_path, test)


def test_a_look_writes_nothing_and_tells_who_has_lost_the_folder(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.write()
        errors: list[Exception] = []
        world.journal.on_error = errors.append

        async def look() -> None:
            looked = asyncio.Event()
            world.journal.look(looked.set)
            await looked.wait()

        inode = world.inode()
        await look()
        assert (records(world), world.inode(), errors) == ([], inode, [])
        (world.path / JOURNAL).unlink()
        await look()
        assert world.read().state == world.state, "what was removed is made anew"
        (world.path / LOCK).unlink()
        with JournalFolder.take(world.path, "other"):
            await look()
            assert [type(error) for error in errors] == [JournalHeldError]

    play(tmp_path, test)


def test_a_bug_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.write()
        with monkeypatch.context() as patch:
            patch.setattr(module, "encode", lambda entries: 1 / 0)
            assert isinstance(await world.write(world.step()), ZeroDivisionError)

    play(tmp_path, test)


def test_at_the_end_nothing_of_the_job_is_left(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", epoch=5)
    asyncio.run(world.write(world.step()))
    assert world.journal.close(143) == ""
    assert read_job(world.path) == Closed(5, "0123", 143)
    assert b"as asked" not in (world.path / JOURNAL).read_bytes()
    assert sorted(each.name for each in world.path.iterdir()) == [JOURNAL, LOCK]
    world.folder.release()


def test_a_disk_that_hangs_holds_up_nobody_but_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    answers = threading.Event()
    whole = RecordFile.append

    def hang(*given: Any) -> None:
        answers.wait()
        whole(*given)

    async def test(world: World) -> None:
        await world.write()
        monkeypatch.setattr(RecordFile, "append", hang)
        writing = asyncio.ensure_future(world.write(world.step()))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not writing.done()
        assert world.read().events == ()
        assert world.journal.close(0) == "the disk does not answer"
        answers.set()
        await writing

    play(tmp_path, test)
