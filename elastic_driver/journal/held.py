"""A journal that this process has locked: what a driver does with it, and the implementation for a folder.

Owns the checks before the takeover of a job from it. The layers below lock it and write to it.
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

# A dying driver may have its socket a moment longer than its lock.
_DYING_S, _LOOK_S = 1.0, 0.05


class HeldJournal(Protocol):
    """A locked journal. Used by one thread at a time; leaving its context releases it."""

    @property
    def name(self) -> str:
        """The name of its place, for messages and commands."""

    @property
    def last(self) -> Signature:
        """The record that the previous process has left there."""

    @property
    def lock(self) -> EtcdLock | None:
        """The lock that drivers of other machines wait for, too; None if none of them can take over."""

    @property
    def waited_for(self) -> str:
        """The job whose driver's end was waited for; "" if there was none."""

    @property
    def only_goes_on(self) -> bool:
        """Whether no job may be begun: this command has stood by for one, whose end only another machine may know."""

    @property
    def is_of_this_command(self) -> bool:
        """Whether its content was written by a driver that the parent of this one had started before it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def release(self) -> None:
        """Release the journal for others."""

    def handed_on(self) -> Self:
        """Return the journal, still locked, for another driver of this process: this one never releases it."""

    def is_of(self, job_id: str) -> None:
        """Record which job is in it, and that it has not ended, for messages."""

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code outside the records, for drivers that stand by. Never raises."""

    def settings(self, settings: Settings) -> Settings:
        """Return the settings with this place for the journal, as others look for it."""

    def read(self) -> Recorded | Closed | None:
        """Return its content; None for none.

        Raises:
            JournalError: it cannot be read, is damaged, or another version has written it, or would decide differently.
        """

    def check(self, found: Recorded) -> None:
        """Check that its job can be taken over from here, and that its driver is dead.

        Raises:
            JournalHeldError: the driver is not dead.
            JournalError: its agents would not find this driver.
        """

    def store(self) -> Store:
        """Return the store for its records."""


class FolderJournal(JournalFolder):
    """A journal in a folder. See HeldJournal."""

    @property
    def name(self) -> str:
        """The path of the folder, for messages and commands."""
        return str(self.path)

    @property
    def lock(self) -> None:
        """None: no driver of another machine can take over."""

    @property
    def only_goes_on(self) -> bool:
        """False: the fate of a driver of this machine is visible here."""
        return False

    @property
    def is_of_this_command(self) -> bool:
        """Whether its content was written by a driver that the parent of this one had started before it."""
        started = parent.started()
        return started is not None and started.before != parent.which_file(self.path / JOURNAL)

    def settings(self, settings: Settings) -> Settings:
        """Return the settings with the folder's path without symbolic links: agents know a job by that path."""
        return replace(settings, journal=JournalPlace(self.path))

    def read(self) -> Recorded | Closed | None:
        """Return its content; None for none."""
        return read_job(self.path)

    def check(self, found: Recorded) -> None:
        """Check that its driver is dead, and that its agents would find this one."""
        _check_nobody_answers(found, self.path)
        _check_is_in_its_place(found, self.path)

    def store(self) -> Store:
        """Return the store for its records."""
        return FolderStore(self)


def _check_nobody_answers(found: Recorded, path: Path) -> None:
    """Check that the driver whose lock this process has is dead: the lock may be a file that somebody removed.

    Raises:
        JournalHeldError: it is not dead.
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
                f"cannot use the journal {path}: its lock is free, but a driver of job {found.job.job_id} "
                f"answers at {socket}; was {path / LOCK} removed?"
            )
        time.sleep(_LOOK_S)


def _check_is_in_its_place(found: Recorded, path: Path) -> None:
    """Raise JournalError if agents look for a driver's socket in another folder: none of them would come back."""
    before, socket = found.job.settings.journal_folder, found.facts.ways.socket
    if before is None or before == path or not socket or Path(socket).parent != before:
        return
    if any(kept.local and may_come_back(kept) for kept in found.facts.agents.values()):
        raise JournalError(
            f"cannot take over job {found.job.job_id}: its agents on this machine look for a driver in its former "
            f"journal, {before}; move the journal back, or end the job (elasticrun end {found.job.job_id})"
        )
