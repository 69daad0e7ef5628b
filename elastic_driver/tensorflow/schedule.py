"""The scheduling of closures to workers, and the membership of workers: all decisions of the elastic coordinator.

Pure: no thread, clock, network or TensorFlow. A closure is a *ticket* of any type; a server is any value that
identifies its process. Methods report events, and their results say what to do. The shell
(:mod:`~elastic_driver.tensorflow.cluster`) calls them under one lock, and wakes the threads that wait for a change.

The life cycle of a worker:

    add() ─► JOINING ─ connected() ─► RUNNING ─ remove() ─► STOPPING ─ is idle ─► STOPPED ─ add() ─► JOINING ...
                │                      │    ▲                  │ ▲                   ▲
           abandoned()              lost()  └─ connected() ── LOST ── remove() ──────┘
                │                      └──────────────────────▲
                ▼
            forgotten, or STOPPED as before

- A RUNNING worker takes closures. A STOPPING worker finishes its current closure, and takes no other. A LOST worker's
  server does not answer: its closure is in the queue again, and the worker returns when its server answers.
- A worker *belongs* to the cluster while the runtime's cluster has it. A STOPPED worker still belongs until the
  runtime's cluster is updated; then it is forgotten, and its index cannot be restored.
- Indices are never reused, so data kept by index never refers to another worker.

An error of a closure is kept until the script calls ``schedule``, ``join`` or ``done``. Then no worker takes closures,
all running closures end, those in the queue are canceled, and only then is the error raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Phase(Enum):
    """The phase of a worker."""

    JOINING = "joining"
    RUNNING = "running"
    LOST = "lost"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class Member(Generic[T]):
    """A worker. Changed only by :class:`Schedule`.

    Attributes:
        index: its task index; no other worker ever has the same.
        address: the address of its server, "host:port".
        phase: its phase.
        server: the process that answered at the address at the last connection; None if unknown.
        belongs: whether the runtime's cluster has it.
        in_hand: the closure that it is running; None for none.
        building: the per-worker value that it is creating, such as an iterator; None for none.
        to_build: the per-worker values to create before it takes a closure.
    """

    index: int
    address: str
    phase: Phase
    server: Hashable = None
    belongs: bool = False
    in_hand: T | None = None
    building: T | None = None
    to_build: deque[T] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        """Whether it is neither running a closure nor creating a value."""
        return self.in_hand is None and self.building is None


class Schedule(Generic[T]):
    """The workers and the closures of one coordinator.

    Args:
        addresses: index -> address of the workers that the runtime's cluster has already. They are RUNNING.
        capacity: the limit of waiting closures; 0 for no limit.
    """

    def __init__(self, addresses: Mapping[int, str], *, capacity: int = 0) -> None:
        self._members = {
            index: Member[T](index, address, Phase.RUNNING, belongs=True) for index, address in addresses.items()
        }
        self._next_index = max(addresses, default=-1) + 1
        self._capacity = capacity
        self._queue: deque[T] = deque()
        self._in_hand = 0
        self._error: BaseException | None = None
        self._raising = False

    # --- workers -----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member[T], ...]:
        """All known workers, in the order of their indices."""
        return tuple(self._members.values())

    def member(self, index: int) -> Member[T]:
        """Return the worker with this index."""
        return self._members[index]

    def find(self, address: str) -> Member[T] | None:
        """Return the worker with this address; None if there is none."""
        return next((member for member in self._members.values() if member.address == address), None)

    def add(self, address: str) -> Member[T]:
        """Add a worker at this address, or keep the existing one.

        Returns:
            The worker: RUNNING if it was running or stopping; LOST; or JOINING, then the caller must query its server,
            and call :meth:`connected` or :meth:`abandoned`.
        """
        member = self.find(address)
        if member is None:
            member = self._members[self._next_index] = Member(self._next_index, address, Phase.JOINING)
            self._next_index += 1
        elif member.phase is Phase.STOPPED:
            member.phase = Phase.JOINING
        elif member.phase is Phase.STOPPING:
            member.phase = Phase.RUNNING
        return member

    def connected(self, index: int, server: Hashable) -> None:
        """Let a JOINING or LOST worker take closures, once it has created its per-worker values."""
        member = self._in_phase(index, Phase.JOINING, Phase.LOST)
        if not member.belongs:
            raise ValueError(f"worker {index} does not belong to the cluster")
        member.phase, member.server = Phase.RUNNING, server

    def abandoned(self, index: int) -> None:
        """Give up a JOINING worker."""
        member = self._in_phase(index, Phase.JOINING)
        member.phase = Phase.STOPPED
        if not member.belongs:
            del self._members[index]

    def remove(self, address: str) -> Member[T]:
        """Remove the worker at this address.

        Returns:
            The worker: STOPPING if it is busy, otherwise STOPPED; or JOINING, if the thread that adds it still has to
            give it up.

        Raises:
            KeyError: there is no worker at this address.
        """
        member = self.find(address)
        if member is None:
            raise KeyError(address)
        if member.phase in (Phase.RUNNING, Phase.LOST):
            # Keep its values to create: until it has stopped, it can be added again.
            member.phase = Phase.STOPPING
            self._stop_if_idle(member)
        return member

    def lost(self, index: int) -> None:
        """Report that the server of an idle worker does not answer. A STOPPING worker becomes STOPPED, others LOST."""
        member = self._in_phase(index, Phase.RUNNING, Phase.STOPPING, Phase.STOPPED)
        if not member.is_idle:
            raise ValueError(f"worker {index} has work in progress")
        member.to_build.clear()
        member.phase = Phase.LOST if member.phase is Phase.RUNNING else Phase.STOPPED

    def wanted(self, silent: Iterable[int] = ()) -> dict[int, str]:
        """Return index -> address of the workers for the next update of the runtime's cluster, without silent ones."""
        left_out = set(silent)
        return {
            member.index: member.address
            for member in self._members.values()
            if member.phase is not Phase.STOPPED and member.index not in left_out
        }

    def told(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Report an update of the runtime's cluster, which now has these workers.

        Returns:
            The indices of the workers that are forgotten.
        """
        there = set(indices)
        for member in self._members.values():
            member.belongs = member.index in there
        gone = tuple(
            member.index for member in self._members.values() if member.phase is Phase.STOPPED and not member.belongs
        )
        for index in gone:
            del self._members[index]
        return gone

    def _in_phase(self, index: int, *phases: Phase) -> Member[T]:
        member = self._members[index]
        if member.phase not in phases:
            raise ValueError(f"worker {index} is {member.phase.value}")
        return member

    # --- their work --------------------------------------------------------------------------------------------------

    def has_work(self, index: int) -> bool:
        """Return whether :meth:`take` would return work for this worker."""
        member = self._members[index]
        if member.phase is not Phase.RUNNING:
            return False
        return bool(member.to_build) or (bool(self._queue) and not self._raising)

    def take(self, index: int) -> T | None:
        """Return an idle worker's next work: first its values to create, then a closure; None if there is none now."""
        member = self._members[index]
        if not member.is_idle:
            raise ValueError(f"worker {index} has work in progress")
        if not self.has_work(index):
            return None
        if member.to_build:
            member.building = member.to_build.popleft()
            return member.building
        member.in_hand = self._queue.popleft()
        self._in_hand += 1
        return member.in_hand

    def build(self, index: int, ticket: T) -> bool:
        """Let a worker create a value before it takes its next closure.

        Returns:
            Whether it will: only a RUNNING worker does. For others, the caller must repeat this after connecting them.
        """
        member = self._members[index]
        if member.phase is not Phase.RUNNING:
            return False
        member.to_build.append(ticket)
        return True

    def built(self, index: int) -> None:
        """Report that a worker has created its current value, or failed to."""
        member = self._members[index]
        if member.building is None:
            raise ValueError(f"worker {index} is not building anything")
        member.building = None
        self._stop_if_idle(member)

    def finished(self, index: int) -> None:
        """Report that a worker's closure has finished."""
        self._let_go(index)

    def put_back(self, index: int) -> T | None:
        """Put a worker's unfinished closure at the head of the queue, for any worker.

        Returns:
            None; or, if there is an error to raise, the closure, which the caller must mark as canceled.
        """
        ticket = self._let_go(index)
        if self._error is not None:
            return ticket
        self._queue.appendleft(ticket)
        return None

    def failed(self, index: int, error: BaseException) -> None:
        """Report that a worker's closure has failed. The first error is the one to raise."""
        self._let_go(index)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Report another error that ``join`` has to raise."""
        if self._error is None:
            self._error = error

    def _let_go(self, index: int) -> T:
        member = self._members[index]
        ticket = member.in_hand
        if ticket is None:
            raise ValueError(f"worker {index} has no work in progress")
        member.in_hand = None
        self._in_hand -= 1
        self._stop_if_idle(member)
        return ticket

    @staticmethod
    def _stop_if_idle(member: Member[T]) -> None:
        if member.phase is Phase.STOPPING and member.is_idle:
            member.to_build.clear()
            member.phase = Phase.STOPPED

    # --- closures ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of waiting closures."""
        return len(self._queue)

    @property
    def in_hand(self) -> int:
        """The number of running closures."""
        return self._in_hand

    @property
    def is_full(self) -> bool:
        """Whether the limit of waiting closures is reached."""
        return bool(self._capacity) and len(self._queue) >= self._capacity

    @property
    def is_done(self) -> bool:
        """Whether no closure is waiting or running."""
        return not self._queue and not self._in_hand

    @property
    def error(self) -> BaseException | None:
        """The error to raise; None for none."""
        return self._error

    @property
    def is_raising(self) -> bool:
        """Whether an error is about to be raised, so that workers take no closures."""
        return self._raising

    def put(self, ticket: T) -> None:
        """Append a closure to the queue."""
        self._queue.append(ticket)

    def begin_raising(self) -> tuple[int, ...]:
        """Begin to raise the error. Returns the workers whose closures the caller must cancel: these end first."""
        self._raising = True
        return tuple(member.index for member in self._members.values() if member.in_hand is not None)

    def postpone_raising(self) -> None:
        """Do not raise the error now. The next caller begins again."""
        self._raising = False

    def end_raising(self) -> tuple[BaseException, tuple[T, ...]]:
        """Clear the error and the queue once no closure runs. Returns the error, and the closures to cancel.

        Raises:
            ValueError: closures are running, or there is no error to raise.
        """
        if not self._raising or self._in_hand or self._error is None:
            raise ValueError("closures are running, or there is no error")
        error, tickets = self._error, tuple(self._queue)
        self._queue.clear()
        self._error, self._raising = None, False
        return error, tickets
