"""Process sets: subsets of the ranks, whose collectives concern only them.

Owns the sets that this process knows and their numbers in the current round. A set is only a list of ranks: in another
round the same ranks may be other processes. At the beginning of each round the members exchange the sets they know, and
all re-create all of them, so that a new process gets those of the others. A set with a rank that the round lacks
sleeps: it has no number, and using it is an error; it returns in the next round that has all its ranks.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_driver.errors import MismatchError
from elastic_driver.worker.engine.byte_collectives import as_data, gather
from elastic_driver.worker.engine.protocol import GLOBAL_SET
from elastic_driver.worker.rounds import devices
from elastic_driver.worker.rounds.context import Context, MemberFacts
from elastic_driver.worker.rounds.current import current, current_round


class ProcessSet:
    """A subset of the job's ranks. Pass it to ``init()`` or ``add_process_set()``, then to collectives.

    Args:
        ranks_or_comm: the ranks, in any order. MPI communicators, which Horovod also accepts here, are rejected.

    Attributes:
        ranks: sorted.
        process_set_id: its number in this round; None before it was added, after it was removed, and while the round
            lacks one of its ranks.

    Raises:
        ValueError: the argument is not a list of ranks, or contains one twice.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        given: Any = ranks_or_comm  # callers may pass anything
        numbers = list(given) if isinstance(given, Iterable) else [given]
        if not isinstance(given, Iterable) or any(type(rank) is not int or rank < 0 for rank in numbers):
            raise ValueError(f"cannot make a process set of {given!r}: expected a list of ranks")
        self.ranks: list[int] = sorted(numbers)
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"cannot make a process set of {self.ranks}: a rank appears twice")
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return the number of members; None if the set has no number."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's index among the members; None if the set has no number.

        Raises:
            ValueError: this process is not a member.
        """
        if self.process_set_id is None:
            return None
        own_rank = current_round().slot.rank
        if own_rank not in self.ranks:
            raise ValueError(f"cannot return a rank in {self}: this process, rank {own_rank}, is not part of it")
        return self.ranks.index(own_rank)

    def included(self) -> bool:
        """Return whether this process is a member. Raises NotInitializedError before ``init()``."""
        return current_round().slot.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET

_wanted_sets: list[tuple[int, ...]] = []  # sets to have in each round; the same on all ranks once in a round
_numbers: dict[tuple[int, ...], int] = {}  # of the sets in this round
_added: set[tuple[int, ...]] = set()  # by this process, in this round
_fresh: list[tuple[int, ...]] = []  # given to init(), before the next round is entered
_objects: weakref.WeakSet[ProcessSet] = weakref.WeakSet()
_last_number = 0


@dataclass(frozen=True, slots=True)
class Members:
    """The participants of a collective.

    Attributes:
        context: the current round.
        number: number of the process set.
        ranks: its global ranks.
        index: this process's index among them.
    """

    context: Context
    number: int
    ranks: Sequence[int]
    index: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


def members_of(process_set: ProcessSet) -> Members:
    """Return the members of a set in the current round.

    Raises:
        NotInitializedError: init() was not called.
        TypeError: the argument is not a process set.
        ValueError: the round does not have the set, or this process is not a member.
    """
    context = current()
    slot = context.slot
    if process_set is global_process_set:
        return Members(context, GLOBAL_SET, range(slot.size), slot.rank)
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"cannot use {process_set!r} as a process set: make one with ProcessSet or add_process_set")
    if process_set.process_set_id is None:
        absent = [rank for rank in process_set.ranks if rank >= slot.size]
        why = f"the job has no rank {absent[0]} now" if absent else "it was not added, or was removed"
        raise ValueError(f"cannot use {process_set}: {why}")
    if slot.rank not in process_set.ranks:
        raise ValueError(f"cannot use {process_set} here: this process, rank {slot.rank}, is not part of it")
    return Members(context, process_set.process_set_id, process_set.ranks, process_set.ranks.index(slot.rank))


def expect(process_sets: Iterable[ProcessSet]) -> None:
    """Store the sets of ``init()`` for the next round. Raises ValueError if one is given twice, or is empty."""
    chosen = list(process_sets)
    keys = [tuple(process_set.ranks) for process_set in chosen]
    for key in keys:
        if keys.count(key) > 1 or not key:
            raise ValueError(f"cannot init with the process set {list(key)}: it is {'given twice' if key else 'empty'}")
    forget_all()
    _wanted_sets.extend(keys)
    _fresh.extend(keys)
    _objects.update(chosen)


def enter_round(context: Context) -> None:
    """Create the sets that any member knows. Blocks until all members have. Raises HorovodInternalError."""
    global _last_number
    slot = context.slot
    members: list[Any] = [{"local_size": slot.local_size, "sets": _wanted_sets, "devices": devices.describe()}]
    if slot.size > 1:
        sent = as_data(json.dumps(members[0]))
        members = [json.loads(bytes(received)) for received in gather(context.engine, sent, "round")]
    context.note_members([MemberFacts(member["local_size"], member["devices"]) for member in members])
    union: dict[tuple[int, ...], None] = {}
    for member in members:
        union.update(dict.fromkeys(tuple(ranks) for ranks in member["sets"]))
    _wanted_sets[:] = list(union)
    _numbers.clear()
    _added.clear()
    _last_number = GLOBAL_SET
    for ranks in _wanted_sets:
        if ranks[-1] < slot.size:
            _last_number += 1
            context.engine.add_process_set(_last_number, ranks)
            _numbers[ranks] = _last_number
    for process_set in _objects:
        process_set.process_set_id = _numbers.get(tuple(process_set.ranks))
    _added.update(key for key in _fresh if key in _numbers)
    _fresh.clear()
    global_process_set.ranks = list(range(slot.size))


def forget_all() -> None:
    """Forget all sets and their numbers, after shutdown."""
    _wanted_sets.clear()
    _numbers.clear()
    _added.clear()
    _fresh.clear()
    for process_set in list(_objects):
        process_set.process_set_id = None
    _objects.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. All ranks must call it alike, members or not; blocks until all have.

    In a process that has joined a running job, adding a set that the others already have does not wait for them.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks do not add the same set.
        NotInitializedError: init() was not called.
        ValueError: it is empty, has ranks that the job lacks, or was added before.
    """
    global _last_number
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    context = current()
    key = tuple(chosen.ranks)
    if not key or key[-1] >= context.slot.size:
        raise ValueError(f"cannot add the process set {list(key)}: the job has ranks 0 to {context.slot.size - 1}")
    if key in _added or (key not in _numbers and len(key) == context.slot.size):
        raise ValueError(f"cannot add the process set {list(key)}: a set of these ranks already exists")
    if key not in _numbers:
        number = _last_number + 1
        _compare(context, key)
        context.engine.add_process_set(number, key)
        _last_number = number
        _numbers[key] = number
        if key not in _wanted_sets:
            _wanted_sets.append(key)
    _added.add(key)
    chosen.process_set_id = _numbers[key]
    _objects.add(chosen)
    return chosen


def _compare(context: Context, key: tuple[int, ...]) -> None:
    """Raise MismatchError, on all ranks, if they do not add the same set."""
    if context.slot.size == 1:
        return
    keys = [bytes(sent).decode() for sent in gather(context.engine, as_data(json.dumps(key)), "add_process_set")]
    for rank, text in enumerate(keys):
        if text != keys[0]:
            raise MismatchError(
                f"cannot add a process set: rank 0 has ranks {keys[0]}, rank {rank} has ranks {text}; all ranks must "
                "add the same sets in the same order"
            )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, here and from later rounds. All ranks must call it alike; blocks until all have.

    Returns:
        Whether a set was removed: not for the global set, nor for one without a number.

    Raises:
        HorovodInternalError: a peer is gone.
        NotInitializedError: init() was not called.
    """
    context = current()
    number = process_set.process_set_id
    if number is None or number == GLOBAL_SET:
        return False
    key = tuple(process_set.ranks)
    context.engine.remove_process_set(number)
    _wanted_sets.remove(key)
    _numbers.pop(key)
    _added.discard(key)
    for alike in list(_objects):
        if tuple(alike.ranks) == key:
            alike.process_set_id = None
            _objects.discard(alike)
    return True
