"""After how long a standstill is suspicious, and after how long it is proof: learned from how the training goes.

Owns the constants, and the slowest of the last steps. All durations are differences of one agent's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_driver.words import in_seconds

LEAST_LIMIT_S = 5.0
"""Nobody is suspected before: collections of garbage, writes to slow discs and busy machines take seconds."""
TIMES_SLOWEST = 10.0
"""How many times the slowest of the last steps a standstill is suspicious."""
START_LIMIT_S = 60.0
"""While too few steps are counted to learn from: the first ones load data and compile, and most are there by then."""
LEAST_PROOF_S = 60.0
"""The shortest deadline of the proof: what is retried, polled or written back is so at least once a minute (kernels
report a task as hung after 120 s, networks retry after at most 64 s)."""
TIMES_LIMIT = 6.0
"""The deadline of the proof is so many times the limit: 60 of the slowest steps."""
LEARNED_FROM, _WINDOW = 10, 100


@dataclass(frozen=True, slots=True)
class Limit:
    """After how long a standstill is suspicious, and how that is derived, in words."""

    seconds: float
    told: str


class _Window:
    """The slowest of the last steps of all members. Members count from the beginning of the round, each for itself."""

    def __init__(self) -> None:
        self.top = 0
        self.slowest_s = 0.0
        self._samples: dict[int, float] = {}

    def add(self, index: int, took_s: float) -> bool:
        """Takes a step's duration. Returns whether the slowest, or the number of steps, has changed."""
        if index <= self.top - _WINDOW or self._samples.get(index, -1.0) >= took_s:
            return False
        self._samples[index] = took_s
        if index <= self.top and took_s <= self.slowest_s:
            return False
        if index > self.top:
            self.top = index
            for old in [each for each in self._samples if each <= index - _WINDOW]:
                del self._samples[old]
        self.slowest_s = max(self._samples.values())
        return True


class Pace:
    """How long steps take in a round, and gaps between collectives; and the limits that follow from it.

    Attributes:
        limit: after how long a standstill is suspicious. Gaps stand in for steps where none are counted.
    """

    def __init__(self) -> None:
        self._steps, self._gaps = _Window(), _Window()
        self.limit = limit_of(0, 0.0, "steps")

    def add_steps(self, first: int, first_s: float, last: int, each_s: float) -> None:
        """A look has seen steps: their numbers, how long the first took at least, and each of them on average.

        The first took at least as long as no step was seen: those that came after it do not make it shorter, and it is
        forgotten a hundred steps after it, not after them.
        """
        is_new = self._steps.add(first, first_s)
        if self._steps.add(last, each_s) or is_new:
            self._derive()

    def add_gap(self, number: int, took_s: float) -> None:
        """Likewise a gap."""
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
        """For how long a suspect may neither compute, read, write nor move, with the present limit."""
        return proof_of(self.limit)

    @property
    def stall_s(self) -> float:
        """How long nothing may happen in a round that goes on. A script may commit seldom, and have no other steps."""
        return min(self.limit.seconds, self._by_gaps().seconds)


def limit_of(counted: int, slowest_s: float, what: str) -> Limit:
    """The limit that follows from so many steps (or gaps), the slowest of which took so long.

    Args:
        counted: of them so far in this round.
        slowest_s: of the last ones, seconds.
        what: "steps", or what takes their place.
    """
    learned_s = TIMES_SLOWEST * slowest_s
    said = (
        f"{TIMES_SLOWEST:g} times the slowest of the last {min(counted, _WINDOW)} {what}, {in_seconds(slowest_s, 2)},"
    )
    if counted < LEARNED_FROM:
        if learned_s > START_LIMIT_S:
            return Limit(learned_s, f"{said} is {in_seconds(learned_s)}")
        return Limit(START_LIMIT_S, f"{START_LIMIT_S:g} s, until {LEARNED_FROM} steps of the round are counted")
    if learned_s < LEAST_LIMIT_S:
        return Limit(LEAST_LIMIT_S, f"{LEAST_LIMIT_S:g} s, the least; {said} is less")
    return Limit(learned_s, f"{said} is {in_seconds(learned_s)}")


def proof_of(limit: Limit) -> Limit:
    """The deadline of the proof that follows from a limit."""
    derived_s = TIMES_LIMIT * limit.seconds
    if derived_s <= LEAST_PROOF_S:
        return Limit(LEAST_PROOF_S, f"the deadline is {LEAST_PROOF_S:g} s, the least")
    return Limit(derived_s, f"the deadline is {TIMES_LIMIT:g} times the limit of {in_seconds(limit.seconds)}")
