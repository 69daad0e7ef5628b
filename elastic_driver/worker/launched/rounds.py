"""The rounds of a launched job: the ranks' requests to rank 0, and their answers.

Owns which ranks wait for a round, have left, or are lost. There is one membership, all ranks; a round is formed when
all of them have asked for it, and a lost rank is never replaced. Used on one event loop; knows no process and no
socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol

from elastic_driver.errors import RendezvousClosedError, StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.messages import (
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.routes import Routes, routes_of_rounds
from elastic_driver.words import Backend, NoticeKind

_NAMED = 20


class Store(Protocol):
    """The server's keys of the current round."""

    def begin_round(self, round_id: int) -> None:
        """Drop the keys of earlier rounds, and reject requests for them."""


class LaunchedRounds:
    """Forms the rounds of a launched job.

    Args:
        workers: the ranks' names, by rank. The server admits no others.
        slots: their places.
        start_timeout_s: how long ranks may wait for others that have not called ``init()``.
    """

    def __init__(self, workers: Sequence[WorkerId], slots: Sequence[SlotInfo], *, start_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._rank_of = {worker: slot.rank for worker, slot in zip(workers, slots, strict=True)}
        self._workers, self._slots = tuple(workers), tuple(slots)
        self._store: Store | None = None
        self._start_timeout_s = start_timeout_s
        self._round_id = 0
        self._ready: dict[int, NextRoundRequest] = {}
        self._parked: dict[int, asyncio.Future[NextRoundReply]] = {}
        self._placed: dict[int, RoundAssignment] = {}
        self._pids: dict[int, int] = {}
        self._away: set[int] = set()  # have called shutdown(), and may return
        self._ended: set[int] = set()  # have reported that they end
        self._over = ""  # why there will be no further round
        self._watching: dict[int, asyncio.Future[Notice]] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")
        self._timer: asyncio.TimerHandle | None = None
        self.all_gone = asyncio.Event()
        """Set when all ranks but 0 have left or are lost."""

    def serve(self, store: Store) -> None:
        """Set the store of the keys. Call it once, before the first request."""
        self._store = store

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def routes(self) -> Routes:
        """The routes of the ranks' requests."""
        return routes_of_rounds(self)

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """Park a rank's request for a round until all have asked.

        Raises:
            RendezvousClosedError: there will be no round; or another process has this rank already.
        """
        rank = self._rank_of[request.worker]
        if self._over:
            raise RendezvousClosedError(self._over)
        if self._ended:
            self._refuse_rounds(self._ending_of(min(self._ended)))
            raise RendezvousClosedError(self._over)
        pid = self._pids.setdefault(rank, request.pid)
        if pid != request.pid:
            raise RendezvousClosedError(
                f"process {request.pid} does not belong to the job: rank {rank} is process {pid}. A process "
                "started by a rank inherits the launcher's variables; unset them for it, or do not call init() "
                "in it"
            )
        future: asyncio.Future[NextRoundReply] = self._loop.create_future()
        placed = self._placed.get(rank)
        if placed is not None and request.after_round < placed.round_id:
            future.set_result(placed)  # the answer was lost on the way
            return future
        older = self._parked.pop(rank, None)
        if older is not None:
            older.cancel()
        self._placed.pop(rank, None)
        self._away.discard(rank)
        self._ready[rank], self._parked[rank] = request, future
        if self._timer is None:
            self._timer = self._loop.call_later(self._start_timeout_s, self._give_up)
        if len(self._ready) == len(self._slots):
            self._form()
        return future

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """Park a rank's request for the next notice of its round, or note its goodbye.

        Raises:
            StaleRoundError: the round has passed.
        """
        rank = self._rank_of[request.worker]
        if request.exiting or request.leaving:
            (self._ended if request.exiting else self._away).add(rank)
            if request.exiting and self._ready:
                self._refuse_rounds(self._ending_of(rank))
            self._look_who_is_there()
        future: asyncio.Future[Notice] = self._loop.create_future()
        if request.exiting or request.leaving:
            future.set_result(self._notice)
            return future
        if request.round_id != self._round_id:
            raise StaleRoundError(request.round_id, self._round_id)
        if self._notice.round_id == request.round_id and self._notice.version > request.version:
            future.set_result(self._notice)
            return future
        older = self._watching.get(rank)
        if older is not None:
            older.cancel()
        self._watching[rank] = future
        return future

    def gone(self, worker: WorkerId) -> None:
        """React to a rank that has lost all connections: its process has ended, unless it said goodbye."""
        rank = self._rank_of[worker]
        if rank in self._away:
            return  # it may return
        if rank not in self._ended and not self._over:
            self._break(f"rank {rank} ({worker}, process {self._pids.get(rank, 0)}) is lost")
        self._ended.add(rank)
        self._look_who_is_there()

    def running(self, report: RunningReport) -> None:
        """Do nothing: progress is not tracked here."""

    def _form(self) -> None:
        asked = [self._ready[rank].backends for rank in range(len(self._slots))]
        common = [backend for backend in asked[0] if all(backend in other for other in asked)]
        if not common:
            names = " or ".join(Backend)
            self._refuse_rounds(f"the ranks have no backend in common ({names}): the installed packages differ")
            return
        self._round_id = max(request.after_round for request in self._ready.values()) + 1
        assert self._store is not None
        self._store.begin_round(self._round_id)
        self._ready.clear()
        self.close()
        self._timer = None
        for rank, slot in enumerate(self._slots):
            self._placed[rank] = RoundAssignment(self._round_id, slot, sync=True, commits=0, backend=common[0])
            future = self._parked.pop(rank)
            if not future.done():  # else it asks again: its poll timed out
                future.set_result(self._placed[rank])

    def _give_up(self) -> None:
        missing = [rank for rank in range(len(self._slots)) if rank not in self._ready]
        named = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
        self._refuse_rounds(
            f"rank{'s' if len(missing) > 1 else ''} {named} of {len(self._slots)} did not call init() within "
            f"{self._start_timeout_s:g} s (HOROVOD_START_TIMEOUT)"
        )

    def _ending_of(self, rank: int) -> str:
        return f"rank {rank} ({self._workers[rank]}) has ended, so there will be no further round"

    def _refuse_rounds(self, why: str) -> None:
        """Refuse further rounds. The current one, if any, continues."""
        self._over = why
        self.close()
        parked, self._parked = self._parked, {}
        for asking in parked.values():
            if not asking.done():
                asking.set_exception(RendezvousClosedError(why))

    def _break(self, why: str) -> None:
        """Break the current round, with none after it."""
        self._refuse_rounds(why)
        self._notice = Notice(self._notice.version + 1, self._round_id, NoticeKind.ABORT, why)
        watching, self._watching = self._watching, {}
        for future in watching.values():
            if not future.done():
                future.set_result(self._notice)

    def _look_who_is_there(self) -> None:
        if len((self._ended | self._away) - {0}) == len(self._slots) - 1:
            self.all_gone.set()
