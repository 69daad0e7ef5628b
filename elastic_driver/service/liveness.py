"""Liveness of a job's nodes. Pure: gets the time as an argument.

Owns when a node counts as lost; :mod:`~elastic_driver.service.nodes` decides what follows.
"""

from __future__ import annotations

from collections import OrderedDict

# From the end of a node's connection until it counts as lost, unless it reconnects: a dying process closes it.
CUT_S = 1.0


class Liveness:
    """When each node was last heard. The cost of a node does not depend on their number.

    Args:
        lost_s: how long a node may be silent, seconds.
    """

    def __init__(self, lost_s: float) -> None:
        self.lost_s = lost_s
        self._heard: OrderedDict[str, float] = OrderedDict()  # the longest silent first
        self._cut: OrderedDict[str, float] = OrderedDict()

    def heard(self, node: str, now: float) -> None:
        """Note a message of the node."""
        self._heard[node] = now
        self._heard.move_to_end(node)
        self._cut.pop(node, None)

    def cut(self, node: str, now: float) -> None:
        """Note the end of the node's connection."""
        if node in self._heard:
            self._cut.setdefault(node, now)

    def forget(self, node: str) -> None:
        """Stop watching the node."""
        self._heard.pop(node, None)
        self._cut.pop(node, None)

    def take_lost(self, now: float) -> tuple[str, ...]:
        """Return the nodes that are lost by now, and stop watching them."""
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
        """Return when the next node will be lost if it stays silent; None if none is watched."""
        dues = [
            next(iter(times.values())) + limit_s
            for times, limit_s in ((self._heard, self.lost_s), (self._cut, CUT_S))
            if times
        ]
        return min(dues, default=None)
