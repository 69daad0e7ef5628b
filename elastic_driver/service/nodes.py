"""Which nodes of a torchrun job run together: every decision about it. Pure: no socket, clock or random source.

Owns the state of one job, and ``step(job, event, now)``, which gives the next one. Nobody is told anything here: what
a node is to be answered follows from the state (:func:`reply_to`), and the service answers when that changes. Who is
silent is found elsewhere (:mod:`~elastic_driver.service.liveness`); what that means is an event like any other.

A node is *joining* (its workers do not run, it waits for its place) or not (it is in the generation, or was). A
generation runs until it is *broken*: a member joins again (its workers have failed), leaves, or is lost; or a node has
come and the job grows at once. Then all members have to join again, and who of them is lost or too late is gone on
without. What a node of an earlier generation hears is RESTART, whenever it comes back: nothing of two generations runs
side by side for longer than it takes a node to hear it.

| joining nodes | the next generation is formed |
|---|---|
| as many as there may be | at once |
| enough are members of the last | at once: who comes meanwhile comes too late, as any newcomer |
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

# How long living members are waited for that do not join again. torch gives workers 30 s to end; who takes longer has
# finished, or hangs.
STRAGGLER_S = 45.0
# A job whose last node is gone is forgotten after this time.
FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is known, and not lost.

    Attributes:
        member: who it is.
        came: the order in which nodes have come.
        joining: whether it waits for a place.
        rank: in the last generation; None when it is none of its members.
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
    """A job.

    Attributes:
        terms: of the job.
        nodes: by number, in the order in which they came. Never changed: each change makes another.
        formed: the last generation; None before the first.
        broken: why it is to end; "" while it runs.
        broken_at: since when.
        is_losing: whether members of it were lost, or have left without success.
        after_loss: whether members of the one before had.
        finished: members of it that have ended with success.
        enough_at: since when enough nodes are joining; None when they are not.
        not_before: nothing is formed before this time: a service that was started again learns first what there is. 0
            when it has passed.
        over: whether the job has ended.
        came: nodes that have come so far.
        last: the highest number of a generation that nodes have had, also from an earlier start of the service.
        version: grows when nodes are to be told something.
        empty_at: since when it has no nodes; None when it has.
        joining: how many nodes are.
        ranked: how many were members of the last generation.
        awaited: how many of these are not joining.
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
        """With these, in the places of those that they were."""
        fresh = {node.member.node: node for node in nodes}
        former = [self.nodes[name] for name in fresh if name in self.nodes]
        return self._become({**self.nodes, **fresh}, more=fresh.values(), fewer=former)

    def without(self, *gone: Node) -> Job:
        """Without these."""
        names = {node.member.node for node in gone}
        return self._become({name: node for name, node in self.nodes.items() if name not in names}, fewer=gone)

    def only(self, nodes: Iterable[Node]) -> Job:
        """With these nodes and no others, in this order."""
        return self.without(*self.nodes.values()).put(*nodes)

    def _become(self, nodes: Mapping[str, Node], *, more: Iterable[Node] = (), fewer: Iterable[Node] = ()) -> Job:
        """With these nodes: more than there were, and fewer. To count all of them anew would cost as much for each."""
        joining, ranked, awaited = self.joining, self.ranked, self.awaited
        for changed, by in ((more, 1), (fewer, -1)):
            for node in changed:
                joining += by * node.joining
                ranked += by * (node.rank is not None)
                awaited += by * node.is_awaited
        return replace(self, nodes=nodes, joining=joining, ranked=ranked, awaited=awaited)


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node asks for its place.

    Attributes:
        member: who.
        terms: of its job, as it has them.
        after: number of the generation that it was in last; 0 before the first.
    """

    member: Member
    terms: Terms
    after: int


@dataclass(frozen=True, slots=True)
class NodeClaimed:
    """A node says in which generation it is: of this job, though nothing is known of it.

    Attributes:
        member: who.
        terms: of its job, as it has them.
        formed: the generation.
    """

    member: Member
    terms: Terms
    formed: Formed


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Nodes have been silent for too long, or their connections have ended."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node has ended, and has said so."""

    node: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing but that."""


Event = NodeJoined | NodeClaimed | NodesLost | NodeLeft | TimePassed


def step(job: Job, event: Event, now: float, salt: str) -> Job:
    """The next state.

    Args:
        job: the state.
        event: what has happened.
        now: when; never goes back.
        salt: what no other generation has in its name.

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
    """When something is due if nothing happens before; None for never."""
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
    """Whether nothing is left of it."""
    return job.empty_at is not None and now >= job.empty_at + FORGET_S


