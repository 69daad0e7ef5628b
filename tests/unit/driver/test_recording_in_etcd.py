"""Whose job is in a journal in etcd, and what becomes of it. What is so of every journal is in test_recording.py."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.driver.agent_side import agents_of
from elastic_driver.driver.recording import Recording, Resumed, close, enter, has_journal, recording
from elastic_driver.errors import SettingsError
from elastic_driver.etcd.client import EtcdClient
from elastic_driver.etcd.driver_record import RegisteredDriver, driver_key, driver_there, encode
from elastic_driver.etcd.sealed import Secret
from elastic_driver.journal import etcd_waiting
from elastic_driver.journal.entries import Closed, Fact
from elastic_driver.journal.etcd_journal import read_etcd
from elastic_driver.journal.etcd_records import head_key
from elastic_driver.journal.etcd_waiting import LEASE_S
from elastic_driver.journal.folder import JournalError, JournalHeldError
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.settings import Settings
from elastic_driver.system import parent
from elastic_driver.system.job_clock import JobClock
from elastic_driver.words import NO_BARS, OnChange
from tests.support.fakes.etcd_jobs import until
from tests.support.fakes.fake_etcd import FakeEtcd, fake_etcd
from tests.support.fakes.fleet_fakes import Sink
from tests.support.fakes.job_facts import an_agent, greeting, job_of_one
from tests.support.fakes.left_jobs import STATE

pytestmark = pytest.mark.unit

SECRET = "5ec4e7 that nobody can guess"
FAR = an_agent(local=False, hello=greeting("a" * 32))


class FakeConsole:
    """A console."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.has_line = threading.Event()

    def line(self, text: str) -> None:
        self.lines.append(text)
        self.has_line.set()

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class Place:
    """A prefix in etcd, and the key of its journal."""

    def __init__(self, etcd: FakeEtcd, folder: Path) -> None:
        self.etcd = etcd
        self.key = folder / "key"
        self.key.write_text(f"{SECRET}\n")
        self.place = etcd.place()

    def settings(self, **more: object) -> Settings:
        """What a job is started with whose journal is there."""
        given: dict[str, object] = {"num_proc": 1, "min_num_proc": 1, "accept_agents": True}
        given |= {"journal": JournalPlace(url=str(self.place), key=self.key), **more}
        return Settings(command=("true",), **given)  # type: ignore[arg-type]

    def read(self) -> Recorded | Closed | None:
        """What is there."""
        return read_etcd(self.place, Secret(SECRET, self.place.prefix))

    def leave(self, *facts: Fact) -> None:
        """A driver has died there, with these facts."""
        job = job_of_one(settings=self.settings(), directory=str(self.key.parent))

        async def write() -> None:
            with recording(self.settings(), job.job_id, FakeConsole()) as recorded:
                assert recorded.held is not None
                journal = Journal(recorded.held.store(), job, epoch=4, facts=facts)
                await written(journal)
                journal.give_up()
                assert recorded.journal is not None
                recorded.journal.give_up()

        asyncio.run(write())


async def written(journal: Journal) -> Exception | None:
    """There is something of the job in it."""
    done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    journal.write(1.0, STATE, (), done.set_result)
    return await done


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with fake_etcd() as etcd:
        yield Place(etcd, tmp_path)


def test_a_new_job_begins_where_the_last_one_was_closed(place: Place) -> None:
    for epoch in (1, 2):
        assert has_journal(place.settings()), "nobody knows before it is asked"
        with recording(place.settings(), f"012{epoch}", told := FakeConsole()) as recorded:
            assert recorded.journal is not None
            assert recorded.lock is not None
            assert recorded.lock.place == place.place
            assert (recorded.journal.epoch, recorded.before) == (epoch, None)
            assert recorded.job.settings == place.settings()
            recorded.journal.close(0)
        assert place.read() == Closed(epoch, f"012{epoch}", 0)
        assert (told.lines, told.warnings) == ([], [])
    assert driver_key(place.place) not in place.etcd.held()


