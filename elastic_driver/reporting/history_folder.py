"""The history: the folder that keeps this user's last jobs, one folder each, and how they are found again.

Owns its location, its file names, how many jobs and bytes are kept, and how a running job is distinguished from one
whose driver was killed: a driver holds a lock on its job's events while it lives, and others query that lock without
taking one. When and what is written belongs to :mod:`elastic_driver.reporting.history`. All functions block: a home
folder may be on a disk that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_driver.system.kernel import F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, lock_file
from elastic_driver.system.safe_files import leads_to, make_private_folder, open_inside, put_text, why_not_private

EVENTS, PAGE, FACTS = "events.jsonl", "page.json", "job.json"
"""The files of a job's folder: its event log, the last state of its page, and its entry in the list."""
SHOWN = "page.html"
"""The page made of these when a user opens the job."""
MOST_JOBS, MOST_BYTES = 50, 100 << 20
SHORT_ID = 8
"""Length of a job id's beginning, as shown to users."""

_VERSION = 1
_LOCK = ".tidying"
_JOB_ID = re.compile(r"[0-9a-f]{16}")
_MOST_FACTS = 1 << 20
# Limit of a command, in characters: a shell's * may expand to megabytes. As JSON a character has at most six bytes.
_MOST_COMMAND = 1 << 16
# A folder without events is just being created by a driver, or its driver was killed then.
_MADE_S = 60.0
# For disks without locks, and a job without an end: a driver writes its goodput each minute.
_SILENT_S = 600.0
_TRIES = 10
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


class NoHistoryError(OSError):
    """This user has no place for a history, and can do nothing about it: in a container, or as a service."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A job's entry in the list. Points in time are seconds since 1970.

    Attributes:
        job_id: the job.
        command: its command; of a very long one only the beginning is kept.
        directory: the working directory of the driver; "" if it had been removed.
        began: when it began.
        journal: where its journal is; "" for none.
        workers: the number in its last round.
        ended: when it ended; None while it runs, or if its driver was killed.
        exit_code, message: how it ended; None and "" likewise.
    """

    job_id: str
    command: tuple[str, ...]
    directory: str
    began: float
    journal: str = ""
    workers: int = 0
    ended: float | None = None
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job of the history.

    Attributes:
        folder: its folder.
        facts: its entry.
        last: when its files were last written, seconds since 1970.
        is_running: whether its driver is alive.
    """

    folder: Path
    facts: Facts
    last: float
    is_running: bool

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.facts.job_id

    @property
    def ended(self) -> float | None:
        """When it ended, or was last written; None while it runs."""
        if self.is_running:
            return None
        return self.last if self.facts.ended is None else self.facts.ended


def history_folder(environ: Mapping[str, str]) -> Path:
    """Return the path of the history, which may not exist.

    Raises:
        NoHistoryError: this user has no place of its own: in a container, or with another user's variables (sudo, su).
        OSError: the path cannot be determined.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the XDG standard says to ignore relative paths
        there = next(folder for folder in (Path(state), *Path(state).parents) if folder.exists())
        if there.stat().st_uid not in (0, os.geteuid()):
            raise NoHistoryError(errno.EACCES, f"the folder {there} (XDG_STATE_HOME) is not this user's")
        return Path(state) / "elasticrun" / "history"
    home = environ.get("HOME", "")
    if not home:
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.geteuid()).pw_dir
    if not os.path.isabs(home) or home.strip("/") == "":
        raise NoHistoryError(errno.ENOENT, "there is no home folder (HOME)")
    try:
        owner = os.stat(home).st_uid
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoHistoryError(errno.ENOENT, f"there is no home folder {home}") from error
    if owner != os.geteuid():
        raise NoHistoryError(errno.EACCES, f"the home folder {home} is not this user's")
    return Path(home) / ".local" / "state" / "elasticrun" / "history"


def make_history_folder(environ: Mapping[str, str]) -> Path:
    """Return the path of the history, and create it if it does not exist.

    Raises:
        NoHistoryError: this user has no place for one.
        OSError: it cannot be created, or is not private to this user.
    """
    folder = history_folder(environ)
    with _read_only_is_nowhere(folder):
        make_private_folder(folder)
    return folder


def open_job(history: Path, job_id: str) -> tuple[Path, int]:
    """Open the events of a new or existing job, and hold a lock on them while they are open.

    Returns:
        The job's folder, and the descriptor.

    Raises:
        NoHistoryError: the history is read-only now.
        OSError: they cannot be opened, or the folder is not private to this user.
    """
    folder = history / job_id
    for _ in range(_TRIES):
        with _read_only_is_nowhere(folder), contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        why = why_not_private(folder.lstat())
        if why:
            raise OSError(errno.EACCES, f"it {why}", str(folder))
        try:
            with _read_only_is_nowhere(folder):
                descriptor = open_inside(folder / EVENTS, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode=0o600)
        except FileNotFoundError:
            continue  # another driver has just deleted the folder
        with _unless_no_locks():
            lock_file(descriptor, F_OFD_SETLKW, fcntl.F_RDLCK)
        if leads_to(folder / EVENTS, descriptor):
            _remove_unfinished(descriptor, folder)
            return folder, descriptor
        os.close(descriptor)
    raise OSError(errno.EBUSY, "another process keeps removing it", str(folder))