def reply_to(job: Job, known: Node | None, number: int, *, joins: bool) -> NodeReply:
    """What a node is to be told.

    Args:
        job: the state.
        known: the node, as the state has it; None when it is not in there.
        number: of the generation that it knows; 0 for none.
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
    """What :func:`reply_to` tells a node of itself."""
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
            # Also when it is broken already: the node hears of that next, and an answer that was lost is given again.
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
    """What the job does or waits for, in words."""
    if job.over:
        return "it has ended"
    if job.formed is not None and not job.broken:
        spare = f"; {job.joining} wait" if job.joining else ""
        return f"generation {job.formed.number} runs on {len(job.formed.members)} nodes{spare}"
    nodes = job.nodes.values()
    if job.awaited:
        names = _some(node.member.name for node in nodes if node.is_awaited)
        return f"waiting for {job.awaited} nodes to stop their workers ({names})"
    if job.joining < job.terms.least:
        there = f" ({_some(node.member.name for node in nodes if node.joining)})" if job.joining else ""
        return f"waiting for nodes: {job.joining} of at least {job.terms.least} are there{there}"
    return f"a last call: {job.joining} of at most {job.terms.most} nodes are there"


# --- events ----------------------------------------------------------------------------------------------------------


def _joined(job: Job, event: NodeJoined, now: float) -> Job:
    node, formed = event.member.node, job.formed
    known = job.nodes.get(node)
    job = replace(job, last=event.after) if event.after > job.last else job
    if job.over and known is None:
        # The id is used again.
        job = Job(event.terms, came=job.came, last=job.last, version=job.version + 1)
        formed = None
    elif not job.nodes:
        job = replace(job, terms=event.terms)
    elif event.terms != job.terms:
        raise RendezvousProtocolError(
            f"cannot join: the nodes of this job have other terms ({_terms(job.terms)}) than this one "
            f"({_terms(event.terms)})"
        )
    if known is None:
        newcomer = Node(event.member, job.came, joining=True)
        return replace(job.put(newcomer), came=job.came + 1, empty_at=None)
    if formed is not None and known.rank is not None and not known.joining and event.after < formed.number:
        return job  # its answer was lost: it is placed, and is told so again
    job = job.put(replace(known, member=event.member, joining=True))
    if known.rank is not None and not known.joining:
        job = _break(job, f"node {event.member.name} starts its workers again", now)
    return job


def _claimed(job: Job, event: NodeClaimed, now: float) -> Job:
    """Takes over what an earlier start of this service has formed."""
    claimed = event.formed
    is_member = claimed.rank_of(event.member.node) is not None
    if not is_member or job.over or (job.formed is not None and claimed.number <= job.formed.number):
        return job  # a node of the past, or of a job that has ended
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
    return job if again is None else _break(job, f"node {again.member.name} starts its workers again", now)


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
    words = "has failed" if outcome is Outcome.FAILED else "has left"
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
                job = _break(job, f"node {newcomer.member.name} joins", now)
    if not job.over and (job.formed is None or job.broken):
        job = _formed(job, now, salt)
    if not job.nodes:
        return replace(job, empty_at=now) if job.empty_at is None else job
    return job if job.empty_at is None else replace(job, empty_at=None)


def _formed(job: Job, now: float, salt: str) -> Job:
    if job.not_before or job.awaited or job.joining < job.terms.least:
        return replace(job, enough_at=None) if job.enough_at is not None else job
    enough_at = now if job.enough_at is None else job.enough_at
    # All members that are left are joining again.
    is_due = job.joining >= job.terms.most or job.ranked >= job.terms.least or now >= enough_at + job.terms.last_call_s
    if not is_due:
        return replace(job, enough_at=enough_at)
    joining = [node for node in job.nodes.values() if node.joining]
    survivors = sorted((node for node in joining if node.rank is not None), key=lambda node: node.rank or 0)
    # Spares have waited longest: they are taken before those who have come since.
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
