"""How long an agent keeps its workers: by when it has heard the driver, and by when that was known to be dead.

Owns these times, and nothing else. A driver with a journal may die, and another comes in its place: then an agent's
lease is also renewed by each proof that nobody drives (:mod:`elastic_driver.launch.agent.refusals`), for as long as
that driver's ``driver_timeout_s``. One that says itself that another may have the job by now is heard for no longer
than that, either. It is counted by CLOCK_BOOTTIME: a driver goes on without a machine that was
suspended for longer than the lease, and so its workers must not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

STUCK_S = 3.0
"""Six beats that have not come although the driver's kernel acknowledges: it is stopped, or what it sends was lost."""
# After that: as long as it takes a driver to say that it is in doubt.
_SURE_S = 5.0
# The two clocks are not read at one instant.
_APART_S = 0.1


def boot_time() -> float:
    """CLOCK_BOOTTIME, seconds: goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """See above.

    Args:
        timeout_s: how long nothing may be heard of a driver that may live, seconds.
        clock: by which that is measured as long as nobody waits for another driver.
        boot_clock: by which it is measured then.

    Attributes:
        timeout_s: as given.
        driver_timeout_s: for how long another driver is waited for, seconds; 0 for not at all.
    """

    def __init__(
        self, timeout_s: float, *, clock: Callable[[], float], boot_clock: Callable[[], float] = boot_time
    ) -> None:
        self.timeout_s = timeout_s
        self.driver_timeout_s = 0.0
        self._clock = self._now = clock
        self._boot_clock = boot_clock
        self._ahead_s = self._was_ahead_s = 0.0  # of the one clock to the other; before it was suspended last
        self._awake_since = -math.inf
        self._heard_at = clock()
        self._refused_at = -math.inf
        self._doubted_at, self._in_doubt_at = math.inf, -math.inf

    @property
    def waits(self) -> bool:
        """Whether another driver is waited for where this one is gone."""
        return self.driver_timeout_s > 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the driver has perhaps not the job any more."""
        return self._doubted_at < math.inf

    @property
    def unheard_s(self) -> float:
        """For how long the driver has not been heard, seconds."""
        return self._now() - self._heard_at

    @property
    def left_s(self) -> float:
        """The seconds that are left of it; less than 0 when it is over."""
        until = self._heard_at + self.timeout_s
        if self.waits:
            until = max(until, min(self._refused_at + self.timeout_s, self._heard_at + self.driver_timeout_s))
        return min(until, self._doubted_at + self.driver_timeout_s) - self._now()

    @property
    def is_waited_out(self) -> bool:
        """Whether it is over because nobody has come for as long as another driver is waited for."""
        since = min(self._heard_at, self._doubted_at)
        return self.waits and self._now() >= since + max(self.driver_timeout_s, self.timeout_s)

    def begin(self, timeout_s: float, driver_timeout_s: float) -> None:
        """A driver has welcomed the agent, and says by which limits both go from now on."""
        self.timeout_s, self.driver_timeout_s = timeout_s, driver_timeout_s
        self._now = self._boot_clock if self.waits else self._clock
        self._ahead_s = self._was_ahead_s = self._now() - self._clock()
        self._awake_since = -math.inf
        self._heard_at = self._now()
        self._refused_at = -math.inf
        self.sure()

    def now(self) -> float:
        """The time by which it is measured, seconds."""
        return self._now()

    def heard(self, unheard_s: float) -> None:
        """The driver has been heard last so many seconds ago, in which the machine was not suspended, or that does not
        count.
        """
        clock = self._clock()
        ahead_s = self._now() - clock
        if ahead_s - self._ahead_s > _APART_S:
            self._was_ahead_s, self._awake_since = self._ahead_s, clock
        self._ahead_s = ahead_s
        at = clock - unheard_s
        # What was heard before somebody has seen that it was suspended may have been heard before it was.
        self._heard_at = max(self._heard_at, at + (ahead_s if at >= self._awake_since else self._was_ahead_s))

    def doubts(self, silent_s: float, *, says_so: bool) -> None:
        """Notes since when the driver has perhaps not had the job any more. To be called again and again.

        One that was stopped says so soon after it goes on, and does not know since when that is so.

        Args:
            silent_s: for how long nothing has come of it, though its machine acknowledges.
            says_so: whether it says itself that it is in doubt.
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
        """It has the job, as it says."""
        self._doubted_at, self._in_doubt_at = math.inf, -math.inf

    def refused(self, asked_at: float) -> None:
        """There was no driver at that time, by :meth:`now`: when it was asked, and not when the answer came."""
        self._refused_at = max(self._refused_at, asked_at)
