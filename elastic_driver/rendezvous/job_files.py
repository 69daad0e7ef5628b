"""Where the running jobs of this user are found: a file for each, which only the user can read.

Owns the folder ($XDG_RUNTIME_DIR/elasticrun, else /tmp/elasticrun-UID) and the files in it. A file names the driver's
socket. Its driver holds a lock on it for as long as it lives: a process id alone may be another's by now.
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
    """What one file says.

    Attributes:
        job_id: the job.
        socket: of its driver: a path.
        pid: of the driver, for who reads the file.
        command: what it trains.
        meets_at: the port on loopback at which its nodes meet, where all are on this machine; 0 where there are none.
        journal: the folder of its journal; "" where it has none.
        parent: the process that starts its driver again (:mod:`elastic_driver.system.process_name`); "" for none.
        folder: the driver's working directory; "" where it is gone.
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
        """Of its driver."""
        return url_of(Path(self.socket))


class Posting:
    """This process's job file, from :meth:`post` to :meth:`remove`."""

    def __init__(self, job: JobFile, path: Path, descriptor: int) -> None:
        self._job = job
        self._path = path
        self._descriptor = descriptor
        self._has_told = False  # that it cannot be written anew

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
        """Writes it. Where that cannot be done, it is logged, and the job goes on without."""
        kept_in = "" if journal is None else str(journal)
        folder = ""
        with contextlib.suppress(OSError):  # somebody has removed it
            folder = os.getcwd()
        job = JobFile(job_id, str(socket), os.getpid(), tuple(command), meets_at, kept_in, parent, folder)
        for attempt in range(3):
            try:
                posting = cls(job, *_write(job))
            except (OSError, SettingsError) as error:
                # The last of the other jobs has ended at this moment, and taken the folder along.
                if isinstance(error, FileNotFoundError) and attempt < 2:
                    continue
                _log.warning(_NOT_FOUND, with_path(error))
                break
            else:
                with contextlib.suppress(SettingsError):
                    running_jobs()  # removes what drivers have left that were killed
                return posting
        return None

    def renew(self, socket: Path) -> None:
        """Writes it anew where somebody has removed it, or where the driver's socket is another one by now.

        Where that cannot be done, it is logged once; the next time it may be.
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
        """Removes it, if it is there; the folder, too, if it was the last."""
        _remove(self._path)
        os.close(self._descriptor)


def running_jobs() -> list[JobFile]:
    """This user's jobs on this machine whose driver lives; files of others are removed, but for :func:`left_jobs`.

    Raises:
        SettingsError: the folder is not this user's alone, or cannot be read.
    """
    return [job for job, has_driver in _jobs() if has_driver]


def left_jobs() -> list[JobFile]:
    """Those whose driver has died and whose journal is there: it tells whether there is such a job.

    Raises:
        SettingsError: see :func:`running_jobs`.
    """
    return [job for job, has_driver in _jobs() if not has_driver]


def _jobs() -> list[tuple[JobFile, bool]]:
    """All, and whether they have a driver."""
    try:
        folder = _folder()
    except OSError as error:
        raise SettingsError(f"cannot look for jobs: {in_words(error)}") from error
    try:
        _check_private(folder)
        paths = sorted(folder.glob("*.json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettingsError(f"cannot look for jobs in {folder}: {in_words(error)}") from error
    return [found for path in paths if (found := _read(path)) is not None]


def private_folder(*, make: bool = False) -> Path:
    """The folder of the job files, where other things of this user's jobs may lie, too.

    Args:
        make: whether to make it where it is not there.

    Raises:
        OSError: there is none.
        SettingsError: it is another's, or open to others.
    """
    folder = _folder()
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    _check_private(folder)
    return folder


def put_page(name: str, text: str) -> Path:
    """Writes an HTML document that only this user can read, in place of the one before of that name.

    Args:
        name: a job's id, with whose file it goes; or another, and then it stays.
        text: the document.

    Returns:
        Where it is.

    Raises:
        OSError: it cannot be written.
        SettingsError: the folder is another's, or open to others.
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
    """Makes sure that the folder is this user's and nobody else can read or write it.

    Raises:
        OSError: there is none.
        SettingsError: it is another's, or open to others.
    """
    why = why_not_private(folder.lstat())
    if why:
        raise SettingsError(
            f"the folder of job files, {folder}, {why}; have it removed, or set XDG_RUNTIME_DIR to a folder of your "
            "own for the job and for elasticrun's subcommands"
        )


def _write(job: JobFile) -> tuple[Path, int]:
    """The file, and the descriptor that holds its lock."""
    folder = private_folder(make=True)
    new = folder / f".{job.job_id}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Before it has its name: whoever finds it finds it whole and locked.
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
    """Removes the file of a job that is no more, and has no driver."""
    with contextlib.suppress(OSError, SettingsError):
        _read(private_folder() / f"{job.job_id}.json", forgets=True)


def _read(path: Path, *, forgets: bool = False) -> tuple[JobFile, bool] | None:
    """What the file says, and whether its driver lives.

    Args:
        path: of the file.
        forgets: whether it is not kept for its journal.

    Returns:
        None when it is no file of ours, or one of a driver that is dead, which is removed. One that names a journal
        stays.
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
            has_driver = True  # it holds it; or this disc knows no locks, and nobody can tell
        job = None
        with contextlib.suppress(OSError, ValueError, RendezvousProtocolError):
            job = JobFile.from_json(file.read())
        if has_driver:
            return None if job is None else (job, True)
        if job is not None and job.journal and os.path.isdir(job.journal) and not forgets:
            return job, False
        if leads_to(path, descriptor):  # else its driver has just written another in its place
            _remove(path)
        return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_suffix(_PAGE).unlink(missing_ok=True)
        path.parent.rmdir()
