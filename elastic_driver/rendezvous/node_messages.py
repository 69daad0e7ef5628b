"""What an agent of torchrun says to ``elasticrun rendezvous``, and is answered: ``POST /v1/nodes``.

Owns shapes and validation; JSON both ways. Pure: knows no socket, clock or random source. A *node* is one such agent,
with a number of its own; a *generation* is a set of nodes whose workers run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from elastic_driver.codec import Within
from elastic_driver.rendezvous.messages import Body

MOST_NODES = 100_000
# Of generations and versions: each is followed by another.
_Number = Annotated[int, Within(0, 1 << 62)]
_Start = Annotated[int, Within(0, 1 << 63)]
_Nodes = Annotated[int, Within(1, MOST_NODES)]
_Name = Annotated[str, Within(0, 1024)]
_Id = Annotated[str, Within(1, 1024)]
_Seconds = Annotated[float, Within(0, 1e7)]


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

    least: _Nodes
    most: _Nodes
    last_call_s: _Seconds = 1.0
    grow_now: bool = False
    lost_s: Annotated[_Seconds, Within(0.001, 1e7)] = 3.0

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"cannot run a job on {self.least} to {self.most} nodes")


@dataclass(frozen=True, slots=True)
class Member:
    """A node in a generation.

    Attributes:
        node: its number; random hexadecimal digits.
        name: of its host.
        address: at which other nodes reach it.
        port: at which it serves the store of its generation's workers, if they are of rank 0.
    """

    node: Annotated[str, Within(1, 64)]
    name: _Name
    address: _Name
    port: Annotated[int, Within(0, 65535)]


@dataclass(frozen=True, slots=True)
class Formed:
    """A generation that was formed.

    Attributes:
        number: grows by 1.
        scope: of the keys of its agents; no other generation ever has it.
        members: in the order of their ranks.
    """

    number: Annotated[_Number, Within(1, 1 << 62)]
    scope: _Id
    members: Annotated[tuple[Member, ...], Within(1, MOST_NODES)]

    def __post_init__(self) -> None:
        if len({member.node for member in self.members}) != len(self.members):
            raise ValueError("has a node twice")

    def rank_of(self, node: str) -> int | None:
        """The node's rank; None when it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)


@dataclass(frozen=True, slots=True)
class NodeRequest(Body):
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
        start: of the service that it was answered by last; 0 for none. Likewise.
        wait_s: how long it may be parked.
        outcome: how it ends, where it does.
    """

    saying: Saying
    job: _Id
    member: Member
    terms: Terms
    number: _Number = 0
    formed: Formed | None = None
    version: _Number = 0
    start: _Start = 0
    wait_s: _Seconds = 0.0
    outcome: Outcome = Outcome.LEFT


class Standing(StrEnum):
    """What a node is told of itself."""

    PLACED = "placed"  # it is in a generation, and its workers run or are to be started
    RESTART = "restart"  # its workers are to be stopped, and it is to join again
    FORMING = "forming"  # it waits for others
    SPARE = "spare"  # it waits while a generation runs
    OVER = "over"  # the job has ended without it
    UNKNOWN = "unknown"  # the service does not know its generation, and asks what it is


@dataclass(frozen=True, slots=True)
class NodeReply(Body):
    """What a node is answered.

    Attributes:
        standing: of the node.
        why: in words.
        version: of this answer.
        formed: its generation, where it is placed in one.
        after_loss: whether nodes of the one before it were lost: then its workers' end is no fault of theirs.
        start: tells this start of the service from others; it keeps nothing over its own death.
    """

    standing: Standing
    why: str
    version: _Number
    formed: Formed | None = None
    after_loss: bool = False
    start: _Start = 0
