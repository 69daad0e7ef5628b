"""What faulthandler prints of a process's threads: read once, for all who ask something of it.

Owns the form of such a text, which of its threads are worth a look, whether two texts are the same, and where the main
thread is. Reads no process.

The text is taken as it comes: cut off, mixed with other lines, of any Python. What is not understood is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# 'Thread 0x00007f33 [name] (most recent call first):'; the name since Python 3.14. A process that has one thread only
# is asked without all_threads: 'Stack (most recent call first):'.
_HEAD = re.compile(
    r"(?:(?:Current )?[Tt]hread (?P<ident>0x[0-9a-fA-F]+)(?: \[(?P<name>.*)\])?|Stack) \(most recent call first\):?\s*"
)
# A file's name may hold anything but the end of the line: the last ', line N in ' counts.
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}|\?+) in (?P<function>.*)')
_PACKAGE = "elastic_driver/"
_OUR_PLACES = tuple(f"{_PACKAGE}{folder}" for folder in ("worker/", "torch/", "launch/", "torchelastic/", "system/"))
# Functions in which a thread of a pool, or one that waits to be woken, has nothing to do.
_IDLE = {
    "threading.py": None,  # None: any of its functions
    "queue.py": None,
    "concurrent/futures/thread.py": frozenset({"_worker"}),
    "multiprocessing/pool.py": frozenset(
        {"worker", "_handle_workers", "_handle_tasks", "_handle_results", "_wait_for_updates", "_help_stuff_finish"}
    ),
    "multiprocessing/connection.py": frozenset({"wait", "_recv", "_recv_bytes", "recv", "poll", "_poll"}),
    "multiprocessing/queues.py": frozenset({"_feed"}),
    "selectors.py": frozenset({"select"}),
    "tqdm/_monitor.py": None,
}
_STARTS = frozenset({"_bootstrap", "_bootstrap_inner", "run"})
# Nearly all debuggers for terminals (pdb, ipdb, pudb, and those that listen on a port) are made of Python's own bdb;
# those of editors are not.
_DEBUGGERS = {"bdb.py": "pdb", "pydevd.py": "pydevd"}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack; ``line`` is 0 where it is not known."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The file, without the folder that a Python has been installed in."""
        for mark in ("/site-packages/", "/dist-packages/"):
            _, found, rest = self.file.rpartition(mark)
            if found:
                return rest
        match = re.fullmatch(r".*/lib/python3\.[0-9]+/(.+)", self.file)
        return match[1] if match else self.file

    @property
    def is_of_library(self) -> bool:
        """Whether it is no line of the user's: of Python, of a package that is installed, or of this one."""
        return self.file.startswith("<") or "/lib/python3" in self.file or f"/{_PACKAGE}" in self.file

    def __str__(self) -> str:
        return f"{self.place}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread.

    Attributes:
        frames: the innermost first.
        name: "" where the Python does not tell it.
        is_cut: whether it has more frames further out, which were not printed.
        ident: the number that Python has for it, as it is printed; "" where it is not.
    """

    frames: tuple[Frame, ...]
    name: str = ""
    is_cut: bool = False
    ident: str = ""

    @property
    def is_started(self) -> bool:
        """Whether Python's threading has started it, so that it is not the main thread."""
        return any(frame.function == "_bootstrap" and frame.place == "threading.py" for frame in self.frames[-1:])

    @property
    def own(self) -> tuple[Frame, ...]:
        """The frames without those with which every thread of threading begins."""
        frames = list(self.frames)
        while frames and frames[-1].place == "threading.py" and frames[-1].function in _STARTS:
            frames.pop()
        return tuple(frames)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for work, as threads of a pool do; or has no Python to show."""
        return all(_is_idle(frame) for frame in self.own)

    @property
    def is_ours(self) -> bool:
        """Whether it works for this package only: the first that it calls is in the parts that scripts do not see."""
        return self.begins_here and any(place in self.own[-1].file for place in _OUR_PLACES)

    @property
    def begins_here(self) -> bool:
        """Whether this package has started it, be it for the script: the first that it calls is here."""
        own = self.own
        return self.is_started and bool(own) and f"/{_PACKAGE}" in own[-1].file


def _is_idle(frame: Frame) -> bool:
    functions = _IDLE.get(frame.place, frozenset())
    return functions is None or frame.function in functions


def is_head(line: str) -> bool:
    """Whether a line stands above a thread's stack."""
    return _HEAD.fullmatch(line) is not None


@lru_cache(maxsize=1 << 14)
def frame_of(text: str) -> Frame | None:
    """The frame that a line of a dump is; None where it is none."""
    # The same lines come from thousands of ranks.
    match = _FRAME.fullmatch(text)
    if match is None:
        return None
    return Frame(match["file"], int(match["line"]) if match["line"].isdigit() else 0, match["function"])


def parse(text: str) -> list[Thread]:
    """The threads in a text of faulthandler's, in its order. Of a text that holds none: []."""
    threads: list[Thread] = []
    frames: list[Frame] | None = None
    name, is_cut, ident = "", False, ""

    def end() -> None:
        if frames is not None:
            threads.append(Thread(tuple(frames), name, is_cut, ident))

    # Not splitlines(): names may hold what that takes for the end of a line.
    for number, line in enumerate(text.split("\n")):
        stripped = line.rstrip("\r")
        if stripped.startswith("  "):
            if frames is None:
                if number or not stripped.startswith('  File "'):
                    continue
                frames = []  # the head of the first thread was cut off
            if stripped == "  ...":
                is_cut = True
            elif (frame := frame_of(stripped)) is not None:
                frames.append(frame)
        elif (match := _HEAD.fullmatch(stripped)) is not None:
            end()
            frames, name, is_cut, ident = [], (match["name"] or "").strip(), False, match["ident"] or ""
        elif stripped:
            # A section of its own: the C stack, the list of extension modules.
            end()
            frames = None
    end()
    return threads


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that runs the script: the last that threading has not started. None where there is none.

    faulthandler prints the oldest thread last. A stack that was cut shows no beginning: where nothing else does, the
    last thread is it.
    """
    seen = [thread for thread in threads if thread.frames]
    for thread in reversed(seen):
        if not thread.is_started and not thread.is_idle:
            return thread
    return seen[-1] if seen else None


def alike(one: str, other: str) -> bool:
    """Whether all threads of two dumps of a process stand where they stood.

    Threads of this project are left out: they go on in a worker that hangs. Which thread takes the signal, and so
    comes first, means nothing.
    """
    return _standing(one) == _standing(other)


def _standing(text: str) -> list[tuple[str, tuple[Frame, ...]]]:
    threads = sorted((thread for thread in parse(text) if not thread.begins_here), key=lambda thread: thread.ident)
    return [(thread.ident, thread.frames) for thread in threads]


def innermost(text: str, most: int = 3) -> tuple[str, ...]:
    """The innermost frames of the main thread, "train.py:12 in step"; none where the text has none.

    Where these are all of libraries, the last of them is left out for the innermost frame of the script's own.
    """
    main = main_thread(parse(text))
    if main is None:
        return ()
    chosen = list(main.frames[:most])
    if all(frame.is_of_library for frame in chosen):
        chosen[-1:] = [frame for frame in main.frames if not frame.is_of_library][:1] or chosen[-1:]
    return tuple(map(str, chosen))


def debugger(text: str) -> str:
    """The debugger that has the process at a prompt, or runs it, by a dump of it; "" for none."""
    for thread in parse(text):
        for frame in thread.frames:
            if name := _DEBUGGERS.get(frame.file.rpartition("/")[2]):
                return name
    return ""
