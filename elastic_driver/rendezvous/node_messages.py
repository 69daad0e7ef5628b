"""The messages between an agent of torchrun and ``elasticrun rendezvous``: ``POST /v1/nodes``.

Owns shapes and validation; JSON both ways. Pure: knows no socket, clock or random source. A *node* is one such agent,
with its own number; a *generation* is a set of nodes whose workers run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from elastic_driver.codec import Within
from elastic_driver.rendezvous.messages import Body

MOST_NODES = 100_000
# Of generations and versions; each must have a successor.
_Number = Annotated[int, Within(0, 1 << 62)]
_Start = Annotated[int, Within(0, 1 << 63)]
_Nodes = Annotated[int, Within(1, MOST_NODES)]
_Name = Annotated[str, Within(0, 1024)]
_Id = Annotated[str, Within(1, 1024)]
_Seconds = Annotated[float, Within(0, 1e7)]


class Saying(StrEnum):
    """The kind of a node's request."""

    JOIN = "join"  # its workers do not run: it asks for a place in a generation
    BEAT = "beat"  # a heartbeat
    LEAVE = "leave"  # it ends


class Outcome(StrEnum):
    """How a node ends."""

    SUCCEEDED = "succeeded"  # its workers have exited with 0
    FAILED = "failed"  # they have not, and are not restarted
    LEFT = "left"  # it was asked to end


@dataclass(frozen=True, slots=True)
class Terms:
    """A job's requirements for its generations; the same on all its nodes.

    Attributes:
        least: fewest nodes that run.
        most: most nodes that run; further ones wait as spares.
        last_call_s: how long to wait for more nodes once there are enough.
        grow_now: whether a new node makes the others restart their workers; else it waits until they do.
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
        name: its host's name.
        address: the address at which other nodes reach it.
        port: the port at which it serves the store of its generation's workers, if it has rank 0.
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
        scope: scope of its agents' keys; no other generation ever has it.
        members: in the order of their ranks.
    """

    number: Annotated[_Number, Within(1, 1 << 62)]
    scope: _Id
    members: Annotated[tuple[Member, ...], Within(1, MOST_NODES)]

    def __post_init__(self) -> None:
        if len({member.node for member in self.members}) != len(self.members):
            raise ValueError("lists a node twice")

    def rank_of(self, node: str) -> int | None:
        """Return the node's rank; None if it is not a member."""
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)


@dataclass(frozen=True, slots=True)
class NodeRequest(Body):
    """A node's request.

    Attributes:
        saying: its kind.
        job: the job's id (``--rdzv-id``).
        member: the node.
        terms: its job's terms.
        number: number of its current or last generation; 0 before the first.
        formed: that generation, if the service has asked for it: a restarted service learns from it which generations
            exist. Else None.
        version: version of the last answer; if the current one differs, the service answers at once.
        start: the service's start as of the last answer, 0 for none; likewise.
        wait_s: how long the request may be parked.
        outcome: how the node ends, if it does.
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
    """The state of a node, as the service reports it."""

    PLACED = "placed"  # it is in a generation, and its workers run or have to be started
    RESTART = "restart"  # it has to stop its workers and join again
    FORMING = "forming"  # it waits for other nodes
    SPARE = "spare"  # it waits while a generation runs
    OVER = "over"  # the job has ended without it
    UNKNOWN = "unknown"  # the service does not know its generation, and asks for it


@dataclass(frozen=True, slots=True)
class NodeReply(Body):
    """The answer to a node.

    Attributes:
        standing: the node's state.
        why: the reason, in words.
        version: version of this answer.
        formed: its generation, if it has a place in one.
        after_loss: whether the generation before lost nodes: then its workers are not to blame for their end.
        start: distinguishes this start of the service from others; it keeps nothing across restarts.
    """

    standing: Standing
    why: str
    version: _Number
    formed: Formed | None = None
    after_loss: bool = False
    start: _Start = 0
