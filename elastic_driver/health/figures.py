"""What the training has reported of itself, as one figure a name for the whole job; and how busy its GPUs are.

Owns which worker's word counts: that of the lowest rank that reports a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_driver.figures import MOST_NAMES, Figures, GpuLook, fault_of
from elastic_driver.hosts import WorkerId

_NO_RANK = 1 << 62


class FigureBook:
    """See above.

    Args:
        rank_of: the present rank of a worker; None for one that has none, or is no more.
    """

    def __init__(self, rank_of: Callable[[WorkerId], int | None]) -> None:
        self._rank_of = rank_of
        self._values: dict[str, tuple[WorkerId, float | None]] = {}
        self._gpus: dict[str, GpuLook] = {}

    def take(self, worker: WorkerId, figures: Figures) -> None:
        """A worker has reported these. What is no figure is dropped: agents are believed nothing."""
        rank = self._rank(worker)
        for name, value in figures.items():
            holder = self._values.get(name)
            if holder is None:
                if len(self._values) >= MOST_NAMES or fault_of(name):
                    continue
            elif holder[0] != worker and self._rank(holder[0]) < rank:
                continue
            self._values[name] = worker, value

    def _rank(self, worker: WorkerId) -> int:
        rank = self._rank_of(worker)
        return _NO_RANK if rank is None else rank

    @property
    def figures(self) -> Figures:
        """The newest, by name. Those of workers that have ended stay until another reports."""
        return {name: value for name, (_, value) in self._values.items()}

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
        """In use on all of them; None where there are none."""
        looks: Mapping[str, GpuLook] = {host: look for host, look in self._gpus.items() if look.count}
        return sum(look.memory_bytes for look in looks.values()) if looks else None
