"""How long an agent waits before it asks again a driver that may only be busy.

Owns these pauses, and nothing else. Each question is a connection that the driver has to accept, and perhaps a TLS
handshake. A slow driver may have a thousand agents, all of which notice its silence at the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable

ASK_AGAIN_S = 0.5
"""Interval at which a driver's machine is asked whether the driver is gone: several times in a lease."""
_MOST_BESIDE_S = 30.0
# A pause is the shortest again after so many times the last one without dialling.
_FORGOTTEN_AFTER = 4


def ask_again_after_s(before_s: float, timeout_s: float, *, is_refused: bool) -> float:
    """Return how long to wait before asking again whether the driver is gone, seconds.

    While something listens there, the agent asks ever less often, but still several times in a lease, which only a
    refusal renews.

    Args:
        before_s: the previous wait, seconds.
        timeout_s: of a lease, seconds.
        is_refused: whether the driver's machine has just refused a connection.
    """
    return ASK_AGAIN_S if is_refused else max(ASK_AGAIN_S, min(2 * before_s, timeout_s / 5))


class PausesBeside:
    """Pauses between connections dialled beside a silent one whose kernel still acknowledges.

    What the driver sent may be lost, or the driver is slow, and each further connection would slow it down more. Each
    pause is twice as long as the one before, and longer at random, so that agents do not all dial at once. A message of
    the driver does not shorten them at once, since a slow driver sends one now and then.

    Args:
        least_s: the first one, seconds.
        spread: returns a number from 1 to 2.
    """

    def __init__(self, least_s: float, spread: Callable[[], float] = lambda: random.uniform(1.0, 2.0)) -> None:
        self._least_s = self._pause_s = least_s
        self._spread = spread
        self._dialled_at = self._due_at = float("-inf")

    def is_over(self, now: float) -> bool:
        """Return whether to dial one now; if so, the next pause begins."""
        if now < self._due_at:
            return False
        is_first = now - self._dialled_at > _FORGOTTEN_AFTER * self._pause_s
        self._pause_s = self._least_s if is_first else min(2 * self._pause_s, _MOST_BESIDE_S)
        self._dialled_at, self._due_at = now, now + self._pause_s * self._spread()
        return True
