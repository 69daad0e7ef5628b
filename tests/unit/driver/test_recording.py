"""Whose job is in the folder of a journal, and what becomes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_driver.core.events import EndJob
from elastic_driver.driver.recording import Recording, Resumed, close, enter, has_journal, recording
from elastic_driver.errors import SettingsError
from elastic_driver.journal import held as module
from elastic_driver.journal.entries import Closed, Fact, WaysKept
from elastic_driver.journal.folder import LOCK, JournalError, JournalFolder, JournalHeldError
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.journal.store import FolderStore
from elastic_driver.system import parent
from elastic_driver.system.local_socket import SocketFolder
from elastic_driver.system.process_name import boot_id, name_of_this_process, place_of_processes
from tests.support.fakes.job_facts import SECRET, an_agent, greeting, job_of_one
from tests.support.fakes.left_jobs import STATE, leave, settings_in

pytestmark = pytest.mark.unit

HERE = an_agent(hello=dataclasses.replace(greeting("a" * 32), owner=name_of_this_process()))
DEAD = an_agent(hello=dataclasses.replace(greeting("a" * 32), owner=f"{place_of_processes()} {os.getpid()} 1"))


class FakeConsole:
    """A console."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def test_without_a_journal_a_job_has_its_facts_all_the_same() -> None:
    settings = settings_in(Path("/nowhere"), journal=None)
    with recording(settings, "0123", FakeConsole()) as recorded:
        job = recorded.job
    assert (recorded.journal, recorded.before, recorded.over) == (None, None, None)
    assert (job.job_id, job.settings, job.directory) == ("0123", settings, os.getcwd())
    assert len(job.job_key.secret) == 32
    assert job.join_token
    assert job.environment["PATH"] == os.environ["PATH"]
    os.umask(job.umask)


def test_a_new_job_begins_where_the_last_one_was_closed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert not has_journal(settings_in(kept))
    for epoch in (1, 2):
        with recording(settings_in(kept), "0123", told := FakeConsole()) as recorded:
            assert recorded.journal is not None
            assert (recorded.journal.epoch, recorded.before) == (epoch, None)
            recorded.journal.close(0)
        assert has_journal(settings_in(kept))
        assert (told.lines, told.warnings) == ([], [])


@pytest.mark.parametrize(
    "agents",
    [
        [],
        [DEAD],
        [dataclasses.replace(HERE, given_up=True, hello=None)],
        [an_agent(hello=dataclasses.replace(greeting("a" * 32), owner=HERE.facts.hello.owner.replace(boot_id(), "b")))],
    ],
)
def test_where_nobody_is_left_it_is_a_new_job(tmp_path: Path, agents: Sequence[Fact]) -> None:
    kept = tmp_path / "kept"
    leave(kept, *agents)
    with recording(settings_in(kept), "0456", told := FakeConsole()) as recorded:
        assert (recorded.job.job_id, recorded.before) == ("0456", None)
        assert recorded.journal is not None
        assert recorded.journal.epoch == 5
        recorded.journal.close(0)
    (line,) = told.lines
    assert line.startswith("job 0123 is over: its driver died ")
    assert line.endswith(" ago, and none of its agents is left; starting a new job")


