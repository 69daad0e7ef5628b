"""Formats the stacks of a job's workers: which ranks wait for which, then groups of workers, unusual groups first.

Owns the wording. :mod:`elastic_driver.reporting.stacks` does the grouping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_driver.health.dumps import Frame, Thread, main_thread, parse
from elastic_driver.reporting.lengths import length
from elastic_driver.reporting.printable import one_line
from elastic_driver.reporting.stacks import (
    Family,
    Group,
    Process,
    families,
    process_of,
    spell_ranks,
)
from elastic_driver.words import counted

# As much as fits on a screen or two. The rest is in --all and --json.
_MOST_FAMILIES, _MOST_GROUPS = 12, 6
_INNERMOST, _OUTERMOST = 16, 8
_MOST_OTHERS, _FRAMES_OF_OTHERS = 3, 4
_MOST_WAITING = 8


def stacks_text(answer: Mapping[str, Any], *, ungrouped: bool = False) -> str:
    """Format the answer as text.

    Args:
        answer: of ``GET /v1/stacks``.
        ungrouped: whether to show each worker separately, with all its threads.
    """
    hosts = {stack.get("rank"): str(stack.get("host", "")) for stack in answer["stacks"]}
    parts = [list(_waiting(answer.get("waiting", ()), hosts))]
    if not answer["stacks"]:
        parts.append(["the job has no workers now"])
    elif ungrouped:
        order = sorted(answer["stacks"], key=lambda each: (_rank(each) < 0, _rank(each), str(each.get("worker"))))
        parts += [list(_whole(each)) for each in order]
    else:
        found = families(map(process_of, answer["stacks"]))
        total = len(answer["stacks"])
        parts += [list(_family(family, total)) for family in found[:_MOST_FAMILIES]]
        if rest := found[_MOST_FAMILIES:]:
            of = sum(len(group.processes) for family in rest for group in family.groups)
            parts.append([f"{counted(of, 'more worker')} elsewhere: see --all"])
    return "\n\n".join("\n".join(one_line(line) for line in part) for part in parts if part)


def _rank(entry: Mapping[str, Any]) -> int:
    rank = entry.get("rank")
    return rank if isinstance(rank, int) else -1


def _waiting(waiting: Sequence[Mapping[str, Any]], hosts: Mapping[Any, str]) -> Iterator[str]:
    for each in waiting[:_MOST_WAITING]:
        missing = sorted(each["missing"])
        whom = f"rank{'' if len(missing) == 1 else 's'} {spell_ranks(missing)}"
        where = list(dict.fromkeys(hosts[rank] for rank in missing if hosts.get(rank)))
        if len(where) == 1:
            whom += f" (host {where[0]})"
        yield f"{each['name']} has waited {length(each['since_s'])} for {whom}"
    if len(waiting) > _MOST_WAITING:
        yield f"{counted(len(waiting) - _MOST_WAITING, 'more collective')} waiting"


def _family(family: Family, total: int) -> Iterator[str]:
    shared = len(family.shared)
    for group in family.groups[:_MOST_GROUPS]:
        yield _whose(group, total)
        yield from _frames(group.frames[: len(group.frames) - shared])
        yield from _others(group)
    if rest := family.groups[_MOST_GROUPS:]:
        yield f"{counted(sum(len(group.processes) for group in rest), 'more worker')} in {counted(len(rest), 'place')}"
    if shared:
        yield "all of these are called from"
        yield from _frames(family.shared)


def _whose(group: Group, total: int) -> str:
    if len(group.processes) == 1:
        whose = _name(group.processes[0])
    else:
        ranks = [process.rank for process in group.processes if process.rank >= 0]
        unranked = len(group.processes) - len(ranks)
        whose = f"ranks {spell_ranks(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else ""
        if unranked:
            whose += f"{' and ' if whose else ''}{counted(unranked, 'worker')} without a rank"
    share = f", {len(group.processes):,} of {total:,}" if total > len(group.processes) > 1 else ""
    return f"{whose}{share}: {group.reason}" if group.reason else f"{whose}{share}:"


def _name(process: Process) -> str:
    facts = process.facts
    who = f"rank {process.rank}" if process.rank >= 0 else f"worker {process.worker}"
    said = [f"host {process.host}", f"pid {facts.get('pid')}"]
    if facts.get("steps"):
        said.append(counted(facts["steps"], "step"))
    if facts.get("state") in ("T", "t", "D"):
        said.append({"T": "stopped by a signal", "t": "stopped by a tracer", "D": "in the kernel"}[facts["state"]])
    if (facts.get("waits_s") or 0) >= 1:
        said.append(f"in a collective for {length(facts['waits_s'])}")
    return f"{who} ({', '.join(said)})"


def _frames(frames: Sequence[Frame], *, indent: str = "    ") -> Iterator[str]:
    if len(frames) <= _INNERMOST + _OUTERMOST:
        yield from (f"{indent}{frame}" for frame in frames)
        return
    yield from (f"{indent}{frame}" for frame in frames[:_INNERMOST])
    yield f"{indent}... {len(frames) - _INNERMOST - _OUTERMOST} more"
    yield from (f"{indent}{frame}" for frame in frames[-_OUTERMOST:])


def _others(group: Group) -> Iterator[str]:
    """Format other threads of the group, by place."""
    by_place: dict[tuple[Frame, ...], set[tuple[int, str]]] = {}
    for process in group.processes:
        for thread in process.others:
            by_place.setdefault(thread.own, set()).add((process.rank, process.worker))
    some = sorted(by_place.items(), key=lambda item: (len(item[1]), str(item[0][:1])))
    for frames, who in some[:_MOST_OTHERS]:
        all_of = len(who) == len(group.processes)
        ranks = [rank for rank, _ in who if rank >= 0]
        yield f"  another thread{'' if all_of or not ranks else f' of rank {spell_ranks(ranks)}'}:"
        yield from (f"      {frame}" for frame in frames[:_FRAMES_OF_OTHERS])
        if len(frames) > _FRAMES_OF_OTHERS:
            yield f"      ... {len(frames) - _FRAMES_OF_OTHERS} more"
    if len(some) > _MOST_OTHERS:
        yield f"  threads in {counted(len(some) - _MOST_OTHERS, 'other place')}"


def _whole(entry: Mapping[str, Any]) -> Iterator[str]:
    process = process_of(entry)
    yield f"{_name(process)}: {process.reason}" if process.reason else f"{_name(process)}:"
    threads = parse(str(entry.get("text") or ""))
    main = main_thread(threads)
    for thread in sorted(threads, key=lambda each: each is not main):
        yield f"  {_title(thread, is_main=thread is main)}"
        yield from (f"    {frame}" for frame in thread.frames)
        if thread.is_cut:
            yield "    ..."


def _title(thread: Thread, *, is_main: bool) -> str:
    title = "main thread" if is_main else f"thread {thread.name}".rstrip()
    return f"{title}:" if thread.frames else f"{title}: no Python frames"
