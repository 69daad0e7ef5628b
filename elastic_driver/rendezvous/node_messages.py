"""What an agent of torchrun says to ``elasticrun rendezvous``, and is answered: ``POST /v1/nodes``.

Owns shapes and validation; JSON both ways. Pure: knows no socket, clock or random source. A *node* is one such agent,
with a number of its own; a *generation* is a set of nodes whose workers run together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from elastic_driver.errors import RendezvousProtocolError

MOST_NODES = 100_000
_MOST_TEXT = 1024
_MOST_SECONDS = 1e7
# Of generations and versions; what has more than a machine word is no number of ours.
_MOST_NUMBER = 1 << 62


class Saying(StrEnum):
    """What a node says."""

    JOIN = "join"  # its workers do not run: it asks for its place in a generation
    BEAT = "beat"  # it lives
    LEAVE = "leave"  # it ends


class Outcome(StrEnum):
    """How a node ends."""

    SUCCEEDED = "succeeded"  # its workers have ended with 0
    FAILED = "failed"  # they have not, and are not started again
    LEFT = "left"  # it was told to end


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job asks of its generations. All nodes of a job have the same.

    Attributes:
        least: nodes, or none runs.
        most: nodes; more wait as spares.
        last_call_s: how long more are waited for when there are enough.
        grow_now: whether a node that comes has the others restart their workers; else it waits until they do.
        lost_s: how long a node may be silent.
    """

    least: int
    most: int
    last_call_s: float = 1.0
    grow_now: bool = False
    lost_s: float = 3.0

    def to_data(self) -> list[object]:
        """As it stands in JSON."""
        return [self.least, self.most, self.last_call_s, self.grow_now, self.lost_s]

    @classmethod
    def read(cls, data: Any) -> Self:
        """The inverse of :meth:`to_data`. Raises RendezvousProtocolError."""
        match data:
            case [int(least), int(most), int() | float() as last_call_s, bool(grow_now), int() | float() as lost_s]:
                pass
            case _:
                raise RendezvousProtocolError("cannot read message: field 'terms' is missing or wrong")
        if not 1 <= least <= most <= MOST_NODES:
            raise RendezvousProtocolError(f"cannot run a job on {least} to {most} nodes")
        if not (_is_seconds(last_call_s) and _is_seconds(lost_s) and lost_s > 0):
            raise RendezvousProtocolError(f"cannot wait for {last_call_s} or {lost_s} s")
        return cls(least, most, float(last_call_s), grow_now, float(lost_s))


@dataclass(frozen=True, slots=True)
class Member:
    """A node in a generation.

    Attributes:
        node: its number; random hexadecimal digits.
        name: of its host.
        address: at which other nodes reach it.
        port: at which it serves the store of its generation's workers, if they are of rank 0.
    """

    node: str
    name: str
    address: str
    port: int

    def to_data(self) -> list[object]:
        """As it stands in JSON."""
        return [self.node, self.name, self.address, self.port]

    @classmethod
    def read(cls, data: Any) -> Self:
        """The inverse of :meth:`to_data`. Raises RendezvousProtocolError."""
        match data:
            case [str(node), str(name), str(address), int(port)]:
                if 0 < len(node) <= 64 and max(len(name), len(address)) <= _MOST_TEXT and 0 <= port < 65536:
                    return cls(node, name, address, port)
            case _:
                pass
        raise RendezvousProtocolError("cannot read message: a node is missing or wrong")


