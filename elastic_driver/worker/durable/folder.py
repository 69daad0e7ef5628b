"""The folder of durable commits: whole files under their numbers, and marks that identify the folder and its job.

commit-000000000042-3.state a commit, made in round 3; without a round's number where there is no driver
.commit-*.tmp               one that is being written; its writer has it locked
folder.id                   made once, by the first process: ranks that read the same id see the same folder
job.lock                    held by the driver, in its own folder; its text is the job's id
begun                       the id of the job that made commits last
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.errors import DurableError
from elastic_driver.system.commit_file import is_complete
from elastic_driver.system.safe_files import make_folder, new_file, open_inside, put_text, read_mark
from elastic_driver.worker.durable import format as durable_format

LOCK_NAME = "job.lock"
_BEGUN_NAME = "begun"
_ID_NAME = "folder.id"
_NAME = re.compile(r"commit-(?P<commits>\d{12})(-(?P<round>[1-9]\d{0,17}))?\.state")
_ID_BYTES = 16
# An unlocked file is a killed writer's, unless it was opened a moment ago. Where files cannot be locked, one that has
# not grown for this long is.
_MOMENT_S, _STALE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, order=True)
class CommitId:
    """Identifies a commit. Greater ones are further on in the training.

    Attributes:
        commits: its number.
        round_id: the round in which it was made; 0 without a driver.
    """

    commits: int
    round_id: int = 0


def commit_path(folder: Path, commit: CommitId) -> Path:
    """Return the path of a commit's file."""
    return folder / f"commit-{commit.commits:012d}{f'-{commit.round_id}' if commit.round_id else ''}.state"


def commit_ids(folder: Path) -> list[CommitId]:
    """Return the commits there, oldest first, without checking that they are whole. Raises OSError."""
    matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return sorted(CommitId(int(match["commits"]), int(match["round"] or 0)) for match in matches)


def commit_files(folder: Path) -> list[tuple[int, Path]]:
    """Return their numbers and files. Raises OSError."""
    return [(commit.commits, commit_path(folder, commit)) for commit in commit_ids(folder)]


def write_file(
    folder: Path, commit: CommitId, encoded: durable_format.Encoded, *, permit: Callable[[], None] | None = None
) -> Path:
    """Write a commit to the folder: whole, or not at all.

    Each round has its own files, so that a delayed writer of an earlier round replaces no newer commit.

    Args:
        folder: the folder.
        commit: the commit's id.
        encoded: the state.
        permit: called when all is written, before the file gets its name; raises to prevent that.

    Raises:
        OSError: the disk is full, or fails; no file is left behind.
    """
    path = commit_path(folder, commit)
    descriptor, temporary = new_file(folder, path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            durable_format.write(encoded, file)
            file.flush()
            os.fsync(file.fileno())
            if permit is not None:
                permit()  # the file stays locked: it may take long
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(folder)
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: Path, keep: int, newest: CommitId, job_id: str = "") -> None:
    """Remove all but the last commits up to the newest, and files left half written by killed writers.

    Another process may still be writing the commit that it began as the writer of the round before.

    Args:
        folder: the folder.
        keep: how many commits to keep.
        newest: the commit just written.
        job_id: its job. Another job's commit of this number is removed: its rounds are not comparable.
    """
    ids = commit_ids(folder)
    older = [commit for commit in ids if commit <= newest]
    # A torn file is not a commit to go back to.
    kept = [commit for commit in older if is_complete(commit_path(folder, commit))][-keep:]
    remove = [commit_path(folder, commit) for commit in older if kept and commit < kept[0]]
    for commit in ids:
        if commit.commits == newest.commits and commit > newest and _job_of(commit_path(folder, commit)) != job_id:
            remove.append(commit_path(folder, commit))
    with contextlib.suppress(OSError):
        remove += abandoned(folder, commit_path(folder, newest).stat().st_mtime)  # the file system's own clock
    for path in remove:
        with contextlib.suppress(OSError):
            path.unlink()


