"""A journal's file: torn and damaged at each byte, and on a disk that is full."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_driver.journal import file
from elastic_driver.journal.file import AHEAD, HEADER, MOST_BODY, RecordFile, frame, parse, read, remove_leftovers
from elastic_driver.journal.folder import JOURNAL, JournalError

pytestmark = pytest.mark.unit

BODIES = (b"the first", b"\x01\x00\x00\x00 looks like a length", b"the third", b"x" * 40)
HERE = Path("journal")


def written(*bodies: bytes, first: int = 7) -> bytes:
    return HEADER + b"".join(frame(first + index, body) for index, body in enumerate(bodies))


def bodies_of(data: bytes) -> list[bytes]:
    return [record.body for record in parse(data, HERE)]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may be larger than that: the kernel says so as it does of a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_written_is_read() -> None:
    assert bodies_of(written(*BODIES)) == list(BODIES)
    assert bodies_of(written(*BODIES) + bytes(1000)) == list(BODIES)
    assert [record.sequence for record in parse(written(*BODIES), HERE)] == [7, 8, 9, 10]


def test_torn_at_each_byte_it_ends_before_the_record_that_is_torn() -> None:
    whole = written(*BODIES)
    ends = [len(written(*BODIES[:count])) for count in range(len(BODIES) + 1)]
    for size in range(ends[1], len(whole) + 1):
        there = list(BODIES[: sum(end <= size for end in ends[1:])])
        for zeros in (0, 5, 300):
            assert bodies_of(whole[:size] + bytes(zeros)) == there, size


def test_a_record_of_which_any_sectors_are_missing_is_torn() -> None:
    whole = written(*BODIES)
    last = len(written(*BODIES[:-1]))
    for begins in range(last, len(whole)):
        torn = whole[:begins] + bytes(min(8, len(whole) - begins)) + whole[begins + 8 :]
        assert bodies_of(torn + bytes(300)) == list(BODIES[:-1])


def test_a_first_record_that_is_torn_or_damaged_is_refused() -> None:
    whole = written(BODIES[0])
    for size in range(len(whole)):
        with pytest.raises(JournalError):
            parse(whole[:size], HERE)
    for at in range(len(whole)):
        with pytest.raises(JournalError):
            parse(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], HERE)


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF, "zero"])
def test_damaged_at_each_byte_it_is_refused_and_says_where(change: int | str) -> None:
    whole = written(*BODIES)
    starts = [len(written(*BODIES[:count])) for count in range(len(BODIES))]
    for at in range(starts[1], starts[-1]):
        byte = 0 if isinstance(change, str) else whole[at] ^ change
        if byte == whole[at]:
            continue
        begins = max(start for start in starts if start <= at)
        with pytest.raises(JournalError, match=rf"damaged at byte {begins}, and valid records follow"):
            parse(whole[:at] + bytes([byte]) + whole[at + 1 :] + bytes(300), HERE)


def test_damage_to_the_last_record_is_a_torn_one() -> None:
    whole = written(*BODIES)
    for at in range(len(written(*BODIES[:-1])), len(whole)):
        assert bodies_of(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] + bytes(300)) == list(BODIES[:-1])


def test_records_that_do_not_follow_each_other() -> None:
    base = written(*BODIES)
    with pytest.raises(JournalError, match="damaged at byte"):
        parse(base + frame(12, b"one is missing"), HERE)
    assert bodies_of(base + frame(3, b"from before")) == list(BODIES)


def test_a_length_beyond_all_bounds_is_no_record() -> None:
    huge = b"\xff\xff\xff\x7f" + frame(11, b"x")[4:]
    assert bodies_of(written(*BODIES) + huge + bytes(300)) == list(BODIES)
    assert MOST_BODY < 0x7FFFFFFF


def test_other_files_are_refused_by_name() -> None:
    with pytest.raises(JournalError, match="it is of version 12; this elastic_driver reads version 1"):
        parse(b"elastic_driver journal 12\n" + frame(1, b"x"), HERE)
    for data in (b"", b"#!/bin/sh\n", HEADER[:-1], bytes(100)):
        with pytest.raises(JournalError):
            parse(data, HERE)


def test_a_file_is_private_filled_ahead_and_on_disk(tmp_path: Path) -> None:
    records = RecordFile.new(tmp_path, 1, b"first")
    path = tmp_path / JOURNAL
    assert [each.name for each in tmp_path.iterdir()] == [JOURNAL]
    assert path.stat().st_mode & 0o777 == 0o600
    sizes = {path.stat().st_size}
    assert sizes == {records.size + AHEAD}
    for number in range(2, 600):
        records.append(number, b"x" * 1000)
        sizes.add(path.stat().st_size)
    assert len(sizes) < 8, "it is filled seldom"
    assert path.stat().st_size >= records.size + AHEAD // 2
    found = read(path)
    assert found is not None
    assert [len(record.body) for record in found] == [5, *[1000] * 598]
    records.append(600, b"y" * (3 * AHEAD))
    assert len(read(path) or ()) == 600
    records.close()


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    assert read(tmp_path / JOURNAL) is None
    old = RecordFile.new(tmp_path, 1, b"old")
    assert old.is_in(tmp_path)
    new = RecordFile.new(tmp_path, 2, b"new")
    assert not old.is_in(tmp_path)
    assert new.is_in(tmp_path)
    assert [record.body for record in read(tmp_path / JOURNAL) or ()] == [b"new"]
    (tmp_path / JOURNAL).unlink()
    assert not new.is_in(tmp_path)
    old.close()
    new.close()


def test_a_full_disk_still_has_what_was_filled_ahead(tmp_path: Path) -> None:
    records = RecordFile.new(tmp_path, 1, b"first")
    bodies = [b"x" * 4000] * 60
    with room_for((tmp_path / JOURNAL).stat().st_size):
        for number, body in enumerate(bodies, 2):
            records.append(number, body)
        with pytest.raises(OSError, match="too large"):
            records.append(62, b"x" * AHEAD)
    assert len(read(tmp_path / JOURNAL) or ()) == 61
    records.close()


def test_a_disk_without_room_for_a_new_file_keeps_the_old_one(tmp_path: Path) -> None:
    old = RecordFile.new(tmp_path, 1, b"old")
    with room_for(1000), pytest.raises(OSError, match="too large"):
        RecordFile.new(tmp_path, 2, b"new")
    assert old.is_in(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [JOURNAL], "nothing is left behind"
    old.close()


def test_a_write_that_fails_leaves_the_records_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = RecordFile.new(tmp_path, 1, b"first")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file.os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        records.append(2, b"second")
    monkeypatch.undo()
    assert (read(tmp_path / JOURNAL) or [])[0].body == b"first"
    records.close()


def test_a_disk_that_fails_where_the_file_is_extended_is_no_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = RecordFile.new(tmp_path, 1, b"first")
    whole = os.pwrite

    def fail(descriptor: int, data: memoryview, at: int) -> int:
        if not any(data):
            raise OSError(5, "Input/output error")
        return whole(descriptor, data, at)

    monkeypatch.setattr(file.os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output"):
        records.append(2, b"x" * (AHEAD // 2 + 1))
    records.close()


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.fsync
    synced: list[tuple[bool, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / JOURNAL).exists()))
        whole(descriptor)

    monkeypatch.setattr(file.os, "fsync", note)
    RecordFile.new(tmp_path, 1, b"first").close()
    assert synced == [(False, False), (True, True)]


def test_leftovers_of_a_writer_that_was_killed_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from elastic_driver.journal import file\n"
        "file.os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "file.RecordFile.new(Path(sys.argv[1]), 1, b'x')"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    assert read(tmp_path / JOURNAL) is None
    (tmp_path / "other.tmp").touch()
    remove_leftovers(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["other.tmp"]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(file.os, "pwrite", lambda fd, data, at: whole(fd, data[:1000], at))
    records = RecordFile.new(tmp_path, 1, b"x" * 5000)
    records.append(2, b"y" * 5000)
    records.close()
    assert [record.body for record in read(tmp_path / JOURNAL) or ()] == [b"x" * 5000, b"y" * 5000]
