"""Room on a full disk: which files of the folder to remove, so that a new commit fits.

Owns that choice and the removal. Others own the writing, and the choice of commits to keep on a disk with room.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.system.commit_file import check_whole
from elastic_driver.worker.durable.folder import CommitId, abandoned, commit_ids, commit_path


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of a folder that may be removed.

    Attributes:
        useless: left half written by killed writers, or damaged.
        whole: commits older than the one to be written, oldest first.
    """

    useless: list[Path]
    whole: list[Path]


class Room:
    """Makes room in one folder. It remembers which files were whole, so that each is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[tuple[int, ...], bool]] = {}  # file facts when read, and whether it was whole

    def make(self, error: OSError, newest: CommitId, size: int, freed: int) -> int:
        """Remove files so that a commit fits that did not: useless ones first, then the oldest.

        The newest whole commit stays. Nothing is removed if the commit would not fit even then. If that is unknown (a
        quota; a full disk that claims not to be), one file is removed at a time, and two whole ones stay.

        Args:
            error: the error of the write.
            newest: the commit that did not fit; later whole ones are another writer's.
            size: size of its file, in bytes.
            freed: bytes already freed for it.

        Returns:
            Bytes freed; 0 if retrying the write is useless.
        """
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return 0
        with contextlib.suppress(OSError):
            free = _free_bytes(self._folder) if error.errno == errno.ENOSPC else None
            files = self._files(newest)
            spare = [*files.useless, *files.whole[:-1]]
            at_least = freed if free is None else free
            if at_least < size <= at_least + sum(map(_size_of, spare)):
                return _remove(spare, size - at_least)
            if free is None or size <= free:
                return _remove([*files.useless, *files.whole[:-2]], 1)
        return 0

    def _files(self, newest: CommitId) -> _Files:
        useless, whole = abandoned(self._folder, self._folder.stat().st_mtime), list[Path]()
        ids = commit_ids(self._folder)
        self._read = {
            path: self._read[path] for commit in ids if (path := commit_path(self._folder, commit)) in self._read
        }
        for commit in reversed(ids):
            path = commit_path(self._folder, commit)
            try:
                # The one that must stay is read again: its bytes may have changed on the disk.
                is_whole = self._is_whole(path, anew=not whole)
            except OSError:
                continue  # unknown
            if not is_whole:
                useless.append(path)
            elif commit < newest:
                whole.append(path)
        return _Files(useless, whole[::-1])

    def _is_whole(self, path: Path, *, anew: bool) -> bool:
        facts = path.lstat()
        now = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        before, is_whole = self._read.get(path, ((), False))
        if anew or before != now:
            try:
                check_whole(path)
                is_whole = True
            except ValueError:
                is_whole = False
            self._read[path] = now, is_whole
        return is_whole


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes for this user; None if the file system does not say."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


def _size_of(path: Path) -> int:
    """Return the most that its removal frees: a compressed file takes less than its bytes, as will the next one."""
    try:
        facts = path.lstat()
    except OSError:
        return 0
    return max(facts.st_size, facts.st_blocks * 512, 1)


def _remove(paths: Sequence[Path], wanted: int) -> int:
    freed = 0
    for path in paths:
        if freed >= wanted:
            break
        size = _size_of(path)
        with contextlib.suppress(OSError):
            path.unlink()
            freed += size
    return freed
