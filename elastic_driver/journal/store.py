"""Where a journal lies, for the driver that writes it; and the way of a folder: a lock and a file.

Owns the numbers of the records, and what is done when the files are taken away.
"""

from __future__ import annotations

from typing import Protocol

from elastic_driver.journal.file import RecordFile, remove_leftovers
from elastic_driver.journal.folder import JournalFolder


class Store(Protocol):
    """A place that this driver alone may write to. Used by one thread at a time, which may block in each method.

    Attributes:
        name: of the place, for messages and for commands.
        silence: what is said of it where it does not answer, and it is not known why.
    """

    name: str
    silence: str

    @property
    def size(self) -> int:
        """Bytes of what a reader would find; 0 where :meth:`begin` comes next."""

    def look(self) -> None:
        """Makes sure that no other driver has had the place until now.

        Raises:
            JournalHeldError: one has.
            OSError, JournalError: nobody can tell.
        """

    def begin(self, body: bytes) -> None:
        """Puts a record in the place of all that is there. Raises as :meth:`look` does; then the old ones are there."""

    def append(self, body: bytes) -> None:
        """Puts a record behind the others. Raises as :meth:`look` does; then :meth:`begin` has to come next."""

    def close(self) -> None:
        """Nothing is appended to what is there any more: :meth:`begin` comes next, if anything does."""

    def has_ended(self, exit_code: int) -> None:
        """Notes the job's exit code apart from the records, for drivers that stand by. Never raises."""


class FolderStore:
    """Of a folder that is locked."""

    silence = "the disc does not answer"

    def __init__(self, folder: JournalFolder) -> None:
        self._folder = folder
        self.name = str(folder.path)
        self._file: RecordFile | None = None
        self._sequence = 0

    @property
    def size(self) -> int:
        """See Store."""
        return 0 if self._file is None else self._file.size

    def look(self) -> None:
        """See Store. What somebody has removed is made anew."""
        path = self._folder.path
        if not self._folder.is_ours:
            self._folder.take_again()
            self.close()
        if self._file is not None and not self._file.is_in(path):
            self.close()
        if self._file is None:
            remove_leftovers(path)

    def begin(self, body: bytes) -> None:
        """See Store."""
        self._sequence += 1
        file = RecordFile.new(self._folder.path, self._sequence, body)
        self.close()
        self._file = file

    def append(self, body: bytes) -> None:
        """See Store."""
        assert self._file is not None
        self._sequence += 1
        self._file.append(self._sequence, body)

    def close(self) -> None:
        """See Store."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def has_ended(self, exit_code: int) -> None:
        """See Store."""
        self._folder.has_ended(exit_code)