def test_a_job_that_had_ended_is_closed_with_its_exit_code(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    leave(kept, DEAD, state=dataclasses.replace(STATE, end=EndJob(3, "too few")))
    with recording(settings_in(kept), "0456", told := FakeConsole()) as recorded:
        assert recorded.over == 3
    assert told.lines == []
    closed = read_job(kept)
    assert isinstance(closed, Closed)
    assert (closed.exit_code, closed.epoch) == (3, 5)


@pytest.mark.parametrize("code", [0, 3, 70])
def test_a_job_that_ends_before_it_is_gone_on_with_is_not_begun_anew(tmp_path: Path, code: int) -> None:
    kept = tmp_path / "kept"
    with recording(settings_in(kept), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        recorded.journal.close(code)
    with recording(settings_in(kept), "0456", told := FakeConsole(), resumed=Resumed("0123")) as recorded:
        assert recorded.over == code
    assert told.lines == [f"job 0123 has ended with exit code {code}"]


@pytest.mark.parametrize("there", ["", "0789"])
def test_a_journal_that_is_anothers_by_now_is_left_alone(tmp_path: Path, there: str) -> None:
    kept = tmp_path / "kept"
    if there:
        leave(kept, HERE, job=job_of_one(job_id=there, settings=settings_in(kept)))
    with (
        pytest.raises(SettingsError, match=r"cannot continue job 0123: the journal .* is .*"),
        recording(settings_in(kept), "0456", FakeConsole(), resumed=Resumed("0123")),
    ):
        pass
    found = read_job(kept)
    assert found is None if not there else isinstance(found, Recorded) and found.job.job_id == there


@pytest.mark.parametrize("begins", [False, True])
def test_who_goes_on_with_a_job_of_which_nobody_is_left(tmp_path: Path, begins: bool) -> None:
    """Its command begins another. Who goes on with it to end it does not."""
    kept = tmp_path / "kept"
    leave(kept, DEAD)
    with recording(settings_in(kept), "0456", told := FakeConsole(), resumed=Resumed("0123", begins)) as recorded:
        assert recorded.over == (None if begins else 143)
        assert recorded.journal is not None
        recorded.journal.close(143)
    assert told.lines[0].endswith("none of its agents is left; starting a new job" if begins else "agents is left")
    closed = read_job(kept)
    assert isinstance(closed, Closed)
    assert closed.job_id == ("0456" if begins else "0123")


@pytest.mark.parametrize(("code", "is_over"), [(0, True), (3, True), (70, False)])
def test_a_driver_that_was_started_again_begins_a_job_where_none_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_over: bool
) -> None:
    """It has closed the journal itself when no agent had come back, or the one before it has, and was killed then."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
    with recording(settings_in(kept), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        close(recorded.journal, code, told := FakeConsole(), found_nothing=code == 70)
        assert told.warnings == []
    with recording(settings_in(kept), "0456", FakeConsole()) as recorded:
        assert recorded.over == (code if is_over else None)
        assert recorded.job.job_id == ("0123" if is_over else "0456")
        if not is_over:
            assert recorded.journal is not None
            assert recorded.journal.epoch == 2
            recorded.journal.close(0)


def test_a_driver_that_was_started_again_finds_that_another_has_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pause of its parent somebody else has gone on with it."""
    kept = tmp_path / "kept"
    with JournalFolder.take(kept, "0123"):
        with (
            pytest.raises(JournalError, match="job 0123 is driven by process"),
            recording(settings_in(kept), "0456", FakeConsole()),
        ):
            pass
        monkeypatch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
        with recording(settings_in(kept), "0456", told := FakeConsole()) as recorded:
            assert (recorded.over, recorded.journal) == (75, None)
    assert "another driver has taken over this job" in told.warnings[0]


def test_nobody_else_gets_the_folder_before_another_job_begins_in_it(tmp_path: Path) -> None:
    """One that stands by would end with the exit code of the job of which nothing is left."""
    kept = tmp_path / "kept"
    leave(kept, HERE)
    with recording(settings_in(kept), "0456", FakeConsole()) as recorded:
        assert recorded.journal is not None
        assert recorded.held is not None
        assert close(recorded.journal, 70, FakeConsole(), found_nothing=True)
        held = recorded.held.handed_on()
    with pytest.raises(JournalHeldError, match="job 0123 is driven by process"):
        JournalFolder.take(kept, "0789")
    with recording(settings_in(kept), "0456", FakeConsole(), held=held) as recorded:
        assert (recorded.job.job_id, recorded.before, recorded.over) == ("0456", None, None)
        with pytest.raises(JournalHeldError, match="job 0456 is driven by process"):
            JournalFolder.take(kept, "0789")
        assert recorded.journal is not None
        recorded.journal.close(0)
    JournalFolder.take(kept, "0789").release()


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A folder whose job has an agent, which can be taken over."""
    kept = tmp_path / "kept"
    leave(kept, HERE)
    return kept


def test_a_job_that_is_taken_over_goes_on_as_it_was_started(taken: Path) -> None:
    given = settings_in(taken, num_proc=2, min_num_proc=2, worker_env={"A": SECRET}, verbose=True)
    with recording(given, "0456", told := FakeConsole()) as recorded:
        job, before, journal = recorded.job, recorded.before, recorded.journal
        assert before is not None
        assert journal is not None
        assert (journal.epoch, before.epoch, before.state, before.clock) == (5, 4, STATE, 1.0)
        assert before.facts.agents == {HERE.agent: HERE}
        assert job == dataclasses.replace(
            job_of_one(directory=str(taken.parent)), settings=settings_in(taken, verbose=True)
        )
        assert "0123" in (taken / LOCK).read_text()
        assert told.lines == []
        (warning,) = told.warnings
        assert warning.endswith("changed settings have no effect: -np, --min-np, the tuning flags")
        journal.give_up()


def test_the_same_command_is_told_nothing(taken: Path) -> None:
    with recording(settings_in(taken), "0456", told := FakeConsole()):
        pass
    assert (told.lines, told.warnings) == ([], [])


def test_a_driver_that_cannot_take_over_leaves_the_job_to_the_next(taken: Path) -> None:
    with pytest.raises(SettingsError, match="no port"), recording(settings_in(taken), "0456", FakeConsole()):
        raise SettingsError("no port")
    found = read_job(taken)
    assert isinstance(found, Recorded)
    assert found.epoch == 4


def test_a_new_job_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match="no port"),
        recording(settings_in(tmp_path / "kept"), "0456", FakeConsole()),
    ):
        raise SettingsError("no port")
    closed = read_job(tmp_path / "kept")
    assert isinstance(closed, Closed)
    assert closed.exit_code == 2


def test_it_goes_where_the_job_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o77)
    try:
        (tmp_path / "there").mkdir()
        enter(job_of_one(directory=str(tmp_path / "there"), umask=0o27))
        assert Path.cwd() == tmp_path / "there"
        assert os.umask(0o77) == 0o27
        with pytest.raises(SettingsError, match=r"^its folder /no/where: No such file"):
            enter(job_of_one(directory="/no/where"))
    finally:
        os.umask(mask)


def test_what_happens_to_a_job_that_is_taken_over_is_written_behind_its_past(taken: Path) -> None:
    async def go_on() -> None:
        with recording(settings_in(taken), "0456", FakeConsole()) as recorded:
            assert recorded.journal is not None
            assert recorded.before is not None
            done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            recorded.journal.write(2.0, recorded.before.state, (), done.set_result)
            assert await done is None
            recorded.journal.give_up()

    asyncio.run(go_on())
    found = read_job(taken)
    assert isinstance(found, Recorded)
    assert (found.epoch, found.job.job_id, found.clock) == (5, "0123", 2.0)
    assert found.facts.agents == {HERE.agent: HERE}


@pytest.mark.parametrize("agent", [HERE, DEAD])
def test_a_journal_that_was_moved_is_not_where_agents_look_for_a_driver(tmp_path: Path, agent: Fact) -> None:
    kept, moved = tmp_path / "kept", tmp_path / "moved"
    leave(kept, agent, WaysKept(str(kept / "driver.sock")))
    kept.rename(moved)
    if agent is HERE:
        with (
            pytest.raises(
                JournalError,
                match=r"look for a driver in its former journal, .*kept; move the journal back, or end the job",
            ),
            recording(settings_in(moved), "0456", FakeConsole()),
        ):
            pass
        moved.rename(kept)
        moved = kept
    with recording(settings_in(moved), "0456", FakeConsole()) as recorded:
        assert (recorded.before is not None) == (agent is HERE)


def test_a_driver_that_answers_is_not_dead_though_somebody_has_removed_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DYING_S", 0.1)
    kept = tmp_path / "kept"
    leave(kept, HERE, WaysKept(str(kept / "driver.sock")))
    folder = SocketFolder.at(kept)
    with folder.listen("driver.sock"):
        with (
            pytest.raises(JournalError, match=r"a driver of job 0123 answers at .*; was .*lock removed\?"),
            recording(settings_in(kept), "0456", FakeConsole()),
        ):
            pass
        assert isinstance(read_job(kept), Recorded)
    with recording(settings_in(kept), "0456", FakeConsole()) as recorded:
        assert recorded.before is not None, "it is dead: nobody listens"
    folder.close()


async def written(journal: Journal) -> None:
    """There is something of the job in it."""
    done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    journal.write(1.0, STATE, (), done.set_result)
    assert await done is None


def refuse(*unused: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Standing:
    """A driver that stands by, in a thread, until the one that has the folder lets go of it."""

    def __init__(self, folder: Path, job_id: str = "0456") -> None:
        self.told = FakeConsole()
        self.waits = threading.Event()
        self.told.line = lambda text: (self.told.lines.append(text), self.waits.set())  # type: ignore[method-assign, assignment]
        self.found: Recording | None = None
        self._folder = folder
        self._job_id = job_id
        self._thread = threading.Thread(target=self._stand_by)
        self._thread.start()
        self.waits.wait()

    def _stand_by(self) -> None:
        with recording(settings_in(self._folder, standby_driver=True), self._job_id, self.told) as recorded:
            self.found = recorded
            if recorded.journal is not None:
                recorded.journal.close(0)

    def ends_with(self) -> Recording:
        self._thread.join()
        assert self.found is not None
        return self.found


@pytest.mark.parametrize("code", [0, 2, 3, 70, 143])
def test_those_that_stand_by_end_with_the_job_that_they_have_waited_for(tmp_path: Path, code: int) -> None:
    """With 70, too, though its journal stays as it is for the report."""
    kept = tmp_path / "kept"
    with recording(settings_in(kept), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        asyncio.run(written(recorded.journal))
        later = [Standing(kept, job_id) for job_id in ("0456", "0789")]
        close(recorded.journal, code, FakeConsole())
    for each in later:
        assert each.ends_with().over == code
        assert each.told.lines[-1] == f"job 0123 has ended with exit code {code}"
    assert isinstance(read_job(kept), Recorded if code == 70 else Closed)


def test_a_job_whose_end_could_not_be_written_has_ended_for_one_that_stands_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    with recording(settings_in(kept), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        asyncio.run(written(recorded.journal))
        later = Standing(kept)
        with monkeypatch.context() as patch:
            patch.setattr(FolderStore, "begin", refuse)
            assert not close(recorded.journal, 3, FakeConsole())
    assert later.ends_with().over == 3


def test_its_command_begins_it_anew_and_waits_for_none_of_its_agents(taken: Path) -> None:
    with JournalFolder.take(taken, "0123") as folder:
        folder.is_of("0123")
        folder.has_ended(3)
    with recording(settings_in(taken), "0456", FakeConsole()) as recorded:
        assert (recorded.job.job_id, recorded.before, recorded.over) == ("0456", None, None)


def test_a_job_that_has_ended_with_an_error_of_its_drivers_is_begun_anew_by_its_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    with recording(settings_in(kept), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        asyncio.run(written(recorded.journal))
        close(recorded.journal, 70, FakeConsole())
    with recording(settings_in(kept), "0456", FakeConsole(), resumed=Resumed("0123")) as recorded:
        assert recorded.over == 70
    with monkeypatch.context() as patch:  # its driver was killed when it had said so
        patch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
        with recording(settings_in(kept), "0456", FakeConsole()) as recorded:
            assert recorded.over == 70
    with recording(settings_in(kept), "0456", FakeConsole()) as recorded:
        assert (recorded.job.job_id, recorded.over) == ("0456", None)


def test_one_that_stands_by_begins_the_job_whose_driver_died_before_it_wrote_anything(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with recording(settings_in(kept), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        recorded.journal.give_up()
        later = Standing(kept)
    found = later.ends_with()
    assert (found.job.job_id, found.before, found.over) == ("0456", None, None)
