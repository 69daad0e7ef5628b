"""The hosts that get no workers, and until when. Pure: the time and the random draw are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elastic_driver.core.moments import Moment

# Hosts of which only the number of failures is known any more. Where host names are never reused that is worth nothing.
MOST_REMEMBERED = 1024
# Without a cooldown, the loss of a whole host does not mean that its workers fail there, and the host may be used again
# when it is back: the first time soon, then after a pause that doubles.
FIRST_LOSS_S = 1.0
LOSS_RANGE_S = (30.0, 600.0)
# Workers that failed this shortly before their host was down failed because it was going down: a machine that is shut
# down ends them first.
GOING_DOWN_S = 30.0


@dataclass(frozen=True, slots=True)
class BlacklistEntry:
    """One host that has failed.

    Attributes:
        hostname: its name as discovery lists it.
        failures: how often it has been blacklisted in this job.
        until: when it may be used again (the clock of ``now``, seconds); None for never.
        active: False once its time has run out, or once it has left the list of hosts; the count of failures is kept.
        since: when it failed last.
    """

    hostname: str
    failures: int
    until: Moment | None
    active: bool
    since: Moment = 0.0


@dataclass(frozen=True, slots=True)
class Blacklist:
    """The failed hosts.

    Attributes:
        cooldown_range_s: shortest and longest time a host stays out; None keeps it out forever (Horovod's default).
        entries: one for each host that has failed, in order of last failure; of unlisted hosts that are no longer out
            only the latest, and without a range none, as their failures do not count then.
    """

    cooldown_range_s: tuple[float, float] | None = None
    entries: tuple[BlacklistEntry, ...] = ()
    # The entries by name. Derived.
    _by_name: dict[str, BlacklistEntry] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name.update((entry.hostname, entry) for entry in self.entries)

    def entry_of(self, hostname: str) -> BlacklistEntry | None:
        """Return what is known of a host; None if it has never failed."""
        return self._by_name.get(hostname)

    def _with(self, entry: BlacklistEntry) -> Blacklist:
        kept = tuple(other for other in self.entries if other.hostname != entry.hostname)
        return replace(self, entries=(*kept, entry))

    def fail(self, hostname: str, *, now: float, draw: float, lost: bool = False) -> Blacklist:
        """Count a failure of the host and keep it out from now on.

        The k-th failure keeps it out for ``low * 2**(k-1)`` seconds, at most ``high``; from the second failure on, up
        to ``low`` more at random, so that hosts that failed together do not all return at once.

        A failure while the host is already out belongs to the one that put it out (siblings die together), and changes
        nothing, as in Horovod.

        Args:
            hostname: the host.
            now: the present, seconds.
            draw: a random number from 0 to 1.
            lost: whether the whole host is lost. Without a range that keeps it out for FIRST_LOSS_S, then for
                LOSS_RANGE_S.
        """
        old = self.entry_of(hostname)
        if old is not None and old.active:
            return self
        failures = (old.failures if old else 0) + 1
        until = None if self.cooldown_range_s is None and not lost else now + self._pause_s(failures, draw)
        return self._with(BlacklistEntry(hostname, failures, until, active=True, since=now))

    def _pause_s(self, failures: int, draw: float) -> float:
        before = failures - 1
        if self.cooldown_range_s is not None:
            low, high = self.cooldown_range_s
        elif not before:
            return FIRST_LOSS_S
        else:
            (low, high), before = LOSS_RANGE_S, before - 1
        # 2**60 seconds is beyond every upper bound; the cap keeps the power from overflowing.
        delay = low * 2.0 ** min(before, 60) + (draw * low if failures > 1 else 0.0)
        return min(delay, high)

    def go_down(self, hostnames: Iterable[str], now: float) -> Blacklist:
        """Record that hosts are down: a failure there just before was the loss of the host."""
        blacklist = self
        for name in hostnames:
            entry = self.entry_of(name)
            if entry is not None and entry.active and entry.until is None and now - entry.since <= GOING_DOWN_S:
                until = now + self._pause_s(entry.failures, 0.0)
                blacklist = blacklist._with(replace(entry, until=until))
        return blacklist

    def is_blacklisted(self, hostname: str) -> bool:
        """Return whether the host gets no new workers, as of the last :meth:`expire`."""
        entry = self.entry_of(hostname)
        return entry is not None and entry.active

    def is_out_for_good(self, hostname: str) -> bool:
        """Return whether the host is out with no time limit."""
        entry = self.entry_of(hostname)
        return entry is not None and entry.active and entry.until is None

    def expire(self, now: float) -> Blacklist:
        """Readmit hosts whose time has run out. Their failures stay counted."""
        due = self.next_expiry()
        if due is None or due > now:
            return self
        entries = tuple(
            replace(entry, active=False) if entry.until is not None and entry.until <= now else entry
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def forgive_absent(self, listed: Iterable[str]) -> Blacklist:
        """Readmit hosts that are no longer listed: a host that returns under the same name counts as a new machine.

        Their failures stay counted, so that with a cooldown range the next failure keeps them out longer.
        """
        if not self.entries:
            return self
        names = frozenset(listed)
        absent = [entry for entry in self.entries if entry.hostname not in names]
        kept = (
            frozenset(entry.hostname for entry in absent[-MOST_REMEMBERED:]) if self.cooldown_range_s else frozenset()
        )
        entries = tuple(
            entry if entry.hostname in names else replace(entry, active=False)
            for entry in self.entries
            if entry.hostname in names or entry.hostname in kept
        )
        return replace(self, entries=entries)

    def next_expiry(self) -> float | None:
        """Return when the next cooldown ends; None if there is none."""
        return min((entry.until for entry in self.entries if entry.active and entry.until is not None), default=None)
