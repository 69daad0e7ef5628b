"""Stacks of many processes, grouped by similarity.

Owns the grouping; :mod:`elastic_driver.health.dumps` parses the stacks. Does not depend on jobs or terminals: texts in
the results come from scripts, and have to be made printable by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_driver.health.dumps import Frame, Thread, main_thread, parse


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its stacks.

    Attributes:
        worker: its name, for messages.
        rank: its rank; -1 for none.
        host: the host on which it runs.
        facts: the rest of the driver's answer.
        main: its main thread; None if there is no stack.
        others: other threads of interest.
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
    """Parse one entry of ``GET /v1/stacks``."""
    threads = parse(str(answer.get("text") or ""))
    main = main_thread(threads)
    others = tuple(thread for thread in threads if thread is not main and not thread.is_idle and not thread.is_ours)
    reason = "" if main is not None else str(answer.get("reason") or "") or "no readable stack"
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
    """Processes whose main threads are at the same place.

    Attributes:
        processes: by rank.
        frames: of the main thread, the innermost first; () if there is no stack.
        reason: why there is no stack.
    """

    processes: tuple[Process, ...]
    frames: tuple[Frame, ...]
    reason: str

    @property
    def order(self) -> tuple[int, int, str]:
        """A sort key that puts unusual groups first."""
        first = self.processes[0]
        return len(self.processes), first.rank, first.worker


@dataclass(frozen=True, slots=True)
class Family:
    """Groups that differ in their innermost frames only.

    Attributes:
        groups: the smallest first.
        shared: the outer frames that all share, the innermost of them first; () if there is one group only.
    """

    groups: tuple[Group, ...]
    shared: tuple[Frame, ...]


def families(processes: Iterable[Process]) -> list[Family]:
    """Group processes by similarity, unusual groups first."""
    members: dict[tuple[tuple[Frame, ...], str], list[Process]] = {}
    for process in processes:
        frames = () if process.main is None else _without_imports(process.main.frames)
        members.setdefault((frames, process.reason), []).append(process)
    groups = sorted(
        (
            Group(tuple(sorted(processes, key=lambda process: (process.rank, process.worker))), frames, reason)
            for (frames, reason), processes in members.items()
        ),
        key=lambda group: group.order,
    )
    found: list[tuple[list[Group], tuple[Frame, ...]]] = []
    by_root: dict[Frame, list[int]] = {}  # families by their outermost frame; those of others share nothing
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


def _without_imports(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames without those of Python's import system, as in tracebacks: six for each import."""
    return tuple(frame for frame in frames if not frame.file.startswith("<frozen importlib.")) or frames


def _common(one: Sequence[Frame], other: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the outer frames that both share."""
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    return tuple(one[len(one) - shared :])


def spell_ranks(ranks: Iterable[int], *, width: int = 60) -> str:
    """Format ranks: "0-3,5"; a text longer than ``width`` characters is cut, and gives their number."""
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