def test_a_job_is_taken_over(place: Place) -> None:
    place.leave(FAR)
    assert not any(SECRET.encode() in value or b"num_proc" in value for value in place.etcd.held().values())
    with recording(place.settings(), "0456", told := FakeConsole()) as recorded:
        journal, before = recorded.journal, recorded.before
        assert journal is not None
        assert before is not None
        assert (journal.epoch, before.epoch, before.state, before.clock) == (5, 4, STATE, 1.0)
        assert before.facts.agents == {FAR.agent: FAR}
        assert recorded.job.job_id == "0123"
        assert asyncio.run(written(journal)) is None
        with EtcdClient(place.place) as client:
            until(lambda: (there := driver_there(client, place.place)) is not None and there.job == "0123")
        journal.give_up()
    assert (told.lines, told.warnings) == ([], [])
    found = place.read()
    assert isinstance(found, Recorded)
    assert (found.epoch, found.facts.agents) == (5, {FAR.agent: FAR})


def test_another_key_takes_nothing_over(place: Place) -> None:
    place.leave(FAR)
    before = place.etcd.held()
    place.key.write_text("another that nobody can guess")
    why = r"it is sealed with another key: is --journal-key the key of this job\?"
    with pytest.raises(JournalError, match=why), recording(place.settings(), "0456", FakeConsole()):
        pass
    assert place.etcd.held() == before


@pytest.mark.parametrize(
    ("text", "why"),
    [("short", "cannot use the file .* as a journal token: it has 5"), (None, "cannot read the journal")],
)
def test_a_key_that_is_none(place: Place, text: str | None, why: str) -> None:
    place.key.unlink()
    if text is not None:
        place.key.write_text(text)
    with pytest.raises(SettingsError, match=why), recording(place.settings(), "0456", FakeConsole()):
        pass


def test_etcd_is_away(place: Place) -> None:
    place.etcd.close()
    with (
        pytest.raises(JournalError, match=r"^cannot use etcd://.* \(--journal\): cannot reach etcd: http://127.0.0.1:"),
        recording(place.settings(), "0456", FakeConsole()),
    ):
        pass


