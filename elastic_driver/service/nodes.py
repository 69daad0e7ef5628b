"""All decisions about which nodes of a torchrun job run together. Pure: no socket, clock or random source.

Owns the state of one job, and ``step(job, event, now)``, which returns the next one. Nothing is sent here: the answer
to a node follows from the state (:func:`reply_to`), and the service sends it when it changes. Silent nodes are detected
in :mod:`~elastic_driver.service.liveness`; their loss is an event like any other.

A node is *joining* (its workers do not run, it waits for its place) or not (it is in the generation, or was). A
generation runs until it is *broken*: a member joins again (its workers have failed), leaves, or is lost; or a new node
has joined and the job grows at once. Then all members have to join again, and the job continues without those that are
lost or too late. A node of an earlier generation is always answered RESTART: two generations never run side by side for
longer than this answer takes.

| joining nodes | the next generation is formed |
|---|---|
| the maximum | at once |
| enough are members of the last | at once: a node that arrives meanwhile is too late, like any newcomer |
| enough | after the last call |
| fewer | not yet |

It waits for living members that have not joined again yet, for as long as torch may take to stop their workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import natural_key
from elastic_driver.rendezvous.node_messages import Formed, Member, NodeReply, Outcome, Standing, Terms

# How long to wait for living members that do not join again. torch gives workers 30 s to end; a node that takes longer
# has finished, or hangs.
STRAGGLER_S = 45.0
# A job without nodes is forgotten after this time.
FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """A known node that is not lost.

    Attributes:
        member: its identity.
        came: its number in the order of arrival.
        joining: whether it waits for a place.
        rank: in the last generation; None if it was not a member.
    """

    member: Member
    came: int
    joining: bool
    rank: int | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether it was a member, and has not joined again."""
        return self.rank is not None and not self.joining


