"""What waits for the disc: steps that are made, and not visible before they are in the journal.

Owns the write that is under way, what is said of a disc that does not answer, and who waits for it. One write is under
way. What comes of a step that is on disc, and of one that will never be, is :mod:`elastic_driver.driver.stepper`'s.
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

# A write that takes longer is told of, and an end waits for it no longer. A busy disc takes a hundredth of that.
_LATE_S = 2.0


class Maker(Protocol):
    """Makes steps that are on disc; the stepper does."""

    def make(self, steps: Sequence[Step]) -> None:
        """These are on disc."""

    def go_on(self) -> None:
        """Nothing is under way any more."""

    def late(self) -> None:
        """The disc does not answer. An end is not to wait for it."""

    def lost(self, why: str) -> None:
        """The journal cannot be written, and the job ends."""

    def failed(self, error: Exception) -> None:
        """The journal has an error of its own."""


class WriteAhead:
    """See above. Used on the event loop only.

    Args:
        journal: where steps are written.
        limit_s: the job ends when something has waited for so long.
        call_later: measures that, on the job's clock.
        tell: is told when the disc does not answer, and when it does again.
        on_held: called when another driver has the journal.
        on_too_late: called when something has waited for too long, where the job does not end for that.

    Attributes:
        under_way: the steps that are being written; None for nothing.
        keeping: what has come, and what of it is on disc, or need not be.
        trouble: what keeps the journal from being written, in words; "" for nothing.
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
        """Says who makes steps. To be called once, before anything else."""
        self._maker = maker
        self._journal.on_error = self._is_lost

    def write(self, clock: float, state: State, steps: Sequence[Step]) -> None:
        """Has steps written. With them all that has come so far is on disc.

        Args:
            clock: the job's time.
            state: as of the last of them.
            steps: in their order.
        """
        assert self.under_way is None
        self.under_way = steps
        self._limits = [
            self._call_later(min(_LATE_S, self._limit_s / 2), self._is_late),
            self._call_later(self._limit_s, self._is_too_late),
        ]
        self._journal.write(clock, state, steps, partial(self._written, steps, self.keeping.came))

    async def wait(self) -> None:
        """Blocks until what is under way is on disc and made, or never will be."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def look(self) -> None:
        """Blocks until it is sure that no other driver has had the job until now, or this one has been told."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._journal.look(lambda: None if future.done() else future.set_result(None))
        await future

    def drop(self) -> None:
        """What is under way is not made any more. What has come is not kept: whoever comes next has to know of it."""
        self.under_way = None
        self._journal.on_error = lambda error: None
        for timer in self._limits:
            timer.cancel()
        self._limits = []
        self._release()

    def end(self) -> None:
        """The job has ended. Nothing of it is written any more, and nothing that comes is waited for."""
        self.drop()
        self.keeping.keep(self.keeping.came)

    def give_up(self) -> None:
        """Likewise, though the journal does not say so."""
        self._journal.give_up()
        self.end()

    def abandon(self) -> None:
        """Another driver has the job: nothing is written any more, and what has come is not kept."""
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
            self._tell("the journal is written again")
        self._maker.make(steps)
        if self.under_way is steps:
            self.under_way = None
            self.keeping.keep(came)
            self._release()
        self._maker.go_on()

    def _is_lost(self, error: Exception) -> None:
        """What waits, or what is kept beside the state, can never be on disc."""
        if isinstance(error, JournalHeldError):
            self._on_held(str(error))
        else:
            self._maker.failed(error)

    def _is_late(self) -> None:
        self.trouble = f"cannot write the journal {self._journal.name}: {self._why}"
        self._tell(
            f"{self.trouble}; training goes on, what happens waits, and after {in_seconds(self._limit_s)} "
            f"(--driver-timeout) {'the job' if self._on_too_late is None else 'this driver'} ends"
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
