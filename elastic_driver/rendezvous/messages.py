"""The messages of the wire: every request and reply between workers and driver, as values with a JSON form.

Owns shapes and bounds; :mod:`elastic_driver.codec` writes and reads them. Opens no socket. The paths are in
docs/design.md, "Wire".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from elastic_driver.codec import (
    OMITTABLE,
    CodecError,
    Count,
    Cut,
    OsText,
    Seconds,
    Within,
    encode,
    from_data,
    from_text,
)
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.version import __version__
from elastic_driver.words import Backend, NoticeKind, ReadyCause

API = "/v1"
# What is larger goes in pieces: half of what a request to the driver may have.
PIECE_BYTES = 8 << 20

# For people: what a log can hold of an error.
Text = Annotated[str, Cut(2000)]


class Body:
    """A dataclass that is the body of a request or an answer."""

    __slots__ = ()
    _what: ClassVar[str] = "message"  # it is, for errors

    def to_json(self) -> bytes:
        """UTF-8 JSON, one line of ASCII."""
        return encode(type(self), self)

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        value: Self = parse(cls, body, cls._what)
        return value


def parse(kind: Any, body: bytes, what: str = "message") -> Any:
    """A value of this type from JSON; ``what`` it is, for the error.

    Raises:
        RendezvousProtocolError: it is not JSON, or not of this type.
    """
    data = _json(body, what)
    try:
        return from_data(kind, data)
    except CodecError as error:
        # It is read strictly: mostly it has come from another version.
        raise RendezvousProtocolError(
            f"cannot read {what}: {error}; elastic_driver {__version__} reads it, and both ends need the same version"
        ) from None


def _json(body: bytes, what: str) -> Any:
    try:
        return from_text(body)
    except CodecError as error:
        raise RendezvousProtocolError(f"cannot read {what}: {error}") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
        RendezvousProtocolError: it is not JSON, or not an object.
    """
    data = _json(body, "message")
    if not isinstance(data, dict):
        raise RendezvousProtocolError("cannot read message: not a JSON object")
    return data


@dataclass(frozen=True, slots=True)
class NextRoundRequest(Body):
    """``POST /v1/next-round``: the worker is READY and asks for its place in the next round.

    Asking again (the connection broke, the long poll ran out) is harmless: it says the same level.
    """

    worker: WorkerId
    after_round: Count  # the last round this process was in; 0 for none
    commits: Count  # commits of its state, as of its last restore point; 0 for a blank process
    cause: ReadyCause
    detail: Text  # for the log: the error's text
    backends: tuple[Backend, ...]  # what this process can use, best first
    pid: int
    thread: int = 0  # the system's id of a thread that lives as long as the process; 0 for none
    steps: Count = 0  # operations that it has finished since that restore point
    where: Text = ""  # the line of the user's code that the error came through, for people
    raised: bool = False  # whether that code raised it, and not the library
    unreachable: tuple[Count, ...] = ()  # ranks of that round that could not be reached, or acknowledged nothing
    uncommitted_s: Seconds = 0.0  # for how long it had trained there since that restore point, if what it did is lost


class _NextRoundReply(Body):
    """One of several kinds, which its JSON names."""

    __slots__ = ()

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return encode(NextRoundReply, self)


@dataclass(frozen=True, slots=True)
class RoundAssignment(_NextRoundReply):
    """The answer to a READY worker that has a place: everything it needs to know of the round."""

    round_id: int
    slot: SlotInfo
    sync: bool  # whether members broadcast rank 0's state first; the same for all of them
    commits: int  # commits of the state this round goes on from (rank 0's)
    backend: Backend
    address: str = "127.0.0.1"  # of its own machine, on which the worker listens for the others


