"""Where the running jobs of this user are found: a file for each, which only the user can read.

Owns the folder ($XDG_RUNTIME_DIR/elasticrun, else /tmp/elasticrun-UID) and the files in it. A file names the driver's
address and the job's token, so that ``elasticrun drain`` can speak to the driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil

_log = logging.getLogger("elastic_driver")


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "elasticrun"
    return Path(tempfile.gettempdir()) / f"elasticrun-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Whether the folder is this user's and nobody else can read or write it."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


@dataclass(frozen=True, slots=True)
class JobFile:
    """What one file says.

    Attributes:
        job_id: the job.
        url: of its driver.
        token: goes with each request.
        pid: of the driver.
        command: what it trains.
    """

    job_id: str
    url: str
    token: str
    pid: int
    command: tuple[str, ...]

    @classmethod
    def write(cls, job_id: str, url: str, token: str, command: Sequence[str]) -> Self:
        """Writes this process's file. Where that cannot be done, it is logged, and the job goes on without."""
        job = cls(job_id, url, token, os.getpid(), tuple(command))
        for attempt in range(3):
            try:
                job._write()
                break
            except FileNotFoundError as error:
                # The last of the other jobs has ended at this moment, and taken the folder along.
                if attempt == 2:
                    _log.warning("elasticrun drain will not find this job: %s", error)
            except OSError as error:
                _log.warning("elasticrun drain will not find this job: %s", error)
                break
        return job

    def _write(self) -> None:
        folder = _folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder):
            raise PermissionError(f"{folder} is not private to this user")
        descriptor = os.open(folder / f"{self.job_id}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)

    def remove(self) -> None:
        """Removes it, if it is there; the folder, too, if it was the last."""
        with contextlib.suppress(OSError):
            (_folder() / f"{self.job_id}.json").unlink(missing_ok=True)
            _folder().rmdir()


def running_jobs() -> list[JobFile]:
    """This user's jobs on this machine whose driver lives; files of others are removed."""
    folder = _folder()
    try:
        if not _is_private(folder):
            return []
        paths = sorted(folder.glob("*.json"))
    except OSError:
        return []
    jobs = []
    for path in paths:
        try:
            data = json.loads(path.read_text())
            job = JobFile(**(data | {"command": tuple(data["command"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # being written, or no file of ours
        if psutil.pid_exists(job.pid):
            jobs.append(job)
        else:
            job.remove()
    return jobs
