"""Which states of bars an agent tells its driver of, and shows itself."""

from __future__ import annotations

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.bars import BarsOfWorkers
from elastic_driver.rendezvous.agent_messages import Redrawn
from elastic_driver.words import Bar

pytestmark = pytest.mark.unit

WORKER = WorkerId("a", 0, 0)


class Screen:
    """Keeps what it is given."""

    def __init__(self, bars: str = "all") -> None:
        self.bars = bars
        self.given: list[bytes] = []

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        self.given.append(b"" if bar is None else bar.data)


def bar(label: str, *, data: bytes = b"x\n", is_line: bool = False) -> Bar:
    return Bar("stderr", label, data, is_line)


@pytest.mark.parametrize(
    ("shown", "watched"),
    [("all", ["0", "7", "chief"]), ("none", []), ("7", ["7"]), ("8", ["8"])],
)
def test_the_driver_is_told_of_bars_that_it_may_show(shown: str, watched: list[str]) -> None:
    sent: list[Redrawn] = []
    bars = BarsOfWorkers(sent.append, lambda: True, None, shown)
    labels = ["0", "7", "8", "1000", "chief"]
    for label in labels:
        bars.take(WORKER, bar(label))
    assert [message.label for message in sent] == [label for label in labels if bars.are_watched(label)] == watched


def test_lines_and_ends_are_told_of_all() -> None:
    sent: list[Redrawn] = []
    bars = BarsOfWorkers(sent.append, lambda: True, None, "none")
    bars.take(WORKER, bar("9", is_line=True))
    bars.take(WORKER, bar("9", data=b""))
    assert [(message.is_line, message.blob) for message in sent] == [(True, b"x\n"), (False, b"")]


def test_nothing_overtakes_what_waits_for_the_driver_and_this_machines_screen_waits_for_nobody() -> None:
    sent: list[Redrawn] = []
    screen = Screen()
    bars = BarsOfWorkers(sent.append, lambda: False, screen, "all")
    bars.take(WORKER, bar("0", is_line=True))
    assert sent == []
    bars.take(WORKER, bar("0", data=b""))
    assert [message.blob for message in sent] == [b""]
    bars.end(WORKER)
    assert screen.given == [b"x\n", b"", b""]
    assert bars.are_watched("12")  # on its own screen
