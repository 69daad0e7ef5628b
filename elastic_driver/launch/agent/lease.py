"""How long an agent keeps its workers, given when the driver was last heard from and when it was known to be dead.

Owns these times, and nothing else. A driver with a journal may die and be replaced: then each proof that no driver runs
(:mod:`elastic_driver.launch.agent.refusals`) renews the agent's lease, too, for as long as that driver's
``driver_timeout_s``. A driver that reports that another may have the job by now is obeyed for no longer than that,
either. The lease is measured by CLOCK_BOOTTIME: a driver continues without a machine that was suspended for longer than
the lease, and so its workers must not continue either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

STUCK_S = 3.0
"""Six heartbeats missing although the driver's kernel acknowledges: it is stopped, or what it sent was lost."""
# After that: as long as a driver takes to report that it is in doubt.
_SURE_S = 5.0
# The two clocks are not read at the same instant.
_APART_S = 0.1


def boot_time() -> float:
    """Return CLOCK_BOOTTIME, seconds, which advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The time for which an agent may keep its workers without a sign of its driver.

    Args:
        timeout_s: how long a driver that may be alive may be silent, seconds.
        clock: measures that as long as no other driver is waited for.
        boot_clock: measures it otherwise.

    Attributes:
        timeout_s: as given.
        driver_timeout_s: how long to wait for another driver, seconds; 0 for not at all.
    """

    def __init__(
        self, timeout_s: float, *, clock: Callable[[], float], boot_clock: Callable[[], float] = boot_time
    ) -> None:
        self.timeout_s = timeout_s
        self.driver_timeout_s = 0.0
        self._clock = self._now = clock
        self._boot_clock = boot_clock
        self._ahead_s = self._was_ahead_s = 0.0  # of the boot clock over the other; before the last suspension
        self._awake_since = -math.inf
        self._heard_at = clock()
        self._refused_at = -math.inf
        self._doubted_at, self._in_doubt_at = math.inf, -math.inf

    @property
    def waits(self) -> bool:
        """Whether to wait for another driver if this one is gone."""
        return self.driver_timeout_s > 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the driver may have lost the job."""
        return self._doubted_at < math.inf

    @property
    def unheard_s(self) -> float:
        """How long the driver has not been heard from, seconds."""
        return self._now() - self._heard_at

    @property
    def left_s(self) -> float:
        """The seconds left of the lease; negative when it is over."""
        until = self._heard_at + self.timeout_s
        if self.waits:
            until = max(until, min(self._refused_at + self.timeout_s, self._heard_at + self.driver_timeout_s))
        return min(until, self._doubted_at + self.driver_timeout_s) - self._now()

    @property
    def is_waited_out(self) -> bool:
        """Whether it is over because no other driver has come within the time to wait for one."""
        since = min(self._heard_at, self._doubted_at)
        return self.waits and self._now() >= since + max(self.driver_timeout_s, self.timeout_s)

    def begin(self, timeout_s: float, driver_timeout_s: float) -> None:
        """Start over with the limits from the welcome of a driver."""
        self.timeout_s, self.driver_timeout_s = timeout_s, driver_timeout_s
        self._now = self._boot_clock if self.waits else self._clock
        self._ahead_s = self._was_ahead_s = self._now() - self._clock()
        self._awake_since = -math.inf
        self._heard_at = self._now()
        self._refused_at = -math.inf
        self.sure()

    def now(self) -> float:
        """Return the time by which the lease is measured, seconds."""
        return self._now()

    def heard(self, unheard_s: float) -> None:
        """Record that the driver was last heard from so many seconds ago, not counting suspensions of the machine."""
        clock = self._clock()
        ahead_s = self._now() - clock
        if ahead_s - self._ahead_s > _APART_S:
            self._was_ahead_s, self._awake_since = self._ahead_s, clock
        self._ahead_s = ahead_s
        at = clock - unheard_s
        # Anything heard before a suspension was noticed may be older than the suspension.
        self._heard_at = max(self._heard_at, at + (ahead_s if at >= self._awake_since else self._was_ahead_s))

    def doubts(self, silent_s: float, *, says_so: bool) -> None:
        """Record since when the driver may have lost the job. To be called repeatedly.

        A driver that was stopped reports it soon after it continues, without knowing since when.

        Args:
            silent_s: how long nothing has arrived from it, though its machine acknowledges, seconds.
            says_so: whether the driver itself reports that it is in doubt.
        """
        now = self._now()
        if silent_s > STUCK_S:
            self._doubted_at = min(self._doubted_at, now - silent_s)
        elif says_so:
            self._doubted_at = min(self._doubted_at, now)
        else:
            if now - self._in_doubt_at > _SURE_S:
                self.sure()
            return
        self._in_doubt_at = now

    def sure(self) -> None:
        """Record that the driver is sure to have the job."""
        self._doubted_at, self._in_doubt_at = math.inf, -math.inf

    def refused(self, asked_at: float) -> None:
        """Record that there was no driver at that time, by :meth:`now`: when it was asked, not when the answer came."""
        self._refused_at = max(self._refused_at, asked_at)
