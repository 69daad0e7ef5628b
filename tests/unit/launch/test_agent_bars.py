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
    for slot, label in enumerate(labels):
        bars.take(WorkerId("a", slot, 0), bar(label))
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
    assert sent == []  # the driver knows of none
    bars.end(WORKER)
    assert screen.given == [b"x\n", b"", b""]
    assert bars.are_watched("12")  # on its own screen


class Room:
    """Whether the driver takes something now."""

    def __init__(self) -> None:
        self.is_there = False

    def __call__(self) -> bool:
        return self.is_there


def test_what_there_was_no_room_for_follows_with_its_newest_state_and_each_has_its_turn() -> None:
    sent: list[Redrawn] = []
    room = Room()

    def send(message: Redrawn) -> None:
        sent.append(message)
        room.is_there = False

    bars = BarsOfWorkers(send, room, None, "all")
    other = WorkerId("a", 1, 0)
    bars.take(WORKER, bar("0", data=b"1%\n", is_line=True))
    bars.take(other, bar("1", data=b"1%\n"))
    bars.take(WORKER, bar("0", data=b"2%\n"))
    bars.go_on()
    assert sent == []
    room.is_there = True
    bars.go_on()
    assert [(message.worker, message.is_line, message.blob) for message in sent] == [(WORKER.key, True, b"2%\n")]
    room.is_there = True
    bars.go_on()
    assert [(message.worker, message.is_line, message.blob) for message in sent[1:]] == [(other.key, False, b"1%\n")]
    bars.take(other, bar("1", data=b"2%\n"))
    bars.end(other)
    room.is_there = True
    bars.go_on()
    assert len(sent) == 2


@pytest.mark.parametrize(("shown", "before", "after"), [("all", "3", "12"), ("0", "0", "5")])
def test_the_driver_draws_no_bar_of_a_rank_that_is_another_workers_now(shown: str, before: str, after: str) -> None:
    sent: list[Redrawn] = []
    bars = BarsOfWorkers(sent.append, lambda: True, Screen(), shown)
    for label in (before, after, after):
        bars.take(WORKER, bar(label))
    assert [(message.label, message.blob) for message in sent] == [(before, b"x\n"), (after, b"")]
    bars.take(WORKER, bar(before))
    assert (sent[-1].label, sent[-1].blob) == (before, b"x\n")


def test_another_driver_is_told_of_a_bar_that_stands_still() -> None:
    sent: list[Redrawn] = []
    room = Room()
    bars = BarsOfWorkers(sent.append, room, None, "all")
    room.is_there = True
    bars.take(WORKER, bar("0", is_line=True))
    bars.take(WorkerId("a", 9, 0), bar("9", is_line=True))  # which is not drawn
    room.is_there = False
    bars.take(WorkerId("a", 1, 0), bar("1"))
    sent.clear()
    bars.taken_over("all")
    assert sent == []
    room.is_there = True
    bars.go_on()
    assert [(message.label, message.is_line, message.blob) for message in sent] == [
        ("0", False, b"x\n"),
        ("1", False, b"x\n"),
    ]
    bars.taken_over("none")
    assert len(sent) == 2


def test_a_state_is_no_longer_than_a_row_shows() -> None:
    sent: list[Redrawn] = []
    bars = BarsOfWorkers(sent.append, lambda: True, None, "all")
    for data in (b"x" * 60_000, "é".encode() * 30_000, b"x" * 1996 + b"\x1b[31m" * 9, b"\x1b[1m" * 30_000):
        bars.take(WORKER, bar("0", data=data + b"\n"))
        assert len(sent[-1].blob) <= 2000
        assert sent[-1].blob.endswith((b"x\n", "é\n".encode(), b"m\n"))
        sent[-1].blob.decode()
