"""The folder of durable commits: whole files under their numbers, and the marks that say whose folder it is.

commit-000000000042-3.state a commit, made in round 3; without a round's number where there is no driver
.commit-*.tmp               one that is being written; its writer has it locked
folder.id                   made once by whoever comes first: ranks that read the same id see the same folder
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
# A file that is not locked is a killed writer's, unless it was opened a moment ago. Where files cannot be locked, one
# that has not grown for so long is.
_MOMENT_S, _STALE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, order=True)
class CommitId:
    """Which commit a file has. The greater, the further on is the training that made it.

    Attributes:
        commits: its number.
        round_id: the round that it was made in; 0 where there is no driver.
    """

    commits: int
    round_id: int = 0


def commit_path(folder: Path, commit: CommitId) -> Path:
    """Where that commit is, or would be."""
    return folder / f"commit-{commit.commits:012d}{f'-{commit.round_id}' if commit.round_id else ''}.state"


def commit_ids(folder: Path) -> list[CommitId]:
    """The commits there, oldest first; whether they are whole is not looked at. Raises OSError."""
    matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return sorted(CommitId(int(match["commits"]), int(match["round"] or 0)) for match in matches)


def commit_files(folder: Path) -> list[tuple[int, Path]]:
    """Their numbers and files. Raises OSError."""
    return [(commit.commits, commit_path(folder, commit)) for commit in commit_ids(folder)]


def write_file(
    folder: Path, commit: CommitId, encoded: durable_format.Encoded, *, permit: Callable[[], None] | None = None
) -> Path:
    """Puts a commit into the folder: whole, or not at all.

    Each round has files of its own, so that a writer of a past round, who was stopped in the last moment before it,
    replaces no newer commit.

    Args:
        folder: the folder.
        commit: which it is.
        encoded: the state.
        permit: called when all is written, before the file gets its name; raises when it must not.

    Raises:
        OSError: the disc is full, or fails; nothing is left behind.
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
    """Removes all but the last commits up to the newest, and what killed writers have left half done.

    Another process may still write the commit that it began as the writer of the round before.

    Args:
        folder: the folder.
        keep: commits to keep.
        newest: the one that was just put there.
        job_id: whose it is. Another job's commit of this number goes: its rounds are counted otherwise.
    """
    ids = commit_ids(folder)
    older = [commit for commit in ids if commit <= newest]
    # A torn file is no commit to go back to.
    kept = [commit for commit in older if is_complete(commit_path(folder, commit))][-keep:]
    remove = [commit_path(folder, commit) for commit in older if kept and commit < kept[0]]
    for commit in ids:
        if commit.commits == newest.commits and commit > newest and _job_of(commit_path(folder, commit)) != job_id:
            remove.append(commit_path(folder, commit))
    with contextlib.suppress(OSError):
        remove += abandoned(folder, commit_path(folder, newest).stat().st_mtime)  # the disc's own clock
    for path in remove:
        with contextlib.suppress(OSError):
            path.unlink()


def abandoned(folder: Path, now: float) -> list[Path]:
    """What killed writers have left half done."""
    names = ("commit-*", _BEGUN_NAME, _ID_NAME)
    return [path for name in names for path in folder.glob(f".{name}.*.tmp") if _is_abandoned(path, now)]


def _job_of(path: Path) -> str | None:
    """The job that has made a commit; None of what cannot be read."""
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
    """Makes the folder if it is not there. Returns its id, which is the same for all who see this very folder.

    Args:
        folder: the folder.
        former_id: the id it is to get if it has none, because it had this one before it was removed.

    Raises:
        OSError: it can be neither made nor read, or it is new and cannot be written to.
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
        os.link(unnamed, mark)  # of several who come at once one wins
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        unnamed.rename(mark)


class Marks:
    """Whose folder it is, as this process finds it and leaves it.

    Args:
        folder: the folder.
        job_id: of this process's job; "" without one, and then nothing is looked at.
    """

    def __init__(self, folder: Path, job_id: str) -> None:
        self._folder = folder
        self._job_id = job_id
        self._id = ""
        self._marked = False
        self.drivers = False  # whether this is the folder that the job's driver has locked

    def open(self, *, anew: bool) -> str:
        """The folder's id. Raises OSError.

        Args:
            anew: whether to look. Else what was found last will do: a disc that hangs must not stop who trains.
        """
        if anew or not self._id:
            self._id = open_folder(self._folder, self._id)
            self.drivers = bool(self._job_id) and read_mark(self._folder / LOCK_NAME) == self._job_id
        return self._id

    def is_begun(self) -> bool:
        """Whether a commit of this job has been on its way into this folder."""
        return bool(self._job_id) and read_mark(self._folder / _BEGUN_NAME) == self._job_id

    def begin(self) -> None:
        """Marks that this job makes commits."""
        put_text(self._folder, _BEGUN_NAME, self._job_id)
        self._marked = True

    def check(self) -> None:
        """Before a write: makes what was removed meanwhile anew, and refuses a folder that is another job's now.

        A driver that was killed leaves its workers behind for a while: they must not write into its successor's. A lock
        that is not the driver's is a driver's that once ran on this machine, and says nothing.

        Raises:
            DurableError: another job has the folder.
            OSError: it cannot be made or read.
        """
        self._id = open_folder(self._folder, self._id)
        if not self._job_id:
            return
        lock, begun = read_mark(self._folder / LOCK_NAME), read_mark(self._folder / _BEGUN_NAME)
        for holder, is_ours in ((lock, self.drivers), (begun, self._marked)):
            if is_ours and holder not in ("", self._job_id):
                raise DurableError(f"the folder is job {holder}'s now")
        if begun != self._job_id:
            self.begin()
        if self.drivers and not lock:
            # The driver's lock went with the folder. Who takes the new one over writes its own id.
            with contextlib.suppress(FileExistsError), (self._folder / LOCK_NAME).open("x") as file:
                file.write(self._job_id)
