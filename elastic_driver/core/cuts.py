"""Hosts whose workers cannot reach each other: the accusations, which hosts are left out for them, and for how long.

Values, and the choice from accusations alone. :mod:`elastic_driver.core.unreachable` decides whether the job can do
without the chosen hosts. The time is an argument.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic_driver.core.moments import Moment
from elastic_driver.hosts import WorkerId

# A lasting cut costs a round each time the host is retried, and a short one does not keep the host out any longer.
LEFT_OUT_RANGE_S = (10.0, 300.0)
# How long after it could have been back it is forgotten that a host was left out.
FORGOTTEN_AFTER_S = 300.0


class Accused(NamedTuple):
    """Workers of one host that a worker of another cannot reach: the first of them by rank, and their number."""

    first: WorkerId
    number: int


@dataclass(frozen=True, slots=True)
class Accuser:
    """A worker that cannot reach others.

    Attributes:
        worker: the worker.
        accused: the workers that it cannot reach, by host; none on its own host.
    """

    worker: WorkerId
    accused: tuple[Accused, ...]


class Accusation(NamedTuple):
    """The report that a worker cannot reach workers of another host."""

    accuser: WorkerId
    accused: Accused


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A host that is left out, or was recently.

    Attributes:
        hostname: the host.
        until: when it is readmitted.
        pause_s: how long it is left out.
        active: False once its time is over.
    """

    hostname: str
    until: Moment
    pause_s: float
    active: bool = True


@dataclass(frozen=True, slots=True)
class Cuts:
    """The consequences of cuts between hosts.

    Attributes:
        hosts: those that are left out, or were recently, in order of their last time.
        pauses: how many times in a row the job could not do without any of the hosts that cannot reach each other.
        since: when the first of these pauses began; None for none.
        until: when the last of them ends; None for none.
    """

    hosts: tuple[LeftOut, ...] = ()
    pauses: int = 0
    since: Moment | None = None
    until: Moment | None = None

    @property
    def out(self) -> frozenset[str]:
        """The hosts that get no workers, as of the last :meth:`expire`."""
        return frozenset(cut_host.hostname for cut_host in self.hosts if cut_host.active)

    def leave_out(self, hostnames: Sequence[str], now: float) -> Cuts:
        """Leave these hosts out, for longer each time."""
        low, high = LEFT_OUT_RANGE_S
        before = {cut_host.hostname: cut_host.pause_s for cut_host in self.hosts}
        pauses = [min(high, 2 * before[name]) if name in before else low for name in hostnames]
        fresh = (LeftOut(name, now + pause_s, pause_s) for name, pause_s in zip(hostnames, pauses, strict=True))
        kept = tuple(cut_host for cut_host in self.hosts if cut_host.hostname not in hostnames)
        return Cuts((*kept, *fresh))

    def pause(self, now: float, range_s: tuple[float, float]) -> Cuts:
        """Put off another try with all hosts, for longer each time."""
        low, high = range_s
        pause_s = min(high, low * 2.0 ** min(self.pauses, 60))
        since = now if self.since is None else self.since
        return Cuts(self.hosts, self.pauses + 1, since, now + pause_s)

    def forget_pauses(self) -> Cuts:
        """Reset the pauses, since the training has made progress."""
        return Cuts(self.hosts) if self.pauses else self

    def expire(self, now: float) -> Cuts:
        """Readmit hosts whose time is over, and forget old entries."""
        cuts = self
        if cuts.until is not None and now >= cuts.until + FORGOTTEN_AFTER_S:
            cuts = cuts.forget_pauses()
        if all(
            now < (cut_host.until if cut_host.active else cut_host.until + FORGOTTEN_AFTER_S) for cut_host in cuts.hosts
        ):
            return cuts
        hosts = (cut_host if now < cut_host.until else replace(cut_host, active=False) for cut_host in cuts.hosts)
        return replace(cuts, hosts=tuple(cut_host for cut_host in hosts if now < cut_host.until + FORGOTTEN_AFTER_S))

    def next_expiry(self) -> float | None:
        """Return when the next host is readmitted; None if none is out."""
        return min((cut_host.until for cut_host in self.hosts if cut_host.active), default=None)

    def forget_absent(self, listed: Iterable[str]) -> Cuts:
        """Forget unlisted hosts: a host that returns under the same name counts as a new machine."""
        names = frozenset(listed)
        if all(cut_host.hostname in names for cut_host in self.hosts):
            return self
        return replace(self, hosts=tuple(cut_host for cut_host in self.hosts if cut_host.hostname in names))


def hosts_that_go(
    accusations: Iterable[Accusation],
    order: Sequence[str],
    *,
    stateful: Container[str] = (),
    protected: Container[str] = (),
    kept: bool = False,
) -> tuple[str, ...]:
    """Choose hosts to leave out, so that no two remain of which one accuses the other; in the order of the choice.

    The host that is cut off from the most workers elsewhere goes first, whichever end reports it: a host that accuses
    all others, though none accuses it, is the one that is cut off. Among equals, a host without the training's state
    goes first: new workers dial the old ones, and may be the only ones that notice. Then the host that the most workers
    accuse: in a cut in one direction only, the one that cannot be reached. Then one that is not protected. Then the
    last in the order.

    Args:
        accusations: between workers of different hosts.
        order: at least all their hosts, in order.
        stateful: hosts that have the training's state.
        protected: hosts that are preferred for rank 0.
        kept: whether stateful hosts are left out only for cuts between themselves.
    """
    # By accusing and accused host: how many of its workers report it, and the most workers that one of them cannot
    # reach.
    said: dict[str, dict[str, tuple[int, int]]] = {}
    for accuser, (first, number) in accusations:
        of_host = said.setdefault(accuser.hostname, {})
        before, most = of_host.get(first.hostname, (0, 0))
        of_host[first.hostname] = before + 1, max(most, number)
    cut: dict[str, dict[str, int]] = {}  # by host: from how many workers of each other one it is cut off
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
