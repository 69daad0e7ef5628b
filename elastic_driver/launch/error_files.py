"""Error files: hold the exception that ended a worker's script, in the format of torch's ``@record``.

TORCHELASTIC_ERROR_FILE names a file that does not exist yet. A failing script writes JSON into it: ``{"message":
{"message": "ValueError: ...", "extraInfo": {"py_callstack": ..., "timestamp": ...}}}``, or a plain text as ``message``.
The agent reads it, bounded, and passes it on as text; only the driver parses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# A traceback with a recursion in it has about 100 KB.
_MOST_BYTES = 128 << 10
_MOST_LINES = 20
_PREFIX = "elastic_driver-errors-"


class ErrorFiles:
    """The error files of one host's workers: names, in a folder that only this user can read.

    The folder is locked for as long as its agent lives. The next agent of this user on this machine removes unlocked
    ones, left by agents that were killed.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1
        self._given = 0

    def new(self) -> str:
        """Return a new name for one worker; "" if no folder can be made."""
        if self._folder is None:
            try:
                self._folder, self._lock = _new_folder()
            except OSError:
                return ""
            _remove_dead(self._folder.parent)
        self._given += 1
        return str(self._folder / f"{self._given}.json")

    def remove(self) -> None:
        """Remove all of them. Harmless when repeated."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(self._lock)


def _new_folder() -> tuple[Path, int]:
    """Make a folder. Returns it, and the descriptor that holds its lock. Raises OSError."""
    # Locked before it has its name, so that no process finds it unlocked.
    new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    lock = -1
    try:
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # this disk supports no locks, so no other process can have one either
            fcntl.flock(lock, fcntl.LOCK_SH)
        return new.rename(new.with_name(new.name[1:])), lock
    except BaseException:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(new, ignore_errors=True)
        raise


def _remove_dead(parent: Path) -> None:
    """Remove the folders of this user's dead agents."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def read_error_file(path: str) -> tuple[str, float | None]:
    """Return the content of a worker's error file, and its age in seconds.

    ("", None) for nothing, and if it is not a regular file or too long.
    """
    if not path:
        return "", None
    with contextlib.suppress(OSError):
        # Nothing that the worker puts there may block the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(_MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
            if 0 < len(data) <= _MOST_BYTES:
                # The file's time or the machine's clock may have been changed, but it was not written later than now.
                return data.decode(errors="replace"), max(0.0, time.time() - status.st_mtime)
    return "", None


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception recorded in an error file.

    Attributes:
        error: the exception in one line: its type and text.
        callstack: where it was raised, line by line; only the end of a long one.
    """

    error: str
    callstack: tuple[str, ...]


def raised_in(text: str) -> Raised | None:
    """Parse an error file; None if it is empty or invalid."""
    document = _document(text)
    if document is None:
        return None
    said, callstack = document["message"], ""
    if isinstance(said, dict):
        more = said.get("extraInfo")
        if isinstance(more, dict):
            callstack = str(more.get("py_callstack", ""))
        said = said.get("message", "")
    error = next((line.strip() for line in str(said).splitlines() if line.strip()), "")
    return Raised(error, tuple(callstack.splitlines()[-_MOST_LINES:])) if error else None


def pass_on(path: str, text: str, how: str, returncode: int) -> None:
    """Write the error file of this job, which is itself the worker of another launcher. Never fails.

    Args:
        path: chosen by that launcher.
        text: the error file of the first worker that failed; "" if it left none.
        how: how it ended, in words.
        returncode: its exit code.
    """
    document = _document(text)
    if document is None:
        document = {"message": {"message": how, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}
    if isinstance(document["message"], dict):
        document["message"]["errorCode"] = returncode
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(document))


def _document(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "message" in document else None
