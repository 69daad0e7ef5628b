"""A journal in etcd, before one in this process: its lock, its records, and whoever takes it from others.

tests/etcd has what needs a real one: leases that run out, servers that die.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_driver import codec
from elastic_driver.etcd.client import EtcdClient, EtcdRefusedError, EtcdUnreachableError
from elastic_driver.etcd.driver_record import RegisteredDriver, driver_key, driver_there, encode
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.journal import etcd_lock, etcd_records, etcd_waiting
from elastic_driver.journal.etcd_lock import EtcdLock, LockInDoubtError, LockLostError
from elastic_driver.journal.etcd_records import Ended, Head, ended_key, head_key, piece_key
from elastic_driver.journal.folder import JournalError, JournalHeldError, Signature
from elastic_driver.system.process_name import name_of, name_of_this_process, place_of_processes
from tests.support.fakes.etcd_jobs import Writer, bodies, until, writer
from tests.support.fakes.fake_etcd import FakeEtcd, Instead, Refusal, fake_etcd

pytestmark = pytest.mark.unit


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    with fake_etcd() as fake:
        yield fake


@pytest.fixture
def place(etcd: FakeEtcd) -> EtcdPlace:
    return etcd.place()


@pytest.fixture
def mine(place: EtcdPlace) -> Iterator[Writer]:
    with writer(place) as made:
        yield made


def records(etcd: FakeEtcd) -> list[str]:
    return [key for key in etcd.held() if "/records/" in key]


# --- records ------------------------------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    assert bodies(place) is None
    assert mine.store.size == 0
    mine.begin(b"first")
    assert bodies(place) == [b"first"]
    mine.append(b"second")
    mine.append(b"")
    assert bodies(place) == [b"first", b"second", b""]
    before = mine.store.size
    mine.append(b"x" * 100)
    assert mine.store.size >= before + 100
    assert not any(b"first" in value or b"second" in value for value in etcd.held().values())


def test_another_snapshot_takes_the_place_of_all(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    mine.append(b"second")
    mine.begin(b"third")
    assert bodies(place) == [b"third"]
    assert records(etcd) == [piece_key(place, 2, 1)]
    mine.append(b"fourth")
    assert bodies(place) == [b"third", b"fourth"]


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_what_is_too_large_for_etcd_is_in_pieces(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(etcd_records, "PIECE_BYTES", 10)
    monkeypatch.setattr(etcd_records, "_PAGE", 2)
    large = bytes(range(pieces * 10 - 3))
    mine.begin(large)
    mine.append(b"small")
    mine.append(large[::-1])
    assert len(records(etcd)) == 2 * pieces + 1
    assert bodies(place) == [large, b"small", large[::-1]]


def test_a_record_that_no_reader_would_take_is_not_written(
    place: EtcdPlace, mine: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.begin(b"first")
    monkeypatch.setattr("elastic_driver.journal.etcd_store.MOST_BODY", 10)
    for write in (mine.begin, mine.append):
        with pytest.raises(OSError, match="a record has 11 bytes; the maximum is 10"):
            write(b"x" * 11)
    monkeypatch.setattr(etcd_records, "MOST_BODY", 3)
    with pytest.raises(JournalError, match="a record has more than 3 bytes"):
        bodies(place)


def test_another_drivers_generation_is_above_all_before(etcd: FakeEtcd, place: EtcdPlace) -> None:
    for generation in (1, 2, 3):
        with writer(place) as made:
            made.begin(b"%d" % generation)
        assert records(etcd) == [piece_key(place, generation, 1)]
    assert bodies(place) == [b"3"]


def test_each_request_of_a_snapshot_may_be_the_last(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed before it, or behind it: then all that there was is there, or all that is new; and the next
    one removes what is left."""
    monkeypatch.setattr(etcd_records, "PIECE_BYTES", 4)
    old, new = [b"the first one", b"and"], [b"another one"]
    cuts = 0
    for is_carried_out in (False, True):
        at = 0
        while True:
            with writer(place) as made:
                made.begin(old[0])
                made.append(old[1])
            with writer(place) as made:
                made.store.look()
                asked = len(etcd.asked)
                etcd.instead += [None] * at + [Instead(carried_out=is_carried_out)] * 2
                try:
                    made.store.begin(new[0])
                except EtcdUnreachableError:
                    cuts += 1
                etcd.instead.clear()
                is_over = len(etcd.asked) - asked <= at
            found = bodies(place)
            assert found in (old, new)
            if is_over:
                assert found == new
                break
            with writer(place) as made:
                made.begin(b"z")
            assert bodies(place) == [b"z"]
            assert len(records(etcd)) == 1
            at += 1
    assert cuts >= 12