@dataclass(frozen=True, slots=True)
class Formed:
    """A generation that was formed.

    Attributes:
        number: grows by 1.
        scope: of the keys of its agents; no other generation ever has it.
        members: in the order of their ranks.
    """

    number: int
    scope: str
    members: tuple[Member, ...]

    def rank_of(self, node: str) -> int | None:
        """The node's rank; None when it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)

    def to_data(self) -> list[object]:
        """As it stands in JSON."""
        return [self.number, self.scope, [member.to_data() for member in self.members]]

    @classmethod
    def read(cls, data: Any) -> Self:
        """The inverse of :meth:`to_data`. Raises RendezvousProtocolError."""
        match data:
            case [int(number), str(scope), list(members)] if number > 0 and _is_number(number) and _is_text(scope):
                read = tuple(Member.read(each) for each in members)
                if read and len({member.node for member in read}) == len(read):
                    return cls(number, scope, read)
            case _:
                pass
        raise RendezvousProtocolError("cannot read message: a generation is missing or wrong")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What a node says.

    Attributes:
        saying: what.
        job: the job's id (``--rdzv-id``).
        member: who says it.
        terms: of its job.
        number: of the generation that it is in, or was in last; 0 before the first.
        formed: that generation, where the service has asked for it: one that was started again learns from it what
            there is. Else None.
        version: of what it was answered last; it is answered at once when there is something else.
        wait_s: how long it may be parked.
        outcome: how it ends, where it does.
    """

    saying: Saying
    job: str
    member: Member
    terms: Terms
    number: int = 0
    formed: Formed | None = None
    version: int = 0
    wait_s: float = 0.0
    outcome: Outcome = Outcome.LEFT

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps(
            {
                "saying": self.saying,
                "job": self.job,
                "member": self.member.to_data(),
                "terms": self.terms.to_data(),
                "number": self.number,
                "formed": None if self.formed is None else self.formed.to_data(),
                "version": self.version,
                "wait_s": self.wait_s,
                "outcome": self.outcome,
            }
        ).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = _object(body)
        try:
            saying, outcome = Saying(data["saying"]), Outcome(data["outcome"])
            job, version, wait_s, formed = data["job"], data["version"], data["wait_s"], data["formed"]
            member, terms, number = data["member"], data["terms"], data["number"]
        except (KeyError, ValueError) as error:
            raise RendezvousProtocolError(f"cannot read message: {error!r}") from None
        if not (isinstance(job, str) and _is_text(job)):
            raise RendezvousProtocolError("cannot read message: the job's id (--rdzv-id) is missing or too long")
        if not (_is_number(version) and _is_number(number) and _is_seconds(wait_s)):
            raise RendezvousProtocolError("cannot read message: field 'number', 'version' or 'wait_s' is wrong")
        claimed = None if formed is None else Formed.read(formed)
        who = Member.read(member)
        return cls(saying, job, who, Terms.read(terms), number, claimed, version, float(wait_s), outcome)


class Standing(StrEnum):
    """What a node is told of itself."""

    PLACED = "placed"  # it is in a generation, and its workers run or are to be started
    RESTART = "restart"  # its workers are to be stopped, and it is to join again
    FORMING = "forming"  # it waits for others
    SPARE = "spare"  # it waits while a generation runs
    OVER = "over"  # the job has ended without it
    UNKNOWN = "unknown"  # the service does not know its generation, and asks what it is


@dataclass(frozen=True, slots=True)
class NodeReply:
    """What a node is answered.

    Attributes:
        standing: of the node.
        why: in words.
        version: of this answer.
        formed: its generation, where it is placed in one.
        after_loss: whether nodes of the one before it were lost: then its workers' end is no fault of theirs.
    """

    standing: Standing
    why: str
    version: int
    formed: Formed | None = None
    after_loss: bool = False

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        formed = None if self.formed is None else self.formed.to_data()
        return json.dumps(
            {
                "standing": self.standing,
                "why": self.why,
                "version": self.version,
                "formed": formed,
                "after_loss": self.after_loss,
            }
        ).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = _object(body)
        try:
            standing, formed = Standing(data["standing"]), data["formed"]
            why, version, after_loss = data["why"], data["version"], data["after_loss"]
        except (KeyError, ValueError) as error:
            raise RendezvousProtocolError(f"cannot read message: {error!r}") from None
        if not (isinstance(why, str) and _is_number(version) and isinstance(after_loss, bool)):
            raise RendezvousProtocolError("cannot read message: field 'why', 'version' or 'after_loss' is wrong")
        return cls(standing, why, version, None if formed is None else Formed.read(formed), after_loss)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise RendezvousProtocolError("cannot read message: not JSON") from None
    if not isinstance(data, dict):
        raise RendezvousProtocolError("cannot read message: not a JSON object")
    return data


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST_SECONDS  # neither is what is not finite


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NUMBER


def _is_text(value: str) -> bool:
    return 0 < len(value) <= _MOST_TEXT
