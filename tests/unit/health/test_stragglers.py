"""Simulated rounds: a rank that is 1.3 times slower is found at once, chance names nobody."""

from __future__ import annotations

import pytest

from elastic_driver.health.findings import StragglerFound, StragglerGone
from elastic_driver.health.stragglers import StragglerWatch
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals
from tests.support.fakes.straggler_rounds import Draw, heavy, jitter, simulate

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("draw", [jitter, heavy])
@pytest.mark.parametrize(
    ("size", "step_s", "steps"),
    [
        (2, 0.3, 10_000),
        (3, 0.02, 10_000),
        *(pytest.param(*world, marks=pytest.mark.release) for world in ((8, 0.7, 10_000), (64, 2.5, 1500))),
    ],
)
def test_chance_names_nobody(size: int, step_s: float, steps: int, draw: Draw) -> None:
    told, _ = simulate(size, steps, step_s, draw)
    assert told == []


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.release) for seed in (2, 3))])
@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("step_s", [0.01, 0.3, 0.7, 2.5])
def test_a_rank_that_gets_slow_is_named_within_20_steps_and_two_looks_and_again_when_it_is_not(
    size: int, step_s: float, seed: int
) -> None:
    first = max(60, int(8 / step_s))
    last, end = 3 * first, 4 * first + 60
    told, began = simulate(size, end, step_s, jitter, slow={1: (first, last, 1.3)}, seed=seed)
    assert [(type(one.news), one.news.rank) for one in told] == [(StragglerFound, 1), (StragglerGone, 1)]
    # Or two looks; then the look at the last step, and the one at the round, each once a second.
    assert told[0].at_s - began[first] <= max(20 * step_s * 1.56, 2.0) + 2.0
    found = told[0].news
    assert isinstance(found, StragglerFound)
    assert 1.15 <= 1 / found.against_others <= 1.6


def test_one_that_was_always_slow_is_so_against_the_others_only() -> None:
    told, _ = simulate(8, 200, 0.3, jitter, slow={5: (0, 200, 1.5)})
    assert [one.news.rank for one in told] == [5]
    found = told[0].news
    assert isinstance(found, StragglerFound)
    assert found.against_past > 0.9
    assert found.against_others < 0.75


def test_steps_shorter_than_a_time_slice_are_noise() -> None:
    told, _ = simulate(4, 5000, 0.001, jitter, slow={2: (0, 5000, 1.5)})
    assert told == []


def test_a_round_that_ends_ends_the_straggler() -> None:
    watch = StragglerWatch()
    workers = [WorkerId("a", slot, 0) for slot in range(3)]
    ranks = {worker: rank for rank, worker in enumerate(workers)}
    watch.begin(1, ranks, 0.0)
    named = []
    for second in range(20):
        for rank, worker in enumerate(workers):
            waits_s = 0.0 if rank == 2 else 0.5 * second
            steps, at_s = 10 * second, float(second)
            seen = Vitals(
                at_s,
                1,
                pulse_s=0.1,
                round_id=1,
                steps=steps,
                waited_s=waits_s,
                own_s=0.05 * (1 + (rank == 2)) if steps >= 20 else None,
            )
            watch.take(worker, seen)
        named += [one.rank for one in watch.look(20.0)]
    assert named == [2]
    watch.begin(2, ranks, 30.0)
    gone = watch.look(30.0)
    assert gone == [StragglerGone(workers[2], 2, "a new round began", 10.0)]
    watch.forget(workers[2], 31.0)
    assert watch.look(31.0) == []
