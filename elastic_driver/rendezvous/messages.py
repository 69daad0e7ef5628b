"""The messages of the wire: every request and reply between workers and driver, as values with a JSON form.

Owns shapes and bounds; :mod:`elastic_driver.codec` encodes and decodes them. Opens no socket. The paths are in
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
# Larger bodies are sent in pieces: half of the largest request that the driver accepts.
PIECE_BYTES = 8 << 20

# Text for people: cut to what a log can hold of an error.
Text = Annotated[str, Cut(2000)]


class Body:
    """A dataclass that is the body of a request or an answer."""

    __slots__ = ()
    _what: ClassVar[str] = "message"  # names the message in errors

    def to_json(self) -> bytes:
        """Encode as UTF-8 JSON: one line of ASCII."""
        return encode(type(self), self)

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Decode. Raises RendezvousProtocolError for anything that is not such a message."""
        value: Self = parse(cls, body, cls._what)
        return value


def parse(kind: Any, body: bytes, what: str = "message") -> Any:
    """Decode JSON to a value of this type.

    Args:
        kind: the type.
        body: the JSON.
        what: names the message in errors.

    Raises:
        RendezvousProtocolError: it is not JSON, or not of this type.
    """
    data = _json(body, what)
    try:
        return from_data(kind, data)
    except CodecError as error:
        # Decoding is strict: most errors come from another version.
        raise RendezvousProtocolError(
            f"cannot read {what}: {error}; this end runs elastic_driver {__version__}, and both ends must run the "
            "same version"
        ) from None


def _json(body: bytes, what: str) -> Any:
    try:
        return from_text(body)
    except CodecError as error:
        raise RendezvousProtocolError(f"cannot read {what}: {error}") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

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

    Repeating it (the connection broke, the long poll timed out) is harmless: it is a level, not an edge.
    """

    worker: WorkerId
    after_round: Count  # the last round this process was in; 0 for none
    commits: Count  # commits of its state at its last restore point; 0 for a new process
    cause: ReadyCause
    detail: Text  # for the log: the error's text
    backends: tuple[Backend, ...]  # backends this process can use, best first
    pid: int
    thread: int = 0  # kernel id of a thread that lives as long as the process; 0 for none
    steps: Count = 0  # operations finished since that restore point
    where: Text = ""  # the line of the user's code that the error came through, for people
    raised: bool = False  # whether the user's code raised it, and not the library
    unreachable: tuple[Count, ...] = ()  # ranks of that round that could not be reached or acknowledged nothing
    uncommitted_s: Seconds = 0.0  # seconds it trained there since that restore point, if that work is lost


class _NextRoundReply(Body):
    """One of several kinds of reply; the JSON names the kind."""

    __slots__ = ()

    def to_json(self) -> bytes:
        """Encode as UTF-8 JSON."""
        return encode(NextRoundReply, self)


@dataclass(frozen=True, slots=True)
class RoundAssignment(_NextRoundReply):
    """The answer to a READY worker that has a place: everything it needs for the round."""

    round_id: int
    slot: SlotInfo
    sync: bool  # whether members broadcast rank 0's state first; the same for all of them
    commits: int  # commits of the state that this round resumes from (rank 0's)
    backend: Backend
    address: str = "127.0.0.1"  # address of its own machine, on which the worker listens for the others


@dataclass(frozen=True, slots=True)
class Removed(_NextRoundReply):
    """The answer to a READY worker that no longer has a place: it exits with code 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobOver(_NextRoundReply):
    """The answer to a READY worker when the job has ended."""

    reason: str


NextRoundReply = RoundAssignment | Removed | JobOver


def parse_next_round_reply(body: bytes) -> NextRoundReply:
    """Decode the answer to ``POST /v1/next-round``.

    Raises:
        RendezvousProtocolError: it is not one of the three kinds.
    """
    reply: NextRoundReply = parse(NextRoundReply, body)
    return reply


