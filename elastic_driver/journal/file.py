"""The file of a journal: records of bytes, each of which is complete or absent.

    elastic_driver journal 1\n
    u32 length | u32 CRC-32 | u64 sequence | body                 little-endian; the CRC covers sequence and body
    ...
    zeros

Owns the format, and what is known to be on disk. :mod:`elastic_driver.journal.entries` defines the bodies.

A record is the result of one write, so a torn one is the last. The file is filled with zeros ahead of the records: so
no metadata has to be written to disk with a record, and there is room for the next ones when the disk is full. A file
is written by one process from its beginning to its end, and gets its name when it has its first record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, Self

from elastic_driver.journal.folder import JOURNAL, JournalError, open_private
from elastic_driver.system.safe_files import leads_to, new_file

HEADER = b"elastic_driver journal 1\n"
# The largest write; a length above it is damage.
MOST_BODY = 64 << 20
AHEAD = 256 << 10
_HEAD = struct.Struct("<IIQ")
_SEQUENCE = struct.Struct("<Q")
# The beginning of the only record of a job of which nothing is left, after the byte that says it is not compressed.
_CLOSED = b'[{"is":"Closed"'
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Record(NamedTuple):
    """A body, and its sequence number."""

    sequence: int
    body: bytes


def frame(sequence: int, body: bytes) -> bytes:
    """Return a record as in the file."""
    return _HEAD.pack(len(body), _crc(sequence, body), sequence) + body


def parse(data: bytes, path: Path) -> list[Record]:
    """Return the complete records of a file; at least one. A torn one at its end is left out.

    Args:
        data: the content of the file.
        path: its path, for messages.

    Raises:
        JournalError: it is damaged, or of another version.
    """
    if not data.startswith(HEADER):
        raise JournalError(f"cannot read {path}: {_why_no_header(data)}")
    records: list[Record] = []
    at = len(HEADER)
    while (record := _record(data, at)) is not None and record.sequence == _next(records, record):
        records.append(record)
        at += _HEAD.size + len(record.body)
    if not records:
        raise JournalError(f"cannot read {path}: its first record is damaged (byte {at})")
    # A torn record is the last one that was written.
    if _is_followed(data, at, records[-1].sequence + 1):
        raise JournalError(f"cannot read {path}: it is damaged at byte {at}, and valid records follow")
    return records


def read(path: Path) -> list[Record] | None:
    """Return the complete records of a journal; None if there is none.

    Raises:
        OSError: it cannot be read.
        JournalError: it cannot be used, or as :func:`parse` raises it.
    """
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return parse(file.read(), path)


def has_job(folder: Path) -> bool:
    """Return whether there is a journal of a job that has not ended, as far as its beginning shows."""
    with contextlib.suppress(OSError), (folder / JOURNAL).open("rb") as file:
        beginning = file.read(len(HEADER) + _HEAD.size + 1 + len(_CLOSED))
        return beginning.startswith(HEADER) and not beginning.endswith(_CLOSED)
    return False


def remove_leftovers(folder: Path) -> None:
    """Remove files of writers that did not finish. Only for the owner of the lock. Raises OSError."""
    for path in folder.glob(f".{JOURNAL}.*.tmp"):
        path.unlink(missing_ok=True)


class RecordFile:
    """A journal that this process writes. After an error of :meth:`append` nothing more may be written to it.

    Attributes:
        size: the bytes that are written, without the zeros.
    """

    def __init__(self, descriptor: int, size: int, filled: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self._filled = filled

    @classmethod
    def new(cls, folder: Path, sequence: int, body: bytes) -> Self:
        """Create a file with a first record, on disk, replacing the existing one.

        Raises:
            OSError: it cannot be written; the existing one is still there.
        """
        descriptor, path = new_file(folder, JOURNAL, 0o600)
        try:
            data = HEADER + frame(sequence, body)
            _write(descriptor, data + bytes(AHEAD), 0)
            os.fsync(descriptor)
            path.rename(folder / JOURNAL)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        file = cls(descriptor, len(data), len(data) + AHEAD)
        try:
            _sync_folder(folder)
        except BaseException:
            file.close()
            raise
        return file

    def is_in(self, folder: Path) -> bool:
        """Return whether others find it there."""
        return leads_to(folder / JOURNAL, self._descriptor)

    def append(self, sequence: int, body: bytes) -> None:
        """Write a record; it is on disk when this returns. Raises OSError."""
        data = frame(sequence, body)
        end = self.size + len(data)
        if end > self._filled - AHEAD // 2:
            try:
                _write(self._descriptor, bytes(end + AHEAD - self._filled), self._filled)
                self._filled = end + AHEAD
            except OSError as error:
                # A full disk still has the room that was filled.
                if error.errno not in _FULL or end > self._filled:
                    raise
        _write(self._descriptor, data, self.size)
        os.fdatasync(self._descriptor)
        self.size = end

    def close(self) -> None:
        """End writing to it."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _crc(sequence: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_SEQUENCE.pack(sequence)))


def _record(data: bytes, at: int) -> Record | None:
    """Return the complete record that begins there; None for none."""
    if len(data) < at + _HEAD.size:
        return None
    length, crc, sequence = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size : at + _HEAD.size + min(length, MOST_BODY)]
    return Record(sequence, body) if 0 < length == len(body) and _crc(sequence, body) == crc else None


def _next(records: list[Record], found: Record) -> int:
    return records[-1].sequence + 1 if records else found.sequence


def _is_followed(data: bytes, at: int, sequence: int) -> bool:
    """Return whether a complete record after this byte was written later than the one that belongs here."""
    end = len(data.rstrip(b"\0"))
    for place in range(at, min(end, len(data) - _HEAD.size)):
        length, _, found = _HEAD.unpack_from(data, place)
        # Few places pass this test, so few checksums are computed.
        fits = 0 < length <= len(data) - place - _HEAD.size and sequence < found < sequence + (1 << 32)
        if fits and _record(data, place) is not None:
            return True
    return False


def _why_no_header(data: bytes) -> str:
    first = HEADER.rpartition(b" ")[0]
    line, newline, _ = data[:80].partition(b"\n")
    if newline and line.startswith(first) and line[len(first) + 1 :].isdigit():
        return f"it is of version {line[len(first) + 1 :].decode()}; this elastic_driver reads version 1"
    return "it is not a journal, or its first line is damaged"


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