def abandoned(folder: Path, now: float) -> list[Path]:
    """Return files left half written by killed writers."""
    names = ("commit-*", _BEGUN_NAME, _ID_NAME)
    return [path for name in names for path in folder.glob(f".{name}.*.tmp") if _is_abandoned(path, now)]


def _job_of(path: Path) -> str | None:
    """Return the job that made a commit; None if it cannot be read."""
    try:
        return str(durable_format.facts_of(path).get("job"))
    except (OSError, DurableError):
        return None


def _is_abandoned(path: Path, now: float) -> bool:
    with contextlib.suppress(OSError), os.fdopen(open_inside(path, os.O_RDONLY), "rb") as file:
        age_s = now - os.fstat(file.fileno()).st_mtime
        if age_s < _MOMENT_S:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return age_s > _STALE_S
        return True
    return False


def open_folder(folder: Path, former_id: str = "") -> str:
    """Create the folder if it is missing. Returns its id, which is the same for all processes with access to this
    folder.

    Args:
        folder: the folder.
        former_id: the id to give it if it has none: the one it had before it was removed.

    Raises:
        OSError: it can be neither created nor read, or it is new and not writable.
    """
    make_folder(folder)
    mark = folder / _ID_NAME
    folder_id = read_mark(mark)
    if folder_id:
        return folder_id
    put_text(folder, _ID_NAME, former_id or secrets.token_hex(_ID_BYTES), _link)
    return read_mark(mark)


def _link(unnamed: Path, mark: Path) -> None:
    try:
        os.link(unnamed, mark)  # of several at once, one wins
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        unnamed.rename(mark)


class Marks:
    """The marks in a folder, as this process reads and writes them.

    Args:
        folder: the folder.
        job_id: id of this process's job; "" without one: then the marks are ignored.
    """

    def __init__(self, folder: Path, job_id: str) -> None:
        self._folder = folder
        self._job_id = job_id
        self._id = ""
        self._marked = False
        self.drivers = False  # whether this is the folder that the job's driver has locked

    def open(self, *, anew: bool) -> str:
        """Return the folder's id. Raises OSError.

        Args:
            anew: whether to read the marks again. Else the last result is used: a hanging disk must not stop the
                training.
        """
        if anew or not self._id:
            self._id = open_folder(self._folder, self._id)
            self.drivers = bool(self._job_id) and read_mark(self._folder / LOCK_NAME) == self._job_id
        return self._id

    def is_begun(self) -> bool:
        """Return whether this job has started to write a commit to this folder."""
        return bool(self._job_id) and read_mark(self._folder / _BEGUN_NAME) == self._job_id

    def begin(self) -> None:
        """Mark that this job makes commits."""
        put_text(self._folder, _BEGUN_NAME, self._job_id)
        self._marked = True

    def check(self) -> None:
        """Prepare for a write: re-create whatever was removed, and refuse a folder that now belongs to another job.

        A killed driver leaves its workers behind for a while: they must not write to its successor's folder. A lock in
        a folder that is not the driver's is from a driver that once ran on this machine, and is ignored.

        Raises:
            DurableError: another job has the folder.
            OSError: it cannot be created or read.
        """
        self._id = open_folder(self._folder, self._id)
        if not self._job_id:
            return
        lock, begun = read_mark(self._folder / LOCK_NAME), read_mark(self._folder / _BEGUN_NAME)
        for holder, is_ours in ((lock, self.drivers), (begun, self._marked)):
            if is_ours and holder not in ("", self._job_id):
                raise DurableError(f"the folder now belongs to job {holder}")
        if begun != self._job_id:
            self.begin()
        if self.drivers and not lock:
            # The driver's lock was removed with the folder. Another driver that takes it over writes its own id.
            with contextlib.suppress(FileExistsError), (self._folder / LOCK_NAME).open("x") as file:
                file.write(self._job_id)
