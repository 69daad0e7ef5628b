"""Hosts whose workers cannot reach each other: who accuses whom, which hosts go for it, and for how long.

Values, and the choice from accusations alone. Whether the job can do without those who go is decided in
:mod:`elastic_driver.core.unreachable`. The time is an argument.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic_driver.core.moments import Moment
from elastic_driver.hosts import WorkerId

# A cut that lasts costs a round each time that the host is tried again, and one that was short keeps it out no longer.
LEFT_OUT_RANGE_S = (10.0, 300.0)
# It is forgotten that a host was left out when it could have been back for so long.
FORGOTTEN_AFTER_S = 300.0


class Accused(NamedTuple):
    """Workers of one host that a worker of another cannot reach: the first of them by rank, and how many they are."""

    first: WorkerId
    number: int


@dataclass(frozen=True, slots=True)
class Accuser:
    """A worker that cannot reach others.

    Attributes:
        worker: which.
        accused: them, by host; none of its own.
    """

    worker: WorkerId
    accused: tuple[Accused, ...]


class Accusation(NamedTuple):
    """That a worker cannot reach workers of another host."""

    accuser: WorkerId
    accused: Accused


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A host that is left out, or was so lately.

    Attributes:
        hostname: which.
        until: until when.
        pause_s: for how long that was.
        active: False once its time is over.
    """

    hostname: str
    until: Moment
    pause_s: float
    active: bool = True


@dataclass(frozen=True, slots=True)
class Cuts:
    """What has come of cuts between hosts.

    Attributes:
        hosts: those that are left out, or were so lately, in order of their last time.
        pauses: how often in a row the job could do without none of those that cannot reach each other.
        since: when the first of these began; None for none.
        until: when the last of them ends; None for none.
    """

    hosts: tuple[LeftOut, ...] = ()
    pauses: int = 0
    since: Moment | None = None
    until: Moment | None = None

    @property
    def out(self) -> frozenset[str]:
        """The hosts that get no workers, as of the last :meth:`expire`."""
        return frozenset(one.hostname for one in self.hosts if one.active)

    def leave_out(self, hostnames: Sequence[str], now: float) -> Cuts:
        """Leaves these out: for longer each time."""
        low, high = LEFT_OUT_RANGE_S
        before = {one.hostname: one.pause_s for one in self.hosts}
        pauses = [min(high, 2 * before[name]) if name in before else low for name in hostnames]
        fresh = (LeftOut(name, now + pause_s, pause_s) for name, pause_s in zip(hostnames, pauses, strict=True))
        kept = tuple(one for one in self.hosts if one.hostname not in hostnames)
        return Cuts((*kept, *fresh))

    def pause(self, now: float, range_s: tuple[float, float]) -> Cuts:
        """All are tried again, later each time."""
        low, high = range_s
        pause_s = min(high, low * 2.0 ** min(self.pauses, 60))
        since = now if self.since is None else self.since
        return Cuts(self.hosts, self.pauses + 1, since, now + pause_s)

    def forget_pauses(self) -> Cuts:
        """The training has come further."""
        return Cuts(self.hosts) if self.pauses else self

    def expire(self, now: float) -> Cuts:
        """Lets hosts in again whose time is over, and forgets what was long ago."""
        cuts = self
        if cuts.until is not None and now >= cuts.until + FORGOTTEN_AFTER_S:
            cuts = cuts.forget_pauses()
        if all(now < (one.until if one.active else one.until + FORGOTTEN_AFTER_S) for one in cuts.hosts):
            return cuts
        hosts = (one if now < one.until else replace(one, active=False) for one in cuts.hosts)
        return replace(cuts, hosts=tuple(one for one in hosts if now < one.until + FORGOTTEN_AFTER_S))

    def next_expiry(self) -> float | None:
        """When the next host is let in again; None when none is out."""
        return min((one.until for one in self.hosts if one.active), default=None)

    def forget_absent(self, listed: Iterable[str]) -> Cuts:
        """Forgets hosts that are on no list any more: what comes back under the name is taken as a new machine."""
        names = frozenset(listed)
        if all(one.hostname in names for one in self.hosts):
            return self
        return replace(self, hosts=tuple(one for one in self.hosts if one.hostname in names))


def hosts_that_go(
    accusations: Iterable[Accusation],
    order: Sequence[str],
    *,
    stateful: Container[str] = (),
    protected: Container[str] = (),
    kept: bool = False,
) -> tuple[str, ...]:
    """Which hosts go, so that no two are left of which one accuses the other; the first to go first.

    It goes who is cut off from the most workers elsewhere, whichever end has said so: a host that nobody else complains
    of, and that complains of all, is the one that is cut off. Among equals it goes who has nothing of the training yet:
    newcomers dial those who are there, and may be the only ones that can tell. Then who is accused by the most workers:
    of a cut that holds one way only, the one that cannot be reached. Then one that is not protected. Then the last in
    the order.

    Args:
        accusations: between workers of different hosts.
        order: of at least all their hosts.
        stateful: hosts that have the training's state.
        protected: hosts that rank 0 is better on than elsewhere.
        kept: whether these go only for what is between themselves.
    """
    # By the accusing host and the accused one: how many of its workers say so, and of how many there, at most.
    said: dict[str, dict[str, tuple[int, int]]] = {}
    for accuser, (first, number) in accusations:
        of_host = said.setdefault(accuser.hostname, {})
        before, most = of_host.get(first.hostname, (0, 0))
        of_host[first.hostname] = before + 1, max(most, number)
    cut: dict[str, dict[str, int]] = {}  # of each host: from how many workers of each other one it is cut off
    accused: dict[str, int] = {}
    for mine, others in said.items():
        for its, (accusers, number) in others.items():
            for host, other, workers in ((its, mine, accusers), (mine, its, number)):
                cut_off = cut.setdefault(host, {})
                cut_off[other] = max(cut_off.get(other, workers), workers)
            accused[its] = accused.get(its, 0) + accusers
    place = {name: index for index, name in enumerate(order)}
    total = {host: sum(of_host.values()) for host, of_host in cut.items()}
    going = []
    while cut:
        among = [host for host in cut if host not in stateful] if kept else []
        worst = max(
            among or cut,
            key=lambda host: (
                total[host],
                host not in stateful,
                accused.get(host, 0),
                host not in protected,
                place[host],
            ),
        )
        going.append(worst)
        for other in cut.pop(worst):
            total[other] -= cut[other].pop(worst)
            accused[other] = accused.get(other, 0) - said.get(worst, {}).get(other, (0, 0))[0]
            if not cut[other]:
                del cut[other]
    return tuple(going)
