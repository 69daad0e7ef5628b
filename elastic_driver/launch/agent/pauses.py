"""How long an agent waits before it asks a driver again that may only be busy.

Owns these pauses, and nothing else. Each question is a connection that the driver has to accept, and perhaps a
handshake of TLS. A driver that is slow may have a thousand agents, all of which find it silent at the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable

ASK_AGAIN_S = 0.5
"""Between two times that the machine of a driver that is gone is asked whether there is one: a lease has several."""
_MOST_BESIDE_S = 30.0
# A pause is the shortest one again when nothing was dialled for so many of the last one.
_FORGOTTEN_AFTER = 4


def ask_again_after_s(before_s: float, timeout_s: float, *, is_refused: bool) -> float:
    """How long an agent waits before it asks again whether its driver is gone, seconds.

    Where somebody listens it asks less and less often, though some times in a lease, which only a refusal renews.

    Args:
        before_s: how long it has waited last.
        timeout_s: of a lease.
        is_refused: whether the driver's machine has refused now.
    """
    return ASK_AGAIN_S if is_refused else max(ASK_AGAIN_S, min(2 * before_s, timeout_s / 5))


class PausesBeside:
    """Those between two connections that are dialled beside one on which nothing comes, though the driver's kernel
    acknowledges: what it has sent may be lost, or the driver is slow, and would be slower for each of them.

    Each is twice as long as the one before, and longer at random, so that agents do not all dial at once. That the
    driver says something meanwhile does not count at once, as a slow one does now and then.

    Args:
        least_s: the first one.
        spread: gives a number from 1 to 2.
    """

    def __init__(self, least_s: float, spread: Callable[[], float] = lambda: random.uniform(1.0, 2.0)) -> None:
        self._least_s = self._pause_s = least_s
        self._spread = spread
        self._dialled_at = self._due_at = float("-inf")

    def is_over(self, now: float) -> bool:
        """Whether one may be dialled now; the next pause begins then."""
        if now < self._due_at:
            return False
        is_first = now - self._dialled_at > _FORGOTTEN_AFTER * self._pause_s
        self._pause_s = self._least_s if is_first else min(2 * self._pause_s, _MOST_BESIDE_S)
        self._dialled_at, self._due_at = now, now + self._pause_s * self._spread()
        return True
