"""The frame of a durable commit's file, which distinguishes a complete one from a torn or a changed one.

    magic (8) | header length (8) | data length (8) | header | zeros to a multiple of 64 | data | digest (16)

Numbers are little-endian. The digest is BLAKE2b of everything before it. The content of header and data is defined in
elastic_driver.worker.durable.format; code that only checks whether a commit exists needs no more than this.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

from elastic_driver.system.safe_files import open_inside

MAGIC = b"EDSTATE1"
PREFIX = struct.Struct("<8sQQ")
ALIGN = 64
DIGEST_BYTES = 16
_CHUNK_BYTES = 4 << 20


def layout(start: bytes | bytearray, size: int) -> tuple[int, int]:
    """Return where the header ends and where the data begins.

    Args:
        start: the file's first bytes.
        size: the file's, in bytes.

    Raises:
        ValueError: this is not such a file, or not a complete one.
    """
    if size < PREFIX.size + DIGEST_BYTES:
        raise ValueError(f"it has only {size} bytes")
    magic, header_bytes, data_bytes = PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise ValueError("it does not begin like a commit file")
    begin = -(-(PREFIX.size + header_bytes) // ALIGN) * ALIGN
    whole = begin + data_bytes + DIGEST_BYTES
    if size != whole:
        raise ValueError(f"it has {size} bytes; {whole} are expected")
    return PREFIX.size + header_bytes, begin


def is_complete(path: Path) -> bool:
    """Return whether a file has the length that its first bytes claim. Quick; a changed byte is not noticed."""
    try:
        with os.fdopen(open_inside(path, os.O_RDONLY), "rb") as file:
            layout(file.read(PREFIX.size), os.fstat(file.fileno()).st_size)
    except (OSError, ValueError, struct.error):
        return False
    return True


def is_whole(path: Path) -> bool:
    """Return whether a file is readable and unchanged since it was written. Reads all of it, a few MB at a time."""
    try:
        check_whole(path)
    except (OSError, ValueError):
        return False
    return True


def check_whole(path: Path) -> None:
    """Check all of a file, a few MB at a time.

    Raises:
        ValueError: it has changed since it was written.
        OSError: it cannot be read, which says nothing about its content.
    """
    with os.fdopen(open_inside(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(PREFIX.size)
        layout(start.ljust(PREFIX.size, b"\0"), size)
        file.seek(0)
        if _digest(file, size - DIGEST_BYTES) != file.read():
            raise ValueError("its digest differs")


def _digest(file: BinaryIO, length: int) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    while length:
        piece = file.read(min(length, _CHUNK_BYTES))
        if not piece:
            raise ValueError("it has become shorter")
        digest.update(piece)
        length -= len(piece)
    return digest.digest()