@dataclass(frozen=True, slots=True)
class Job:
    """The state of a job.

    Attributes:
        terms: of the job.
        nodes: by node id, in the order of arrival. Never modified: each change creates a new mapping.
        formed: the last generation; None before the first.
        broken: why that generation has to end; "" while it runs.
        broken_at: since when.
        is_losing: whether members of it were lost, or have left without success.
        after_loss: whether that was so for the previous generation.
        finished: the number of its members that have ended with success.
        enough_at: since when enough nodes are joining; None if too few are.
        not_before: no generation is formed before this time: a restarted service first learns which nodes there are. 0
            once it has passed.
        over: whether the job has ended.
        came: the number of nodes that have arrived so far.
        last: the highest number of a generation that any node reported, also from an earlier start of the service.
        version: grows when there is news for nodes.
        empty_at: since when it has no nodes; None if it has some.
        joining: the number of joining nodes.
        ranked: the number of members of the last generation.
        awaited: the number of those that are not joining.
    """

    terms: Terms
    nodes: Mapping[str, Node] = field(default_factory=dict)
    formed: Formed | None = None
    broken: str = ""
    broken_at: float = 0.0
    is_losing: bool = False
    after_loss: bool = False
    finished: int = 0
    enough_at: float | None = None
    not_before: float = 0.0
    over: bool = False
    came: int = 0
    last: int = 0
    version: int = 1
    empty_at: float | None = None
    joining: int = 0
    ranked: int = 0
    awaited: int = 0

    def put(self, *nodes: Node) -> Job:
        """Return the job with these nodes, which replace their former states."""
        fresh = {node.member.node: node for node in nodes}
        former = [self.nodes[name] for name in fresh if name in self.nodes]
        return self._become({**self.nodes, **fresh}, more=fresh.values(), fewer=former)

    def without(self, *gone: Node) -> Job:
        """Return the job without these nodes."""
        names = {node.member.node for node in gone}
        return self._become({name: node for name, node in self.nodes.items() if name not in names}, fewer=gone)

    def only(self, nodes: Iterable[Node]) -> Job:
        """Return the job with these nodes and no others, in this order."""
        return self.without(*self.nodes.values()).put(*nodes)

    def _become(self, nodes: Mapping[str, Node], *, more: Iterable[Node] = (), fewer: Iterable[Node] = ()) -> Job:
        """Return the job with these nodes; ``more`` were added, ``fewer`` removed: a recount would visit all nodes."""
        joining, ranked, awaited = self.joining, self.ranked, self.awaited
        for changed, by in ((more, 1), (fewer, -1)):
            for node in changed:
                joining += by * node.joining
                ranked += by * (node.rank is not None)
                awaited += by * node.is_awaited
        return replace(self, nodes=nodes, joining=joining, ranked=ranked, awaited=awaited)


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node asked for its place.

    Attributes:
        member: the node.
        terms: of its job, by its own flags.
        after: the number of its last generation; 0 before the first.
    """

    member: Member
    terms: Terms
    after: int


@dataclass(frozen=True, slots=True)
class NodeClaimed:
    """A node reported that it is in a generation of this job which is unknown here.

    Attributes:
        member: the node.
        terms: of its job, by its own flags.
        formed: the generation.
    """

    member: Member
    terms: Terms
    formed: Formed


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Nodes were silent for too long, or their connections ended."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node reported its end."""

    node: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed without another event."""


Event = NodeJoined | NodeClaimed | NodesLost | NodeLeft | TimePassed


def step(job: Job, event: Event, now: float, salt: str) -> Job:
    """Return the next state.

    Args:
        job: the state.
        event: the event.
        now: its time; never goes back.
        salt: makes a generation's name unique.

    Raises:
        RendezvousProtocolError: the event cannot be of this job. The state stays as it was.
    """
    match event:
        case NodeJoined():
            job = _joined(job, event, now)
        case NodeClaimed():
            job = _claimed(job, event, now)
        case NodesLost(nodes):
            job = _lost(job, nodes, now)
        case NodeLeft(node, outcome):
            job = _left(job, node, outcome, now)
        case TimePassed():
            pass
    return _settled(job, now, salt)


def next_deadline(job: Job) -> float | None:
    """Return when the next step is due without an event; None for never."""
    times = []
    if job.enough_at is not None:
        times.append(job.enough_at + job.terms.last_call_s)
    if job.broken and job.awaited:
        times.append(job.broken_at + STRAGGLER_S)
    if job.not_before:
        times.append(job.not_before)
    if job.empty_at is not None:
        times.append(job.empty_at + FORGET_S)
    return min(times, default=None)


def is_forgotten(job: Job, now: float) -> bool:
    """Whether the job can be forgotten."""
    return job.empty_at is not None and now >= job.empty_at + FORGET_S


def reply_to(job: Job, known: Node | None, number: int, *, joins: bool) -> NodeReply:
    """Return the answer to a node.

    Args:
        job: the state.
        known: the node's entry in the state; None if it has none.
        number: of the generation that the node knows; 0 for none.
        joins: whether it asks for a place.
    """
    standing = standing_of(job, known, number, joins=joins)
    why, formed = "", None
    match standing:
        case Standing.PLACED if joins:
            formed = job.formed
        case Standing.OVER:
            why = "the job has ended"
        case Standing.RESTART if job.formed is not None and number == job.formed.number and job.broken:
            why = job.broken
        case Standing.RESTART:
            why = f"generation {number} has ended: {explain(job)}"
        case Standing.FORMING | Standing.SPARE:
            why = explain(job)
        case _:
            pass
    return NodeReply(standing, why, job.version, formed, formed is not None and job.after_loss)


def standing_of(job: Job, known: Node | None, number: int, *, joins: bool) -> Standing:
    """Return a node's standing, a part of :func:`reply_to`'s answer."""
    formed = job.formed
    rank = None if known is None else known.rank
    if joins:
        if (
            known is not None
            and formed is not None
            and rank is not None
            and not known.joining
            and number < formed.number
        ):
            # Even if it is broken already: the node learns that next, and a lost answer is repeated.
            return Standing.PLACED
        if job.over:
            return Standing.OVER
        return Standing.SPARE if formed is not None and not job.broken else Standing.FORMING
    if not number:
        return Standing.FORMING
    if formed is None or number > formed.number:
        return Standing.UNKNOWN
    is_old = number < formed.number or rank is None or job.broken
    return Standing.RESTART if is_old else Standing.PLACED


def explain(job: Job) -> str:
    """Describe what the job does or waits for."""
    if job.over:
        return "it has ended"
    if job.formed is not None and not job.broken:
        spare = f"; waiting nodes: {job.joining}" if job.joining else ""
        return f"generation {job.formed.number} runs on {len(job.formed.members)} nodes{spare}"
    nodes = job.nodes.values()
    if job.awaited:
        names = _some(node.member.name for node in nodes if node.is_awaited)
        return f"waiting for {job.awaited} nodes to stop their workers ({names})"
    if job.joining < job.terms.least:
        there = f" ({_some(node.member.name for node in nodes if node.joining)})" if job.joining else ""
        return f"waiting for nodes: {job.joining} of at least {job.terms.least} have joined{there}"
    return f"last call: {job.joining} of at most {job.terms.most} nodes have joined"


# --- events ----------------------------------------------------------------------------------------------------------


def _joined(job: Job, event: NodeJoined, now: float) -> Job:
    node, formed = event.member.node, job.formed
    known = job.nodes.get(node)
    job = replace(job, last=event.after) if event.after > job.last else job
    if job.over and known is None:
        # The id is being reused.
        job = Job(event.terms, came=job.came, last=job.last, version=job.version + 1)
        formed = None
    elif not job.nodes:
        job = replace(job, terms=event.terms)
    elif event.terms != job.terms:
        raise RendezvousProtocolError(
            f"cannot join: the job's other nodes have different settings ({_terms(job.terms)}) than this one "
            f"({_terms(event.terms)})"
        )
    if known is None:
        newcomer = Node(event.member, job.came, joining=True)
        return replace(job.put(newcomer), came=job.came + 1, empty_at=None)
    if formed is not None and known.rank is not None and not known.joining and event.after < formed.number:
        return job  # its answer was lost: it has a place, and gets the answer again
    job = job.put(replace(known, member=event.member, joining=True))
    if known.rank is not None and not known.joining:
        job = _break(job, f"node {event.member.name} is restarting its workers", now)
    return job


def _claimed(job: Job, event: NodeClaimed, now: float) -> Job:
    """Adopt a generation that an earlier start of this service formed."""
    claimed = event.formed
    is_member = claimed.rank_of(event.member.node) is not None
    if not is_member or job.over or (job.formed is not None and claimed.number <= job.formed.number):
        return job  # an outdated node, or one of a job that has ended
    there = dict(job.nodes)
    members = tuple(
        replace(there.pop(member.node, Node(member, job.came + rank, joining=False)), rank=rank)
        for rank, member in enumerate(claimed.members)
    )
    others = tuple(replace(node, rank=None) for node in there.values())
    job = replace(
        job.only((*members, *others)),
        terms=event.terms,
        formed=claimed,
        broken="",
        is_losing=False,
        after_loss=False,
        finished=0,
        enough_at=None,
        came=job.came + len(members),
        last=max(job.last, claimed.number),
        version=job.version + 1,
        empty_at=None,
    )
    again = next((node for node in members if node.joining), None)
    return job if again is None else _break(job, f"node {again.member.name} is restarting its workers", now)


def _lost(job: Job, nodes: tuple[str, ...], now: float) -> Job:
    lost = [job.nodes[node] for node in nodes if node in job.nodes]
    if not lost:
        return job
    job = job.without(*lost)
    members = [node.member.name for node in lost if node.rank is not None]
    if not members:
        return job
    return _break(
        replace(job, is_losing=True), f"{'node' if len(members) == 1 else 'nodes'} {_some(members)} lost", now
    )


def _left(job: Job, node: str, outcome: Outcome, now: float) -> Job:
    known = job.nodes.get(node)
    if known is None:
        return job
    job = job.without(known)
    if known.rank is None:
        return job
    if outcome is Outcome.SUCCEEDED:
        return replace(job, finished=job.finished + 1)
    words = "failed" if outcome is Outcome.FAILED else "left"
    return _break(replace(job, is_losing=True), f"node {known.member.name} {words}", now)


# --- what follows ----------------------------------------------------------------------------------------------------


def _settled(job: Job, now: float, salt: str) -> Job:
    if job.not_before and now >= job.not_before:
        job = replace(job, not_before=0.0)
    if job.broken and now >= job.broken_at + STRAGGLER_S and job.awaited:
        job = job.put(*(replace(node, rank=None) for node in job.nodes.values() if node.is_awaited))
    formed = job.formed
    if formed is not None and not job.over:
        if not job.ranked and job.finished:
            job = replace(job, over=True, enough_at=None, version=job.version + 1)
        elif not job.broken and job.terms.grow_now and not job.finished and job.ranked < job.terms.most:
            newcomer = next((node for node in job.nodes.values() if node.joining), None) if job.joining else None
            if newcomer is not None:
                job = _break(job, f"node {newcomer.member.name} is joining", now)
    if not job.over and (job.formed is None or job.broken):
        job = _formed(job, now, salt)
    if not job.nodes:
        return replace(job, empty_at=now) if job.empty_at is None else job
    return job if job.empty_at is None else replace(job, empty_at=None)


def _formed(job: Job, now: float, salt: str) -> Job:
    if job.not_before or job.awaited or job.joining < job.terms.least:
        return replace(job, enough_at=None) if job.enough_at is not None else job
    enough_at = now if job.enough_at is None else job.enough_at
    # All remaining members are joining again.
    is_due = job.joining >= job.terms.most or job.ranked >= job.terms.least or now >= enough_at + job.terms.last_call_s
    if not is_due:
        return replace(job, enough_at=enough_at)
    joining = [node for node in job.nodes.values() if node.joining]
    survivors = sorted((node for node in joining if node.rank is not None), key=lambda node: node.rank or 0)
    # Spares have waited longest: they have precedence over later arrivals.
    newcomers = sorted((node for node in joining if node.rank is None), key=lambda node: node.came)
    newcomers = newcomers[: max(0, job.terms.most - len(survivors))]
    newcomers.sort(key=lambda node: (natural_key(node.member.name), node.came))
    members = tuple(node.member for node in (*survivors, *newcomers))[: job.terms.most]
    number = job.last + 1
    formed = Formed(number, f"{number}-{salt}", members)
    ranks = {member.node: rank for rank, member in enumerate(members)}
    nodes = (
        replace(node, rank=ranks.get(name), joining=node.joining and name not in ranks)
        for name, node in job.nodes.items()
    )
    return replace(
        job.put(*nodes),
        formed=formed,
        broken="",
        is_losing=False,
        after_loss=job.is_losing,
        finished=0,
        enough_at=None,
        last=number,
        version=job.version + 1,
    )


def _break(job: Job, why: str, now: float) -> Job:
    if job.broken or job.formed is None:
        return job
    return replace(job, broken=why, broken_at=now, version=job.version + 1)


def _some(names: Iterable[str]) -> str:
    first = list(islice(names, 11))
    return ", ".join(first[:10]) + (", ..." if len(first) > 10 else "")


def _terms(terms: Terms) -> str:
    grow = "now" if terms.grow_now else "restart"
    return f"nnodes {terms.least}:{terms.most}, last_call_timeout {terms.last_call_s:g}, grow {grow}"
