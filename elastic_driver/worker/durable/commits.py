"""Commits on disk: written in the background by one rank per folder, read when no rank has a state.

Owns when a commit is due, which rank writes it, and the writing thread. :mod:`elastic_driver.worker.durable.folder`
owns the folder, :mod:`elastic_driver.worker.durable.format` the file, :mod:`elastic_driver.worker.durable.restore` the
way back from disk.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elastic_driver.errors import DurableError, in_words
from elastic_driver.rendezvous.messages import DiskReport, PublishRequest
from elastic_driver.worker.api.objects import allgather_object
from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.folder import CommitId, Marks, commit_ids, prune, write_file
from elastic_driver.worker.durable.restore import DurableState, View, find_and_load
from elastic_driver.worker.durable.room import Room
from elastic_driver.worker.rounds.current import current_round
from elastic_driver.worker.rounds.runtime import DriverClient, new_client, runtime
from elastic_driver.worker.settings import WorkerSettings, worker_settings

# A write that takes longer is reported: the disk hangs, or is too slow for the state.
SLOW_S = 30.0
# How long an ending process waits for its last commit to be on disk.
FLUSH_S = 60.0


def say(text: str) -> None:
    """Print one line on standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"elastic_driver: {text}", file=sys.stderr, flush=True)


class CommitPermission:
    """Asks the driver whether a commit may be on disk: only the driver knows whether this worker is still a member.

    A worker that is cut off may train on while others have continued without it: its state is no longer the job's.
    """

    def __init__(self) -> None:
        self._client: DriverClient | None = None

    def __call__(self, commit: CommitId) -> None:
        """Block until the driver has answered, even if it is frozen.

        Raises:
            DurableError: it refuses.
            RendezvousError: it cannot be reached, or the job is over.
        """
        if self._client is None:
            self._client = new_client()
        reply = self._client.publish(PublishRequest(commit.round_id, commit.commits))
        if not reply.granted:
            raise DurableError(f"the driver rejected the commit: {reply.reason}")