def test_each_request_of_a_record_may_be_the_last(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_records, "PIECE_BYTES", 4)
    first, large = b"the first one", b"another that is large"
    for is_carried_out in (False, True):
        for at in range(3):  # six pieces, two at once
            with writer(place) as made:
                made.begin(first)
                etcd.instead += [None] * at + [Instead(carried_out=is_carried_out)] * 2
                with pytest.raises(EtcdUnreachableError):
                    made.append(large)
                etcd.instead.clear()
            assert bodies(place) == ([first, large] if is_carried_out and at == 2 else [first])


def test_what_had_no_answer_is_written_anew(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    """It may come to etcd late. It is not carried out then."""
    mine.begin(b"first")
    go_on = threading.Event()
    mine.store._client.timeout_s = 0.2
    etcd.instead.append(Instead(until=go_on, carried_out=True))
    try:
        with pytest.raises(EtcdUnreachableError):
            mine.store.append(b"second")
        mine.store.close()
        mine.begin(b"first and second")
        mine.append(b"third")
    finally:
        answers = len(etcd.answered)
        go_on.set()
    until(lambda: len(etcd.answered) > answers)
    assert bodies(place) == [b"first and second", b"third"]
    assert records(etcd) == [piece_key(place, 2, 1), piece_key(place, 2, 2)]


def test_a_head_that_is_moved_late_is_not(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    go_on = threading.Event()
    mine.store._client.timeout_s = 0.2
    # Of the second snapshot the look at the head, its piece, and the move.
    etcd.instead += [None, None, Instead(until=go_on, carried_out=True)]
    try:
        with pytest.raises(EtcdUnreachableError):
            mine.store.begin(b"second")
        mine.store.close()
        mine.begin(b"third")
    finally:
        answers = len(etcd.answered)
        go_on.set()
    until(lambda: len(etcd.answered) > answers)
    assert bodies(place) == [b"third"]


def test_a_piece_of_a_snapshot_that_is_written_late_does_not_count(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer
) -> None:
    mine.begin(b"first")
    go_on = threading.Event()
    mine.store._client.timeout_s = 0.2
    etcd.instead += [None, Instead(until=go_on, carried_out=True)]
    try:
        with pytest.raises(EtcdUnreachableError):
            mine.store.begin(b"second")
        mine.store.close()
        mine.begin(b"third")
    finally:
        go_on.set()
    until(lambda: len(records(etcd)) == 2)
    assert bodies(place) == [b"third"]
    mine.begin(b"fourth")
    assert records(etcd) == [piece_key(place, 4, 1)]


@pytest.mark.parametrize("at", range(5))
def test_no_request_of_a_first_snapshot_that_comes_late_meets_what_counts(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A server that was cut off carries out what it was asked for, also to delete."""
    monkeypatch.setattr(etcd_records, "PIECE_BYTES", 3)
    with writer(place) as made:
        made.begin(b"of a driver before")
    etcd.put(piece_key(place, 2, 1), b"left over")
    go_on = threading.Event()
    with writer(place) as made:
        made.store.look()
        made.store._client.timeout_s = 0.2
        etcd.instead += [None] * at + [Instead(until=go_on, carried_out=True)]
        try:
            with pytest.raises(EtcdUnreachableError):
                made.store.begin(b"first")
            etcd.instead.clear()
            made.store.close()
            made.store._client.timeout_s = 3.0
            made.begin(b"second")
            made.append(b"third")
        finally:
            answers = len(etcd.answered)
            go_on.set()
        until(lambda: len(etcd.answered) > answers)
        made.append(b"fourth")
        assert bodies(place) == [b"second", b"third", b"fourth"]
        made.begin(b"fifth")
    assert bodies(place) == [b"fifth"]
    assert len({key.rpartition("/")[0] for key in records(etcd)}) == 1


@pytest.mark.parametrize("name", ["x", "00000000000000000009", "0000000000000000000x/1", f"{'9' * 20}/1"])
def test_what_is_no_piece_is_not_in_the_way(etcd: FakeEtcd, place: EtcdPlace, mine: Writer, name: str) -> None:
    etcd.put(f"/jobs/a/records/{name}", b"")
    mine.begin(b"first")
    mine.append(b"second")
    assert bodies(place) == [b"first", b"second"]


@pytest.mark.parametrize("status", [True, False])
def test_a_reader_finds_one_generation_whatever_is_written_meanwhile(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, monkeypatch: pytest.MonkeyPatch, status: bool
) -> None:
    monkeypatch.setattr(etcd_records, "_PAGE", 1)
    mine.begin(b"first")
    mine.append(b"second")
    if not status:
        # etcd has compacted what was read away: the reader begins anew.
        etcd.compacts = True
    etcd.before_next_page = lambda: mine.begin(b"third")
    assert bodies(place) == ([b"first", b"second"] if status else [b"third"])


# --- what is no journal -------------------------------------------------------------------------------------------


def test_another_key(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    with pytest.raises(JournalError, match=r"it is sealed with another key: is --journal-key the key of this job\?"):
        bodies(place, secret="another secret")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_piece_that_is_missing_before_others(etcd: FakeEtcd, place: EtcdPlace, mine: Writer, number: int) -> None:
    mine.begin(b"first")
    for body in (b"second", b"third", b"fourth"):
        mine.append(body)
    etcd.remove(piece_key(place, 1, number))
    with pytest.raises(JournalError, match=f"it is damaged: piece {number} of its records is missing"):
        bodies(place)


def test_a_piece_in_the_place_of_another(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    mine.append(b"second")
    mine.append(b"third")
    values = etcd.held()
    etcd.put(piece_key(place, 1, 3), values[piece_key(place, 1, 2)])
    with pytest.raises(JournalError, match=r"it is damaged at .*/00000000000000000003: it was sealed with another key"):
        bodies(place)


@pytest.mark.parametrize("value", [b"", b"x", b"\0" * 40])
def test_a_piece_that_nobody_has_sealed(etcd: FakeEtcd, place: EtcdPlace, mine: Writer, value: bytes) -> None:
    mine.begin(b"first")
    etcd.put(piece_key(place, 1, 2), value)
    with pytest.raises(JournalError, match=r"it is damaged at .*/00000000000000000002: it was sealed with another key"):
        bodies(place)


def test_no_piece_at_all(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    etcd.remove(piece_key(place, 1, 1))
    with pytest.raises(JournalError, match="its first record is missing"):
        bodies(place)


@pytest.mark.parametrize("value", [b"", b"{}", b'{"generation":-1,"job":"a","key":"b","driver":"c"}'])
def test_a_head_that_is_none(etcd: FakeEtcd, place: EtcdPlace, value: bytes) -> None:
    etcd.put(head_key(place), value)
    with pytest.raises(JournalError, match="its head is not a journal's"):
        bodies(place)
    with pytest.raises(JournalError, match="its head is not a journal's"):
        EtcdLock.take(place, "0123")
    assert driver_key(place) not in etcd.held()


# --- the lock -----------------------------------------------------------------------------------------------------


def test_it_says_who_drives(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    with EtcdClient(place) as client:
        found = driver_there(client, place)
        assert found is not None
        assert (found.job, found.process, found.epoch, found.urls) == ("0123", name_of_this_process(), 0, ())
        assert (found.lease_s, mine.lock.lease_s) == (5, 5.0)
        assert mine.lock.cluster_id == client.cluster_id != ""
        said = replace(found, job="0456", epoch=3, name="n", urls=("https://a:1", "https://b:1"), fingerprint="f")
        mine.lock.is_of("0456")
        mine.lock.announce(epoch=3, name="n", urls=said.urls, fingerprint="f")
        until(lambda: driver_there(client, place) == said)
        mine.lock.release()
        assert driver_there(client, place) is None


def test_what_is_said_survives_an_etcd_that_does_not_answer(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    etcd.instead += [Instead()] * 4
    mine.lock.is_of("0456")
    with EtcdClient(place) as client:
        until(lambda: not etcd.instead)
        until(lambda: (found := driver_there(client, place)) is not None and found.job == "0456")


def test_one_that_lives_on_this_machine_has_it(place: EtcdPlace, mine: Writer) -> None:
    told: list[str] = []
    with pytest.raises(JournalHeldError, match=rf"^cannot use etcd://.*: job 0123 is driven by process {os.getpid()}"):
        EtcdLock.take(place, "0456", on_wait=told.append)
    assert told == []


def test_one_of_this_machine_that_is_dead_loses_it_at_once(etcd: FakeEtcd, place: EtcdPlace) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = name_of(process.pid)
        process.kill()
    etcd.put(driver_key(place), encode(RegisteredDriver("0123", "here", name)))
    lock = EtcdLock.take(place, "0456")
    assert (lock.waited_for, lock.there.job) == ("", "0456")
    lock.release()


def test_one_of_another_user_that_cannot_be_seen_is_not_taken_for_dead(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    etcd.put(driver_key(place), encode(RegisteredDriver("0123", "here", f"{place_of_processes()} 4194304 1")))
    with pytest.raises(JournalHeldError, match="job 0123 is driven by process 4194304 on here"):
        EtcdLock.take(place, "0456")


ELSEWHERE = RegisteredDriver("0123", "there", f"{place_of_processes().replace('pid:', 'other:')} 1 2")


@pytest.mark.parametrize("value", [encode(ELSEWHERE), b"", b"{}", b"\xff", encode(RegisteredDriver("", "there", ""))])
def test_one_of_another_machine_is_waited_for_as_long_as_a_lease(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.setattr(etcd_waiting, "LEASE_S", 0.0)
    monkeypatch.setattr(etcd_waiting, "_LATER_S", 0.1)
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.01)
    etcd.put(driver_key(place), value)
    told: list[str] = []
    with pytest.raises(JournalHeldError, match=r"^cannot use etcd://.* is driven by "):
        EtcdLock.take(place, "0456", on_wait=told.append)
    (line,) = told
    assert line.endswith(": waiting 0.1 s to see whether that driver is dead")
    # Its lease is over meanwhile.
    lock = EtcdLock.take(place, "0456", on_wait=lambda text: etcd.remove(driver_key(place)))
    assert lock.waited_for == ""
    lock.release()


def test_one_that_stands_by_waits_for_one_that_lives(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_waiting, "LEASE_S", 0.0)
    monkeypatch.setattr(etcd_waiting, "_LATER_S", 0.0)
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.001)
    etcd.put(driver_key(place), encode(ELSEWHERE))
    told: list[str] = []
    looks: list[bool] = []

    def look(*, drives: bool) -> None:
        looks.append(drives)
        if len(looks) == 3:
            etcd.instead += [Instead()] * 2  # it is not away for good
        if len(looks) == 6:
            etcd.put(driver_key(place), encode(replace(ELSEWHERE, job="0789")))
        if len(looks) == 9:
            etcd.remove(driver_key(place))

    lock = EtcdLock.take(place, "0456", stands_by=True, on_wait=told.append, look=look)
    first, waits, again, second = told
    assert waits.startswith("still standing by, waiting for etcd: cannot reach etcd: ")
    assert first == again == "standing by: job 0123 is driven by process 1 on there"
    assert second == "standing by: job 0789 is driven by process 1 on there"
    assert all(looks)
    assert lock.waited_for == "0789"
    lock.release()

    class Ended(Exception):
        pass

    def end(*, drives: bool) -> None:
        raise Ended

    etcd.put(driver_key(place), encode(ELSEWHERE))
    with pytest.raises(Ended):
        EtcdLock.take(place, "0456", stands_by=True, look=end)


def test_how_the_job_has_ended_is_told_to_the_next(place: EtcdPlace) -> None:
    with writer(place) as made:
        made.begin(b"first")
        made.store.has_ended(3)
    lock = EtcdLock.take(place, "0456")
    assert lock.last == Signature(job="0123", exit_code=3)
    # As far as one can see before it is read.
    assert lock.there.job == "0123"
    lock.release()


def test_that_it_has_ended_is_not_said_by_whoever_has_lost_it(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    etcd.remove(driver_key(place))
    mine.store.has_ended(3)
    etcd.close()
    mine.store.has_ended(3)
    assert "/jobs/a/ended" not in etcd.held()


@pytest.mark.parametrize("value", [b"", b"{}"])
def test_an_end_that_nobody_of_ours_has_said_was_not_said(etcd: FakeEtcd, place: EtcdPlace, value: bytes) -> None:
    etcd.put("/jobs/a/ended", value)
    lock = EtcdLock.take(place, "0456")
    assert lock.last == Signature()
    lock.release()


@pytest.mark.parametrize("at", range(1, 4))
@pytest.mark.parametrize("is_carried_out", [False, True])
def test_who_had_no_answer_takes_it(etcd: FakeEtcd, place: EtcdPlace, at: int, is_carried_out: bool) -> None:
    etcd.instead += [None] * at + [Instead(carried_out=is_carried_out)]
    lock = EtcdLock.take(place, "0123")
    assert etcd.held().keys() == {driver_key(place)}
    with EtcdClient(place) as client:
        found = client.get(driver_key(place))
        assert found is not None
        assert found.create_revision == lock.created
    lock.release()


# --- the lock is gone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lease", "key", "all"])
def test_a_lock_that_is_gone_is_taken_again_where_nobody_else_has_had_it(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, how: str
) -> None:
    mine.begin(b"first")
    match how:
        case "lease":
            etcd.expire()
        case "key":
            etcd.remove(driver_key(place))
        case _:
            for key in etcd.held():
                etcd.remove(key)
    with pytest.raises(LockLostError):
        mine.store.append(b"second")
    assert mine.lock.is_in_doubt
    with pytest.raises(LockInDoubtError, match="another driver may have taken over the job by now: "):
        mine.lock.check()
    mine.doubted.wait()
    mine.lost.wait()
    mine.store.close()
    mine.begin(b"first and second")
    assert bodies(place) == [b"first and second"]
    assert not mine.lock.is_in_doubt
    until(lambda: mine.doubts == [True, False])


def test_a_lock_that_another_has_is_lost(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    etcd.expire()
    with writer(place, "0456") as other:
        with pytest.raises(LockLostError, match="another driver holds it"):
            mine.store.append(b"second")
        with pytest.raises(JournalHeldError, match="job 0123 is driven by process"):
            mine.store.look()
        other.begin(b"other")
    # It is free again, and yet another has had it.
    with pytest.raises(JournalHeldError, match="another driver has taken over the job in the meantime"):
        mine.store.look()
    assert bodies(place) == [b"other"]
    mine.doubted.wait()
    assert mine.doubts == [True]


def test_one_that_has_written_nothing_does_not_count(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    etcd.expire()
    with writer(place, "0456"), pytest.raises(LockLostError):
        mine.store.append(b"second")
    mine.begin(b"first and second")
    assert bodies(place) == [b"first and second"]


def test_a_write_that_comes_late_is_not_made(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    """The process stood still between its look and its write, or the network did."""
    mine.begin(b"first")
    etcd.expire()
    with writer(place, "0456") as other:
        other.begin(b"other")
        for write in (mine.store.append, mine.store.begin):
            with pytest.raises(OSError, match=r"another driver holds it|another driver may have"):
                write(b"late")
        assert bodies(place) == [b"other"]


def test_a_lock_that_was_taken_again_without_an_answer_is_still_this_drivers(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer
) -> None:
    mine.begin(b"first")
    etcd.expire()
    with pytest.raises(LockLostError):
        mine.store.append(b"second")
    mine.store.close()
    # The look at the key, at the head, the lease, and the transaction, twice.
    etcd.instead += [None, None, None, Instead(carried_out=True), Instead(carried_out=True)]
    with pytest.raises(EtcdUnreachableError):
        mine.store.look()
    mine.begin(b"first and second")
    assert bodies(place) == [b"first and second"]


def test_its_thread_finds_out_that_it_is_gone(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_lock, "_ASKS", 500)
    for how in (etcd.expire, lambda: etcd.remove(driver_key(place))):
        with writer(place) as made:
            made.begin(b"first")
            how()
            made.doubted.wait()
            assert made.lock.is_lost
            made.lost.wait()
            made.begin(b"second")
            until(lambda made=made: made.doubts == [True, False])


def test_it_is_in_doubt_from_a_second_before_its_lease_is_over(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_lock, "_ASKS", 500)
    monkeypatch.setattr(etcd_lock, "_AGAIN_S", 0.001)
    skipped = 0.0
    clock = etcd_lock.now_s
    monkeypatch.setattr(etcd_lock, "now_s", lambda: clock() + skipped)
    with writer(place) as made:
        made.begin(b"first")
        etcd.refusal = Refusal(403, 7, "etcdserver: permission denied")
        etcd.is_away = True
        until(lambda: made.lock._why)
        assert not made.lock.is_in_doubt
        skipped = 3.0
        assert not made.lock.is_in_doubt
        skipped = 4.1
        assert made.lock.is_in_doubt
        made.doubted.wait()
        with pytest.raises(LockInDoubtError, match="cannot reach etcd"):
            made.store.append(b"second")
        made.doubted.clear()
        etcd.is_away, etcd.refusal = False, None
        made.doubted.wait()
        assert not made.lock.is_in_doubt
        made.append(b"second")
        assert made.doubts == [True, False]
    assert bodies(place) == [b"first", b"second"]


class Hanging:
    """Keep-alives that wait for a name's address, and are not to be told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        keep_alive = EtcdClient.keep_alive

        def hang(client: EtcdClient, lease: int) -> int:
            if not self.may_end.is_set():
                self.has_begun.set()
                self.may_end.wait()
            return keep_alive(client, lease)

        monkeypatch.setattr(etcd_lock, "_ASKS", 500)
        monkeypatch.setattr(etcd_lock, "_JOIN_S", 0.01)
        monkeypatch.setattr(EtcdClient, "keep_alive", hang)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    before = set(threading.enumerate())
    made = Hanging(monkeypatch)
    yield made
    made.may_end.set()
    until(lambda: not [each for each in set(threading.enumerate()) - before if each.name == "elasticrun-lease"])


def test_it_is_told_of_a_doubt_while_a_name_is_looked_up(
    hanging: Hanging, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = 0.0
    clock = etcd_lock.now_s
    monkeypatch.setattr(etcd_lock, "now_s", lambda: clock() + skipped)
    with writer(place) as made:
        hanging.has_begun.wait()
        skipped = 4.1
        made.doubted.wait()
        assert made.lock.doubt_at < etcd_lock.now_s()
        assert made.doubts == [True]


def test_neither_its_release_nor_its_loss_waits_for_a_name(hanging: Hanging, etcd: FakeEtcd, place: EtcdPlace) -> None:
    with writer(place) as made:
        made.begin(b"first")
        hanging.has_begun.wait()
        etcd.remove(driver_key(place))
        with pytest.raises(LockLostError):
            made.append(b"second")
        made.store.close()
        made.begin(b"first and second")
        created = made.lock.created
        with EtcdClient(place) as client:
            found = client.get(driver_key(place))
            assert found is not None
            assert found.create_revision == created
    assert driver_key(place) not in etcd.held()
    hanging.may_end.set()


def test_what_was_asked_for_before_a_loss_says_nothing_of_the_lock_after_it(
    hanging: Hanging, etcd: FakeEtcd, place: EtcdPlace
) -> None:
    with writer(place) as made:
        made.begin(b"first")
        hanging.has_begun.wait()
        first = made.lock._threads[0]
        etcd.expire()
        with pytest.raises(LockLostError):
            made.append(b"second")
        made.store.close()
        made.begin(b"first and second")
        good_until = made.lock.good_until
        hanging.may_end.set()
        first.join()  # its lease has run out
        assert not made.lock.is_lost
        assert made.lock.good_until >= good_until


def test_who_has_seen_a_doubt_is_told_that_it_is_over(place: EtcdPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was too short for the thread that tells of it."""
    skipped = 0.0
    clock = etcd_lock.now_s
    monkeypatch.setattr(etcd_lock, "now_s", lambda: clock() + skipped)
    monkeypatch.setattr(etcd_lock, "_WATCH_S", 60.0)
    with writer(place) as made:
        until(lambda: not made.lock._changed.is_set())
        skipped = 4.1
        assert made.lock.is_in_doubt
        skipped = 0.0
        made.lock._changed.set()
        until(lambda: made.doubts and not made.doubts[-1])


def test_an_error_of_whoever_is_told_ends_nothing(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    told: list[bool] = []

    def fail() -> None:
        told.append(mine.lock.is_in_doubt)
        raise ValueError

    mine.lock.on_doubt = fail
    mine.begin(b"first")
    etcd.expire()
    with pytest.raises(LockLostError):
        mine.append(b"second")
    mine.lost.wait()
    mine.store.close()
    mine.begin(b"second")
    until(lambda: told == [True, False])


def test_what_is_said_while_it_is_taken_is_not_lost(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.begin(b"first")
    etcd.expire()
    with pytest.raises(LockLostError):
        mine.append(b"second")
    mine.store.close()
    txn = EtcdClient.txn

    def say(client: EtcdClient, *what: Any) -> Any:
        outcome = txn(client, *what)
        mine.lock.announce(epoch=3, name="n", urls=("https://a:1",), fingerprint="f")
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(EtcdClient, "txn", say)
        mine.store.look()
    with EtcdClient(place) as client:
        until(lambda: (found := driver_there(client, place)) is not None and found.epoch == 3)


def test_it_is_not_taken_again_once_it_is_released(etcd: FakeEtcd, place: EtcdPlace) -> None:
    """The journal's thread may still be at it when the process ends."""
    with writer(place) as made:
        made.begin(b"first")
        etcd.expire()
        with pytest.raises(LockLostError):
            made.append(b"second")
    with pytest.raises(LockLostError, match="the driver lock of the job has been released"):
        made.store.look()
    assert driver_key(place) not in etcd.held()
    assert made.lock.is_lost


@pytest.mark.parametrize("says", [True, False])
def test_a_driver_with_a_longer_lease_is_waited_for_as_long(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    etcd.least_lease_s = 15
    with writer(place) as made:
        assert made.lock.lease_s == 15.0
        with EtcdClient(place) as client:
            there = driver_there(client, place)
    assert there is not None
    assert there.lease_s == 15

    class Ended(Exception):
        pass

    def end(*, drives: bool) -> None:
        raise Ended

    told: list[str] = []
    process = ELSEWHERE.process
    etcd.put(driver_key(place), encode(replace(there, process=process, lease_s=15 if says else 0)))
    with pytest.raises(Ended):
        EtcdLock.take(place, "0456", on_wait=told.append, look=end)
    (line,) = told
    assert line.endswith(f": waiting {16 if says else 6} s to see whether that driver is dead")


def test_one_that_stands_by_leaves_a_job_whose_keys_were_removed_to_its_driver(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That makes them anew as soon as it sees it. It would end if it found another one."""
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.001)
    mine.begin(b"first")
    looks = 0

    def look(*, drives: bool) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            for key in etcd.held():
                etcd.remove(key)
        if looks == 6:
            assert driver_key(place) not in etcd.held()
            with pytest.raises(LockLostError):
                mine.append(b"second")
            mine.store.close()
            mine.begin(b"first and second")
        if looks == 9:
            mine.lock.release()

    lock = EtcdLock.take(place, "0456", stands_by=True, look=look)
    assert lock.waited_for == "0123"
    assert bodies(place) == [b"first and second"]
    lock.release()


def test_one_that_stands_by_has_the_jobs_key(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.001)
    looks = 0

    def look(*, drives: bool) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            mine.begin(b"first")

    with pytest.raises(JournalError, match=r"it is sealed with another key: is --journal-key the key of this job\?$"):
        EtcdLock.take(place, "0456", key_name="another", stands_by=True, look=look)
    assert looks == 3


def test_only_where_nobody_drives_is_it_said_how_the_job_is_given_up(place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    with pytest.raises(JournalError, match=r"is --journal-key the key of this job\?$"):
        bodies(place, secret="another secret")
    mine.lock.release()
    with pytest.raises(
        JournalError, match=r"To abandon job 0123, whose workers may still be running: etcdctl del --prefix "
    ):
        bodies(place, secret="another secret")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("0123", r"Job 0123 has ended with exit code 3\. To start another job there: etcdctl del --prefix /jobs/a/$"),
        ("0122", r"To abandon job 0123, whose workers may still be running: etcdctl del --prefix /jobs/a/$"),
    ],
)
def test_of_a_job_that_has_ended_nobody_is_told_that_it_may_run(
    etcd: FakeEtcd, place: EtcdPlace, mine: Writer, ended: str, said: str
) -> None:
    mine.begin(b"first")
    mine.store.close()
    etcd.put(ended_key(place), codec.encode(Ended, Ended(ended, 3)))
    mine.lock.release()
    with pytest.raises(JournalError, match=said):
        bodies(place, secret="another secret")


def test_one_that_stands_by_goes_on_where_etcd_refuses(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is full, or a user has another password: somebody mends that before the job has nobody."""
    monkeypatch.setattr(etcd_waiting, "_LOOK_S", 0.001)
    etcd.put(driver_key(place), encode(ELSEWHERE))
    told: list[str] = []
    looks = 0

    def look(*, drives: bool) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            etcd.users["jobs"] = "pa55word"
        if looks == 6:
            etcd.users.clear()
            etcd.remove(driver_key(place))
            etcd.refusal = Refusal(429, 8, "etcdserver: mvcc: database space exceeded")
        if looks == 9:
            etcd.refusal = None

    lock = EtcdLock.take(place, "0456", stands_by=True, on_wait=told.append, look=look)
    assert looks >= 9
    assert told[1].startswith(
        "still standing by, waiting for etcd: etcd rejected the request: etcdserver: user name is empty"
    )
    assert len(told) == 2
    lock.release()
    etcd.users["jobs"] = "pa55word"
    with pytest.raises(EtcdRefusedError):
        EtcdLock.take(place, "0456", stands_by=True)


def test_it_is_good_from_when_its_lease_was_asked_for(
    etcd: FakeEtcd, place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from when the answer came: that may have been on its way for long."""
    skipped = 0.0
    clock = etcd_lock.now_s
    monkeypatch.setattr(etcd_lock, "now_s", lambda: clock() + skipped)
    grant, keep_alive = EtcdClient.grant, EtcdClient.keep_alive
    answered_s: list[float] = []

    def slow_grant(client: EtcdClient, ttl_s: int) -> tuple[int, int]:
        nonlocal skipped
        skipped += 1.5
        return grant(client, ttl_s)

    def slow_keep_alive(client: EtcdClient, lease: int) -> int:
        nonlocal skipped
        skipped += 1.5
        answered_s.append(etcd_lock.now_s())
        return keep_alive(client, lease)

    monkeypatch.setattr(EtcdClient, "grant", slow_grant)
    monkeypatch.setattr(EtcdClient, "keep_alive", slow_keep_alive)
    began_s = etcd_lock.now_s()
    with writer(place) as made:
        first_s = made.lock.good_until
        assert began_s + 5 <= first_s <= etcd_lock.now_s() + 5 - 1.5
        until(lambda: made.lock.good_until != first_s)
        # It is kept alive again more than a second later.
        assert made.lock.good_until <= answered_s[0] + 5 - 1.5


def test_what_etcd_refuses_is_an_error_of_the_disk(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    etcd.refusal = Refusal(429, 8, "etcdserver: mvcc: database space exceeded")
    for write in (mine.append, mine.begin):
        with pytest.raises(EtcdRefusedError, match="database space exceeded: free space"):
            write(b"second")
    etcd.refusal = None
    mine.store.close()
    mine.begin(b"first and second")
    assert bodies(place) == [b"first and second"]


def test_a_head_that_somebody_has_replaced_is_written_again(etcd: FakeEtcd, place: EtcdPlace, mine: Writer) -> None:
    mine.begin(b"first")
    etcd.put(head_key(place), codec.encode(Head, Head(77, "0123", "key", "other")))
    with pytest.raises(LockLostError, match="the journal's records were removed or replaced"):
        mine.append(b"second")
    mine.store.close()
    mine.begin(b"first and second")
    assert bodies(place) == [b"first and second"]
    assert records(etcd) == [piece_key(place, 78, 1)]
