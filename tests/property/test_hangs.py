"""Whatever workers do, and whatever is seen of it: who is told and who is proven is what the looks at them bear out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.core.events import WorkerHung
from elastic_driver.health.findings import Kind, StackWanted, WorkerCleared, WorkerSuspected
from elastic_driver.health.hangs import STOPPED_PROOF_S, Finding, HangWatch
from elastic_driver.health.seen import STALE_S
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals, Waiting
from tests.support.extent import examples

pytestmark = pytest.mark.property

STACK = 'Thread 0x01 (most recent call first):\n  File "/x/train.py", line {} in wait\n'
MODES = (
    "train",
    "wait",
    "hang",
    "compute",
    "write",
    "step",
    "stop",
    "stop and go",
    "traced",
    "held",
    "disk",
    "silent",
    "poll",
    "lock",
)
_MODE = st.sampled_from(MODES)
# What leads somewhere comes more often: others wait for one that does something of its own for a long time.
_ALONE = st.tuples(_MODE, st.integers(0, 3)).map(
    lambda one: tuple(one[0] if rank == one[1] else "wait" for rank in range(4))
)
_SECONDS = st.sampled_from((1.0, 2.0, 5.0, 9.0, 12.0, 30.0, 64.0, 75.0, 140.0))
_PACE = st.sampled_from((0.5, 1.0, 1.0, 2.5))
_STACKS = st.sampled_from(("same", "same", "other", "none", "late"))


@dataclass(frozen=True)
class Segment:
    """What each of four workers does for a while."""

    modes: tuple[str, ...]
    seconds: float
    pace_s: float
    stacks: str


_SEGMENT = st.builds(
    Segment, st.one_of(_ALONE, _ALONE, st.tuples(_MODE, _MODE, _MODE, _MODE)), _SECONDS, _PACE, _STACKS
)
_STORY = st.lists(_SEGMENT, min_size=1, max_size=5)


@dataclass
class World:
    """Four workers, a watch, and a dumb twin that keeps all looks and answers."""

    knows: bool = True
    proves: bool = True
    watch: HangWatch = field(init=False)
    now: float = 50.0
    told: list[tuple[float, Finding]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = HangWatch(proves=self.proves)
        self.workers = [WorkerId(f"h{rank}", 0, 0) for rank in range(4)]
        self.watch.begin(1, {worker: rank for rank, worker in enumerate(self.workers)})
        self.last = {
            worker: Vitals(100.0 * rank, rank + 1, "R", pulse_s=0.1, round_id=1, rank=rank)
            for rank, worker in enumerate(self.workers)
        }
        self.looks: dict[WorkerId, list[Vitals]] = {worker: [] for worker in self.workers}
        self.answers: dict[WorkerId, list[tuple[float, str | None]]] = {worker: [] for worker in self.workers}
        self.open: list[StackWanted] = []
        self.noise: Callable[[WorkerId, Vitals], None] = lambda worker, look: None
        self.ended: set[WorkerId] = set()

    def play(self, segment: Segment) -> None:
        ticks = max(1, round(segment.seconds / segment.pace_s))
        for tick in range(ticks):
            self.now += segment.pace_s
            lacking = tuple(rank for rank, mode in enumerate(segment.modes) if mode not in ("train", "wait"))
            for rank, worker in enumerate(self.workers):
                look = self._next(self.last[worker], segment.modes[rank], segment.pace_s, tick)
                if rank == 0:
                    waiting = self.knows and lacking and any(mode == "wait" for mode in segment.modes)
                    longest = max([look.waits_s, *(self.last[each].waits_s for each in self.workers)])
                    look = replace(look, waiting=(Waiting("allreduce 'x'", longest, lacking),) if waiting else ())
                self.last[worker] = look
                if segment.modes[rank] != "silent":
                    self.looks[worker].append(look)
                    self.watch.take(worker, look, self.now)
                    self.noise(worker, look)
            self._answer(segment.stacks)
            found = self.watch.look(self.now)
            for finding in found:
                self._check(finding)
            self._check_order(found)
            self.told += [(self.now, finding) for finding in found]
            self.open += [finding for finding in found if isinstance(finding, StackWanted)]
            if segment.stacks != "late":
                self._answer(segment.stacks)

    def _next(self, look: Vitals, mode: str, passed_s: float, tick: int) -> Vitals:
        look = replace(look, at_s=look.at_s + passed_s, state="S", traced=False, awaits="")
        if mode == "wait":
            return replace(look, waits_s=look.waits_s + passed_s)
        look = replace(look, waits_s=0.0)
        match mode:
            case "train":
                done = max(1, round(passed_s / 0.25))
                return replace(
                    look,
                    state="R",
                    steps=look.steps + done,
                    submitted=look.submitted + done,
                    finished=look.finished + done,
                    cpu_s=look.cpu_s + passed_s,
                )
            case "compute":
                return replace(look, cpu_s=look.cpu_s + 0.1 * passed_s)
            case "write":
                return replace(look, io_bytes=look.io_bytes + int(4096 * passed_s))
            case "step":
                return replace(look, commits=look.commits + 1)
            case "stop":
                return replace(look, state="T")
            case "stop and go":
                return replace(look, state="T", cpu_s=look.cpu_s + 0.01)
            case "traced":
                return replace(look, state="t", traced=True)
            case "held":
                return replace(look, traced=True)
            case "poll":
                return replace(look, wakes=look.wakes + (tick % 20 == 0))
            case "lock":
                return replace(look, awaits="a file lock")
            case "disk":
                return replace(look, state="D")
        return look

    def _answer(self, how: str) -> None:
        for wanted in self.open:
            cannot = how == "none" or self.last[wanted.worker].state in ("T", "t")
            text = None if cannot else STACK.format(wanted.number if how == "other" else 1)
            self.answers[wanted.worker].append((self.last[wanted.worker].at_s, text))
            self.watch.answer(wanted.worker, wanted.number, text)
        self.open = []

    # --- the twin ----------------------------------------------------------------------------------------------------

    def _check(self, finding: Finding) -> None:
        worker = finding.worker
        assert worker not in self.ended, "who is proven to hang is nobody's business any more"
        looks = self.looks[worker]
        now = looks[-1]
        before = [one for _, one in self.told if one.worker == worker and not isinstance(one, StackWanted)]
        is_open = bool(before) and isinstance(before[-1], WorkerSuspected)
        match finding:
            case WorkerSuspected():
                assert not is_open, "it has been told already"
                assert not finding.spared or finding.ends_s is None
                assert now.waits_s == 0 or finding.kind is Kind.DEADLOCK
                if finding.kind is Kind.STOPPED:
                    assert looks[-2].state in ("T", "t")
                    assert (now.state, now.traced) == ("T", False)
                elif finding.kind is Kind.LACKS or finding.kind is Kind.IDLE:
                    assert _stands_s(looks) >= finding.limit_s
                assert not self.proves or finding.ends_s is None or finding.kind in (Kind.STOPPED, Kind.LACKS)
            case WorkerCleared():
                assert is_open, "it was not suspected"
            case WorkerHung(silent=silent):
                assert is_open
                assert self.proves
                self.ended.add(worker)
                (self._check_stopped if silent else self._check_hung)(worker)

    def _check_stopped(self, worker: WorkerId) -> None:
        end = [self.looks[worker][-1]]
        for look in reversed(self.looks[worker][:-1]):
            gap_s = end[-1].at_s - look.at_s
            if look.state != "T" or look.traced or look.cpu_s != end[-1].cpu_s or gap_s > STALE_S:
                break
            end.append(look)
        assert end[0].at_s - end[-1].at_s >= STOPPED_PROOF_S

    def _check_hung(self, worker: WorkerId) -> None:
        looks = self.looks[worker]
        proof_s = 60.0
        window = [look for look in looks if look.at_s >= looks[-1].at_s - proof_s]
        assert looks[-1].at_s - window[0].at_s >= proof_s - STALE_S
        assert all(late.at_s - early.at_s <= STALE_S for early, late in itertools.pairwise(window))
        assert not any(look.waits_s or look.traced or look.state in ("T", "t") for look in window)
        assert not any(look.awaits for look in window)
        assert len({look.wakes for look in window}) == 1
        assert len({(look.steps, look.submitted, look.finished, look.commits) for look in window}) == 1
        assert window[-1].cpu_s - window[0].cpu_s < 0.01 * proof_s + 0.05
        assert window[-1].io_bytes - window[0].io_bytes < 1024 * proof_s + 16384
        (first_s, first), *others = self.answers[worker][-3:]
        assert [text for _, text in others] == [first, first]
        assert first is not None
        assert looks[-1].at_s - first_s >= proof_s * 11 / 12 - STALE_S

    def _check_order(self, found: list[Finding]) -> None:
        ranks: dict[bool, list[int]] = {True: [], False: []}
        for finding in found:
            if isinstance(finding, WorkerSuspected):
                assert finding.rank is not None
                halted = self.looks[finding.worker][-1].state in ("T", "t")
                ranks[halted].append(finding.rank)
        assert all(each == sorted(each) for each in ranks.values())


def _stands_s(looks: list[Vitals]) -> float:
    """For how long the last looks show no progress, of which nothing was missed."""
    last, since = looks[-1], looks[-1].at_s
    for look in reversed(looks):
        counts = (look.steps, look.submitted, look.finished, look.commits)
        if counts != (last.steps, last.submitted, last.finished, last.commits) or since - look.at_s > STALE_S:
            break
        since = look.at_s
    return last.at_s - since


LEARN = Segment(("train",) * 4, 15.0, 1.0, "same")


@given(story=_STORY, knows=st.booleans(), proves=st.sampled_from((True, True, True, False)))
@settings(max_examples=examples(60))
def test_what_is_told_is_what_was_seen(story: list[Segment], knows: bool, proves: bool) -> None:
    world = World(knows, proves)
    world.play(LEARN)
    assert world.told == []
    for segment in story:
        world.play(segment)


@given(story=_STORY, seed=st.integers(0, 1 << 16))
@settings(max_examples=examples(30))
def test_looks_out_of_order_or_repeated_and_answers_to_nobody_change_nothing(story: list[Segment], seed: int) -> None:
    draw = random.Random(seed)
    plain, noisy = World(), World()

    def noise(worker: WorkerId, look: Vitals) -> None:
        noisy.watch.take(worker, look, noisy.now)
        for old in draw.sample(noisy.looks[worker], min(3, len(noisy.looks[worker]))):
            noisy.watch.take(worker, replace(old, cpu_s=9e9, steps=draw.randrange(99), state="T"), noisy.now)
        noisy.watch.answer(worker, draw.randrange(10**6, 10**7), draw.choice((None, STACK)))

    noisy.noise = noise
    for segment in (LEARN, *story):
        plain.play(segment)
        noisy.play(segment)
    assert noisy.told == plain.told


@given(story=_STORY, pace_s=st.sampled_from((0.5, 1.0, 2.5)), victim=st.integers(0, 3))
@settings(max_examples=examples(30))
def test_whatever_was_before_who_is_stopped_is_ended_after_ten_seconds(
    story: list[Segment], pace_s: float, victim: int
) -> None:
    world = World()
    world.play(LEARN)
    for segment in story:
        world.play(segment)
    world.play(replace(LEARN, seconds=5.0))
    began, worker = world.now, world.workers[victim]
    if worker in world.ended:
        return
    modes = tuple("stop" if rank == victim else "train" for rank in range(4))
    world.play(Segment(modes, STOPPED_PROOF_S + 2 * pace_s + 0.5, pace_s, "none"))
    (at,) = [at for at, one in world.told if isinstance(one, WorkerHung) and one.worker == worker]
    assert STOPPED_PROOF_S <= at - began <= STOPPED_PROOF_S + 2 * pace_s


_TIME = st.one_of(st.sampled_from((0.0, 0.5, 1.0, 4.0, 9e15)), st.floats(0, 1e6))
_COUNT = st.one_of(st.integers(0, 4), st.just((1 << 53) - 1))
_RUBBISH = st.builds(
    Vitals,
    at_s=_TIME,
    pid=st.integers(0, 2),
    state=st.sampled_from(("R", "S", "D", "T", "t", "Z", "", "?")),
    traced=st.booleans(),
    cpu_s=_TIME,
    io_bytes=_COUNT,
    pulse_s=st.one_of(st.none(), _TIME),
    round_id=st.integers(0, 2),
    rank=st.integers(-1, 3),
    steps=_COUNT,
    submitted=_COUNT,
    finished=_COUNT,
    waits_s=_TIME,
    waited_s=_TIME,
    commits=_COUNT,
    wakes=_COUNT,
    awaits=st.sampled_from(("", "a file lock")),
    peer=st.sampled_from(("", "10.0.0.1")),
    waiting=st.lists(
        st.builds(Waiting, st.sampled_from(("x", "")), _TIME, st.lists(st.integers(0, 5), max_size=4).map(tuple)),
        max_size=3,
    ).map(tuple),
)
_WHO = st.integers(0, 3)
_THING = st.one_of(
    st.tuples(st.just("take"), _WHO, _RUBBISH),
    st.tuples(st.just("take"), _WHO, _RUBBISH),
    st.tuples(st.just("look"), _TIME, st.booleans()),
    st.tuples(st.just("begin"), st.integers(0, 2), st.lists(_WHO, unique=True)),
    st.tuples(st.just("answer"), _WHO, st.one_of(st.none(), st.text(), st.just(STACK.format(1)))),
    st.tuples(st.just("forget"), _WHO, st.none()),
)


@given(things=st.lists(_THING, max_size=60))
@settings(max_examples=examples(150))
def test_rubbish_raises_nothing_and_nothing_remains_of_those_who_ended(things: list[tuple[str, Any, Any]]) -> None:
    watch, now = HangWatch(), 0.0
    workers = [WorkerId("h", slot, 0) for slot in range(4)]
    suspected: set[WorkerId] = set()
    for what, who, value in things:
        match what:
            case "take":
                watch.take(workers[who], value, now)
            case "begin":
                watch.begin(who, {workers[each]: rank for rank, each in enumerate(value)})
            case "answer":
                for number in range(4):
                    watch.answer(workers[who], number, value)
            case "forget":
                watch.forget(workers[who])
            case "look":
                now += min(who, 10.0)
                _follow(watch.look(now, trains=lambda worker, all_do=value: all_do), suspected)  # type: ignore[misc]
                listed = watch.suspects()
                assert {worker for worker, *_ in listed} == suspected
                assert watch.limit.seconds >= 5.0
                assert watch.proof.seconds >= 60.0
    for worker in workers:
        watch.forget(worker)
    _follow(watch.look(now), suspected)
    assert not suspected
    watch.begin(9, {})
    kept = {name: value for name, value in vars(watch).items() if isinstance(value, dict | set | list) and value}
    assert kept == {}


def _follow(found: list[Finding], suspected: set[WorkerId]) -> None:
    for finding in found:
        match finding:
            case WorkerSuspected(worker):
                assert worker not in suspected
                suspected.add(worker)
            case WorkerCleared(worker) | WorkerHung(worker):
                suspected.remove(worker)
