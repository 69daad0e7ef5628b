"""Selects the links between hosts to check, and judges the results: which hosts are barred, which links are slow.

Owns these decisions. Pure. A host is its name; a link is a pair of names.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Link: TypeAlias = tuple[str, str]

# A link is slow if it is so many times slower than the median of the others, ...
SLOW_RATIO = 10.0
# ... and late if its round trip is so many times longer, and longer than this: anything below is noise of the machines.
LATE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurements of one link.

    Attributes:
        rtt_s: the shortest round trip, seconds.
        speed: bytes per second, of the slower direction; None if not measured.
    """

    rtt_s: float
    speed: float | None = None

    def better(self, other: Figures) -> Figures:
        """Return the better of two measurements: a busy machine makes a link look slow, nothing makes it look fast."""
        speeds = [each.speed for each in (self, other) if each.speed is not None]
        return Figures(min(self.rtt_s, other.rtt_s), max(speeds, default=None))


def barred(hosts: Sequence[str], admitted: Collection[str], broken: Collection[Link]) -> list[str]:
    """Return the newcomers to bar so that all remaining hosts reach each other, in the order of the decisions.

    A newcomer that cannot be reached by an admitted host, or cannot reach it, is barred. Of the others the one with the
    most broken links is barred first; of several with as many the last one listed.

    Args:
        hosts: all, in the order of their list.
        admitted: those of them that stay.
        broken: links that do not work, in one direction or both.
    """
    stays = set(admitted)
    at = {host: place for place, host in enumerate(hosts)}
    others: dict[str, set[str]] = {host: set() for host in hosts}
    for one, other in broken:
        if not {one, other} <= stays:
            others[one].add(other)
            others[other].add(one)
    gone = [host for host in hosts if host not in stays and others[host] & stays]
    for host in gone:
        _leave(others, host)
    while True:
        worst = max(hosts, key=lambda host: (len(others[host]), at[host]), default="")
        if not worst or not others[worst]:
            return gone
        gone.append(worst)
        _leave(others, worst)


def _leave(others: dict[str, set[str]], host: str) -> None:
    for other in others[host]:
        others[other].discard(host)
    others[host] = set()


def neighbors(hosts: Sequence[str], most: int) -> dict[str, list[str]]:
    """Return all others for each host; of more than twice ``most`` only so many before and after it, in a ring."""
    count = len(hosts)
    if count - 1 <= 2 * most:
        return {host: [other for other in hosts if other != host] for host in hosts}
    around = [*range(-most, 0), *range(1, most + 1)]
    return {host: [hosts[(place + step) % count] for step in around] for place, host in enumerate(hosts)}


def matchings(hosts: Sequence[str], newcomers: Collection[str], most: int) -> list[list[Link]]:
    """Pair hosts to be measured, turn by turn: no host is in two links of a turn, and no link appears twice.

    The turns of a round-robin tournament, without links between two hosts that are not newcomers. Each newcomer has a
    partner in nearly each turn; up to ``most`` hosts have all their links measured.

    Args:
        hosts: all, in order.
        newcomers: those of them whose links are to be measured.
        most: turns.
    """
    at = {host: place for place, host in enumerate(hosts)}
    wanted = set(newcomers)
    fixed, *circle = [*hosts, *([""] if len(hosts) % 2 else [])] or [""]
    turns = []
    for turn in range(min(most, len(circle))):
        turned = circle[turn:] + circle[:turn]
        half = len(turned) // 2
        # The first of the rotated hosts is paired with the fixed one, each other with the one at the same distance from
        # the end.
        pairs = [(fixed, turned[0]), *((turned[i], turned[-i]) for i in range(1, half + 1))]
        links = [
            (first, second) if at[first] < at[second] else (second, first)
            for first, second in pairs
            if first and second and (first in wanted or second in wanted)
        ]
        if links:
            turns.append(links)
    return turns


def slow_links(figures: Mapping[Link, Figures]) -> dict[Link, float]:
    """Return the slow links, each with the median speed of the others, bytes per second."""
    speeds = {link: figure.speed for link, figure in figures.items() if figure.speed is not None}
    return _outliers(speeds, lambda mine, others: mine * SLOW_RATIO < others)


def late_links(figures: Mapping[Link, Figures]) -> dict[Link, float]:
    """Return the links with a long round trip, each with the median of the others, seconds."""
    rtts = {link: figure.rtt_s for link, figure in figures.items()}
    return _outliers(rtts, lambda mine, others: mine > max(others * SLOW_RATIO, LATE_S))


def _outliers(values: Mapping[Link, float], is_one: Callable[[float, float], bool]) -> dict[Link, float]:
    ordered = sorted(values.values())
    if len(ordered) < 2:
        return {}
    found = [link for link, value in values.items() if is_one(value, _median_without(ordered, value))]
    outliers = set(found)
    usual = [value for link, value in values.items() if link not in outliers]
    median = statistics.median(usual) if usual else None
    return {link: _median_without(ordered, values[link]) if median is None else median for link in found}


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median without one entry of this value: each of thousands of links is compared with all others."""
    gap = bisect_left(ordered, value)
    count = len(ordered) - 1

    def nth(index: int) -> float:
        return ordered[index if index < gap else index + 1]

    return (nth((count - 1) // 2) + nth(count // 2)) / 2
