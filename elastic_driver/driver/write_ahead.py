"""Write-ahead of steps: those that are made, but not visible before they are in the journal.

Owns the current write, the reports on a disk that does not respond, and the callers that wait for it. There is one
write at a time. :mod:`elastic_driver.driver.stepper` decides what follows from a step that is on disk, or never will
be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from elastic_driver.core.state import State
from elastic_driver.journal.folder import JournalHeldError
from elastic_driver.journal.journal import Journal, Step
from elastic_driver.system.job_clock import CallLater, Timer
from elastic_driver.system.keeping import Keeping
from elastic_driver.words import in_seconds

# A longer write is reported, and an end does not wait for it any longer. A busy disk takes a hundredth of that.
_LATE_S = 2.0


class Maker(Protocol):
    """Makes steps that are on disk visible, as the stepper does."""

    def make(self, steps: Sequence[Step]) -> None:
        """Make these steps, which are on disk."""

    def go_on(self) -> None:
        """Continue: no write is in progress any more."""

    def late(self) -> None:
        """Let an end proceed, since the disk does not respond."""

    def lost(self, why: str) -> None:
        """End the job, since the journal cannot be written."""

    def failed(self, error: Exception) -> None:
        """Handle an internal error of the journal."""


class WriteAhead:
    """Writes the steps of one job. Used on the event loop only.

    Args:
        journal: where steps are written.
        limit_s: the job ends when a write has taken this long.
        call_later: measures that, on the job's clock.
        tell: reports when the disk does not respond, and when it does again.
        on_held: called when another driver has the journal.
        on_too_late: called when a write has taken too long, if the job does not end for that.

    Attributes:
        under_way: the steps that are being written; None for nothing.
        keeping: what has arrived, and what of it is on disk, or need not be.
        trouble: what prevents the journal from being written, in words; "" for nothing.
    """

    def __init__(
        self,
        journal: Journal,
        limit_s: float,
        call_later: CallLater,
        tell: Callable[[str], object],
        *,
        on_held: Callable[[str], object],
        on_too_late: Callable[[str], object] | None = None,
    ) -> None:
        self._journal = journal
        self._limit_s = limit_s
        self._call_later = call_later
        self._tell = tell
        self._on_held = on_held
        self._on_too_late = on_too_late
        self._maker: Maker
        self.under_way: Sequence[Step] | None = None
        self.keeping = Keeping()
        self.trouble = ""
        self._limits: list[Timer] = []
        self._waiting: list[asyncio.Future[None]] = []

    def serve(self, maker: Maker) -> None:
        """Set the maker of steps. To be called once, before anything else."""
        self._maker = maker
        self._journal.on_error = self._is_lost

    def write(self, clock: float, state: State, steps: Sequence[Step]) -> None:
        """Write steps. With them everything that has arrived so far is on disk.

        Args:
            clock: the job's time.
            state: the state after the last of them.
            steps: the steps, in order.
        """
        assert self.under_way is None
        self.under_way = steps
        self._limits = [
            self._call_later(min(_LATE_S, self._limit_s / 2), self._is_late),
            self._call_later(self._limit_s, self._is_too_late),
        ]
        self._journal.write(clock, state, steps, partial(self._written, steps, self.keeping.came))

    async def wait(self) -> None:
        """Block until the current write is on disk and its steps are made, or never will be."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def look(self) -> None:
        """Block until it is certain that no other driver has had the job until now, or this one has been notified."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._journal.look(lambda: None if future.done() else future.set_result(None))
        await future

    def drop(self) -> None:
        """Drop the current steps. What has arrived is not acknowledged: the next driver has to get it."""
        self.under_way = None
        self._journal.on_error = lambda error: None
        for timer in self._limits:
            timer.cancel()
        self._limits = []
        self._release()

    def end(self) -> None:
        """End, as the job has ended: nothing more is written, and nothing that arrives is waited for."""
        self.drop()
        self.keeping.keep(self.keeping.came)

    def give_up(self) -> None:
        """End as :meth:`end` does, though the journal does not record it."""
        self._journal.give_up()
        self.end()

    def abandon(self) -> None:
        """Stop, as another driver has the job: nothing more is written, and what has arrived is not acknowledged."""
        self._journal.give_up()
        self.drop()

    def _written(self, steps: Sequence[Step], came: int, error: Exception | None) -> None:
        if self.under_way is not steps:
            return  # the job has ended without them
        for timer in self._limits:
            timer.cancel()
        if error is not None:
            self._is_lost(error)
            return
        if self.trouble:
            self.trouble = ""
            self._tell("the journal can be written again")
        self._maker.make(steps)
        if self.under_way is steps:
            self.under_way = None
            self.keeping.keep(came)
            self._release()
        self._maker.go_on()

    def _is_lost(self, error: Exception) -> None:
        """Handle a write that can never succeed, of steps or of what is stored beside the state."""
        if isinstance(error, JournalHeldError):
            self._on_held(str(error))
        else:
            self._maker.failed(error)

    def _is_late(self) -> None:
        self.trouble = f"cannot write the journal {self._journal.name}: {self._why}"
        self._tell(
            f"{self.trouble}; training continues, changes of the job wait, and "
            f"{'the job' if self._on_too_late is None else 'this driver'} ends after {in_seconds(self._limit_s)} "
            "(--driver-timeout)"
        )
        self._maker.late()

    def _is_too_late(self) -> None:
        path, limit = self._journal.name, in_seconds(self._limit_s)
        (self._on_too_late or self._maker.lost)(
            f"cannot write the journal {path} for {limit} (--driver-timeout): {self._why}"
        )

    @property
    def _why(self) -> str:
        return self._journal.trouble or self._journal.silence

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
