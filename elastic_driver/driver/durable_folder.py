"""The driver's side of durable commits: the folder belongs to one job, and its workers are told of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from pathlib import Path

from elastic_driver.errors import SettingsError
from elastic_driver.settings.settings import Settings
from elastic_driver.system.safe_files import open_inside

_LOCK_NAME = "job.lock"  # workers look into it before they write
_COMMIT = re.compile(r"commit-(\d{12})(-\d+)?\.state")  # as they name them
_LOOK_S = 2.0


class FolderLock:
    """Held for as long as the job runs; the kernel lets go of it when the driver dies, however it does."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path | None, job_id: str) -> FolderLock:
        """Locks the folder, which preflight() has made; does nothing without one.

        Raises:
            SettingsError: it cannot be written to, or another job has it.
        """
        if folder is None:
            return cls(None)
        descriptor = -1
        try:
            descriptor = open_inside(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, job_id.encode(), 0)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise SettingsError(f"another job uses the folder {folder} (--durable-dir)") from error
            what = f" {_LOCK_NAME}:" if str(error.filename) == str(folder / _LOCK_NAME) else ""
            raise SettingsError(f"cannot use the folder {folder} (--durable-dir):{what} {error.strerror}") from error
        return cls(descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets other jobs have the folder."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def newest_commit(folder: Path | None) -> int | None:
    """The newest commit in a folder, going by the names; None when there is none, or no answer within seconds."""
    found: list[int] = []

    def look() -> None:
        with contextlib.suppress(OSError):
            found.extend(int(match[1]) for name in os.listdir(folder) if (match := _COMMIT.fullmatch(name)))

    if folder is not None:
        # A daemon, left alone when the disc hangs: the job has ended.
        thread = threading.Thread(target=look, name="elasticrun-commits", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the end is told without it
            thread.start()
            thread.join(_LOOK_S)
    return max(found, default=None)


def durable_env(settings: Settings) -> dict[str, str]:
    """The variables that tell workers where commits go, and how often."""
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
