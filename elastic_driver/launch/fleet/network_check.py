"""The network check (--check-network) of hosts, before their slots are offered for the first time.

Each newcomer and the hosts in use probe whether they reach each other where workers will listen, and how fast. Owns the
messages to and from the agents, and which hosts are admitted. The results are judged in
:mod:`elastic_driver.launch.fleet.link_figures`; the agents' part is in :mod:`elastic_driver.launch.agent.probes`. Used
on the event loop only. Hosts that arrive together are checked together:

    gather    while others are being dialled for the first time, for GATHER_S at most
    listen    all listen on a port that workers could have                                           LISTEN_S at most
    reach     each newcomer connects to all others, and all others to it, all at a time    REACH_S + ANSWER_S at most
              (of more than 2 * NEIGHBORS others to so many before and after it in the list)
    measure   in turns, each host with one other: round trips, and a burst each way; up to TURNS turns, and once more
              what looks slow; until LIMIT_S after the beginning

So all links between up to TURNS hosts are measured, and of each newcomer to a larger job TURNS. An agent that does not
answer in time (it is stopped, or its connection is gone) is not waited for: a newcomer is checked again later, and a
host admitted before does not prevent others' admission. A barred host is checked again with back-off, and when an
admitted one is lost. An agent that reconnects is not checked again; a new agent is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import with_number
from elastic_driver.launch.fleet.changes import Changes
from elastic_driver.launch.fleet.kept import NOTHING, AdmittedKept, FleetFact, Keeper
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.link_figures import (
    Figures,
    Link,
    barred,
    late_links,
    matchings,
    neighbors,
    slow_links,
)
from elastic_driver.rendezvous.agent_messages import AgentMessage, Listen, Listening, Probe, Probed, Unlisten
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import counted

GATHER_S, LISTEN_S, REACH_S, ANSWER_S, LIMIT_S = 3.0, 3.0, 3.0, 2.0, 10.0
TURNS = 5
# In a larger job each host probes so many others before and after it in the list: all pairs of a thousand hosts would
# take the driver a minute.
NEIGHBORS = 64
# Enough for a measurement, and little for a link that a training uses meanwhile.
BURST_BYTES, BURST_S = 4 << 20, 0.4
# Three connections and two bursts.
_MEASURE_S = 2.5
# With less time left no turn is begun.
_LEAST_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_TRIES = 1.0, 10.0, 1000
_SECRET_BYTES = 32
_HINT = "(check firewalls, routes and --network-interfaces)"

_T = TypeVar("_T", bound=AgentMessage)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one check.

    Attributes:
        admitted: newcomers that may be used from now on.
        barred: newcomers that may not, and why.
        unheard: hosts that were admitted before, and could not be asked.
        links: the links measured now.
        slow: warnings, one line each.
        took_s: seconds.
    """

    admitted: Sequence[str]
    barred: Mapping[str, str]
    unheard: Sequence[str]
    links: Mapping[Link, Figures]
    slow: Sequence[str]
    took_s: float


