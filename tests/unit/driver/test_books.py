"""When what is counted is kept for a later driver, and that it goes on from there."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from elastic_driver.core.membership import Policy, new_state
from elastic_driver.core.standing import JobActivity, Standing
from elastic_driver.core.state import JobPhase
from elastic_driver.driver.books import ALONE_S, BESIDE_S, Books, go_on
from elastic_driver.health.drains import Drains, DrainsKept
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.journal.entries import BooksKept, Fact, Facts
from elastic_driver.journal.past import Recorded
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.goodput import Turned
from elastic_driver.reporting.instant import Instant
from elastic_driver.reporting.tally import Tally
from elastic_driver.vitals import Vitals
from elastic_driver.words import OnChange
from tests.support.fakes.job_facts import a_took, job_of_one
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

TRAINING = Standing(JobPhase.RUNNING, JobActivity.TRAINING, OnChange.IN_PLACE)


class Journal:
    """Keeps what it is given."""

    beside: Any = None

    def __init__(self) -> None:
        self.kept: list[tuple[float, Fact]] = []

    def keep(self, fact: Fact) -> None:
        self.kept.append((asyncio.get_running_loop().time(), fact))


def test_they_go_with_other_news_and_seldom_by_themselves() -> None:
    async def main(loop: VirtualLoop) -> None:
        journal = Journal()
        books = Books(cast("Any", journal), loop.time, Tally(), Chronicle(), VitalsTable(), None, lambda: 7.0)
        began = loop.time()
        keeping = asyncio.ensure_future(books.keep())
        await asyncio.sleep(BESIDE_S - 0.1)
        assert journal.beside() is None
        await asyncio.sleep(0.1)
        fact = journal.beside()
        assert isinstance(fact, BooksKept)
        assert (fact.clock, fact.heard) == (began + BESIDE_S, 7.0)
        assert journal.beside() is None, "it was kept this moment"
        await asyncio.sleep(3 * ALONE_S + 0.1)
        assert [at - began - BESIDE_S for at, _ in journal.kept] == [ALONE_S, 2 * ALONE_S, 3 * ALONE_S]
        keeping.cancel()

    run_virtually(main)


def test_the_drain_of_a_slow_worker_is_never_written_without_its_pause() -> None:
    """Else the next driver could drain another one at once."""

    async def main(loop: VirtualLoop) -> None:
        journal, drains = Journal(), Drains()
        Books(cast("Any", journal), loop.time, Tally(), Chronicle(), VitalsTable(), drains, lambda: None)
        assert journal.beside() is None
        drains.go_on(DrainsKept(loop.time(), {"a": loop.time()}))
        assert journal.beside().drains == drains.kept()
        assert journal.beside() is None

    run_virtually(main)


def test_nothing_is_written_behind_a_turn_of_the_job_without_it() -> None:
    """Else each snapshot of the journal would have to tell of it."""

    async def main(loop: VirtualLoop) -> None:
        journal, chronicle = Journal(), Chronicle(instant=Instant(loop.time))
        Books(cast("Any", journal), loop.time, Tally(), chronicle, VitalsTable(), None, lambda: None)
        chronicle.started("url", "0123")
        assert journal.beside() is None
        chronicle.stands(TRAINING)
        assert journal.beside().goodput.doing is JobActivity.TRAINING
        assert journal.beside() is None

    run_virtually(main)


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long ago a journal was read."""
    ago = [0.0]
    monkeypatch.setattr("elastic_driver.journal.past._now", lambda: ago[0])
    return ago


def past(kept: BooksKept | None, *turns: Turned) -> Recorded:
    state = new_state(Policy(num_proc=1, min_num_proc=1), 0.0)
    return Recorded(a_took(), job_of_one(), state, 100.0, facts=Facts(books=kept), away_s=7.0, turns=turns)


def test_a_later_driver_goes_on_with_them() -> None:
    now = [1000.0]
    tally = Tally()
    chronicle = Chronicle(tally, instant=Instant(lambda: now[0]))
    chronicle.started("url", "0123")
    chronicle.warning("one")
    vitals, steps = VitalsTable(), VitalsTable()
    vitals.take(WorkerId("a", 0, 0), Vitals(1.0, pid=7, round_id=1, steps=12), 0.0)
    now[0] += 40.0
    pauses = DrainsKept(80.0, {"a": 80.0})
    books = BooksKept(90.0, tally.kept(), chronicle.goodput.kept(), chronicle.kept(), vitals.kept(), pauses)
    now[0] = 5.0  # another machine's boot, say
    counted, told, drains = Tally(), Chronicle(instant=Instant(lambda: now[0])), Drains()
    go_on(past(books, Turned(95.0, TRAINING)), counted, told, steps, drains)
    assert drains.kept() == pauses
    assert (counted.warnings, steps.steps) == (1, 12)
    job = told.goodput.job()
    assert job is not None
    # 40 s of its life, 10 s until the last step, 7 s without a driver.
    assert job.wall_s == pytest.approx(57.0)
    assert job.seconds["training"] == pytest.approx(5.0 + 7.0), "since the step that the books did not have"
    assert told.kept() == books.chronicle


@pytest.mark.parametrize("kept", ["nothing", "no book of the job"])
def test_a_job_without_a_book_has_one_from_its_beginning_on(kept: str, read: list[float]) -> None:
    """Its driver has died at once, or before it was said that the job has begun. The next one took a while to start."""
    now = [5.0]
    tally, chronicle = Tally(), Chronicle(instant=Instant(lambda: now[0]))
    none = BooksKept(60.0, tally.kept(), chronicle.goodput.kept(), chronicle.kept(), VitalsTable().kept(), None)
    assert none.goodput is None
    turns = Turned(70.0, TRAINING), Turned(80.0, TRAINING, (4.0,))
    before = past(None if kept == "nothing" else none, *turns)
    read[0] += 3.0
    assert before.at_s == pytest.approx(112.5)
    go_on(before, tally, chronicle, VitalsTable(), None)
    assert tally.warnings == 0
    job = chronicle.goodput.job()
    assert job is not None
    # 2.5 s when its driver took it at the time 0, 100 s until the last step, 10 s without a driver.
    assert job.wall_s == pytest.approx(112.5)
    assert job.seconds["start"] == pytest.approx(72.5)
    assert (job.seconds["training"], job.seconds["recomputed"]) == pytest.approx((36.0, 4.0))
