"""The process's current round and its place there; all other modules get them here.

Owns the process's one ``CurrentRound``: the current round, the planned place of a process that joins late, and the
listeners for a new round. Knows nothing of how rounds are joined and left: only runtime.py does that and changes the
state here.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_driver.errors import ForkedProcessError, NotInitializedError
from elastic_driver.hosts import SlotInfo
from elastic_driver.worker.rounds.context import Context


class RoundListener(Protocol):
    """Wants to be notified of a new round."""

    def on_round_changed(self) -> None:
        """React to a new round: the old one's collectives are dead; ranks and size may have changed."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """The numbers of a worker that its forked child keeps, as of the fork.

    Attributes:
        pid: the worker's process.
        slot: the worker's place.
        homogeneous: as in Context; None if the worker had yet to join.
    """

    pid: int
    slot: SlotInfo
    homogeneous: bool | None


class CurrentRound:
    """The current round of a process. Used by the training thread, except ``leave_listeners``.

    Attributes:
        first_round: number of the first round in which this process had a place; 0 for none.
        commits_seen: the most commits that one of its rounds resumed from.
        leave_listeners: called by the watch thread when members have to leave the round at their next commit.
        deliverers: called before a round is left: they write the results of finished operations to their callers'
            memory.
    """

    def __init__(self) -> None:
        self.leave_listeners: list[Callable[[], None]] = []
        self.deliverers: list[Callable[[Context], None]] = []
        self._inherited: Inherited | None = None
        self._clear()

    def _clear(self) -> None:
        self.first_round = 0
        self.commits_seen = 0
        self._context: Context | None = None
        self._planned: SlotInfo | None = None
        self._join: Callable[[], None] | None = None
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def initialized(self) -> bool:
        """Whether init() was called and shutdown() was not."""
        return self._context is not None or self._planned is not None

    @property
    def joined(self) -> Context | None:
        """The current round; None before init(), after shutdown(), and before a late join."""
        return self._context

    @property
    def planned(self) -> SlotInfo | None:
        """The place of a process that has yet to join late; None for all others."""
        return self._planned

    @property
    def context(self) -> Context:
        """The current round. Blocks until there is one, in a process that joins late.

        Raises:
            ForkedProcessError: this process was forked from one that called init().
            NotInitializedError: init() was not called, or shutdown() was.
            RuntimeError: this process joins late, and the members are in elastic.run, which it has not entered.
        """
        if self._context is None and self._join is not None:
            self._join()
        if self._context is None:
            self.refuse_if_forked()
            raise NotInitializedError("elastic_driver has not been initialized; use hvd.init().")
        return self._context

    @property
    def slot(self) -> SlotInfo:
        """This process's place in the current round, or, before a late join, the planned one.

        In a forked process it is the worker's place at the time of the fork.

        Raises:
            NotInitializedError: init() was not called, or shutdown() was.
        """
        if self._inherited is not None:
            return self._inherited.slot
        return self._planned or self.context.slot

    @property
    def inherited(self) -> Inherited | None:
        """The numbers inherited from the worker that this process was forked from; None in all others."""
        return self._inherited

    def refuse_if_forked(self) -> None:
        """Raise ForkedProcessError in a process that was forked from a worker."""
        if self._inherited is not None:
            raise ForkedProcessError(
                f"cannot act for rank {self._inherited.slot.rank} in process {os.getpid()}: it was forked from "
                f"process {self._inherited.pid}, which called init(); collectives, commits and steps of a "
                "distributed optimizer belong to that process, and this one only has its numbers (rank, size)"
            )

    def drop_inherited(self) -> None:
        """Forget the numbers inherited by the fork."""
        self._inherited = None

    def listen(self, listener: RoundListener) -> None:
        """Call ``listener.on_round_changed()`` after each reset, for as long as the listener lives."""
        self._listeners.add(listener)

    def plan(self, slot: SlotInfo, join: Callable[[], None]) -> None:
        """Set the place of a process that joins late; ``join`` is called when its round is needed."""
        self._planned, self._join = slot, join

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[None]:
        """Keep a process that joins late from joining: anything that needs a round raises RuntimeError."""
        join, self._join = self._join, _refuse
        try:
            yield
        finally:
            self._join = join

    def drop_plan(self) -> SlotInfo | None:
        """Forget the planned place, and return it: the process joins now, or never."""
        planned, self._planned, self._join = self._planned, None, None
        return planned

    def enter(self, context: Context) -> None:
        """Make this the current round."""
        assignment = context.assignment
        self.first_round = self.first_round or assignment.round_id
        self.commits_seen = max(self.commits_seen, assignment.commits)
        self._context = context

    def deliver(self, context: Context) -> None:
        """Write the results of a round's finished operations to their callers' memory.

        Raises:
            Exception: the error of one of them; the others are written all the same.
        """
        for deliverer in self.deliverers:
            deliverer(context)

    def leave(self) -> Context | None:
        """Clear the current round, and return it."""
        context, self._context = self._context, None
        return context

    def tell_of_change(self) -> None:
        """Call the listeners, once a new round is usable."""
        for listener in list(self._listeners):
            listener.on_round_changed()

    def abandon(self) -> None:
        """After fork, in the child: forget all but the numbers, without touching the parent's sockets and threads."""
        context, slot = self._context, self._planned
        if context is not None:
            context.abandon()
            slot = slot or context.slot
        if slot is not None:
            homogeneous = None if context is None else context.homogeneous
            self._inherited = Inherited(os.getppid(), slot, homogeneous)
        self._clear()


def _refuse() -> None:
    raise RuntimeError(
        "there is no round yet: this process is joining a running job, and is preparing for its next round"
    )


_current = CurrentRound()


def current_round() -> CurrentRound:
    """Return the process's one CurrentRound."""
    return _current


def current() -> Context:
    """Return the current round (:attr:`CurrentRound.context`)."""
    return _current.context


def is_initialized() -> bool:
    """Return whether ``init()`` was called and ``shutdown()`` was not; in a forked process: by its parent."""
    return _current.initialized or _current.inherited is not None


def rank() -> int:
    """Return this process's rank in the job, from 0. Raises NotInitializedError before ``init()``."""
    return _current.slot.rank


def size() -> int:
    """Return the number of processes in the job. Raises NotInitializedError before ``init()``."""
    return _current.slot.size


def local_rank() -> int:
    """Return this process's rank on its host. Raises NotInitializedError before ``init()``."""
    return _current.slot.local_rank


def local_size() -> int:
    """Return the number of the job's processes on this host. Raises NotInitializedError before ``init()``."""
    return _current.slot.local_size


def cross_rank() -> int:
    """Return this host's rank among the hosts that have this local rank. Raises NotInitializedError before
    ``init()``.
    """
    return _current.slot.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank. Raises NotInitializedError before ``init()``."""
    return _current.slot.cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes. Raises NotInitializedError before ``init()``."""
    inherited = _current.inherited
    if inherited is not None and inherited.homogeneous is not None:
        return inherited.homogeneous
    return _current.context.homogeneous