class Hosts(Protocol):
    """What the check needs of the fleet."""

    @property
    def changes(self) -> Changes:
        """Changes of the hosts."""

    def present(self) -> Sequence[AgentLink]:
        """Return the agents of all hosts, in the order of their list, without those that are about to end."""

    def awaits_others(self) -> bool:
        """Return whether more hosts may get an agent soon."""

    def gets_workers(self, link: AgentLink) -> bool:
        """Return whether an agent's usable host gets workers: the job may have left it out for a while."""

    def address_of(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        """Return where the workers of an agent listen for those of others. Raises LaunchError."""

    def admitted(self) -> None:
        """Called when more hosts may be used."""

    def checked(self, report: Checked) -> None:
        """Called when a check of several hosts has ended, with news."""

    def barred(self, host: str, reason: str) -> None:
        """Called when a host is not to be used, once for each reason."""


@dataclass(frozen=True, slots=True)
class _Why:
    """Why a host is barred.

    Attributes:
        text: for the user.
        kind: the same for the same finding in later checks: ports differ in each, and which of two hosts cannot reach
            the other may change while the network does.
    """

    text: str
    kind: str


@dataclass(slots=True)
class _Newcomer:
    """A host that is not admitted.

    Attributes:
        due: whether it is to be checked.
        reason: why it was barred last; "" before.
        tries: how often it was barred.
        timer: runs until its next check.
    """

    due: bool = True
    reason: str = ""
    tries: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Run:
    """One check while it runs.

    Attributes:
        number: of the check.
        links: its hosts' agents by name, in the order of their list.
        newcomers: names of those to be admitted.
        addresses, ports: where they listen.
        faults: why newcomers cannot be admitted, whatever the others report.
        unheard: hosts admitted before that could not be asked.
        failures: for each host and another that it cannot reach, why.
        figures: the measured links.
    """

    number: int
    links: dict[str, AgentLink]
    newcomers: Collection[str]
    addresses: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    unheard: dict[str, None] = field(default_factory=dict)
    failures: dict[Link, str] = field(default_factory=dict)
    figures: dict[Link, Figures] = field(default_factory=dict)

    def silent(self, host: str, why: str) -> None:
        """Record a host that cannot be asked."""
        if host in self.newcomers:
            self.faults.setdefault(host, why)
        else:
            self.unheard[host] = None

    def note(self, one: str, other: str, figures: Figures) -> None:
        """Record the measurements of a link, from one end."""
        link = (one, other) if (one, other) in self.figures else (other, one)
        if link in self.figures:
            self.figures[link] = self.figures[link].better(figures)
        else:
            self.figures[(one, other)] = figures


class NetworkCheck:
    """Checks newcomers, and knows which hosts are admitted. Used on the event loop only.

    Args:
        ports: first and last port of workers; None for any.
        tasks: runs it; an error in it ends the job.
        keeper: persists the admitted agents.
        admitted: agents that the earlier driver has admitted.
    """

    def __init__(
        self,
        ports: tuple[int, int] | None,
        tasks: Tasks,
        *,
        keeper: Keeper[FleetFact] = NOTHING,
        admitted: Collection[str] = (),
    ) -> None:
        self._keeper = keeper
        self._admitted_before = frozenset(admitted)
        self._ports = [] if ports is None else list(ports)
        self._tasks = tasks
        self._hosts: Hosts
        self._numbers = itertools.count(1)
        self._newcomers: dict[AgentLink, _Newcomer] = {}
        self._admitted: set[AgentLink] = set()
        self._answers: dict[tuple[AgentLink, int], asyncio.Future[AgentMessage | None]] = {}
        self._figures: dict[Link, Figures] = {}  # of all present agents, by their numbers
        self._told: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def serve(self, hosts: Hosts) -> None:
        """Set the hosts to check. To be called once, before anything else."""
        self._hosts = hosts

    # --- for the fleet ---------------------------------------------------------------------------------------------

    def admits(self, link: AgentLink) -> bool:
        """Return whether this agent's host may be used."""
        return link in self._admitted

    def is_settled(self, link: AgentLink) -> bool:
        """Return whether it is known, for now, if this agent's host may be used."""
        newcomer = self._newcomers.get(link)
        return newcomer is None or newcomer.tries > 0

    def came(self, link: AgentLink) -> None:
        """Check the host of a new agent, unless the earlier driver has admitted it."""
        if link.agent in self._admitted_before:
            self._admitted.add(link)
            return
        self._newcomers[link] = _Newcomer()
        self._begin()

    def lost(self, link: AgentLink, why: str) -> None:
        """Forget an agent that is lost, or ends. Harmless when repeated, and for an unknown one."""
        newcomer = self._newcomers.pop(link, None)
        if newcomer is not None:
            _cancel(newcomer)
        for key in [key for key in self._answers if key[0] is link]:
            self._answer(key, None)
        self._figures = {pair: figure for pair, figure in self._figures.items() if link.agent not in pair}
        self._told.pop(link.facts.host, None)
        if link in self._admitted:
            self._admitted.discard(link)
            self._keeper.drop(AdmittedKept, link.agent)
            # It may have been the one that others could not reach.
            for each in self._newcomers.values():
                _cancel(each)
                each.due = True
            self._begin()

    def close(self) -> None:
        """Start no more checks, since the job ends. A running one ends with the tasks, or soon."""
        self._closing = True
        for newcomer in self._newcomers.values():
            _cancel(newcomer)

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle an agent's answer in a check. Returns whether the message was one."""
        match message:
            case Listening(number) | Probed(number):
                self._answer((link, number), message)
            case _:
                return False
        return True

    def remarks(self) -> list[str]:
        """Return which hosts are barred, and why."""
        return [
            f"host {link.facts.host} is not ready: {newcomer.reason} (checked {counted(newcomer.tries, 'time')})"
            for link, newcomer in self._newcomers.items()
            if newcomer.tries
        ]

    # --- scheduling ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._task is None and not self._closing and any(newcomer.due for newcomer in self._newcomers.values()):
            self._task = self._tasks.start(self._check_all())

    async def _check_all(self) -> None:
        """Check newcomers until none is due."""
        try:
            while not self._closing and any(newcomer.due for newcomer in self._newcomers.values()):
                await self._gather()
                await self._check()
        finally:
            self._task = None

    async def _gather(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                while self._hosts.awaits_others():
                    await self._hosts.changes.wait(self._hosts.changes.count)

    async def _check(self) -> None:
        began = time.perf_counter()
        present = self._hosts.present()
        newcomers = [link for link in present if link in self._newcomers and self._newcomers[link].due]
        for newcomer in self._newcomers.values():
            newcomer.due = False  # also of hosts that are about to end
        # A host that others' workers cannot reach gets none for a while, and must not prevent a newcomer's admission.
        in_use = {link for link in present if link in self._admitted and self._hosts.gets_workers(link)}
        links = {link.facts.host: link for link in present if link in in_use or link in newcomers}
        run = _Run(next(self._numbers), links, {link.facts.host for link in newcomers})
        if len(links) > 1:
            try:
                async with asyncio.timeout(LIMIT_S) as limit:
                    await self._listen(run)
                    await self._reach(run)
                    gone = self._judge(run)
                    await self._measure(run, gone, limit.when() or 0.0)
            except TimeoutError:
                pass  # the results so far count
            finally:
                for link in links.values():
                    link.send(Unlisten(run.number))
        self._conclude(run, time.perf_counter() - began)

    def _conclude(self, run: _Run, took_s: float) -> None:
        gone = self._judge(run)
        admitted, news = [], False
        for host, link in run.links.items():
            if link not in self._newcomers:
                continue  # admitted before, or lost meanwhile
            if host in gone:
                news |= self._bar(link, gone[host])
            else:
                del self._newcomers[link]
                self._admitted.add(link)
                self._keeper.keep(AdmittedKept(link.agent))
                self._told.pop(host, None)
                admitted.append(host)
        stay = {host for host, link in run.links.items() if link in self._admitted}
        links = {link: figure for link, figure in run.figures.items() if set(link) <= stay and figure.speed is not None}
        slow = self._slow(run, links)
        self._figures |= {_numbers_of(run, link): each for link, each in links.items()}
        if len(run.links) > 1 and (admitted or news):
            out = {host: why.text for host, why in gone.items()}
            self._hosts.checked(Checked(admitted, out, list(run.unheard), links, slow, took_s))
        if admitted:
            self._hosts.admitted()

    def _bar(self, link: AgentLink, why: _Why) -> bool:
        """Bar a host. Returns whether that is news."""
        newcomer, host = self._newcomers[link], link.facts.host
        newcomer.reason = why.text
        if not newcomer.due and not self._closing:  # else a host in use is lost, and it is checked again at once
            pause_s = min(_FIRST_PAUSE_S * 2**newcomer.tries, _LONGEST_PAUSE_S)
            newcomer.timer = asyncio.get_running_loop().call_later(pause_s, self._again, link)
        newcomer.tries = min(newcomer.tries + 1, _MOST_TRIES)
        news = self._told.get(host) != why.kind
        self._told[host] = why.kind
        if news:
            self._hosts.barred(host, why.text)
        return news

    def _again(self, link: AgentLink) -> None:
        self._newcomers[link].due = True
        self._begin()

    # --- questions to agents ---------------------------------------------------------------------------------------

    async def _listen(self, run: _Run) -> None:
        secret = secrets.token_hex(_SECRET_BYTES)
        orders: dict[str, AgentMessage] = {}
        for host, link in run.links.items():
            try:
                address = run.addresses[host] = self._hosts.address_of(link, list(run.links.values()))
            except LaunchError as error:
                run.silent(host, str(error))
                continue
            orders[host] = Listen(run.number, host, secret, address, self._ports, 2 * LIMIT_S)
        for host, answer in (await self._ask(run, orders, Listening, run.number, LISTEN_S)).items():
            if answer is None:
                run.silent(host, f"its agent did not answer within {LISTEN_S:g} s")
            elif 0 < answer.port < 1 << 16:
                run.ports[host] = answer.port
            elif host in run.newcomers:
                run.silent(host, f"it cannot listen on {run.addresses[host]} for the other hosts: {answer.error}")
            # On a host in use the workers themselves may hold the ports. It can still probe others.

    async def _reach(self, run: _Run) -> None:
        number = next(self._numbers)
        able = [host for host in run.links if host not in run.faults and host not in run.unheard]
        orders: dict[str, AgentMessage] = {}
        for host, near in neighbors(able, NEIGHBORS).items():
            peers = [peer for peer in near if peer in run.ports and (host in run.newcomers or peer in run.newcomers)]
            if peers:
                orders[host] = _probe(run, number, peers, REACH_S)
        for host, answer in (await self._ask(run, orders, Probed, number, REACH_S + ANSWER_S)).items():
            if answer is None:
                run.silent(host, f"its agent did not answer within {REACH_S + ANSWER_S:g} s")
                continue
            asked = orders[host]
            assert isinstance(asked, Probe)
            for peer in asked.ports:
                if peer in answer.rtt_s:
                    run.note(host, peer, Figures(abs(answer.rtt_s[peer])))
                else:
                    run.failures[host, peer] = answer.failures.get(peer) or "it did not try"

    async def _measure(self, run: _Run, gone: Collection[str], until: float) -> None:
        able = [host for host in run.links if host not in gone and host not in run.unheard and host in run.ports]
        for turn in matchings(able, run.newcomers, TURNS):
            await self._measure_turn(run, turn, until)
        # A busy machine may make a link look slow: the better measurement counts.
        known = self._known(run)
        again = [link for link in slow_links(known) | late_links(known) if link in run.figures]
        for turn in _disjoint(again)[:TURNS]:
            await self._measure_turn(run, turn, until)

    async def _measure_turn(self, run: _Run, turn: Sequence[Link], until: float) -> None:
        if until - asyncio.get_running_loop().time() < _LEAST_S:
            return
        number = next(self._numbers)
        # Either end can ask, since the burst goes both ways.
        orders: dict[str, AgentMessage] = {
            one: _probe(run, number, [other], _MEASURE_S, BURST_BYTES) for one, other in turn
        }
        partners = dict(turn)
        for one, answer in (await self._ask(run, orders, Probed, number, _MEASURE_S + ANSWER_S)).items():
            other = partners[one]
            if answer is not None and other in answer.rtt_s:
                speeds = answer.speeds.get(other, [])
                run.note(one, other, Figures(abs(answer.rtt_s[other]), min(map(abs, speeds), default=None)))

    async def _ask(
        self, run: _Run, orders: Mapping[str, AgentMessage], kind: type[_T], number: int, limit_s: float
    ) -> dict[str, _T | None]:
        """Return the answer of each host; None if it does not answer in time, or is lost."""
        loop = asyncio.get_running_loop()
        futures: dict[str, asyncio.Future[AgentMessage | None]] = {}
        try:
            for host, order in orders.items():
                link = run.links[host]
                futures[host] = self._answers[link, number] = loop.create_future()
                link.send(order)
                if link.is_lost:
                    futures[host].set_result(None)
                await asyncio.sleep(0)  # writing a thousand hosts' addresses for each of them takes a while
            if futures:
                await asyncio.wait(futures.values(), timeout=limit_s)
            answers = {host: future.result() if future.done() else None for host, future in futures.items()}
        finally:
            for host in orders:
                self._answers.pop((run.links[host], number), None)
        return {host: answer if isinstance(answer, kind) else None for host, answer in answers.items()}

    def _answer(self, key: tuple[AgentLink, int], message: AgentMessage | None) -> None:
        future = self._answers.get(key)
        if future is not None and not future.done():
            future.set_result(message)

    # --- conclusions -----------------------------------------------------------------------------------------------

    def _judge(self, run: _Run) -> dict[str, _Why]:
        """Return which hosts are barred, and why, ignoring those lost by now."""
        hosts = [
            host
            for host, link in run.links.items()
            if host not in run.faults and (link in self._newcomers or link in self._admitted)
        ]
        at = {host: place for place, host in enumerate(hosts)}
        failures = [link for link in run.failures if link[0] in at and link[1] in at]
        broken = {(first, second) if at[first] < at[second] else (second, first) for first, second in failures}
        admitted = [host for host in hosts if host not in run.newcomers]
        why = {host: _Why(text, text) for host, text in run.faults.items()}
        stay = sorted(hosts, key=lambda host: host in run.newcomers)
        for host in barred(hosts, admitted, broken):
            why[host] = _why(run, host, [other for other in stay if other != host and _is_broken(run, host, other)])
            stay.remove(host)
        return why

    def _known(self, run: _Run) -> dict[Link, Figures]:
        """Return all measurements, by host, including those of this check."""
        names = {link.agent: host for host, link in run.links.items()}
        older = {
            (names[one], names[other]): figure
            for (one, other), figure in self._figures.items()
            if one in names and other in names
        }
        return older | {link: figure for link, figure in run.figures.items() if figure.speed is not None}

    def _slow(self, run: _Run, fresh: Collection[Link]) -> list[str]:
        known = self._known(run)
        slow = {link: others for link, others in slow_links(known).items() if link in fresh}
        late = {link: others for link, others in late_links(known).items() if link in fresh}
        speeds = {link: known[link].speed or 0.0 for link in slow}
        rtts = {link: known[link].rtt_s for link in late}
        return [
            *_link_warnings(slow, speeds, list(run.links), "slow", _in_megabits),
            *_link_warnings(late, rtts, list(run.links), "slow to answer", _in_milliseconds),
        ]


def _disjoint(links: Sequence[Link]) -> list[list[Link]]:
    """Split the links into turns in which no host appears twice."""
    turns: list[list[Link]] = []
    for link in links:
        free = next((turn for turn in turns if not any(set(link) & set(each) for each in turn)), None)
        if free is None:
            turns.append([link])
        else:
            free.append(link)
    return turns


def _probe(run: _Run, number: int, peers: Sequence[str], limit_s: float, burst_bytes: int = 0) -> Probe:
    return Probe(
        run.number,
        number,
        {peer: run.addresses[peer] for peer in peers},
        {peer: run.ports[peer] for peer in peers},
        burst_bytes,
        BURST_S if burst_bytes else 0.0,
        limit_s,
    )


def _numbers_of(run: _Run, link: Link) -> Link:
    return run.links[link[0]].agent, run.links[link[1]].agent


def _cancel(newcomer: _Newcomer) -> None:
    if newcomer.timer is not None:
        newcomer.timer.cancel()
        newcomer.timer = None


def _is_broken(run: _Run, one: str, other: str) -> bool:
    return (one, other) in run.failures or (other, one) in run.failures


def _why(run: _Run, host: str, others: Sequence[str]) -> _Why:
    """Return why a host is barred: the first host that it has no link to, and how many more there are."""
    other, more = others[0], len(others) - 1
    to_it, from_it = run.failures.get((other, host)), run.failures.get((host, other))
    if to_it is None:
        what = f"it cannot reach host {other} at {_place(run, other)}: {from_it}"
    elif from_it is None:
        what = f"host {other} cannot reach it at {_place(run, host)}: {to_it}"
    else:
        places = f"{_place(run, host)} and {_place(run, other)}"
        what = f"it and host {other} cannot reach each other at {places}: {to_it}"
    return _Why(f"{what} {_HINT}" + (f"; the same for {counted(more, 'more host')}" if more else ""), other)


def _place(run: _Run, host: str) -> str:
    return with_number(run.addresses[host], run.ports[host])


def _link_warnings(
    others: Mapping[Link, float],
    values: Mapping[Link, float],
    hosts: Sequence[str],
    how: str,
    form: Callable[[float], str],
) -> list[str]:
    """Return one line for each host with all its conspicuous links, and for each other link."""
    lines, rest = [], dict(others)
    while rest:
        counts = Counter(host for link in rest for host in link)
        one = max(counts, key=lambda host: (counts[host], hosts.index(host)))
        mine = [link for link in rest if one in link]
        peers = sorted((other for link in mine for other in link if other != one), key=hosts.index)
        what = (
            f"the link between hosts {' and '.join(sorted((one, *peers), key=hosts.index))} is"
            if len(peers) == 1
            else f"the links between host {one} and hosts {', '.join(peers)} are"
        )
        value = statistics.median(values[link] for link in mine)
        lines.append(f"{what} {how}: {form(value)}, others {form(others[mine[0]])}")
        for link in mine:
            del rest[link]
    return lines


def _in_megabits(speed: float) -> str:
    megabits = speed * 8 / 1e6
    return f"{megabits:.0f} Mbit/s" if megabits >= 10 else f"{megabits:.2g} Mbit/s"


def _in_milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
