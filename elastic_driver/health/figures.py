"""What the training has reported of itself, as one figure a name for the whole job; and how busy its GPUs are.

Owns which worker's word counts: that of the lowest rank that reports a name.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_driver.figures import MOST_NAMES, Figures, GpuLook, fault_of
from elastic_driver.hosts import WorkerId

# Round and rank of a worker that has none.
_NOWHERE = 0, 1 << 62


class FigureBook:
    """See above.

    Args:
        place_of: the present round of a worker, and its rank there; None for one that is in none, or is no more.
        warn: tells the user what is dropped.
    """

    def __init__(self, place_of: Callable[[WorkerId], tuple[int, int] | None], warn: Callable[[str], None]) -> None:
        self._place_of = place_of
        self._warn = warn
        self._is_told_full = self._has_refused = False
        # By name: who has reported it, in which round, as which rank, and what.
        self._values: dict[str, tuple[WorkerId, tuple[int, int], float | None]] = {}
        self._gpus: dict[str, GpuLook] = {}

    def take(self, worker: WorkerId, figures: Figures) -> None:
        """A worker has reported these. What is no figure is dropped: agents are believed nothing."""
        now_at = self._place_of(worker)
        for name, value in figures.items():
            known, place = self._values.get(name), now_at or _NOWHERE
            if known is None:
                if fault_of(name):
                    continue
                if len(self._values) >= MOST_NAMES:
                    self._tell_full(name)
                    continue
            elif known[0] == worker:
                place = now_at or known[1]  # its last word may come after its end
            elif _goes_before(known[1], place):
                continue
            self._values[name] = worker, place, value

    def refuse(self, worker: WorkerId, why: str) -> None:
        """A worker has reported what is no figure. That is told once: all run the same script."""
        if not self._has_refused:
            self._has_refused = True
            self._warn(f"worker {worker} has reported what is no figure, which is dropped: {why}")

    def _tell_full(self, name: str) -> None:
        if not self._is_told_full:
            self._is_told_full = True
            self._warn(f"figures of more than {MOST_NAMES} names are reported: {name!r} and other new ones are dropped")

    @property
    def figures(self) -> Figures:
        """The newest, by name. Those of workers that have ended stay, in their round also before those of higher ranks:
        else a job's last figures were those of the rank that ends last."""
        return {name: value for name, (_, _, value) in self._values.items()}

    # --- GPUs ------------------------------------------------------------------------------------------------------

    def see_gpus(self, host: str, look: GpuLook) -> None:
        """An agent has looked at the GPUs of its host."""
        self._gpus[host] = look

    def lost(self, host: str) -> None:
        """Nobody looks at them any more."""
        self._gpus.pop(host, None)

    @property
    def gpu(self) -> float | None:
        """The mean busy share of all; None where it is not known of any."""
        known = [(look.busy, look.count) for look in self._gpus.values() if look.busy is not None and look.count]
        return sum(busy * count for busy, count in known) / sum(count for _, count in known) if known else None

    @property
    def gpu_memory_bytes(self) -> int | None:
        """In use on all of them; None where it is not known of any."""
        return sum(look.memory_bytes for look in self._gpus.values() if look.count) or None


def _goes_before(place: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether what was reported at a place counts, and what is now reported at another does not."""
    (round_id, rank), (other_round, other_rank) = place, other
    return round_id > other_round or (round_id == other_round and rank < other_rank)
