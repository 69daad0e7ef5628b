"""The index of this user's running jobs: one file per job, which only the user can read.

Owns the folder ($XDG_RUNTIME_DIR/elasticrun, else /tmp/elasticrun-UID) and its files. A file names the driver's socket.
The driver holds a lock on it as long as it lives: a process id alone may have been reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from elastic_driver.codec import OsText
from elastic_driver.errors import RendezvousProtocolError, SettingsError, in_words, with_path
from elastic_driver.rendezvous.messages import Body
from elastic_driver.system.local_socket import url_of
from elastic_driver.system.safe_files import leads_to, put_text, why_not_private

_log = logging.getLogger("elastic_driver")
_PAGE = ".html"
_NOT_FOUND = "elasticrun status, drain and end will not find this job: %s"


@dataclass(frozen=True, slots=True)
class JobFile(Body):
    """The content of a job's file.

    Attributes:
        job_id: the job's id.
        socket: path of the driver's socket.
        pid: the driver's process id, for readers of the file.
        command: the training command.
        meets_at: the port on loopback where its nodes meet, if all are on this machine; 0 if there are none.
        journal: the folder of its journal; "" without one.
        parent: the process that restarts its driver (:mod:`elastic_driver.system.process_name`); "" for none.
        folder: the driver's working directory; "" if it was removed.
    """

    job_id: str
    socket: OsText
    pid: int
    command: tuple[OsText, ...]
    meets_at: int = 0
    journal: OsText = ""
    parent: str = ""
    folder: OsText = ""

    @property
    def url(self) -> str:
        """URL of the driver's socket."""
        return url_of(Path(self.socket))


class Posting:
    """This process's job file, from :meth:`post` to :meth:`remove`."""

    def __init__(self, job: JobFile, path: Path, descriptor: int) -> None:
        self._job = job
        self._path = path
        self._descriptor = descriptor
        self._has_told = False  # the warning that the file cannot be rewritten

    @classmethod
    def post(
        cls,
        job_id: str,
        socket: Path,
        command: Sequence[str],
        *,
        meets_at: int = 0,
        journal: Path | None = None,
        parent: str = "",
    ) -> Self | None:
        """Write the file. A failure is logged, and the job continues without it."""
        kept_in = "" if journal is None else str(journal)
        folder = ""
        with contextlib.suppress(OSError):  # the working directory was removed
            folder = os.getcwd()
        job = JobFile(job_id, str(socket), os.getpid(), tuple(command), meets_at, kept_in, parent, folder)
        for attempt in range(3):
            try:
                posting = cls(job, *_write(job))
            except (OSError, SettingsError) as error:
                # The last other job ended at this moment and removed the folder.
                if isinstance(error, FileNotFoundError) and attempt < 2:
                    continue
                _log.warning(_NOT_FOUND, with_path(error))
                break
            else:
                with contextlib.suppress(SettingsError):
                    running_jobs()  # removes the files of killed drivers
                return posting
        return None

    def renew(self, socket: Path) -> None:
        """Rewrite the file if it was removed, or if the driver's socket has moved.

        A failure is logged once; the next call may succeed.
        """
        job = replace(self._job, socket=str(socket))
        if job == self._job and leads_to(self._path, self._descriptor):
            return
        try:
            path, descriptor = _write(job)
        except (OSError, SettingsError) as error:
            if not self._has_told:
                _log.warning(_NOT_FOUND, with_path(error))
            self._has_told = True
        else:
            os.close(self._descriptor)
            self._job, self._path, self._descriptor = job, path, descriptor

    def remove(self) -> None:
        """Remove the file, if it exists, and the folder if it was the last."""
        _remove(self._path)
        os.close(self._descriptor)


def running_jobs() -> list[JobFile]:
    """Return this user's jobs on this machine whose driver is alive; other files are removed, except those of
    :func:`left_jobs`.

    Raises:
        SettingsError: the folder is open to others, or cannot be read.
    """
    return [job for job, has_driver in _jobs() if has_driver]