@dataclass(frozen=True, slots=True)
class DiskReport:
    """The state of a worker's commit folder on disk, sent with its heartbeats.

    Attributes:
        folder: identifies the folder: equal for all workers that see the same one.
        where: the folder's name, for messages.
        written: the newest commit that the worker has written there; -1 for none yet.
        commits: commits of its state.
        trouble: why the newest commits are not there; "" if nothing is wrong.
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
    """``POST /v1/watch``: a member's long poll for the next notice newer than ``version``; also its heartbeat.

    Attributes:
        worker: the worker that asks.
        round_id: its round.
        version: version of the last notice it has seen; 0 for none.
        progress: grows with each operation that it finishes.
        waiting: whether it waits in an operation for other members.
        leaving: whether this is its last watch of the round, since the process called shutdown(): silence is expected
            from here on.
        exiting: likewise, since the process runs its exit handlers and is about to end.
        disk: the state of its commits on disk; None if it writes none.
    """

    worker: WorkerId
    round_id: int
    version: int
    progress: int = 0
    waiting: bool = False
    leaving: bool = False
    exiting: bool = False
    disk: DiskReport | None = None


@dataclass(frozen=True, slots=True)
class LeaveRequest(Body):
    """``POST /v1/leave``: a signal asked a worker to leave. Answered 204, or 410 if it has to end at once."""

    worker: WorkerId
    signal: str


@dataclass(frozen=True, slots=True)
class PublishRequest(Body):
    """``POST /v1/publish``: asks whether the commit that this worker has made in the round may be written to disk."""

    round_id: int
    commits: int


@dataclass(frozen=True, slots=True)
class PublishReply(Body):
    """The answer to a :class:`PublishRequest`.

    Attributes:
        granted: whether the commit may be written.
        reason: why not, in words; "" if it may.
    """

    granted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DrainHostRequest(Body):
    """``POST /v1/drain``: asks the workers of a host to leave, or undoes that.

    Attributes:
        hostname: the host.
        undo: whether the host may have workers again.
        within_s: seconds until its machine is gone; None if unknown. May be omitted.
    """

    hostname: str
    undo: bool
    within_s: Annotated[Seconds | None, OMITTABLE] = None


@dataclass(frozen=True, slots=True)
class DrainReply(Body):
    """The answer to a :class:`DrainHostRequest`.

    Attributes:
        done: False if the job has no such host.
        text: the result, for people.
    """

    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class EndReply(Body):
    """The answer to ``POST /v1/end``, which has no body.

    Attributes:
        text: the result, for people.
    """

    text: str


@dataclass(frozen=True, slots=True)
class PageRequest(Body):
    """``POST /v1/page``: asks for a link to the job's page.

    Attributes:
        may_act: whether a login by this link allows actions, and not only viewing.
    """

    may_act: bool


@dataclass(frozen=True, slots=True)
class PageReply(Body):
    """The answer to a :class:`PageRequest`.

    Attributes:
        urls: links with the same code, best first; at least one.
    """

    urls: Annotated[list[str], Within(1, 100)] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenReply(Body):
    """The answer to ``POST /v1/token/ROLE``: how to reach the job from elsewhere, as operator, reader or joiner.

    Attributes:
        token: the role's token; "" if hosts may not join.
        url: the driver's URL, for people to pass on; "" without a token.
        only_here: whether that URL works on this machine only.
    """

    token: str = field(repr=False)
    url: str
    only_here: bool


@dataclass(frozen=True, slots=True)
class Notice(Body):
    """The state that the members of a round have to react to. A level, not an edge: a newer one replaces it whole."""

    version: int  # grows with every change, over all rounds
    round_id: int
    kind: NoticeKind
    reason: str


@dataclass(frozen=True, slots=True)
class RunningReport(Body):
    """``POST /v1/running``: the worker's contexts are set up and its state is in sync; it is training.

    Attributes:
        worker: the worker that reports.
        round_id: its round.
        commits: commits of its state.
        another: whether it has finished one training since its last report and begins the next: commits restart at 0.
        total: how many commits, or steps, the training has; 0 if unknown.
        synced: whether it has received the others' state.
    """

    worker: WorkerId
    round_id: int
    commits: int
    another: bool = False
    total: int = 0
    synced: bool = True


@dataclass(frozen=True, slots=True)
class CallReply(Body):
    """The answer to ``GET /v1/call``: the number of pieces of the pickled call, each at ``GET /v1/call/N``."""

    pieces: Count


@dataclass(frozen=True, slots=True)
class CheckupReply(Body):
    """The answer to ``GET /v1/checkup``, in the job of ``elasticrun doctor``.

    Attributes:
        unix_s: the driver's clock.
        is_over: whether the driver waits for no other worker.
        folders: the folders that a job would write to on each host, by the flag that names each.
    """

    unix_s: float
    is_over: bool
    folders: dict[str, OsText]


@dataclass(frozen=True, slots=True)
class ServingReport(Body):
    """``POST /v1/serving``: this worker's server accepts requests, at this port of its host."""

    worker: WorkerId
    port: Annotated[int, Within(1, 65535)]


@dataclass(frozen=True, slots=True)
class ServersRequest(Body):
    """``POST /v1/servers``: the chief asks for the servers, once they differ from those of ``version``.

    Attributes:
        version: version of the last answer; 0 for none.
        left: addresses of workers that the chief has removed and gives no more work.
    """

    version: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """A worker's server.

    Attributes:
        address: ``host:port``.
        leave_within_s: seconds until it is stopped, if it is leaving; None for no limit.
        leaving: whether it is leaving. It is stopped as soon as the chief reports that it has removed it.
    """

    address: str
    leave_within_s: Seconds | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Servers(Body):
    """The answer to a :class:`ServersRequest`: all servers that accept requests now.

    Attributes:
        version: grows with each change.
        parameter_servers: their addresses, in the order of TF_CONFIG.
        workers: the workers' servers.
    """

    version: int
    parameter_servers: tuple[str, ...]
    workers: tuple[Server, ...]
