"""Which commits go when the disk is full: by what it says of itself, with fakes, and on a real small disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.commits import Durable
from elastic_driver.worker.durable.folder import CommitId, commit_files, commit_path, write_file
from elastic_driver.worker.durable.room import Room

pytestmark = pytest.mark.unit

_PAGE = 4096


class Disk:
    """A full disk, or a quota, with room for so many bytes of commits; others' files take some of it, too."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room, self.others, self.number = folder, 1 << 40, 0, errno.ENOSPC
        self.says: int | None = None  # free bytes, whatever is true; None for the truth
        self.failures = 0
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(os, "statvfs", self._statvfs)

    def _free(self) -> int:
        return self.room - self.others - sum(path.stat().st_size for path in self.folder.glob("*commit-*"))

    def _fsync(self, descriptor: int) -> None:
        if self._free() < 0:
            self.failures += 1
            raise OSError(self.number, os.strerror(self.number))

    def _statvfs(self, folder: Path) -> SimpleNamespace:
        free = max(0, self._free()) if self.says is None else self.says
        return SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=self.room)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def encoded(pages: int = 2) -> durable_format.Encoded:
    """A state whose file has just that many pages."""
    return durable_format.encode({"x": np.zeros(pages * _PAGE - 256 - 16, np.uint8)}, commits=1, pad="." * 140)


def put(folder: Path, *numbers: int, pages: int = 2) -> list[Path]:
    return [write_file(folder, CommitId(number), encoded(pages)) for number in numbers]


def damage(path: Path) -> None:
    """Changes a byte of it."""
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def there(folder: Path) -> list[int]:
    return [number for number, _ in commit_files(folder)]


def write(folder: Path, number: int, pages: int = 2, keep: int = 10) -> str:
    """Writes a commit as the writing thread does. What was wrong; "" when it is on disk."""
    durable = Durable(folder, every=1, interval_s=None, keep=keep, job_id="")
    durable._write(CommitId(number), encoded(pages))
    return durable._complaint


def test_a_files_size_is_known_before_it_is_written(tmp_path: Path) -> None:
    for state in (encoded(), durable_format.encode({}), durable_format.encode({"a": 1, "b": [np.ones(3), np.ones(3)]})):
        assert write_file(tmp_path, CommitId(1), state).stat().st_size == state.file_bytes
    assert encoded(3).file_bytes == 3 * _PAGE


def test_nothing_goes_for_a_commit_that_would_not_fit_then_either(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 2, 3, 4, 5)
    disk.room = 8 * _PAGE
    assert write(tmp_path, 6, pages=7) == os.strerror(errno.ENOSPC)
    assert there(tmp_path) == [2, 3, 4, 5]
    assert disk.failures == 1, "it was not tried again"
    assert write(tmp_path, 6, pages=6) == "", "it fits beside the newest"
    assert there(tmp_path) == [5, 6]


def test_only_as_many_go_as_must(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 2, 3, 4, 5)
    disk.room = 9 * _PAGE
    assert write(tmp_path, 6, pages=4) == ""
    assert there(tmp_path) == [4, 5, 6]


def test_others_who_take_the_room_cost_no_more_commits(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 2, 3, 4, 5)
    disk.others, disk.room = 100 * _PAGE, 100 * _PAGE
    assert write(tmp_path, 6, pages=8) != ""
    assert there(tmp_path) == [2, 3, 4, 5]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_two_whole_commits_stay_where_nobody_knows_what_would_be_enough(
    disk: Disk, tmp_path: Path, number: int
) -> None:
    """A quota does not say what is left of it; and some disks fail though they say that there is room."""
    put(tmp_path, 2, 3, 4, 5)
    disk.others, disk.room, disk.number, disk.says = 100 * _PAGE, 100 * _PAGE, number, 1 << 30
    assert write(tmp_path, 6, pages=7) == os.strerror(number)
    assert there(tmp_path) == [4, 5]


def test_a_disk_that_says_nothing_is_taken_as_a_quota(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 2, 3, 4, 5)
    disk.room = 0  # no blocks at all, as some file systems in user space say
    assert write(tmp_path, 6, pages=7) == os.strerror(errno.ENOSPC)
    assert there(tmp_path) == [4, 5]


def test_a_quota_for_two_commits_gets_the_next(disk: Disk, tmp_path: Path) -> None:
    """What the oldest takes is enough, however little is left."""
    put(tmp_path, 4, 5)
    disk.room, disk.number = 4 * _PAGE, errno.EDQUOT
    assert write(tmp_path, 6) == ""
    assert there(tmp_path) == [5, 6]


