"""Which worker runs which closure, and who is a worker: every decision of the elastic coordinator.

Pure: no thread, clock, network or TensorFlow. A closure is a *ticket*, whatever that is; a server is whatever tells two
processes apart. What happens is told by calling a method; what is to be done follows from the answer. The shell
(:mod:`~elastic_driver.tensorflow.cluster`) calls them under one lock, and wakes whoever waits for what has changed.

The life of a worker:

    add() ─► JOINING ─ connected() ─► RUNNING ─ remove() ─► STOPPING ─ ended() ─► STOPPED ─ add() ─► JOINING ...
                │                      │    ▲                  │ ▲                   ▲
           abandoned()              lost()  └─ connected() ── LOST ── remove() ──────┘
                │                      └──────────────────────▲
                ▼
            forgotten, or STOPPED as before

- RUNNING: it takes closures. STOPPING: it has one in hand, and takes no other. LOST: its server does not answer; the
  closure that it had is in the queue again, and it comes back when the server does.
- A worker *belongs* to the cluster when the runtime has been told of it. One that is STOPPED goes on belonging until
  the cluster is told anew; then it is forgotten. Who has no place there any more cannot be given its index again.
- Indices are never used twice. What is held by worker stays true, however late it is used.

An error of a closure is kept until somebody asks (``schedule``, ``join``, ``done``). Then nobody takes anything, all
closures in hand end, those in the queue are cancelled, and only then is the error raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Phase(Enum):
    """Where a worker stands."""

    JOINING = "joining"
    RUNNING = "running"
    LOST = "lost"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class Member(Generic[T]):
    """A worker. To be read by anybody, and changed by :class:`Schedule` only.

    Attributes:
        index: its task index; nobody else has had it, or will.
        address: of its server, "host:port".
        phase: where it stands.
        server: which process answered there when it was connected last; None when that is not known.
        belongs: whether the runtime's cluster has it.
        in_hand: the closure that it runs; None for none.
        building: what it makes for itself at present, such as an iterator; None for nothing.
        to_build: what it has to make before it takes a closure.
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
        """Whether it runs and makes nothing."""
        return self.in_hand is None and self.building is None


