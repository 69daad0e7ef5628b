"""Who of a job's nodes is silent. Pure: is told the time.

Owns when a node counts as lost; what that means is decided in :mod:`~elastic_driver.service.nodes`.
"""

from __future__ import annotations

from collections import OrderedDict

# From the end of a node's connection until it counts as lost, if it does not come back: a process that dies closes it.
CUT_S = 1.0


class Liveness:
    """See above. A node costs the same however many there are.

    Args:
        lost_s: how long a node may be silent.
    """

    def __init__(self, lost_s: float) -> None:
        self.lost_s = lost_s
        self._heard: OrderedDict[str, float] = OrderedDict()  # the longest silent first
        self._cut: OrderedDict[str, float] = OrderedDict()

    def heard(self, node: str, now: float) -> None:
        """It lives."""
        self._heard[node] = now
        self._heard.move_to_end(node)
        self._cut.pop(node, None)

    def cut(self, node: str, now: float) -> None:
        """Its connection has ended."""
        if node in self._heard:
            self._cut.setdefault(node, now)

    def forget(self, node: str) -> None:
        """It is watched no more."""
        self._heard.pop(node, None)
        self._cut.pop(node, None)

    def take_lost(self, now: float) -> tuple[str, ...]:
        """Who is lost by now. They are watched no more."""
        lost = []
        for times, limit_s in ((self._heard, self.lost_s), (self._cut, CUT_S)):
            for node, since in times.items():
                if now < since + limit_s:
                    break
                lost.append(node)
        for node in lost:
            self.forget(node)
        return tuple(dict.fromkeys(lost))

    def next_deadline(self) -> float | None:
        """When somebody will be lost who is not heard before; None when nobody is watched."""
        dues = [
            next(iter(times.values())) + limit_s
            for times, limit_s in ((self._heard, self.lost_s), (self._cut, CUT_S))
            if times
        ]
        return min(dues, default=None)
