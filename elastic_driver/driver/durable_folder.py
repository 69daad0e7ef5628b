"""The driver's side of durable commits: the folder belongs to one job, and its workers get its path."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.settings.settings import Settings
from elastic_driver.system.commit_file import is_complete, is_whole
from elastic_driver.system.safe_files import open_inside

_LOCK_NAME = "job.lock"  # workers check it before they write
_COMMIT = re.compile(r"commit-(\d{12})(-\d+)?\.state")  # names chosen by the workers
_LOOK_S = 2.0
_AGAIN_S = 1.0
_MOST_ID = 256


class FolderLock:
    """A lock held for as long as the job runs; the kernel releases it when the driver dies, however it does.

    Args:
        descriptor: the file's; None without a folder.
        job_id: the content of the file.
        waits: whether another driver of this job still holds it: then this one takes it as soon as it is released.
    """

    def __init__(self, descriptor: int | None, job_id: str = "", *, waits: bool = False) -> None:
        self._descriptor = descriptor
        self._is_released = threading.Event()
        # Ends when it has the lock, or at the release. A daemon, with its own descriptor: a server that hosts the
        # folder may hang.
        self._thread: threading.Thread | None = None
        if waits and descriptor is not None:
            args = (os.dup(descriptor), job_id)
            self._thread = threading.Thread(target=self._wait, args=args, name="elasticrun-durable", daemon=True)
            self._thread.start()

    @classmethod
    def take(cls, folder: Path | None, job_id: str, *, shares: bool = False) -> FolderLock:
        """Lock the folder, which preflight() has created; does nothing without one.

        Args:
            folder: the folder of the commits.
            job_id: written to the lock file.
            shares: whether another driver of this job may still hold it: one that has lost the job, and cannot write.
                Then the lock is taken as soon as that one releases it.

        Raises:
            SettingsError: it cannot be written to, or another job has it.
        """
        if folder is None:
            return cls(None)
        descriptor, waits = -1, False
        try:
            descriptor = open_inside(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not shares or os.pread(descriptor, _MOST_ID, 0) != job_id.encode():
                    raise
                waits = True
            else:
                _sign(descriptor, job_id)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise SettingsError(
                    f"cannot use the folder {folder} (--durable-dir): another job is using it"
                ) from error
            what = f" {_LOCK_NAME}:" if str(error.filename) == str(folder / _LOCK_NAME) else ""
            raise SettingsError(f"cannot use the folder {folder} (--durable-dir):{what} {in_words(error)}") from error
        return cls(descriptor, job_id, waits=waits)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the folder for other jobs."""
        self._is_released.set()
        if self._thread is not None:
            self._thread.join(_LOOK_S)
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _wait(self, descriptor: int, job_id: str) -> None:
        """Block until this process has the lock."""
        try:
            while not self._is_released.wait(_AGAIN_S):
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _sign(descriptor, job_id)  # another job may have had it for a moment
                    break
        finally:
            os.close(descriptor)  # while it is open, it shares the lock with the other one


def _sign(descriptor: int, job_id: str) -> None:
    if os.pread(descriptor, _MOST_ID, 0) != job_id.encode():
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, job_id.encode(), 0)


@dataclass(frozen=True, slots=True)
class FoundCommits:
    """The contents of a folder.

    Attributes:
        newest: the newest commit from which a job can resume; -1 for none.
        damaged: newer ones that are unusable.
    """

    newest: int
    damaged: tuple[int, ...] = ()


def newest_commit(folder: Path | None) -> FoundCommits | None:
    """Return the newest commit in a folder; None if there is none, or the disk does not respond within seconds.

    A file of the wrong length counts as damaged, and so does one with a wrong digest, if it can be read in time.
    """
    torn: list[int] = []
    fitting: list[int] = []  # the newest of the right length, of those not known to be changed
    done = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError):
            assert folder is not None
            names = sorted((name for name in os.listdir(folder) if _COMMIT.fullmatch(name)), key=_order, reverse=True)
            for name in names:
                path, commits = folder / name, _order(name)[0]
                if is_complete(path):
                    fitting.append(commits)
                    if is_whole(path):
                        break
                    fitting.clear()
                torn.append(commits)
        done.set()

    if folder is not None:
        # A daemon, abandoned if the disk hangs: the job has ended.
        thread = threading.Thread(target=look, name="elasticrun-commits", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the end is reported without it
            thread.start()
            thread.join(_LOOK_S)
    newest, damaged = max(fitting, default=-1), tuple(torn)
    if newest < 0 and not (damaged and done.is_set()):
        return None
    return FoundCommits(newest, tuple(commits for commits in damaged if commits > newest))


def _order(name: str) -> tuple[int, int]:
    """Return the key by which a file is newer than others: its commits and its round."""
    match = _COMMIT.fullmatch(name)
    return (int(match[1]), int((match[2] or "-0")[1:])) if match is not None else (-1, 0)


def durable_env(settings: Settings) -> dict[str, str]:
    """Return the variables that tell workers where to write commits, and how often."""
    if settings.durable_dir is None:
        return {}
    env = {"ELASTIC_DRIVER_DURABLE_DIR": str(settings.durable_dir)}
    for name, value in (
        ("EVERY", settings.durable_every),
        ("INTERVAL", settings.durable_interval_s),
        ("KEEP", settings.durable_keep),
    ):
        if value is not None:
            env[f"ELASTIC_DRIVER_DURABLE_{name}"] = str(value)
    return env
