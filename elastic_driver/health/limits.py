"""The time limits of suspicion and proof: learned from the pace of the training.

Owns the constants, and the slowest of the last steps. All durations are differences on one agent's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_driver.words import in_seconds

LEAST_LIMIT_S = 5.0
"""No suspicion before: garbage collections, writes to slow disks and busy machines take seconds."""
TIMES_SLOWEST = 10.0
"""A standstill is suspicious after this many times the slowest of the last steps."""
START_LIMIT_S = 60.0
"""The limit while there are too few steps to learn from: the first ones load data and compile, and most end by then."""
LEAST_PROOF_S = 60.0
"""The shortest deadline of the proof: retries, polls and write-backs happen at least once a minute (kernels report a
task as hung after 120 s, networks retry after at most 64 s)."""
TIMES_LIMIT = 6.0
"""The deadline of the proof is this many times the limit: 60 of the slowest steps."""
LEARNED_FROM, _WINDOW = 10, 100


@dataclass(frozen=True, slots=True)
class Limit:
    """The time after which a standstill is suspicious, and how that is derived, in words."""

    seconds: float
    told: str


class _Window:
    """The slowest of the last steps of all members. Members count from the beginning of the round, each by itself."""

    def __init__(self) -> None:
        self.top = 0
        self.slowest_s = 0.0
        self._samples: dict[int, float] = {}

    def add(self, index: int, took_s: float) -> bool:
        """Add a step's duration. Return whether the slowest, or the number of steps, has changed."""
        if index <= self.top - _WINDOW or self._samples.get(index, -1.0) >= took_s:
            return False
        self._samples[index] = took_s
        if index <= self.top and took_s <= self.slowest_s:
            return False
        if index > self.top:
            self.top = index
            for old in [sample for sample in self._samples if sample <= index - _WINDOW]:
                del self._samples[old]
        self.slowest_s = max(self._samples.values())
        return True


class Pace:
    """How long steps, and gaps between collectives, take in a round; and the limits derived from that.

    Attributes:
        limit: the time after which a standstill is suspicious. Gaps stand in for steps if none are counted.
    """

    def __init__(self) -> None:
        self._steps, self._gaps = _Window(), _Window()
        self.limit = limit_of(0, 0.0, "steps")

    def add_steps(self, first: int, first_s: float, last: int, each_s: float) -> None:
        """Add the steps of an observation: their numbers, the least duration of the first, and the average of each.

        The first took at least the time in which no step was observed: later ones do not shorten it, and it is
        forgotten a hundred steps after it, not after them.
        """
        is_new = self._steps.add(first, first_s)
        if self._steps.add(last, each_s) or is_new:
            self._derive()

    def add_gap(self, number: int, took_s: float) -> None:
        """Add a gap, in the same way."""
        if self._gaps.add(number, took_s) and not self._steps.top:
            self._derive()

    def _derive(self) -> None:
        self.limit = self._by_steps() if self._steps.top else self._by_gaps()

    def _by_steps(self) -> Limit:
        return limit_of(self._steps.top, self._steps.slowest_s, "steps")

    def _by_gaps(self) -> Limit:
        return limit_of(self._gaps.top, self._gaps.slowest_s, "gaps between collectives")

    @property
    def proof(self) -> Limit:
        """For how long a suspect may neither compute, do I/O nor make progress, with the current limit."""
        return proof_of(self.limit)

    @property
    def stall_s(self) -> float:
        """How long nothing may happen in a healthy round. A script may commit seldom, and have no other steps."""
        return min(self.limit.seconds, self._by_gaps().seconds)


def limit_of(counted: int, slowest_s: float, what: str) -> Limit:
    """Derive the limit from this many steps (or gaps), and the slowest of them.

    Args:
        counted: how many there are so far in this round.
        slowest_s: the slowest of the last ones, seconds.
        what: "steps", or their substitute.
    """
    learned_s = TIMES_SLOWEST * slowest_s
    said = (
        f"{TIMES_SLOWEST:g} times the slowest of the last {min(counted, _WINDOW)} {what}, {in_seconds(slowest_s, 2)},"
    )
    if counted < LEARNED_FROM:
        if learned_s > START_LIMIT_S:
            return Limit(learned_s, f"{said} is {in_seconds(learned_s)}")
        return Limit(START_LIMIT_S, f"{START_LIMIT_S:g} s, until {LEARNED_FROM} steps of the round have been counted")
    if learned_s < LEAST_LIMIT_S:
        return Limit(LEAST_LIMIT_S, f"{LEAST_LIMIT_S:g} s, the minimum; {said} is less")
    return Limit(learned_s, f"{said} is {in_seconds(learned_s)}")


def proof_of(limit: Limit) -> Limit:
    """Derive the deadline of the proof from a limit."""
    derived_s = TIMES_LIMIT * limit.seconds
    if derived_s <= LEAST_PROOF_S:
        return Limit(LEAST_PROOF_S, f"the deadline is {LEAST_PROOF_S:g} s, the minimum")
    return Limit(derived_s, f"the deadline is {TIMES_LIMIT:g} times the limit of {in_seconds(limit.seconds)}")
