"""Commits on disc: written by rank 0 in the background, read when a round begins that nobody has a state for.

Owns the folder's files and the writing thread. What is in a file is :mod:`elastic_driver.worker.durable_format`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_driver.errors import DurableError, HorovodInternalError, SettingsError
from elastic_driver.rendezvous.messages import ENV_JOB
from elastic_driver.worker import durable_format
from elastic_driver.worker.objects import broadcast_object

if TYPE_CHECKING:
    from elastic_driver.worker.context import Context
    from elastic_driver.worker.state import State

ENV_DIR = "ELASTIC_DRIVER_DURABLE_DIR"
ENV_EVERY = "ELASTIC_DRIVER_DURABLE_EVERY"
ENV_INTERVAL = "ELASTIC_DRIVER_DURABLE_INTERVAL"
ENV_KEEP = "ELASTIC_DRIVER_DURABLE_KEEP"

LOCK_NAME = "job.lock"  # held by the driver; its text is the job's id
_BEGUN_NAME = "begun"  # the id of the job that has made commits
_NAME = re.compile(r"commit-(\d{12})\.state")
# How long a process that ends waits for its last commit to reach the disc.
FLUSH_S = 60.0


def say(text: str) -> None:
    """One line on standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"elastic_driver: {text}", file=sys.stderr, flush=True)