def test_a_driver_that_was_started_again_waits_for_etcd(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job's agents wait, too."""
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    monkeypatch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
    place.leave(FAR)
    place.etcd.is_away = True
    told = FakeConsole()
    told.line = lambda text: (told.lines.append(text), setattr(place.etcd, "is_away", False))  # type: ignore[method-assign, assignment]
    with recording(place.settings(), "0456", told) as recorded:
        assert recorded.before is not None
        assert recorded.journal is not None
        recorded.journal.give_up()
    (line,) = told.lines
    assert line.startswith("waiting for etcd: cannot reach etcd: http://127.0.0.1:")

    place.etcd.is_away = True
    hurried = place.settings()
    object.__setattr__(hurried, "driver_timeout_s", 0.05)  # users wait longer
    with pytest.raises(JournalError, match="cannot reach etcd"), recording(hurried, "0456", FakeConsole()):
        pass


def test_a_driver_that_was_started_again_finds_that_another_has_the_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(place.settings(), "0123", FakeConsole()) as other:
        assert other.journal is not None
        held = pytest.raises(JournalHeldError, match="job 0123 is driven by process")
        with held, recording(place.settings(), "0456", FakeConsole()):
            pass
        monkeypatch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
        with recording(place.settings(), "0456", told := FakeConsole()) as recorded:
            assert (recorded.over, recorded.journal) == (75, None)
        other.journal.give_up()
    assert "another driver has taken over this job" in told.warnings[0]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_job_that_was_closed_is_over_for_its_own_command_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    mark = os.memfd_create("mark")
    try:
        with monkeypatch.context() as patch:
            if has_begun:
                patch.setattr(parent, "_mark", mark)
            with recording(place.settings(), "0123", FakeConsole()) as recorded:
                assert recorded.journal is not None
                recorded.journal.close(3)
        monkeypatch.setattr(parent, "_mark", mark)
        monkeypatch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
        with recording(place.settings(), "0456", FakeConsole()) as recorded:
            assert recorded.over == (3 if has_begun else None)
            if recorded.journal is not None:
                recorded.journal.close(0)
    finally:
        os.close(mark)


class Standing:
    """A driver that stands by, in a thread."""

    def __init__(self, place: Place, job_id: str = "0456") -> None:
        self.told = FakeConsole()
        self.found: Recording | None = None
        self.error: SettingsError | None = None
        self._place, self._job_id = place, job_id
        self._thread = threading.Thread(target=self._stand_by)
        self._thread.start()
        self.told.has_line.wait()

    def _stand_by(self) -> None:
        try:
            with recording(self._place.settings(standby_driver=True), self._job_id, self.told) as recorded:
                self.found = recorded
                if recorded.journal is not None and recorded.over is None:
                    recorded.journal.give_up()
        except SettingsError as error:
            self.error = error

    def ends_with(self) -> Recording:
        self._thread.join()
        assert self.found is not None
        return self.found

    def refuses_with(self) -> str:
        self._thread.join()
        assert self.found is None
        assert isinstance(self.error, JournalError)
        assert not isinstance(self.error, JournalHeldError)
        return str(self.error)


@pytest.mark.parametrize("code", [0, 3, 70, 143])
def test_those_that_stand_by_end_with_the_job_that_they_have_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        assert asyncio.run(written(recorded.journal)) is None
        later = [Standing(place, job_id) for job_id in ("0456", "0789")]
        close(recorded.journal, code, FakeConsole())
    for each in later:
        assert each.ends_with().over == code
        assert each.told.lines[-1] == f"job 0123 has ended with exit code {code}"
    assert isinstance(place.read(), Recorded if code == 70 else Closed)


def test_one_that_stands_by_takes_the_job_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    place.leave(FAR)
    with recording(place.settings(), "0789", FakeConsole()) as recorded:
        assert recorded.journal is not None
        later = Standing(place)
        recorded.journal.give_up()
    found = later.ends_with()
    assert found.before is not None
    assert found.job.job_id == "0123"
    assert (found.begins, found.code_in_vain) == (False, 70)


@pytest.mark.parametrize("how", ["removed", "removed before", "never written", "another", "another that has ended"])
def test_one_that_stands_by_begins_no_job(place: Place, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The first may have ended that on another machine, and could not say so."""
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    monkeypatch.setattr(etcd_waiting, "_LATER_S", 0.05 - LEASE_S)
    if how == "another that has ended":
        with recording(place.settings(), "0100", FakeConsole()) as recorded:
            assert recorded.journal is not None
            recorded.journal.close(3)
    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        journal = recorded.journal
        assert journal is not None
        assert recorded.lock is not None
        with EtcdClient(place.place) as client:
            until(lambda: (there := driver_there(client, place.place)) is not None and there.job == "0123")
        if how.startswith("removed"):
            assert asyncio.run(written(journal)) is None
        later = [Standing(place, job_id) for job_id in ("0456", "0789")]
        if how == "removed before":
            for key in place.etcd.held():
                place.etcd.remove(key)
        if how == "removed":
            place.etcd.remove(head_key(place.place))
        if how == "another":
            # The driver of another one was too fast to be seen.
            there = Journal(recorded.held.store(), job_of_one(job_id="0200", settings=place.settings()), epoch=1)  # type: ignore[union-attr]
            assert asyncio.run(written(there)) is None
            there.give_up()
        journal.give_up()
    what = {
        "another": f"{place.place} is now the journal of job 0200",
        "another that has ended": f"{place.place} is now the journal of job 0100",
    }.get(how, f"nothing is left of it at {place.place}. If it has not ended, run the same command to start it again")
    for each in later:
        why = each.refuses_with()
        assert why == f"cannot take over job 0123, for which this driver was standing by: {what}"
    assert driver_key(place.place) not in place.etcd.held()


def test_one_that_stands_by_for_a_job_whose_agents_are_gone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        later = Standing(place)
        assert asyncio.run(written(recorded.journal)) is None
        recorded.journal.give_up()
    found = later.ends_with()
    assert (found.over, found.begins) == (70, False)
    assert later.told.lines[-1].endswith("none of its agents is left; run the same command to start it again")
    assert later.told.warnings == []
    # Which it does.
    with recording(place.settings(), "0456", FakeConsole()) as recorded:
        assert (recorded.over, recorded.before) == (None, None)
        assert recorded.journal is not None
        recorded.journal.close(0)


def test_one_that_stands_by_knows_the_end_of_its_job_where_another_has_begun(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    monkeypatch.setattr(etcd_waiting, "_LATER_S", 0.05 - LEASE_S)
    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.held is not None
        assert recorded.journal is not None
        later = Standing(place)
        other = Journal(recorded.held.store(), job_of_one(job_id="0200", settings=place.settings()), epoch=1)
        assert asyncio.run(written(other)) is None
        other.give_up()
        recorded.held.has_ended(3)
        recorded.journal.give_up()
    assert later.ends_with().over == 3
    assert isinstance(place.read(), Recorded)


@pytest.mark.parametrize("had_stood_by", [True, False])
def test_whoever_is_started_after_one_that_had_stood_by_begins_no_job(
    place: Place, monkeypatch: pytest.MonkeyPatch, had_stood_by: bool
) -> None:
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    mark = os.memfd_create("mark")
    try:
        monkeypatch.setattr(parent, "_mark", mark)
        place.leave(FAR)
        os.ftruncate(mark, 0)  # that was another machine's driver
        with recording(place.settings(), "0789", FakeConsole()) as recorded:
            assert recorded.journal is not None
            recorded.journal.give_up()
            if had_stood_by:
                os.ftruncate(mark, 0)  # likewise
                later = Standing(place)
        if had_stood_by:
            assert later.ends_with().before is not None
        monkeypatch.setattr(parent, "_started", parent.Started(is_last=False, before="", signals=[]))
        assert parent.was_begun(None), "it has not written anything"
        for key in place.etcd.held():
            place.etcd.remove(key)
        with recording(place.settings(), "0456", told := FakeConsole()) as recorded:
            # An exit code, and no error: nobody is started after it.
            assert (recorded.over, recorded.journal is None) == ((2, True) if had_stood_by else (None, False))
            if recorded.journal is not None:
                recorded.journal.close(0)
        why = "cannot take over the job, for which this driver was standing by: nothing is left of it"
        assert [why in text for text in told.warnings] == [True] * had_stood_by
    finally:
        os.close(mark)


def test_whoever_goes_on_with_a_job_finds_its_end(place: Place) -> None:
    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        recorded.journal.close(3)
    with recording(place.settings(), "0456", told := FakeConsole(), resumed=Resumed("0123")) as recorded:
        assert recorded.over == 3
    assert told.lines == ["job 0123 has ended with exit code 3"]


def test_nobody_else_gets_it_before_another_job_begins_there(place: Place) -> None:
    place.leave(FAR)
    with recording(place.settings(), "0456", FakeConsole()) as recorded:
        assert recorded.journal is not None
        assert recorded.held is not None
        assert close(recorded.journal, 70, FakeConsole(), found_nothing=True)
        held = recorded.held.handed_on()
    with recording(place.settings(), "0456", FakeConsole(), held=held) as recorded:
        assert (recorded.job.job_id, recorded.before, recorded.over) == ("0456", None, None)
        with pytest.raises(JournalHeldError), recording(place.settings(), "0789", FakeConsole()):
            pass
        assert recorded.journal is not None
        assert asyncio.run(written(recorded.journal)) is None
        recorded.journal.close(0)
    assert place.read() == Closed(6, "0456", 0)


@pytest.mark.parametrize("how", ["written", "looked"])
def test_a_journal_that_another_driver_has_by_now_is_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("elastic_driver.journal.journal._AGAIN_S", 0.01)

    async def lose(journal: Journal) -> None:
        assert await written(journal) is None
        place.etcd.expire()
        there = encode(RegisteredDriver("0123", "there", "another place 1 2"))
        place.etcd.put(driver_key(place.place), there)
        errors: list[Exception] = []
        if how == "written":
            journal.keep(FAR)
            errors.append(await written(journal) or AssertionError())
        else:
            lost = asyncio.Event()
            journal.on_error = lambda error: (errors.append(error), lost.set())
            # As the lock's thread finds out after a while. Nothing is to be written.
            recorded.lock.lost("its lease has expired")  # type: ignore[union-attr]
            await lost.wait()
        (error,) = errors
        assert isinstance(error, JournalHeldError)
        assert str(error).endswith("job 0123 is driven by process 1 on there")
        journal.give_up()

    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        asyncio.run(lose(recorded.journal))
    assert driver_key(place.place) in place.etcd.held()


def test_while_etcd_is_away_the_journal_says_why_and_goes_on_then(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_driver.journal.journal._AGAIN_S", 0.01)

    async def go_on(journal: Journal) -> None:
        assert await written(journal) is None
        assert journal.silence == "etcd does not answer"
        place.etcd.is_away = True
        journal.keep(FAR)
        writing = asyncio.ensure_future(written(journal))
        while not journal.trouble:
            await asyncio.sleep(0.01)
        assert journal.trouble.startswith("cannot reach etcd: http://127.0.0.1:")
        place.etcd.is_away = False
        assert await writing is None
        assert journal.trouble == ""
        journal.give_up()

    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        asyncio.run(go_on(recorded.journal))


@pytest.mark.parametrize("is_there", [False, True])
def test_agents_wait_for_another_driver_as_long_as_etcd_has_that_wait(place: Place, is_there: bool) -> None:
    """Else they would be gone before it has the job."""
    if is_there:
        place.leave(FAR)
    place.etcd.least_lease_s = 15
    why = r"^--agent-timeout 15 is below 30 s, twice the lease of 15 s that etcd grants: "
    with pytest.raises(SettingsError, match=why), recording(place.settings(), "0456", FakeConsole()):
        pass
    assert isinstance(place.read(), Recorded) == is_there
    if not is_there:
        with recording(place.settings(agent_timeout_s=30.0), "0456", FakeConsole()) as recorded:
            assert recorded.journal is not None
            recorded.journal.close(0)


def test_its_password_is_nowhere_in_what_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each driver reads what proves who asks from its own environment; workers have that of the job."""
    monkeypatch.setenv("ETCDCTL_USER", "jobs:pa55word")
    place.etcd.users["jobs"] = "pa55word"
    with recording(place.settings(), "0123", FakeConsole()) as recorded:
        assert recorded.journal is not None
        assert recorded.lock is not None
        assert recorded.lock.place == dataclasses.replace(place.place, user="jobs", password="pa55word")
        assert "pa55word" not in repr(recorded)
        recorded.journal.close(0)


def test_agents_are_told_of_etcd_what_is_given_for_them(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a driver that takes the job over in another folder than it was begun in."""
    place.leave(FAR)
    mine = place.key.parent / "mine"
    mine.mkdir()
    for name in ("cert", "key"):
        (mine / name).write_text(f"-----BEGIN {name} of agents")
        monkeypatch.setenv(f"ELASTIC_DRIVER_AGENTS_ETCDCTL_{name.upper()}", name)
    monkeypatch.setenv("ETCDCTL_USER", "jobs:pa55word")
    place.etcd.users["jobs"] = "pa55word"
    monkeypatch.chdir(mine)

    async def welcome(recorded: Recording) -> object:
        stdin, chronicle = StandardInput(None, None), Chronicle()
        side = agents_of(
            recorded, JobClock(), Sink(), chronicle, 1.0, LocalDialler(), None, OnChange.IN_PLACE, stdin, NO_BARS
        )
        return side.admission._welcome_facts.etcd

    with recording(place.settings(), "0456", FakeConsole()) as recorded:
        enter(recorded.job)
        assert not Path("cert").exists()
        assert asyncio.run(welcome(recorded)) == dataclasses.replace(
            place.place, certificate="-----BEGIN cert of agents", key="-----BEGIN key of agents"
        )
        assert recorded.journal is not None
        recorded.journal.give_up()
