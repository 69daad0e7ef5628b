"""Parser for faulthandler's output: the stacks of a process's threads.

Owns the format, the choice of relevant threads, the comparison of two dumps, and the search for the main thread. Reads
no process.

Accepts any text: cut off, mixed with other lines, from any Python. Skips what it does not understand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# 'Thread 0x00007f33 [name] (most recent call first):'; the name since Python 3.14. A process with a single thread is
# dumped without all_threads: 'Stack (most recent call first):'.
_HEAD = re.compile(
    r"(?:(?:Current )?[Tt]hread (?P<ident>0x[0-9a-fA-F]+)(?: \[(?P<name>.*)\])?|Stack) \(most recent call first\):?\s*"
)
# A file's name may contain anything but the end of the line: the last ', line N in ' counts.
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}|\?+) in (?P<function>.*)')
_PACKAGE = "elastic_driver/"
_OUR_PLACES = tuple(f"{_PACKAGE}{folder}" for folder in ("worker/", "torch/", "launch/", "torchelastic/", "system/"))
# Functions in which a thread of a pool, or one that waits to be woken, is idle.
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
# Nearly all terminal debuggers (pdb, ipdb, pudb, and those that listen on a port) are built on Python's own bdb; those
# of editors are not.
_DEBUGGERS = {"bdb.py": "pdb", "pydevd.py": "pydevd"}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack; ``line`` is 0 if unknown."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The file, without the folder in which Python is installed."""
        for mark in ("/site-packages/", "/dist-packages/"):
            _, found, rest = self.file.rpartition(mark)
            if found:
                return rest
        match = re.fullmatch(r".*/lib/python3\.[0-9]+/(.+)", self.file)
        return match[1] if match else self.file

    @property
    def is_of_library(self) -> bool:
        """Whether it is not the user's code: of Python, of an installed package, or of this one."""
        return self.file.startswith("<") or "/lib/python3" in self.file or f"/{_PACKAGE}" in self.file

    def __str__(self) -> str:
        return f"{self.place}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread.

    Attributes:
        frames: the innermost first.
        name: "" if this Python does not print it.
        is_cut: whether it has more outer frames, which were not printed.
        ident: Python's identifier of the thread, as printed; "" if it is not.
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
        """The frames without those with which every thread of threading starts."""
        frames = list(self.frames)
        while frames and frames[-1].place == "threading.py" and frames[-1].function in _STARTS:
            frames.pop()
        return tuple(frames)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for work, as threads of a pool do; or has no Python frames to show."""
        return all(_is_idle(frame) for frame in self.own)

    @property
    def is_ours(self) -> bool:
        """Whether it works for this package only: its first function is in the parts hidden from scripts."""
        return self.begins_here and any(place in self.own[-1].file for place in _OUR_PLACES)

    @property
    def begins_here(self) -> bool:
        """Whether this package has started it, even if for the script: its first function is here."""
        own = self.own
        return self.is_started and bool(own) and f"/{_PACKAGE}" in own[-1].file


def _is_idle(frame: Frame) -> bool:
    functions = _IDLE.get(frame.place, frozenset())
    return functions is None or frame.function in functions


def is_head(line: str) -> bool:
    """Return whether a line is the heading of a thread's stack."""
    return _HEAD.fullmatch(line) is not None


@lru_cache(maxsize=1 << 14)
def frame_of(text: str) -> Frame | None:
    """Parse a line of a dump as a frame; None if it is not one."""
    # The same lines come from thousands of ranks.
    match = _FRAME.fullmatch(text)
    if match is None:
        return None
    return Frame(match["file"], int(match["line"]) if match["line"].isdigit() else 0, match["function"])


def parse(text: str) -> list[Thread]:
    """Return the threads in faulthandler's output, in its order; [] if it contains none."""
    threads: list[Thread] = []
    frames: list[Frame] | None = None
    name, is_cut, ident = "", False, ""

    def end() -> None:
        if frames is not None:
            threads.append(Thread(tuple(frames), name, is_cut, ident))

    # Not splitlines(): names may contain characters that it takes for the end of a line.
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
            # Another section: the C stack, the list of extension modules.
            end()
            frames = None
    end()
    return threads


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that runs the script: the last one that threading has not started. None if there is none.

    faulthandler prints the oldest thread last. A truncated stack shows no beginning: if no other thread qualifies, it
    is the last one.
    """
    seen = [thread for thread in threads if thread.frames]
    for thread in reversed(seen):
        if not thread.is_started and not thread.is_idle:
            return thread
    return seen[-1] if seen else None


def alike(one: str, other: str) -> bool:
    """Return whether all threads of two dumps of a process are at the same place.

    Threads of this project are ignored: they go on in a hanging worker. Which thread handles the signal, and so comes
    first, does not matter.
    """
    return _standing(one) == _standing(other)


def _standing(text: str) -> list[tuple[str, tuple[Frame, ...]]]:
    threads = sorted((thread for thread in parse(text) if not thread.begins_here), key=lambda thread: thread.ident)
    return [(thread.ident, thread.frames) for thread in threads]


def innermost(text: str, most: int = 3) -> tuple[str, ...]:
    """Return the innermost frames of the main thread, "train.py:12 in step"; empty if the text has none.

    If all of them are in libraries, the last is replaced by the innermost frame of the script.
    """
    main = main_thread(parse(text))
    if main is None:
        return ()
    chosen = list(main.frames[:most])
    if all(frame.is_of_library for frame in chosen):
        chosen[-1:] = [frame for frame in main.frames if not frame.is_of_library][:1] or chosen[-1:]
    return tuple(map(str, chosen))


def debugger(text: str) -> str:
    """Return the debugger that runs the process or has it at a prompt, from a dump of it; "" for none."""
    for thread in parse(text):
        for frame in thread.frames:
            if name := _DEBUGGERS.get(frame.file.rpartition("/")[2]):
                return name
    return ""
