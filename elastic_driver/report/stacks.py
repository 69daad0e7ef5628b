"""Stacks of many processes, grouped by likeness: what faulthandler prints, read and compared.

Owns how such a text is read, which threads are worth a look, and which stacks are alike. Knows no job and no terminal:
what its answers hold comes from scripts, and whoever prints it makes it printable.

The text is taken as it comes: cut off, mixed with other lines, of any Python. What is not understood is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# 'Thread 0x00007f33 [name] (most recent call first):'; the name since Python 3.14. A process that has one thread only
# is asked without all_threads: 'Stack (most recent call first):'.
_HEAD = re.compile(
    r"(?:(?P<current>Current )?[Tt]hread 0x[0-9a-fA-F]+(?: \[(?P<name>.*)\])?|Stack) \(most recent call first\):?\s*"
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

    def __str__(self) -> str:
        return f"{self.place}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread.

    Attributes:
        frames: the innermost first.
        name: "" where the Python does not tell it.
        is_cut: whether it has more frames further out, which were not printed.
    """

    frames: tuple[Frame, ...]
    name: str = ""
    is_cut: bool = False

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
        """Whether this package has started it: the first that it calls is here."""
        own = self.own
        return self.is_started and bool(own) and any(place in own[-1].file for place in _OUR_PLACES)


def _is_idle(frame: Frame) -> bool:
    functions = _IDLE.get(frame.place, frozenset())
    return functions is None or frame.function in functions


@lru_cache(maxsize=1 << 14)
def _frame(text: str) -> Frame | None:
    # The same lines come from thousands of ranks.
    match = _FRAME.fullmatch(text)
    if match is None:
        return None
    return Frame(match["file"], int(match["line"]) if match["line"].isdigit() else 0, match["function"])


def parse(text: str) -> list[Thread]:
    """The threads in a text of faulthandler's, in its order. Of a text that holds none: []."""
    threads: list[Thread] = []
    frames: list[Frame] | None = None
    name, is_cut = "", False

    def end() -> None:
        if frames is not None:
            threads.append(Thread(tuple(frames), name, is_cut))

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
            elif (frame := _frame(stripped)) is not None:
                frames.append(frame)
        elif (match := _HEAD.fullmatch(stripped)) is not None:
            end()
            frames, name, is_cut = [], (match["name"] or "").strip(), False
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


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its stacks.

    Attributes:
        worker: what it is, for people.
        rank: its rank; -1 for none.
        host: where it runs.
        facts: the rest of the driver's answer.
        main: its main thread; None where there is no stack.
        others: other threads that are worth a look.
        reason: why there is no stack.
    """

    worker: str
    rank: int
    host: str
    facts: Mapping[str, Any]
    main: Thread | None
    others: tuple[Thread, ...] = ()
    reason: str = ""


def process_of(answer: Mapping[str, Any]) -> Process:
    """One entry of ``GET /v1/stacks``."""
    threads = parse(str(answer.get("text") or ""))
    main = main_thread(threads)
    others = tuple(thread for thread in threads if thread is not main and not thread.is_idle and not thread.is_ours)
    reason = "" if main is not None else str(answer.get("reason") or "") or "no stack that can be read"
    rank = answer.get("rank")
    return Process(
        str(answer.get("worker", "")),
        rank if isinstance(rank, int) else -1,
        str(answer.get("host", "")),
        answer,
        main,
        others,
        reason,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Processes whose main threads stand at the same place.

    Attributes:
        processes: by rank.
        frames: of the main thread, the innermost first; () where there is no stack.
        reason: why there is none.
    """

    processes: tuple[Process, ...]
    frames: tuple[Frame, ...]
    reason: str

    @property
    def order(self) -> tuple[int, int, str]:
        """The odd ones first."""
        first = self.processes[0]
        return len(self.processes), first.rank, first.worker


@dataclass(frozen=True, slots=True)
class Family:
    """Groups that differ in their innermost frames only.

    Attributes:
        groups: the smallest first.
        shared: the outer frames that all have, the innermost of them first; () where there is one group only.
    """

    groups: tuple[Group, ...]
    shared: tuple[Frame, ...]


def families(processes: Iterable[Process]) -> list[Family]:
    """The processes by likeness, the odd ones first."""
    members: dict[tuple[tuple[Frame, ...], str], list[Process]] = {}
    for process in processes:
        frames = () if process.main is None else process.main.frames
        members.setdefault((frames, process.reason), []).append(process)
    groups = sorted(
        (
            Group(tuple(sorted(each, key=lambda process: (process.rank, process.worker))), frames, reason)
            for (frames, reason), each in members.items()
        ),
        key=lambda group: group.order,
    )
    found: list[tuple[list[Group], tuple[Frame, ...]]] = []
    by_root: dict[Frame, list[int]] = {}  # families by their outermost frame: others share nothing with them
    for group in groups:
        root = group.frames[-1] if group.frames else None
        for index in by_root.get(root, ()) if root is not None else ():
            kin, shared = found[index]
            common = _common(shared, group.frames)
            if 2 * len(common) >= min(len(kin[0].frames), len(group.frames)):
                kin.append(group)
                found[index] = (kin, common)
                break
        else:
            if root is not None:
                by_root.setdefault(root, []).append(len(found))
            found.append(([group], group.frames))
    return [Family(tuple(kin), shared if len(kin) > 1 else ()) for kin, shared in found]


def _common(one: Sequence[Frame], other: Sequence[Frame]) -> tuple[Frame, ...]:
    """The outer frames that both have."""
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    return tuple(one[len(one) - shared :])


def spell_ranks(ranks: Iterable[int], *, width: int = 60) -> str:
    """Ranks for people: "0-3,5"; what is longer than so many characters is cut, and says how many there are."""
    spans: list[list[int]] = []
    known = sorted(set(ranks))
    for rank in known:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    if len(text) <= width:
        return text
    return f"{text[:width].rpartition(',')[0]},... ({len(known)} ranks)"