@dataclass(frozen=True, slots=True)
class Removed(_NextRoundReply):
    """The answer to a READY worker that has no place any more: it ends with exit code 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobOver(_NextRoundReply):
    """The answer to a READY worker when the job has ended."""

    reason: str


NextRoundReply = RoundAssignment | Removed | JobOver


def parse_next_round_reply(body: bytes) -> NextRoundReply:
    """Reads the answer to ``POST /v1/next-round``.

    Raises:
        RendezvousProtocolError: it is none of the three kinds.
    """
    reply: NextRoundReply = parse(NextRoundReply, body)
    return reply


@dataclass(frozen=True, slots=True)
class DiscReport:
    """What a worker that writes commits to disc says of its folder, with its heartbeats.

    Attributes:
        folder: the same for all workers that see the same folder.
        where: its name, for messages.
        written: the newest commit that the worker has put there; -1 for none yet.
        commits: commits of its state.
        trouble: why the newest are not there; "" when there is nothing wrong.
        drivers: whether it is the folder that the job's driver has locked.
    """

    folder: Text
    where: Text
    written: int
    commits: int
    trouble: Text
    drivers: bool


@dataclass(frozen=True, slots=True)
class WatchRequest(Body):
    """``POST /v1/watch``: long poll of a member for the next notice newer than ``version``; its heartbeat, too.

    Attributes:
        worker: who asks.
        round_id: the round it is in.
        version: of the last notice seen; 0 for none.
        progress: grows with each operation that it finishes.
        waiting: whether it waits for other members in one.
        leaving: the last of this round, since the process has called shutdown(): silence is no news from here on.
        exiting: likewise, since it runs its exit handlers: its end is to come.
        disc: of its commits on disc; None when it writes none.
    """

    worker: WorkerId
    round_id: int
    version: int
    progress: int = 0
    waiting: bool = False
    leaving: bool = False
    exiting: bool = False
    disc: DiscReport | None = None


@dataclass(frozen=True, slots=True)
class LeaveRequest(Body):
    """``POST /v1/leave``: a worker was told by a signal to leave. Answered 204, or 410 when it is to end at once."""

    worker: WorkerId
    signal: str


@dataclass(frozen=True, slots=True)
class PublishRequest(Body):
    """``POST /v1/publish``: may the commit that this worker has made in the round be on disc?"""

    round_id: int
    commits: int


@dataclass(frozen=True, slots=True)
class PublishReply(Body):
    """The answer to a :class:`PublishRequest`.

    Attributes:
        granted: whether it may.
        reason: why not, in words; "" when it may.
    """

    granted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DrainHostRequest(Body):
    """``POST /v1/drain``: the workers of a host are to leave; or, to undo that, it may have workers again.

    Attributes:
        hostname: which.
        undo: whether it may have workers again.
        within_s: the seconds that are left until its machine is gone; None when nobody has said. May be missing.
    """

    hostname: str
    undo: bool
    within_s: Annotated[Seconds | None, OMITTABLE] = None


@dataclass(frozen=True, slots=True)
class DrainReply(Body):
    """What comes of a :class:`DrainHostRequest`.

    Attributes:
        done: False when the job has no such host.
        text: the same for people.
    """

    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class EndReply(Body):
    """What comes of ``POST /v1/end``, which has no body.

    Attributes:
        text: for people.
    """

    text: str


@dataclass(frozen=True, slots=True)
class PageRequest(Body):
    """``POST /v1/page``: a link to the job's page.

    Attributes:
        may_act: whether whoever logs in by it may act, and not only look.
    """

    may_act: bool


@dataclass(frozen=True, slots=True)
class PageReply(Body):
    """What comes of a :class:`PageRequest`.

    Attributes:
        urls: links with the same code, the best first; at least one.
    """

    urls: Annotated[list[str], Within(1, 100)] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenReply(Body):
    """Answer to ``POST /v1/token/ROLE``: with what the job is reached from elsewhere, as operator, reader or joiner.

    Attributes:
        token: it; "" where no hosts may join.
        url: of the driver, as people hand it on; "" without a token.
        only_here: whether other machines cannot reach it there.
    """

    token: str = field(repr=False)
    url: str
    only_here: bool


@dataclass(frozen=True, slots=True)
class Notice(Body):
    """What the members of a round are to know now. A level, not an edge: a later one replaces it whole."""

    version: int  # grows with every change, over all rounds
    round_id: int
    kind: NoticeKind
    reason: str


@dataclass(frozen=True, slots=True)
class RunningReport(Body):
    """``POST /v1/running``: the worker's contexts stand and its state is in step; it goes on training.

    Attributes:
        worker: who says so.
        round_id: in which round.
        commits: of the state.
        another: whether it has been through one training since it said so last, and begins the next: commits are
            counted anew.
        total: how many commits, or steps, the training has; 0 when nobody has said.
        synced: whether it has the others' state.
    """

    worker: WorkerId
    round_id: int
    commits: int
    another: bool = False
    total: int = 0
    synced: bool = True


@dataclass(frozen=True, slots=True)
class CallReply(Body):
    """The answer to ``GET /v1/call``: the pickled call is in so many pieces, ``GET /v1/call/N``."""

    pieces: Count


@dataclass(frozen=True, slots=True)
class CheckupReply(Body):
    """The answer to ``GET /v1/checkup``, in the job of ``elasticrun doctor``.

    Attributes:
        unix_s: the driver's clock.
        is_over: whether nobody else is waited for.
        folders: where a job would write on each host, by the flag that names it.
    """

    unix_s: float
    is_over: bool
    folders: dict[str, OsText]


@dataclass(frozen=True, slots=True)
class ServingReport(Body):
    """``POST /v1/serving``: the server of this worker answers, at this port of its host."""

    worker: WorkerId
    port: Annotated[int, Within(1, 65535)]


@dataclass(frozen=True, slots=True)
class ServersRequest(Body):
    """``POST /v1/servers``: the chief asks for the servers, when they are others than those of ``version``.

    Attributes:
        version: of the last answer; 0 for none.
        left: addresses of workers that it has taken out, and gives nothing any more.
    """

    version: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """A worker's server.

    Attributes:
        address: ``host:port``.
        leave_within_s: the seconds that are left until it is stopped, when it is to leave; None for no bound.
        leaving: whether it is to leave. It is stopped as soon as the chief says that it has taken it out.
    """

    address: str
    leave_within_s: Seconds | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Servers(Body):
    """The answer to a :class:`ServersRequest`: all servers that answer now.

    Attributes:
        version: grows with each change.
        parameter_servers: their addresses, in the order of TF_CONFIG.
        workers: those of the workers.
    """

    version: int
    parameter_servers: tuple[str, ...]
    workers: tuple[Server, ...]
