"""What the text of a worker's stacks says: whether two of them are the same, and where its main thread is.

Owns the form of faulthandler's dumps, as far as that is asked. Reads no process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
# A thread that Python has started begins in this module; our own go on in the package.
_STARTS_THREADS = "threading.py"
_OURS = "/elastic_driver/"
_LIBRARIES = "/lib/python3"
# Nearly all debuggers for terminals (pdb, ipdb, pudb, and those that listen on a port) are made of Python's own bdb;
# those of editors are not.
_DEBUGGERS = {"bdb.py": "pdb", "pydevd.py": "pydevd"}


def alike(one: str, other: str) -> bool:
    """Whether all threads of two dumps of a process stand where they stood.

    Threads of this project are left out: they go on in a worker that hangs. Which thread takes the signal, and so
    comes first, means nothing.
    """
    return _threads(one) == _threads(other)


def innermost(text: str, most: int = 3) -> tuple[str, ...]:
    """The innermost frames of the main thread, "train.py:12 in step"; none where the text has none.

    Where these are all of libraries, the last of them is left out for the innermost frame of the script's own.
    """
    blocks = _blocks(text)
    # Threads are listed from the last one that was started to the main one.
    main = next((frames for _, frames in reversed(blocks) if frames and not _is_started(frames)), ())
    chosen = list(main[:most])
    if all(map(_is_of_library, chosen)):
        chosen[-1:] = [frame for frame in main if not _is_of_library(frame)][:1] or chosen[-1:]
    return tuple(f"{file}:{line} in {name}" for file, line, name in chosen)


def debugger(text: str) -> str:
    """The debugger that has the process at a prompt, or runs it, by a dump of it; "" for none."""
    for _, frames in _blocks(text):
        for file, _, _ in frames:
            if name := _DEBUGGERS.get(file.rpartition("/")[2]):
                return name
    return ""


def _threads(text: str) -> list[tuple[str, tuple[tuple[str, str, str], ...]]]:
    return sorted((head, frames) for head, frames in _blocks(text) if not _is_ours(frames))


def _blocks(text: str) -> list[tuple[str, tuple[tuple[str, str, str], ...]]]:
    blocks: list[tuple[str, list[tuple[str, str, str]]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            blocks.append((head[1], []))
        elif blocks and (frame := _FRAME.match(line)):
            blocks[-1][1].append((frame["file"], frame["line"], frame["name"]))
    return [(head, tuple(frames)) for head, frames in blocks]


def _is_of_library(frame: tuple[str, str, str]) -> bool:
    return frame[0].startswith("<") or _LIBRARIES in frame[0] or _OURS in frame[0]


def _is_started(frames: Sequence[tuple[str, str, str]]) -> bool:
    return bool(frames) and frames[-1][0].endswith(_STARTS_THREADS)


def _is_ours(frames: Sequence[tuple[str, str, str]]) -> bool:
    begins = next((file for file, _, _ in reversed(frames) if not file.endswith(_STARTS_THREADS)), "")
    return _is_started(frames) and _OURS in begins
