"""What is counted and summed up of a job, kept for a later driver now and then.

Owns when. It is no news that anything would come of, so it costs few writes of its own: it goes with others, at most
each BESIDE_S, and after ALONE_S by itself; but a drain of a slow worker, whose pause it has, is never written without
it. Nor is anything written without it once the job stands elsewhere: of the steps that it lacks the journal tells,
and each of its snapshots again. So a later driver's clock is at most that far behind, too, and drivers that die again
and again do not begin a limit anew each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic_driver.health.drains import Drains
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.journal.entries import BooksKept
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.goodput import GoodputKept
from elastic_driver.report.tally import Tally

BESIDE_S, ALONE_S = 5.0, 30.0


class Books:
    """See above. Used on the event loop.

    Args:
        journal: of the job.
        clock: the job's time.
        tally, chronicle, vitals: count.
        drains: of slow workers; None where none is drained for that.
        heard: the time of the last step that these know of; None before the first.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        tally: Tally,
        chronicle: Chronicle,
        vitals: VitalsTable,
        drains: Drains | None,
        heard: Callable[[], float | None],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._tally = tally
        self._chronicle = chronicle
        self._vitals = vitals
        self._drains = drains
        self._heard = heard
        self._kept_at = clock()
        self._drained_at: float | None = None
        self._turns = 0  # of the job, that were kept
        journal.beside = self._beside

    async def keep(self) -> None:
        """Has them kept by themselves where nothing else is written. Runs until it is cancelled."""
        while True:
            left_s = self._kept_at + ALONE_S - self._clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                self._journal.keep(self._now())

    def _beside(self) -> BooksKept | None:
        """What goes with the record that is written now; None for nothing."""
        is_new = self._drains is not None and self._drains.last_at != self._drained_at
        has_turned = self._chronicle.goodput.turns != self._turns
        return self._now() if is_new or has_turned or self._clock() - self._kept_at >= BESIDE_S else None

    def _now(self) -> BooksKept:
        self._kept_at = now = self._clock()
        chronicle = self._chronicle
        self._turns = chronicle.goodput.turns
        drains = None
        if self._drains is not None:
            drains, self._drained_at = self._drains.kept(), self._drains.last_at
        return BooksKept(
            now,
            self._tally.kept(),
            chronicle.goodput.kept(),
            chronicle.kept(),
            self._vitals.kept(),
            drains,
            self._heard(),
        )


def go_on(before: Recorded, tally: Tally, chronicle: Chronicle, vitals: VitalsTable, drains: Drains | None) -> None:
    """Goes on with the books of the driver before, as they were kept last. To be called before anything is counted."""
    kept = before.facts.books
    # Where no book of the job was kept yet, its first one begins when the job did.
    goodput, clock = GoodputKept.of_new(), before.took.clock - before.took.at_s
    if kept is not None:
        tally.go_on(kept.tally)
        chronicle.go_on(kept.chronicle)
        vitals.go_on(kept.vitals)
        if drains is not None and kept.drains is not None:
            drains.go_on(kept.drains)
        if kept.goodput is not None:
            goodput, clock = kept.goodput, kept.clock
    since = [(turned.at - clock, turned) for turned in before.turns]
    chronicle.goodput.go_on(goodput, before.ago_s + before.clock - clock, since)
