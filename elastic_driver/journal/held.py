"""A journal that this process has for itself: what a driver does with it, and the way of a folder.

Owns what is looked at before a job is taken over from there. How it is locked, and what is written, is below.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from elastic_driver.journal.entries import Closed
from elastic_driver.journal.folder import JOURNAL, LOCK, JournalError, JournalFolder, JournalHeldError, Signature
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.journal.store import FolderStore, Store
from elastic_driver.launch.fleet.kept import may_come_back
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.settings import Settings
from elastic_driver.system import local_socket, parent

if TYPE_CHECKING:
    from elastic_driver.journal.etcd_lock import EtcdLock

# A driver that is dying may have its socket a moment longer than its lock.
_DYING_S, _LOOK_S = 1.0, 0.05


class HeldJournal(Protocol):
    """See above. Used by one thread at a time; leaving its context releases it."""

    @property
    def name(self) -> str:
        """Of the place, for messages and for commands."""

    @property
    def last(self) -> Signature:
        """What the process before this one has left there."""

    @property
    def lock(self) -> EtcdLock | None:
        """That which drivers of other machines wait for, too; None where none of those can have it."""

    @property
    def waited_for(self) -> str:
        """The job whose driver's end was waited for; "" where nobody had it."""

    @property
    def only_goes_on(self) -> bool:
        """Whether no job may be begun: this command has stood by for one, whose end another machine may know alone."""

    @property
    def is_of_this_command(self) -> bool:
        """Whether what is there was written by a driver that the parent of this one had started before it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def release(self) -> None:
        """Lets others have it."""

    def handed_on(self) -> Self:
        """Held as before, for another driver of this process: this one does not release it any more."""

    def is_of(self, job_id: str) -> None:
        """The job in it is this one, as it turns out, and has not ended: for messages."""

    def has_ended(self, exit_code: int) -> None:
        """Notes the job's exit code apart from the records, for drivers that stand by. Never raises."""

    def settings(self, settings: Settings) -> Settings:
        """These, with this place for the journal, as others look for it."""

    def read(self) -> Recorded | Closed | None:
        """What is there; None for nothing.

        Raises:
            JournalError: it cannot be read, is damaged, or another version has written it, or would decide otherwise.
        """

    def check(self, found: Recorded) -> None:
        """Makes sure that the job that is there can be taken over from here, and that its driver is dead.

        Raises:
            JournalHeldError: it is not.
            JournalError: its agents would not find this driver.
        """

    def store(self) -> Store:
        """Where its records are written."""


class FolderJournal(JournalFolder):
    """In a folder. See HeldJournal."""

    @property
    def name(self) -> str:
        """See HeldJournal."""
        return str(self.path)

    @property
    def lock(self) -> None:
        """See HeldJournal."""

    @property
    def only_goes_on(self) -> bool:
        """See HeldJournal. What has become of a driver of this machine can be seen."""
        return False

    @property
    def is_of_this_command(self) -> bool:
        """See HeldJournal."""
        started = parent.started()
        return started is not None and started.before != parent.which_file(self.path / JOURNAL)

    def settings(self, settings: Settings) -> Settings:
        """See HeldJournal. Without symbolic links, as for whoever takes it over: agents know a job by it."""
        return replace(settings, journal=JournalPlace(self.path))

    def read(self) -> Recorded | Closed | None:
        """See HeldJournal."""
        return read_job(self.path)

    def check(self, found: Recorded) -> None:
        """See HeldJournal."""
        _check_nobody_answers(found, self.path)
        _check_is_in_its_place(found, self.path)

    def store(self) -> Store:
        """See HeldJournal."""
        return FolderStore(self)


def _check_nobody_answers(found: Recorded, path: Path) -> None:
    """Makes sure that the driver whose lock this process has is dead: its lock may be a file that somebody removed.

    Raises:
        JournalHeldError: it is not.
    """
    socket = found.facts.ways.socket
    until = time.monotonic() + _DYING_S
    while socket:
        try:
            local_socket.connect(Path(socket), _DYING_S).close()
        except OSError:
            return
        if time.monotonic() > until:
            raise JournalHeldError(
                f"cannot use the journal {path}: nobody has its lock, and yet a driver of job {found.job.job_id} "
                f"answers at {socket}; has somebody removed {path / LOCK}?"
            )
        time.sleep(_LOOK_S)


def _check_is_in_its_place(found: Recorded, path: Path) -> None:
    """Raises JournalError where agents look for a driver's socket in another folder: none of them would come back."""
    before, socket = found.job.settings.journal_folder, found.facts.ways.socket
    if before is None or before == path or not socket or Path(socket).parent != before:
        return
    if any(kept.local and may_come_back(kept) for kept in found.facts.agents.values()):
        raise JournalError(
            f"cannot take over job {found.job.job_id}: its journal was {before}, where its agents on this machine look "
            f"for a driver; move it back there, or end the job (elasticrun end {found.job.job_id})"
        )
