"""The store of a journal, for the driver that writes it; and the implementation for a folder: a lock and a file.

Owns the numbers of the records, and the reaction to the loss of the files.
"""

from __future__ import annotations

from typing import Protocol

from elastic_driver.journal.file import RecordFile, remove_leftovers
from elastic_driver.journal.folder import JournalFolder


class Store(Protocol):
    """A place to which only this driver may write. Used by one thread at a time, which may block in each method.

    Attributes:
        name: the name of the place, for messages and commands.
        silence: the description of a place that does not respond, for unknown reasons.
    """

    name: str
    silence: str

    @property
    def size(self) -> int:
        """The number of bytes that a reader would find; 0 if :meth:`begin` has to come next."""

    def look(self) -> None:
        """Check that no other driver has had the place until now.

        Raises:
            JournalHeldError: another driver has had it.
            OSError, JournalError: that is unknown.
        """

    def begin(self, body: bytes) -> None:
        """Replace all records by this one. Raises as :meth:`look` does; then the old ones are still there."""

    def append(self, body: bytes) -> None:
        """Append a record. Raises as :meth:`look` does; then :meth:`begin` has to come next."""

    def close(self) -> None:
        """End appending to these records: :meth:`begin` comes next, if anything does."""

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code outside the records, for drivers that stand by. Never raises."""


class FolderStore:
    """The store in a locked folder."""

    silence = "the disk does not answer"

    def __init__(self, folder: JournalFolder) -> None:
        self._folder = folder
        self.name = str(folder.path)
        self._file: RecordFile | None = None
        self._sequence = 0

    @property
    def size(self) -> int:
        """The number of bytes in the file, without the zeros."""
        return 0 if self._file is None else self._file.size

    def look(self) -> None:
        """Check the lock and the file. Removed ones are created again. See Store."""
        path = self._folder.path
        if not self._folder.is_ours:
            self._folder.take_again()
            self.close()
        if self._file is not None and not self._file.is_in(path):
            self.close()
        if self._file is None:
            remove_leftovers(path)

    def begin(self, body: bytes) -> None:
        """Replace the file by a new one. See Store."""
        self._sequence += 1
        file = RecordFile.new(self._folder.path, self._sequence, body)
        self.close()
        self._file = file

    def append(self, body: bytes) -> None:
        """Append a record to the file. See Store."""
        assert self._file is not None
        self._sequence += 1
        self._file.append(self._sequence, body)

    def close(self) -> None:
        """Close the file. See Store."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code in the lock. See Store."""
        self._folder.has_ended(exit_code)
