"""The figures that the training has reported, one per name for the whole job; and how busy its GPUs are.

Owns the choice of the worker whose value counts: the lowest rank that reports a name.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_driver.figures import MOST_NAMES, Figures, GpuLook, fault_of
from elastic_driver.hosts import WorkerId

# Round and rank of a worker without them.
_NOWHERE = 0, 1 << 62


class FigureBook:
    """The figures of one job.

    Args:
        place_of: the current round of a worker, and its rank there; None if it is in none, or has ended.
        warn: warns the user of dropped figures.
    """

    def __init__(self, place_of: Callable[[WorkerId], tuple[int, int] | None], warn: Callable[[str], None]) -> None:
        self._place_of = place_of
        self._warn = warn
        self._is_told_full = self._has_refused = False
        # By name: the worker that reported it, in which round and as which rank, and the value.
        self._values: dict[str, tuple[WorkerId, tuple[int, int], float | None]] = {}
        self._gpus: dict[str, GpuLook] = {}

    def take(self, worker: WorkerId, figures: Figures) -> None:
        """Record a worker's figures. Invalid ones are dropped: agents are not trusted."""
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
                place = now_at or known[1]  # its last report may arrive after its end
            elif _goes_before(known[1], place):
                continue
            self._values[name] = worker, place, value

    def refuse(self, worker: WorkerId, why: str) -> None:
        """Warn that a worker has reported an invalid figure. Only once: all run the same script."""
        if not self._has_refused:
            self._has_refused = True
            self._warn(f"worker {worker} reported an invalid figure, which is dropped: {why}")

    def _tell_full(self, name: str) -> None:
        if not self._is_told_full:
            self._is_told_full = True
            self._warn(f"more than {MOST_NAMES} figures are reported: {name!r} and further names are dropped")

    @property
    def figures(self) -> Figures:
        """The latest value of each figure.

        Those of ended workers stay, and within their round take precedence over those of higher ranks: otherwise
        a job's last figures would be those of the rank that ends last."""
        return {name: value for name, (_, _, value) in self._values.items()}

    # --- GPUs ------------------------------------------------------------------------------------------------------

    def see_gpus(self, host: str, look: GpuLook) -> None:
        """Record an agent's look at the GPUs of its host."""
        self._gpus[host] = look

    def lost(self, host: str) -> None:
        """Drop the GPUs of a host that is lost."""
        self._gpus.pop(host, None)

    @property
    def gpu(self) -> float | None:
        """The mean busy share of all GPUs; None if it is not known of any."""
        known = [(look.busy, look.count) for look in self._gpus.values() if look.busy is not None and look.count]
        return sum(busy * count for busy, count in known) / sum(count for _, count in known) if known else None

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory in use on all GPUs; None if it is not known of any."""
        return sum(look.memory_bytes for look in self._gpus.values() if look.count) or None


def _goes_before(place: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a report from the first place takes precedence over one that now comes from the other."""
    (round_id, rank), (other_round, other_rank) = place, other
    return round_id > other_round or (round_id == other_round and rank < other_rank)
