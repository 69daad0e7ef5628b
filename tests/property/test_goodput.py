"""Goodput: whatever happens to a job, all its time is booked once, and the log alone tells the same figures."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.core.assignment import Placed
from elastic_driver.core.events import PublishRound, StopWorker
from elastic_driver.core.standing import JobActivity, Standing
from elastic_driver.core.state import JobPhase
from elastic_driver.health.findings import Stalled, StallEnded
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.event_records import line_of, records_of
from elastic_driver.reporting.happenings import Happening
from elastic_driver.reporting.instant import Instant
from elastic_driver.words import Backend, OnChange
from tests.support.extent import examples

pytestmark = [pytest.mark.property]

SCRIPT = Path(__file__).parents[2] / "scripts" / "goodput"


def second_program() -> ModuleType:
    loader = SourceFileLoader("goodput_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("goodput_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


SECOND = second_program()


class Lines:
    """An event log in memory, as its reader finds it."""

    live = False

    def __init__(self, instant: Instant) -> None:
        self._instant = instant
        self.lines: list[dict[str, Any]] = []

    def hear(self, happening: Happening) -> None:
        self.lines += [json.loads(line_of(record, self._instant)) for record in records_of(happening)]


class Gone:
    """A process and its end."""

    pid, label, last_lines, error_file, returncode, reason = 1, "0", (), "", 1, ""


class History:
    """A job in which anything may follow anything."""

    def __init__(self) -> None:
        self.now = 1000.0
        instant = Instant(lambda: self.now)
        self.log = Lines(instant)
        self.chronicle = Chronicle(self.log, instant=instant)
        self.living: list[WorkerId] = []
        self.started = 0
        self.round_id = 0
        self.births: dict[WorkerId, float] = {}
        self.on_change = OnChange.IN_PLACE

    def pick(self, number: int) -> WorkerId | None:
        return self.living[number % len(self.living)] if self.living else None

    def go(self, kind: str, number: int, seconds: float) -> None:
        chronicle, worker = self.chronicle, self.pick(number)
        match kind:
            case "wait":
                self.now += seconds
            case "phase":
                doing = list(JobActivity)[number % len(JobActivity)]
                chronicle.stands(Standing(JobPhase.RUNNING, doing, self.on_change))
            case "kind":
                self.on_change = list(OnChange)[number % len(OnChange)]
            case "start":
                worker = WorkerId(f"h{number % 3}", self.started, 0)
                self.started += 1
                self.living.append(worker)
                self.births[worker] = self.now
                chronicle.worker_started(worker, 1)
            case "round":
                self.round_id += 1
                members = [one for index, one in enumerate(self.living) if (index + number) % 4]
                placed = tuple(
                    Placed(one, SlotInfo(rank, len(members), 0, 1, 0, 1)) for rank, one in enumerate(members)
                )
                lost_s = None if number == 7 else 0.0 if number % 2 else seconds
                chronicle.round_formed(
                    PublishRound(self.round_id, placed, True, 1, Backend.NATIVE, "start", 0, lost_s=lost_s), {}, 0.1
                )
            case "still":
                # It can have stood no longer than since it did something last.
                self.now += seconds
                self.now += later_s if (later_s := number / 10) < seconds else 0.0
                chronicle.stood_still(seconds, ended_s=later_s if later_s < seconds else 0.0, trained=number % 3 == 0)
            case "stall":
                # It may be found that nobody has gone on for longer than the round has trained.
                chronicle.found(Stalled(seconds, [] if worker is None else [worker]))
            case "goes on":
                chronicle.found(StallEnded(seconds, [], resumed=True))
            case _ if worker is None:
                pass
            case "ready":
                chronicle.workers_ready([worker])
            case "drain":
                chronicle.workers_drained([worker], undone=bool(number % 2))
            case "stop":
                chronicle.workers_stopped([StopWorker(worker, "why")])
            case "end":
                self.living.remove(worker)
                before = self.chronicle.goodput.worker(worker)
                assert before is not None
                self.check(before.seconds, self.now - self.births[worker])
                chronicle.worker_exited(worker, Gone(), Gone(), expected=False)

    def check(self, seconds: Any, wall_s: float) -> None:
        assert sum(seconds.values()) == pytest.approx(wall_s, abs=1e-6)
        assert min(seconds.values()) >= 0


MOVES = (
    *("wait",) * 3,
    *("phase",) * 2,
    *("start", "ready", "round", "drain", "stop", "end", "still", "kind", "stall", "goes on"),
)
MOVE = st.tuples(
    st.sampled_from(MOVES), st.integers(0, 8), st.floats(0.001, 500.0, allow_nan=False).map(lambda s: round(s, 3))
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(MOVE, min_size=40, max_size=80))
def test_all_time_is_booked_once_and_twice_the_same(moves: list[tuple[str, int, float]]) -> None:
    job = History()
    job.chronicle.started("http://a:1", "j")
    for move in moves:
        job.go(*move)
        booked = job.chronicle.goodput.job()
        assert booked is not None
        job.check(booked.seconds, job.now - 1000.0)
    job.chronicle.ended(0, "over")
    compared = replayed(job.log.lines)
    assert not compared.differs, "\n".join([*compared.differs, *map(str, job.log.lines)])
    ended = sum(move == "worker_goodput" for move in (line["event"] for line in job.log.lines))
    assert compared.compared == ended + 1


def replayed(lines: list[dict[str, Any]]) -> Any:
    job = SECOND.Job(lines[0], lines[0]["at_s"])
    for line in lines[1:]:
        job.take(line, line["at_s"])
    event, at, then = job.said
    job.compare("job", event, then.figures(at), at - job.began)
    return job


def test_a_driver_that_stands_still_between_any_two_lines_of_it_says_the_same_twice() -> None:
    job = History()

    def later() -> float:
        job.now += 0.05
        return job.now

    job.log._instant._clock = later
    job.chronicle.started("http://a:1", "j")
    training = list(JobActivity).index(JobActivity.TRAINING)
    for move in [("start", 0, 0.0), ("start", 1, 0.0), ("phase", training, 0.0), ("wait", 0, 3.0)]:
        job.go(*move)
    job.chronicle.worker_exited(job.living[0], Gone(), Gone(), expected=True)
    job.chronicle.ended(0, "over")
    compared = replayed(job.log.lines)
    assert (compared.differs, compared.compared) == ([], 2)
    over, last = job.log.lines[-1], job.log.lines[-2]
    assert (last["event"], last["at_s"]) == ("goodput", over["at_s"])


def test_a_loss_and_the_next_round_in_one_step_are_booked_like_any_other() -> None:
    """The round is told before the phase: the training that is lost ends with it, and not with an earlier one."""
    job = History()
    job.chronicle.started("http://a:1", "j")
    training, forming = list(JobActivity).index(JobActivity.TRAINING), list(JobActivity).index(JobActivity.FORMING)
    moves: list[tuple[str, int, float]] = [("start", 0, 0.0), ("round", 1, 0.0)]
    for _ in range(3):
        moves += [("phase", training, 0.0), ("wait", 0, 100.0), ("round", 2, 7.0), ("phase", forming, 0.0)]
    for move in moves:
        job.go(*move)
    booked = job.chronicle.goodput.job()
    assert booked is not None
    assert (booked.seconds["training"], booked.seconds["recomputed"]) == (279.0, 21.0)
    job.chronicle.ended(0, "over")
    assert not replayed(job.log.lines).differs


def test_the_second_program_shares_no_code_with_the_first() -> None:
    modules = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            modules |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert modules <= sys.stdlib_module_names


def doctored(change: Callable[[dict[str, Any]], None]) -> Any:
    job = History()
    job.chronicle.started("http://a:1", "j")
    for move in [("start", 0, 0.0), ("wait", 0, 3.0), ("phase", 2, 0.0), ("wait", 0, 10.0), ("end", 0, 0.0)]:
        job.go(*move)
    job.chronicle.ended(0, "over")
    for line in job.log.lines:
        change(line)
    return replayed(job.log.lines)


def test_a_log_whose_figures_are_wrong_is_found() -> None:
    """The comparison can fail: for the job, for a worker, and for time that is missing."""

    def add(event: str, category: str, seconds: float) -> Callable[[dict[str, Any]], None]:
        def change(line: dict[str, Any]) -> None:
            if line["event"] == event:
                line["seconds"][category] += seconds

        return change

    assert not doctored(lambda line: None).differs
    assert not doctored(add("goodput", "training", 0.01)).differs, "less than a thousandth of 13 s"
    assert doctored(add("goodput", "training", 0.02)).differs
    assert doctored(add("worker_goodput", "start", 0.02)).differs
    assert doctored(lambda line: line.update(wall_s=line.get("wall_s", 0) + 1)).differs
    assert doctored(lambda line: line.get("seconds", {}).pop("reset", None)).differs