def left_jobs() -> list[JobFile]:
    """Return the jobs whose driver has died but whose journal exists, which shows whether the job still exists.

    Raises:
        SettingsError: as :func:`running_jobs`.
    """
    return [job for job, has_driver in _jobs() if not has_driver]


def _jobs() -> list[tuple[JobFile, bool]]:
    """Return all jobs, and whether each has a driver."""
    try:
        folder = _folder()
    except OSError as error:
        raise SettingsError(f"cannot list jobs: {in_words(error)}") from error
    try:
        _check_private(folder)
        paths = sorted(folder.glob("*.json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettingsError(f"cannot list jobs in {folder}: {in_words(error)}") from error
    return [found for path in paths if (found := _read(path)) is not None]


def private_folder(*, make: bool = False) -> Path:
    """Return the folder of the job files, which may also hold other files of this user's jobs.

    Args:
        make: whether to create it if it is missing.

    Raises:
        OSError: it does not exist.
        SettingsError: it belongs to another user, or is open to others.
    """
    folder = _folder()
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    _check_private(folder)
    return folder


def put_page(name: str, text: str) -> Path:
    """Write an HTML document that only this user can read, replacing an earlier one of that name.

    Args:
        name: a job's id, with whose file it is removed; or another name, and then it stays.
        text: the document.

    Returns:
        Its path.

    Raises:
        OSError: it cannot be written.
        SettingsError: the folder belongs to another user, or is open to others.
    """
    folder, file = private_folder(make=True), f"{name}{_PAGE}"
    put_text(folder, file, text, mode=0o600)
    return folder / file


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "elasticrun"
    return Path(tempfile.gettempdir()) / f"elasticrun-{os.getuid()}"


def _check_private(folder: Path) -> None:
    """Check that the folder belongs to this user, and that no other user can read or write it.

    Raises:
        OSError: it does not exist.
        SettingsError: it belongs to another user, or is open to others.
    """
    why = why_not_private(folder.lstat())
    if why:
        raise SettingsError(
            f"the folder of job files, {folder}, {why}; have it removed, or set XDG_RUNTIME_DIR to a folder of your "
            "own for the job and for elasticrun's subcommands"
        )


def _write(job: JobFile) -> tuple[Path, int]:
    """Write the file; return its path and the descriptor that holds its lock."""
    folder = private_folder(make=True)
    new = folder / f".{job.job_id}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Before the rename, so that readers always find it complete and locked.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, job.to_json())
        path = new.with_name(f"{job.job_id}.json")
        new.rename(path)
    except BaseException:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        raise
    return path, descriptor


def forget(job: JobFile) -> None:
    """Remove the file of a job that no longer exists and has no driver."""
    with contextlib.suppress(OSError, SettingsError):
        _read(private_folder() / f"{job.job_id}.json", forgets=True)


def _read(path: Path, *, forgets: bool = False) -> tuple[JobFile, bool] | None:
    """Read a file, and find out whether its driver is alive.

    Args:
        path: the file.
        forgets: whether to remove it even if it names a journal.

    Returns:
        None if it is not a job's file, or its driver is dead; then it is removed, unless it names a journal.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None  # its job has just ended
    with os.fdopen(descriptor, "rb") as file:
        has_driver = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            has_driver = True  # the driver holds the lock; or this file system has no locks: then it is unknown
        job = None
        with contextlib.suppress(OSError, ValueError, RendezvousProtocolError):
            job = JobFile.from_json(file.read())
        if has_driver:
            return None if job is None else (job, True)
        if job is not None and job.journal and os.path.isdir(job.journal) and not forgets:
            return job, False
        if leads_to(path, descriptor):  # else its driver has just replaced it
            _remove(path)
        return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_suffix(_PAGE).unlink(missing_ok=True)
        path.parent.rmdir()
