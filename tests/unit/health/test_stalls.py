"""When a round counts as stalled, and for whom it waits."""

from __future__ import annotations

import pytest

from elastic_driver.health.stalls import Sight, Stall, stall_of
from elastic_driver.hosts import WorkerId

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)
NOW, LIMIT_S = 100.0, 5.0


def sight(worker: WorkerId, idle_s: float, what: str = "idle") -> Sight:
    return Sight(worker, NOW - idle_s, what == "waits", what != "unheard", what == "stopped")


@pytest.mark.parametrize(
    ("sights", "lost", "found"),
    [
        # Others wait for it, and it does nothing.
        ([sight(A, 6, "waits"), sight(B, 7)], False, Stall(NOW - 6, (B,))),
        ([sight(A, 4, "waits"), sight(B, 7)], False, None),
        # It computes.
        ([sight(A, 60, "waits"), sight(B, 0.5)], False, None),
        # It is known not to go on: nobody need wait for the limit.
        ([sight(A, 3, "waits"), sight(B, 3, "stopped")], False, Stall(NOW - 3, (B,))),
        ([sight(A, 3, "waits"), sight(B, 4, "unheard")], True, Stall(NOW - 3, (B,))),
        ([sight(A, 1, "waits"), sight(B, 3, "stopped")], False, None),
        # It may go on, but the others do not, and they need it.
        ([sight(A, 6, "waits"), sight(B, 8, "unheard")], False, Stall(NOW - 6, (B,))),
        ([sight(A, 6), sight(B, 8, "unheard")], False, None),
        ([sight(A, 60, "unheard"), sight(B, 60, "unheard")], True, None),
        # Each waits for the other, or for nobody.
        ([sight(A, 6, "waits"), sight(B, 7, "waits")], False, Stall(NOW - 6, ())),
        ([sight(A, 6), sight(B, 7)], False, Stall(NOW - 6, ())),
        ([], False, None),
    ],
)
def test_a_stall(sights: list[Sight], lost: bool, found: Stall | None) -> None:
    assert stall_of(sights, NOW, limit_s=LIMIT_S, lost=lost) == found