def test_a_quota_that_others_use_up_leaves_two_whole_ones(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 2, 3, 4, 5)
    disk.others, disk.room, disk.number = 100 * _PAGE, 100 * _PAGE, errno.EDQUOT
    assert write(tmp_path, 6) != ""
    assert there(tmp_path) == [4, 5]


def test_a_damaged_newer_commit_goes_before_any_whole_one(disk: Disk, tmp_path: Path) -> None:
    *_, damaged = put(tmp_path, 4, 5, 9)
    damage(damaged)
    disk.room = 6 * _PAGE
    assert write(tmp_path, 6) == ""
    assert there(tmp_path) == [4, 5, 6]


def test_a_damaged_newer_commit_blocks_no_disk_for_two(disk: Disk, tmp_path: Path) -> None:
    _, damaged = put(tmp_path, 5, 9)
    damage(damaged)
    disk.room = 4 * _PAGE
    assert write(tmp_path, 6) == ""
    assert there(tmp_path) == [5, 6]


def test_a_damaged_commit_goes_before_an_older_whole_one(disk: Disk, tmp_path: Path) -> None:
    _, damaged, _ = put(tmp_path, 3, 4, 5)
    damage(damaged)
    disk.room = 6 * _PAGE
    assert write(tmp_path, 6) == ""
    assert there(tmp_path) == [3, 5, 6]


def test_whole_newer_commits_are_anothers_and_stay(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 5, 9)
    disk.room = 4 * _PAGE
    assert write(tmp_path, 6) != ""
    assert there(tmp_path) == [5, 9]


def test_the_newest_whole_commit_stays_when_all_later_ones_are_damaged(disk: Disk, tmp_path: Path) -> None:
    _, _, *damaged = put(tmp_path, 2, 3, 4, 5)
    for path in damaged:
        damage(path)
    disk.room = 8 * _PAGE
    assert write(tmp_path, 6, pages=6) == ""
    assert there(tmp_path) == [3, 6]


def test_what_cannot_be_read_is_not_taken_for_damaged(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 4, 5, 9)
    damage(commit_path(tmp_path, CommitId(9)))

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("elastic_driver.worker.durable.room.check_whole", refuse)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    disk.room = 6 * _PAGE
    assert Room(tmp_path).make(error, CommitId(6), 2 * _PAGE, 0) == 0
    assert there(tmp_path) == [4, 5, 9]


def test_a_file_that_was_changed_after_it_was_read_is_read_again(disk: Disk, tmp_path: Path) -> None:
    paths = put(tmp_path, 2, 3, 4)
    room, error = Room(tmp_path), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    disk.room = 6 * _PAGE
    assert room.make(error, CommitId(6), 100 * _PAGE, 0) == 0
    for path in paths[1:]:
        damage(path)
    os.utime(paths[1], ns=(1, 1))
    assert room.make(error, CommitId(6), 4 * _PAGE, 0)
    assert there(tmp_path) == [2]


def test_other_failures_cost_nothing(disk: Disk, tmp_path: Path) -> None:
    put(tmp_path, 2, 3)
    assert Room(tmp_path).make(OSError(errno.EIO, ""), CommitId(6), 1, 0) == 0
    assert there(tmp_path) == [2, 3]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 8 pages, in a mount namespace of its own, which ends with the process in it."""
    command = "mount -t tmpfs -o size=32k none /mnt && echo mounted && exec cat"
    try:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    with process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"mounted\n":
                pytest.skip("needs root and a mount namespace, for a small disk")
            yield Path(f"/proc/{process.pid}/root/mnt")
        finally:
            process.kill()


def test_a_small_disk(small_disk: Path) -> None:
    durable = Durable(small_disk, every=1, interval_s=None, keep=2, job_id="")
    durable._marks.check()  # makes folder.id, which takes a page
    (small_disk / "others").write_bytes(b"x" * _PAGE)
    for number in range(1, 8):  # room for two
        durable._write(CommitId(number), encoded(3))
        assert durable._complaint == ""
        assert there(small_disk) == ([1] if number == 1 else [number - 1, number])
    assert write(small_disk, 8, pages=4) == os.strerror(errno.ENOSPC)
    assert there(small_disk) == [6, 7], "8 would not have fitted beside 7"
    damage(commit_path(small_disk, CommitId(7)))
    assert write(small_disk, 8, pages=3) == ""
    assert there(small_disk) == [6, 8]
    damage(commit_path(small_disk, CommitId(8)))
    assert write(small_disk, 7, pages=3) == ""
    assert there(small_disk) == [6, 7], "nor does a damaged newer one keep the room"