def commit_files(folder: Path) -> list[tuple[int, Path]]:
    """The commits there, oldest first; whether they are whole is not looked at."""
    found = [(int(match[1]), folder / match[0]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return sorted(found)


def write_file(folder: Path, commits: int, encoded: durable_format.Encoded) -> Path:
    """Puts a commit into the folder: whole, or not at all.

    Raises:
        OSError: the disc is full, or fails; nothing is left behind.
    """
    path = folder / f"commit-{commits:012d}.state"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            durable_format.write(encoded, file)
            file.flush()
            os.fsync(file.fileno())
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


def prune(folder: Path, keep: int, newest: int) -> None:
    """Removes all but the last commits up to the newest, and what writers that were killed have left."""
    old = [path for commits, path in commit_files(folder) if commits <= newest][:-keep]
    stale = [path for path in folder.glob(".commit-*.tmp") if not path.name.endswith(f".{os.getpid()}.tmp")]
    for path in (*old, *stale):
        with contextlib.suppress(OSError):
            path.unlink()


class Durable:
    """The durable commits of one process.

    Args:
        folder: where they are.
        every: commits from one to the next; None not to count.
        interval_s: seconds from one to the next; None not to look. With both, what comes first.
        keep: files to keep.
        job_id: of the job that the folder must belong to; "" not to look.
    """

    def __init__(self, folder: Path, *, every: int | None, interval_s: float | None, keep: int, job_id: str) -> None:
        self.folder = folder
        self.keep = keep
        self.written = -1  # the last commit that is on disc by this process
        self._every = every
        self._interval_s = interval_s
        self._job_id = job_id
        self._owner: weakref.ref[State] | None = None
        self._checked = False
        self._last_commits: int | None = None
        self._last_at = 0.0
        self._complaint = ""
        self._wake = threading.Condition()
        self._work: tuple[int, durable_format.Encoded] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Durable | None:
        """As the driver asked for; None when it did not.

        Raises:
            SettingsError: a variable is no number above 0.
        """
        folder = environ.get(ENV_DIR)
        if not folder:
            return None
        try:
            every = int(environ[ENV_EVERY]) if environ.get(ENV_EVERY) else None
            interval_s = float(environ[ENV_INTERVAL]) if environ.get(ENV_INTERVAL) else None
            keep = int(environ.get(ENV_KEEP) or 2)
        except ValueError as error:
            raise SettingsError(f"cannot read {ENV_EVERY}, {ENV_INTERVAL} or {ENV_KEEP}: {error}") from error
        if min(every or 1, keep) < 1 or not 0 < (interval_s or 1.0) < 1e9:
            raise SettingsError(f"{ENV_EVERY}, {ENV_INTERVAL} and {ENV_KEEP} must be above 0")
        if every is None and interval_s is None:
            every = 1
        job_id = environ.get(ENV_JOB, "")
        return cls(Path(folder), every=every, interval_s=interval_s, keep=keep, job_id=job_id)

    @property
    def busy(self) -> bool:
        """Whether a commit is being written."""
        return self._work is not None

    def owns(self, state: State) -> bool:
        """Whether it is this state that goes to disc: the first one that was run or committed."""
        if self._owner is None:
            self._owner = weakref.ref(state)
        return self._owner() is state

    def offer(self, state: State, *, rank: int) -> None:
        """Has a commit written if it is due, this is rank 0, and the commit before is done.

        Raises:
            DurableError: the state has a value that a file cannot hold. At the first commit, on all ranks.
        """
        if not self.owns(state):
            return
        if not self._checked:
            # Not what is written: that must stay the writer's alone. But the first commit is always due.
            if rank != 0:
                durable_format.encode(state.durable_values())
            else:
                self._mark_begun()
            self._checked = True
        if rank != 0 or self.busy or not self._due(state.commits):
            return
        self._hand_over(state)

    def _due(self, commits: int) -> bool:
        if self._last_commits is None:
            return True
        # By the multiples passed since, so that a commit that was skipped makes the next one due.
        if self._every is not None and commits // self._every != self._last_commits // self._every:
            return True
        return self._interval_s is not None and time.monotonic() - self._last_at >= self._interval_s

    def _hand_over(self, state: State) -> None:
        encoded = durable_format.encode(
            state.durable_values(lend=True), commits=state.commits, state=type(state).__name__, job=self._job_id
        )
        self._last_commits, self._last_at = state.commits, time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_all, name="durable commits", daemon=True)
            self._thread.start()
            atexit.unregister(self.wait)
            atexit.register(self.wait)
        with self._wake:
            self._work = (state.commits, encoded)
            self._wake.notify_all()

    def _mark_begun(self) -> None:
        with contextlib.suppress(OSError):  # the first write will say what is wrong with the folder
            (self.folder / _BEGUN_NAME).write_text(self._job_id)

    def _write_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._work is not None)
                work = self._work
            assert work is not None
            self._write(*work)
            del work
            with self._wake:
                self._work = None
                self._wake.notify_all()

    def _write(self, commits: int, encoded: durable_format.Encoded) -> None:
        try:
            self._check_folder()
            write_file(self.folder, commits, encoded)
            self.written = commits
            self._complaint = ""
            prune(self.folder, self.keep, commits)
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if reason != self._complaint:
                self._complaint = reason
                say(f"commit {commits} is not on disc in {self.folder}: {reason}; training goes on")

    def _check_folder(self) -> None:
        """A driver that was killed leaves its workers behind for a while: they must not write into its successor's."""
        if not self._job_id:
            return
        with contextlib.suppress(FileNotFoundError):
            holder = (self.folder / LOCK_NAME).read_text().strip()
            if holder != self._job_id:
                raise DurableError(f"the folder is job {holder}'s now")

    def wait(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until nothing is being written. Returns whether that is so."""
        if self._thread is None or not self._thread.is_alive():
            return True
        with self._wake:
            done = self._wake.wait_for(lambda: self._work is None, timeout_s)
        if not done:
            say(f"the last commit did not reach {self.folder} within {timeout_s:g} s")
        return done

    def finish(self, state: State, *, rank: int) -> None:
        """At the end of training: puts the last commit on disc, due or not."""
        if rank != 0 or not self.owns(state) or not state.commits or not self.wait():
            return
        if self.written != state.commits:
            self._hand_over(state)
            self.wait()

    def restore(self, state: State, context: Context) -> None:
        """At the start of a round that nobody has a state for: rank 0 takes the newest whole commit.

        Called on all ranks, because all must learn when it fails.

        Raises:
            DurableError: there are commits, but none can be used. On all ranks.
        """
        if context.assignment.commits or not self.owns(state):
            return
        failure: str | None = None
        if context.slot.rank == 0 and not state.commits:
            try:
                self._load(state, first=context.assignment.round_id == 1)
            except (DurableError, OSError) as error:
                failure = str(error)
        if context.slot.size > 1:
            failure = broadcast_object(failure, name="durable")
        if failure is not None:
            raise DurableError(failure)

    def _load(self, state: State, *, first: bool) -> None:
        files = commit_files(self.folder)
        for commits, path in reversed(files):
            try:
                facts, values = durable_format.read(path)
                if facts.get("commits") != commits:
                    raise DurableError(f"{path} is no whole commit: its name is that of another")
            except (DurableError, OSError) as error:
                say(f"{error}; going back to the one before")
                continue
            try:
                state.load_durable(values, commits)
            except HorovodInternalError:
                raise
            except Exception as error:
                raise DurableError(f"cannot go on from {path}: {error}") from error
            say(f"going on from commit {commits} in {self.folder}")
            return
        if files:
            raise DurableError(
                f"none of the {len(files)} commits in {self.folder} can be used; to begin anew, empty the folder"
            )
        begun = self.folder / _BEGUN_NAME
        if not first and self._job_id and begun.exists() and begun.read_text() == self._job_id:
            raise DurableError(
                f"all workers that had the training's state are lost, and none of its commits is in {self.folder}"
            )


_durable: Durable | None = None
_read = False


def durable() -> Durable | None:
    """The process's durable commits, as its environment has them; None without."""
    global _durable, _read
    if not _read:
        _durable, _read = Durable.from_environ(os.environ), True
    return _durable