class Schedule(Generic[T]):
    """See above.

    Args:
        addresses: of the workers that the cluster has already, by index. They are RUNNING.
        capacity: so many closures may wait; 0 for no bound.
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
        """All that are known, by index."""
        return tuple(self._members.values())

    def member(self, index: int) -> Member[T]:
        """The one with this index."""
        return self._members[index]

    def find(self, address: str) -> Member[T] | None:
        """The one with this address; None for none."""
        return next((member for member in self._members.values() if member.address == address), None)

    def add(self, address: str) -> Member[T]:
        """Somebody wants a worker at this address.

        Returns:
            Whoever is there: RUNNING, if it runs or was about to stop; LOST; JOINING, if its server has to be asked,
            and then :meth:`connected` or :meth:`abandoned` is to be called.
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
        """A JOINING or LOST worker takes closures from now on, as soon as it has made what it has to."""
        member = self._in_phase(index, Phase.JOINING, Phase.LOST)
        if not member.belongs:
            raise ValueError(f"worker {index} does not belong to the cluster")
        member.phase, member.server = Phase.RUNNING, server

    def abandoned(self, index: int) -> None:
        """A JOINING worker does not come."""
        member = self._in_phase(index, Phase.JOINING)
        member.phase = Phase.STOPPED
        if not member.belongs:
            del self._members[index]

    def remove(self, address: str) -> Member[T]:
        """Nobody wants the worker at this address any more.

        Returns:
            Where it stands now: STOPPING with a closure in hand, otherwise STOPPED; JOINING, if it still has to be
            abandoned by who adds it.

        Raises:
            KeyError: there is none.
        """
        member = self.find(address)
        if member is None:
            raise KeyError(address)
        if member.phase in (Phase.RUNNING, Phase.LOST):
            # What it still has to make it may have to make after all: until it has stopped, it can be added again.
            member.phase = Phase.STOPPING
            self._stop_if_idle(member)
        return member

    def lost(self, index: int) -> None:
        """The server of a worker that has nothing in hand does not answer. One that was to stop has stopped."""
        member = self._in_phase(index, Phase.RUNNING, Phase.STOPPING, Phase.STOPPED)
        if not member.is_idle:
            raise ValueError(f"worker {index} has something in hand")
        member.to_build.clear()
        member.phase = Phase.LOST if member.phase is Phase.RUNNING else Phase.STOPPED

    def wanted(self, silent: Iterable[int] = ()) -> dict[int, str]:
        """The workers that the cluster is to have when it is told anew, but for those whose servers are silent."""
        left_out = set(silent)
        return {
            member.index: member.address
            for member in self._members.values()
            if member.phase is not Phase.STOPPED and member.index not in left_out
        }

    def told(self, indices: Iterable[int]) -> tuple[int, ...]:
        """The cluster has been told anew, with these workers.

        Returns:
            Who is forgotten.
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

    # --- what they do ------------------------------------------------------------------------------------------------

    def has_work(self, index: int) -> bool:
        """Whether :meth:`take` would give this worker something."""
        member = self._members[index]
        if member.phase is not Phase.RUNNING:
            return False
        return bool(member.to_build) or (bool(self._queue) and not self._raising)

    def take(self, index: int) -> T | None:
        """What an idle worker is to do next: what it has to make, then a closure; None for nothing at present."""
        member = self._members[index]
        if not member.is_idle:
            raise ValueError(f"worker {index} has something in hand")
        if not self.has_work(index):
            return None
        if member.to_build:
            member.building = member.to_build.popleft()
            return member.building
        member.in_hand = self._queue.popleft()
        self._in_hand += 1
        return member.in_hand

    def build(self, index: int, ticket: T) -> bool:
        """Has a worker make something before it takes its next closure. Returns whether it will: not one that is away.

        One that is LOST, or does not run yet, makes all of it when it is connected; the caller knows what that is.
        """
        member = self._members[index]
        if member.phase is not Phase.RUNNING:
            return False
        member.to_build.append(ticket)
        return True

    def built(self, index: int) -> None:
        """It has made, or failed to make, what it was about to."""
        member = self._members[index]
        if member.building is None:
            raise ValueError(f"worker {index} makes nothing")
        member.building = None
        self._stop_if_idle(member)

    def finished(self, index: int) -> None:
        """The closure in hand has run."""
        self._let_go(index)

    def put_back(self, index: int) -> T | None:
        """The closure in hand has not run, or not to its end: another worker is to, before all that wait.

        Returns:
            The closure, if it is to be cancelled: there is an error. Else None.
        """
        ticket = self._let_go(index)
        if self._error is not None:
            return ticket
        self._queue.appendleft(ticket)
        return None

    def failed(self, index: int, error: BaseException) -> None:
        """The closure in hand has failed. The first error is the one that is raised."""
        self._let_go(index)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something else has failed that the caller of ``join`` has to know."""
        if self._error is None:
            self._error = error

    def _let_go(self, index: int) -> T:
        member = self._members[index]
        ticket = member.in_hand
        if ticket is None:
            raise ValueError(f"worker {index} has nothing in hand")
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
        """How many closures wait."""
        return len(self._queue)

    @property
    def in_hand(self) -> int:
        """How many run."""
        return self._in_hand

    @property
    def is_full(self) -> bool:
        """Whether no other may be put now."""
        return bool(self._capacity) and len(self._queue) >= self._capacity

    @property
    def is_done(self) -> bool:
        """Whether none waits and none runs."""
        return not self._queue and not self._in_hand

    @property
    def error(self) -> BaseException | None:
        """What is to be raised."""
        return self._error

    @property
    def is_raising(self) -> bool:
        """Whether an error is about to be raised: nobody takes anything."""
        return self._raising

    def put(self, ticket: T) -> None:
        """Another closure waits."""
        self._queue.append(ticket)

    def begin_raising(self) -> tuple[int, ...]:
        """An error is to be raised. Returns the workers whose closures are to be cancelled; they end first."""
        self._raising = True
        return tuple(member.index for member in self._members.values() if member.in_hand is not None)

    def postpone_raising(self) -> None:
        """The error is not raised now. Whoever asks next begins again."""
        self._raising = False

    def end_raising(self) -> tuple[BaseException, tuple[T, ...]]:
        """No closure runs. Returns the error, which is forgotten, and the closures that are cancelled.

        Raises:
            ValueError: that is not so.
        """
        if not self._raising or self._in_hand or self._error is None:
            raise ValueError("closures run, or there is no error")
        error, tickets = self._error, tuple(self._queue)
        self._queue.clear()
        self._error, self._raising = None, False
        return error, tickets
