"""Which bars are drawn, and what that costs."""

from __future__ import annotations

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.bars import DrawnBars, fitted
from elastic_driver.words import Bar

pytestmark = pytest.mark.unit


def bar(rank: int, text: str) -> tuple[WorkerId, Bar]:
    return WorkerId("a", rank, 0), Bar("stderr", str(rank), f"[{rank}] {text}\n".encode())


def texts(bars: DrawnBars) -> list[str]:
    return [text for text, _ in bars.rows(width=60, lines=24)]


def test_a_bar_for_which_there_is_no_room_changes_nothing_until_it_is_shown() -> None:
    bars = DrawnBars(in_color=False)
    for rank in range(1000):
        bars.set(*bar(rank, "1%"))
    shown = texts(bars)
    version = bars.version
    for rank in range(7, 1000):
        bars.set(*bar(rank, "2%"))
    assert (bars.version, texts(bars)) == (version, shown)
    bars.set(*bar(3, "3%"))
    assert texts(bars)[3] == "[3] 3%"
    for rank in range(7):
        bars.remove(bar(rank, "")[0])
    assert texts(bars) == [*(f"[{rank}] 2%" for rank in range(7, 14)), "986 more progress bars"]


def test_a_worker_whose_rank_is_another_one_is_drawn_there() -> None:
    bars = DrawnBars(in_color=False)
    for rank in range(3):
        bars.set(*bar(rank, "1%"))
    assert len(texts(bars)) == 3
    bars.set(bar(0, "")[0], bar(12, "2%")[1])
    assert texts(bars) == ["[1] 1%", "[2] 1%", "[12] 2%"]


def test_a_row_has_no_more_than_it_shows() -> None:
    text, used = fitted("a" + "\u0301" * 30_000 + "b", 20, in_color=True)
    assert (len(text), used) == (22, 2)
    text, used = fitted("\x1b[31m" * 30_000 + "b", 20, in_color=True)
    assert (text, used) == ("\x1b[31m" * 20 + "b\x1b[0m", 1)