def _remove_unfinished(descriptor: int, folder: Path) -> None:
    """Remove half-written files of a driver that was killed, unless another driver lives, which may be writing."""
    found = [path for name in (PAGE, FACTS) for path in folder.glob(f".{name}.*.tmp")]
    with contextlib.suppress(OSError):  # no locks: the state is unknown
        if found and lock_file(descriptor, F_OFD_GETLK, fcntl.F_WRLCK) == fcntl.F_UNLCK:
            for path in found:
                path.unlink(missing_ok=True)


def put_facts(folder: Path, facts: Facts) -> None:
    """Write a job's entry in the list. Raises OSError."""
    facts = replace(facts, command=_beginning_of(facts.command))
    text = json.dumps({"version": _VERSION, **{name: getattr(facts, name) for name in Facts.__slots__}})
    try:
        put_text(folder, FACTS, text, mode=0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Overwrite in place, which needs no room: else a job that ends on a full disk is listed as killed.
        with os.fdopen(open_inside(folder / FACTS, os.O_WRONLY), "wb") as file:
            file.write(text.encode())
            file.truncate()


def _beginning_of(command: tuple[str, ...]) -> tuple[str, ...]:
    room = _MOST_COMMAND
    for number, word in enumerate(command):
        room -= len(word)
        if room < 0:
            return (*command[:number], f"{word[:room]}...", f"({len(command) - number - 1} more)")
    return command


def kept_jobs(history: Path) -> list[KeptJob]:
    """Return all jobs, the latest first.

    Raises:
        OSError: the folder cannot be read, or is not private to this user.
    """
    try:
        why = why_not_private(history.lstat())
    except FileNotFoundError:
        return []
    if why:
        raise OSError(errno.EACCES, f"it {why}", str(history))
    jobs = [found for folder in _folders(history) if (found := _read(folder)) is not None]
    return sorted(jobs, key=lambda job: job.facts.began, reverse=True)


def tidy(history: Path, *, most_jobs: int = MOST_JOBS, most_bytes: int = MOST_BYTES) -> None:
    """Remove the jobs that ended longest ago, until the limits are kept. Running jobs stay.

    Does nothing while another driver does so: two at once would remove too many. Raises OSError.
    """
    lock = open_inside(history / _LOCK, os.O_RDWR | os.O_CREAT, mode=0o600)
    try:
        with _unless_no_locks():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _tidy(history, most_jobs, most_bytes)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _tidy(history: Path, most_jobs: int, most_bytes: int) -> None:
    found = [(*_weighed(folder), folder) for folder in _folders(history)]
    found.sort(key=lambda each: each[0])
    jobs, size = len(found), sum(each[1] for each in found)
    for _, bytes_, folder in found:
        if jobs <= most_jobs and size <= most_bytes:
            return
        if _removed(folder):
            jobs, size = jobs - 1, size - bytes_


def _folders(history: Path) -> Iterator[Path]:
    with os.scandir(history) as entries:
        names = [
            entry.name for entry in entries if _JOB_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return (history / name for name in names)


def _weighed(folder: Path) -> tuple[float, int]:
    """Return when a job's files were last written, and their total size, bytes."""
    last, size = 0.0, 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                size += status.st_size
                if entry.name in (EVENTS, PAGE):
                    last = max(last, status.st_mtime)
    return last, size


def _removed(folder: Path) -> bool:
    """Remove a job unless it runs; return whether it is gone. Its driver cannot start again meanwhile."""
    try:
        descriptor = open_inside(folder / EVENTS, os.O_RDWR)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime < _MADE_S:
                return False
    except OSError:
        pass  # not one of our files
    else:
        try:
            if not _is_free(descriptor, folder, F_OFD_SETLK):
                return False
            shutil.rmtree(folder, ignore_errors=True)
            return not folder.exists()
        finally:
            os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _is_free(descriptor: int, folder: Path, command: int) -> bool:
    """Return whether no driver holds the lock; with F_OFD_SETLK, also bar others from it until the file is closed."""
    try:
        # Not flock, whose locks cannot be queried: taking one in order to check would look like a driver's.
        return lock_file(descriptor, command, fcntl.F_WRLCK) in (fcntl.F_UNLCK, fcntl.F_WRLCK)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        last, _ = _weighed(folder)
        return _facts_in(folder, last).ended is not None or time.time() - last > _SILENT_S


@contextlib.contextmanager
def _read_only_is_nowhere(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EROFS:
            raise NoHistoryError(errno.EROFS, f"{folder} would be on a read-only file system") from error
        raise


@contextlib.contextmanager
def _unless_no_locks() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _read(folder: Path) -> KeptJob | None:
    """Return a job, or None if it is just being created or removed."""
    try:
        descriptor = open_inside(folder / EVENTS, os.O_RDONLY)  # it may be read-only now
    except OSError:
        return None
    try:
        is_running, last = not _is_free(descriptor, folder, F_OFD_GETLK), _weighed(folder)[0]
    finally:
        os.close(descriptor)
    return KeptJob(folder, _facts_in(folder, last), last, is_running)


def _facts_in(folder: Path, last: float) -> Facts:
    """Return a job's entry; a minimal one if it is missing: its driver was killed at once, or the disk was full."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        with os.fdopen(open_inside(folder / FACTS, os.O_RDONLY), "rb") as file:
            found: dict[str, Any] = json.loads(file.read(_MOST_FACTS))
        ended, code = found["ended"], found["exit_code"]
        return Facts(
            folder.name,
            tuple(str(word) for word in found["command"]),
            str(found["directory"]),
            float(found["began"]),
            str(found["journal"]),
            int(found["workers"]),
            None if ended is None else float(ended),
            None if code is None else int(code),
            str(found["message"]),
        )
    return Facts(folder.name, (), "", last)