class Durable:
    """The durable commits of one process.

    Args:
        folder: the folder.
        every: commits from one to the next; None not to count.
        interval_s: seconds from one to the next; None for no interval. With both, whichever comes first.
        keep: how many files to keep.
        job_id: the job that the folder must belong to; "" for no check.
        host: this machine's name in the job, for messages.
        permit: called in the writing thread before a commit gets its name; raises to prevent that. None: nobody is
            asked, and rounds have no number.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int | None,
        interval_s: float | None,
        keep: int,
        job_id: str,
        host: str = "",
        permit: Callable[[CommitId], None] | None = None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.written = -1  # the last commit that this process has written to disk
        self._every = every
        self._interval_s = interval_s
        self._job_id = job_id
        self._host = host
        self._permit = permit
        self._marks = Marks(folder, job_id)
        self._room = Room(folder)
        self._writes: bool | None = None  # whether this rank is the folder's writer; None before a round was entered
        self._entered = False  # whether a round was entered, with the state it resumed from
        self._owner: weakref.ref[DurableState] | None = None
        self._checked = False
        self._last_commits: int | None = None
        self._last_at = 0.0
        self._complaint = ""
        self._folder_id = ""
        self._where = str(folder)
        self._offered = -1  # commits of the state at the last offer that this process may have written
        self._wake = threading.Condition()
        self._work: tuple[CommitId, durable_format.Encoded] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, settings: WorkerSettings) -> Durable | None:
        """Make it as the driver's settings ask; None if they do not."""
        if settings.durable_dir is None:
            return None
        every, interval_s = settings.durable_every, settings.durable_interval_s
        return cls(
            settings.durable_dir,
            every=1 if every is None and interval_s is None else every,
            interval_s=interval_s,
            keep=settings.durable_keep,
            job_id=settings.job,
            host=settings.hostname,
            permit=CommitPermission() if settings.rendezvous and not settings.launched else None,
        )

    @property
    def busy(self) -> bool:
        """Whether a commit is being written."""
        return self._work is not None

    def owns(self, state: DurableState) -> bool:
        """Return whether this is the state written to disk: the first one that was run or committed."""
        if self._owner is None:
            self._owner = weakref.ref(state)
        return self._owner() is state

    def is_writer(self, rank: int) -> bool:
        """Return whether this process writes commits: the lowest rank of those that see the same folder."""
        return rank == 0 if self._writes is None else self._writes

    def offer(self, state: DurableState, *, rank: int) -> None:
        """Start writing a commit if it is due, this rank is its folder's writer, and the previous one is done.

        Raises:
            DurableError: the state has a value that a file cannot store. At the first commit, on all ranks.
        """
        if not self.owns(state):
            return
        if not self._checked:
            # Only a check, since the writer alone may borrow the values. The first commit is always due.
            if not self.is_writer(rank):
                durable_format.encode(state._durable_values())
            else:
                with contextlib.suppress(OSError):  # the first write will report what is wrong with the folder
                    self._marks.begin()
            self._checked = True
        if not self.is_writer(rank):
            return
        self._offered = state._commits
        if not self.busy and self._due(state._commits):
            self._hand_over(state)

    def report(self) -> DiskReport | None:
        """Return the report to the driver; None if this process does not write to the folder. Thread-safe."""
        if self._offered < 0 or self._writes is False:
            return None
        trouble, work, on_its_way_s = self._complaint, self._work, time.monotonic() - self._last_at
        if work is not None and on_its_way_s >= SLOW_S:
            trouble = f"commit {work[0].commits} has been waiting for the disk for {on_its_way_s:.0f} s"
        return DiskReport(self._folder_id, self._where, self.written, self._offered, trouble, self._marks.drivers)

    def _due(self, commits: int) -> bool:
        if self._last_commits is None:
            return True
        # Compares multiples of ``every``, so that after a skipped commit the next one is due.
        if self._every is not None and commits // self._every != self._last_commits // self._every:
            return True
        return self._interval_s is not None and time.monotonic() - self._last_at >= self._interval_s

    def _hand_over(self, state: DurableState) -> None:
        encoded = durable_format.encode(
            state._durable_values(lend=True), commits=state._commits, state=type(state).__name__, job=self._job_id
        )
        self._last_commits, self._last_at = state._commits, time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_all, name="durable commits", daemon=True)
            self._thread.start()
            atexit.unregister(self.wait)
            atexit.register(self.wait)
        round_id = 0 if self._permit is None else current_round().context.assignment.round_id
        with self._wake:
            self._work = (CommitId(state._commits, round_id), encoded)
            self._wake.notify_all()

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

    def _write(self, commit: CommitId, encoded: durable_format.Encoded) -> None:
        permit, commits, freed = self._permit, commit.commits, 0
        try:
            while True:
                try:
                    self._marks.check()
                    write_file(self.folder, commit, encoded, permit=permit and (lambda: permit(commit)))
                    break
                except OSError as error:
                    # Usually the oldest is removed once the newest is there. A disk that holds no more than these would
                    # never get another commit.
                    room = self._room.make(error, commit, encoded.file_bytes, freed)
                    if not room:
                        raise
                    freed += room
            self.written = commits
            if self._complaint:
                say(f"commits are written to {self.folder} again, starting with commit {commits}")
            self._complaint = ""
            prune(self.folder, self.keep, commit, self._job_id)
        except Exception as error:
            reason = in_words(error)
            path = Path(getattr(error, "filename", None) or ".")
            if path.parent == self.folder and not path.name.startswith("."):  # temporary names differ each time
                reason = f"{path.name}: {reason}"
            if reason != self._complaint:
                self._complaint = reason
                say(f"cannot write commit {commits} to {self.folder}: {reason}; training continues")

    def wait(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until nothing is being written. Returns whether that is so."""
        if self._thread is None or not self._thread.is_alive():
            return True
        with self._wake:
            done = self._wake.wait_for(lambda: self._work is None, timeout_s)
        if not done:
            say(f"the last commit was not written to {self.folder} within {timeout_s:g} s")
        return done

    def finish(self, state: DurableState, *, rank: int) -> None:
        """Write the last commit at the end of training, due or not."""
        if not self.is_writer(rank) or not self.owns(state) or not state._commits or not self.wait():
            return
        self._offered = state._commits
        if self.written != state._commits:
            self._hand_over(state)
            self.wait()

    def enter(self, state: DurableState) -> None:
        """Start a round: agree on the writers, and load a commit from disk if no rank has a state.

        Called on all ranks. Blocks for one gathering, and for the reading of the commit.

        Raises:
            DurableError: there are or must be commits, but none can be used. On all ranks.
            HorovodInternalError: a peer is gone.
        """
        if not self.owns(state):
            return
        context = current_round().context
        views: list[View] = allgather_object(self._look(state, listing=False), name="durable.folders")
        folders = [view.folder for view in views]
        rank = context.slot.rank
        self._writes = folders.index(folders[rank]) == rank
        shared = len(set(folders)) == 1
        self._folder_id, self._where = folders[rank], str(self.folder) if shared else views[rank].where
        if context.assignment.sync and not context.assignment.commits and not views[0].state_commits:
            find_and_load(state, context, lambda: self._look(state, listing=True), say)
        self._entered = True

    def _look(self, state: DurableState, *, listing: bool) -> View:
        current = current_round()
        view = View(
            # If a folder cannot be read, one rank of the host reports it.
            folder=f"none on {self._host}",
            path=str(self.folder),
            host=self._host if current.context.slot.size > 1 else "",
            state_commits=state._commits,
            was_member=self._entered or current.first_round == 1 < current.context.assignment.round_id,
            reached=current.commits_seen,
        )
        try:
            view = replace(view, folder=self._marks.open(anew=listing))
            if listing:
                commits = tuple(commit_ids(self.folder))
                view = replace(view, commits=commits, drivers=self._marks.drivers, begun=self._marks.is_begun())
        except OSError as error:
            view = replace(view, trouble=in_words(error))
        return view


_durable: Durable | None = None
_read = False


def durable() -> Durable | None:
    """Return the process's durable commits, as set by its environment; None without any."""
    global _durable, _read
    if not _read:
        _durable, _read = Durable.of(worker_settings()), True
    if _durable is not None:
        runtime().report_disk(_durable.report)
    return _durable
