"""The words of the wire: every request and reply between workers and driver, as values with a JSON form.

Owns shapes and validation, both directions. Opens no socket. The paths are in docs/design.md, "Wire".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Self

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.words import Backend, NoticeKind, ReadyCause

API = "/v1"
# What is larger goes in pieces: half of what a request to the driver may have.
PIECE_BYTES = 8 << 20
# Of a message, either way: Python writes and adds to longer ones, but not to those of any length.
MOST_INTEGER = (1 << 63) - 1


def _get(data: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int) or not _is_short(value):
        raise RendezvousProtocolError(f"cannot read message: field {name!r} is missing or of the wrong type")
    return value


def _is_short(value: Any) -> bool:
    return not isinstance(value, int) or -MOST_INTEGER <= value <= MOST_INTEGER


def _seconds(data: Mapping[str, Any], name: str) -> float:
    value = _get(data, name, (int, float))
    # The longest time that a float holds is below the inf that it is compared with.
    if isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise RendezvousProtocolError(f"cannot read message: field {name!r} is no number of seconds")
    return float(value)


def _ints(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _get(data, name, list)
    if not all(type(value) is int and _is_short(value) for value in values):
        raise RendezvousProtocolError(f"cannot read message: field {name!r} is not a list of integers")
    return tuple(values)


def _texts(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = _get(data, name, list)
    if not all(isinstance(value, str) for value in values):
        raise RendezvousProtocolError(f"cannot read message: field {name!r} is not a list of texts")
    return tuple(values)


def _ranks(data: Mapping[str, Any]) -> tuple[int, ...]:
    ranks = _get(data, "unreachable", list)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= MOST_INTEGER for rank in ranks):
        raise RendezvousProtocolError("cannot read message: its 'unreachable' is no list of ranks")
    return tuple(ranks)


def _worker(data: Mapping[str, Any]) -> WorkerId:
    try:
        return WorkerId.parse(_get(data, "worker", str))
    except ValueError as error:  # SettingsError is one; so is what int() says of thousands of digits
        raise RendezvousProtocolError(str(error)) from None


def _text(data: Mapping[str, Any], name: str) -> str:
    # JSON may carry halves of surrogate pairs, which no log can be written with.
    return str(_get(data, name, str))[:2000].encode("utf-8", "replace").decode()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RendezvousProtocolError(f"cannot read message: not JSON ({error})") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
        RendezvousProtocolError: it is not JSON, or not an object.
    """
    data = _parsed(body)
    if not isinstance(data, dict):
        raise RendezvousProtocolError("cannot read message: not a JSON object")
    return data


def parse_array(body: bytes) -> list[Any]:
    """A JSON array from bytes.

    Raises:
        RendezvousProtocolError: it is not JSON, or not an array.
    """
    data = _parsed(body)
    if not isinstance(data, list):
        raise RendezvousProtocolError("cannot read message: not a JSON array")
    return data


@dataclass(frozen=True, slots=True)
class NextRoundRequest:
    """``POST /v1/next-round``: the worker is READY and asks for its place in the next round.

    Asking again (the connection broke, the long poll ran out) is harmless: it says the same level.
    """

    worker: WorkerId
    after_round: int  # the last round this process was in; 0 for none
    commits: int  # commits of its state, as of its last restore point; 0 for a blank process
    cause: ReadyCause
    detail: str  # for the log: the error's text
    backends: tuple[Backend, ...]  # what this process can use, best first
    pid: int
    thread: int = 0  # the system's id of a thread that lives as long as the process; 0 for none
    steps: int = 0  # operations that it has finished since that restore point
    where: str = ""  # the line of the user's code that the error came through, for people
    raised: bool = False  # whether that code raised it, and not the library
    unreachable: tuple[int, ...] = ()  # ranks of that round that could not be reached, or acknowledged nothing
    uncommitted_s: float = 0.0  # for how long it had trained there since that restore point, if what it did is lost

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps(
            {
                "worker": self.worker.key,
                "after_round": self.after_round,
                "commits": self.commits,
                "cause": self.cause,
                "detail": self.detail,
                "backends": list(self.backends),
                "pid": self.pid,
                "thread": self.thread,
                "steps": self.steps,
                "where": self.where,
                "raised": self.raised,
                "unreachable": list(self.unreachable),
                "uncommitted_s": self.uncommitted_s,
            }
        ).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        try:
            cause = ReadyCause(_get(data, "cause", str))
            backends = tuple(Backend(name) for name in _get(data, "backends", list))
        except ValueError as error:
            raise RendezvousProtocolError(f"cannot read message: {error}") from None
        after_round, commits = _get(data, "after_round", int), _get(data, "commits", int)
        steps = _get(data, "steps", int)
        if min(after_round, commits, steps) < 0:
            raise RendezvousProtocolError("cannot read message: a round or a number of commits or steps is below 0")
        return cls(
            worker=_worker(data),
            after_round=after_round,
            commits=commits,
            cause=cause,
            detail=_text(data, "detail"),
            backends=backends,
            pid=_get(data, "pid", int),
            thread=_get(data, "thread", int),
            steps=steps,
            where=_text(data, "where"),
            raised=_get(data, "raised", bool),
            unreachable=_ranks(data),
            # A worker of an older library does not say it.
            uncommitted_s=_seconds(data, "uncommitted_s") if "uncommitted_s" in data else 0.0,
        )


@dataclass(frozen=True, slots=True)
class RoundAssignment:
    """The answer to a READY worker that has a place: everything it needs to know of the round."""

    round_id: int
    slot: SlotInfo
    sync: bool  # whether members broadcast rank 0's state first; the same for all of them
    commits: int  # commits of the state this round goes on from (rank 0's)
    backend: Backend
    address: str = "127.0.0.1"  # of its own machine, on which the worker listens for the others

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        slot = self.slot
        return json.dumps(
            {
                "kind": "round",
                "round_id": self.round_id,
                "slot": [
                    slot.rank,
                    slot.size,
                    slot.local_rank,
                    slot.local_size,
                    slot.cross_rank,
                    slot.cross_size,
                ],
                "sync": self.sync,
                "commits": self.commits,
                "backend": self.backend,
                "address": self.address,
            }
        ).encode()


@dataclass(frozen=True, slots=True)
class Removed:
    """The answer to a READY worker that has no place any more: it ends with exit code 0."""

    reason: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"kind": "removed", "reason": self.reason}).encode()


@dataclass(frozen=True, slots=True)
class JobOver:
    """The answer to a READY worker when the job has ended."""

    reason: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"kind": "job_over", "reason": self.reason}).encode()


NextRoundReply = RoundAssignment | Removed | JobOver


def parse_next_round_reply(body: bytes) -> NextRoundReply:
    """Reads the answer to ``POST /v1/next-round``.

    Raises:
        RendezvousProtocolError: it is none of the three kinds.
    """
    data = parse_json(body)
    match data.get("kind"):
        case "round":
            numbers = _ints(data, "slot")
            if len(numbers) != 6:
                raise RendezvousProtocolError("cannot read message: a slot has six numbers")
            try:
                backend = Backend(_get(data, "backend", str))
            except ValueError as error:
                raise RendezvousProtocolError(f"cannot read message: {error}") from None
            return RoundAssignment(
                round_id=_get(data, "round_id", int),
                slot=SlotInfo(*numbers),
                sync=_get(data, "sync", bool),
                commits=_get(data, "commits", int),
                backend=backend,
                address=_get(data, "address", str),
            )
        case "removed":
            return Removed(_get(data, "reason", str))
        case "job_over":
            return JobOver(_get(data, "reason", str))
        case kind:
            raise RendezvousProtocolError(f"cannot read message: unknown kind {kind!r}")


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

    folder: str
    where: str
    written: int
    commits: int
    trouble: str
    drivers: bool

    @classmethod
    def read(cls, values: Sequence[Any]) -> Self | None:
        """From the fields' values; None for no values. Raises RendezvousProtocolError."""
        if not values:
            return None
        names = [field.name for field in fields(cls)]
        if len(values) != len(names):
            raise RendezvousProtocolError(f"cannot read message: {len(values)} values of a folder's {len(names)}")
        data = dict(zip(names, values, strict=True))

        def text(name: str) -> str:
            return str(_get(data, name, str)[:2000].encode("utf-8", "replace").decode())

        return cls(
            text("folder"),
            text("where"),
            _get(data, "written", int),
            _get(data, "commits", int),
            text("trouble"),
            _get(data, "drivers", bool),
        )


@dataclass(frozen=True, slots=True)
class WatchRequest:
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

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps(
            {
                "worker": self.worker.key,
                "round_id": self.round_id,
                "version": self.version,
                "progress": self.progress,
                "waiting": self.waiting,
                "leaving": self.leaving,
                "exiting": self.exiting,
                "disc": [] if self.disc is None else astuple(self.disc),
            }
        ).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        return cls(
            _worker(data),
            _get(data, "round_id", int),
            _get(data, "version", int),
            _get(data, "progress", int),
            _get(data, "waiting", bool),
            _get(data, "leaving", bool),
            _get(data, "exiting", bool),
            DiscReport.read(_get(data, "disc", list)),
        )


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """``POST /v1/leave``: a worker was told by a signal to leave. Answered 204, or 410 when it is to end at once."""

    worker: WorkerId
    signal: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"worker": self.worker.key, "signal": self.signal}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        return cls(_worker(data), _get(data, "signal", str))


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """``POST /v1/publish``: may the commit that this worker has made in the round be on disc?"""

    round_id: int
    commits: int

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"round_id": self.round_id, "commits": self.commits}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        return cls(_get(data, "round_id", int), _get(data, "commits", int))


@dataclass(frozen=True, slots=True)
class PublishReply:
    """The answer to a :class:`PublishRequest`.

    Attributes:
        granted: whether it may.
        reason: why not, in words; "" when it may.
    """

    granted: bool
    reason: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"granted": self.granted, "reason": self.reason}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        return cls(_get(data, "granted", bool), _get(data, "reason", str))


@dataclass(frozen=True, slots=True)
class DrainHostRequest:
    """``POST /v1/drain``: the workers of a host are to leave; or, to undo that, it may have workers again.

    Attributes:
        hostname: which.
        undo: whether it may have workers again.
        within_s: the seconds that are left until its machine is gone; None when nobody has said. May be left out.
    """

    hostname: str
    undo: bool
    within_s: float | None = None

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        within = {} if self.within_s is None else {"within_s": self.within_s}
        return json.dumps({"hostname": self.hostname, "undo": self.undo, **within}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        within_s = _seconds(data, "within_s") if "within_s" in data else None
        return cls(_get(data, "hostname", str), _get(data, "undo", bool), within_s)


@dataclass(frozen=True, slots=True)
class DrainReply:
    """What comes of a :class:`DrainHostRequest`.

    Attributes:
        done: False when the job has no such host.
        text: the same for people.
    """

    done: bool
    text: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"done": self.done, "text": self.text}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        return cls(_get(data, "done", bool), _get(data, "text", str))


@dataclass(frozen=True, slots=True)
class EndReply:
    """What comes of ``POST /v1/end``, which has no body.

    Attributes:
        text: for people.
    """

    text: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"text": self.text}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        return cls(_get(parse_json(body), "text", str))


@dataclass(frozen=True, slots=True)
class PageRequest:
    """``POST /v1/page``: a link to the job's page.

    Attributes:
        may_act: whether whoever logs in by it may act, and not only look.
    """

    may_act: bool

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"may_act": self.may_act}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        return cls(_get(parse_json(body), "may_act", bool))


@dataclass(frozen=True, slots=True)
class PageReply:
    """What comes of a :class:`PageRequest`.

    Attributes:
        urls: links with the same code, the best first; at least one.
    """

    urls: list[str] = field(repr=False)

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"urls": self.urls}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        urls = _get(parse_json(body), "urls", list)
        if not urls or not all(isinstance(url, str) for url in urls):
            raise RendezvousProtocolError("cannot read the links to the page")
        return cls(urls)


@dataclass(frozen=True, slots=True)
class Notice:
    """What the members of a round are to know now. A level, not an edge: a later one replaces it whole."""

    version: int  # grows with every change, over all rounds
    round_id: int
    kind: NoticeKind
    reason: str

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps(
            {"version": self.version, "round_id": self.round_id, "kind": self.kind, "reason": self.reason}
        ).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        try:
            kind = NoticeKind(_get(data, "kind", str))
        except ValueError as error:
            raise RendezvousProtocolError(f"cannot read message: {error}") from None
        return cls(_get(data, "version", int), _get(data, "round_id", int), kind, _get(data, "reason", str))


@dataclass(frozen=True, slots=True)
class RunningReport:
    """``POST /v1/running``: the worker's contexts stand and its state is in step; it goes on training.

    Attributes:
        worker: who says so.
        round_id: in which round.
        commits: of the state.
        another: whether it has been through one training since it said so last, and begins the next: commits are
            counted anew.
        total: how many commits, or steps, the training has; 0 when nobody has said. May be left out.
        synced: whether it has the others' state. May be left out: it has.
    """

    worker: WorkerId
    round_id: int
    commits: int
    another: bool = False
    total: int = 0
    synced: bool = True

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        data = {"worker": self.worker.key, "round_id": self.round_id, "commits": self.commits, "another": self.another}
        data |= {"total": self.total} if self.total else {}
        return json.dumps(data if self.synced else {**data, "synced": False}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        round_id, commits = _get(data, "round_id", int), _get(data, "commits", int)
        total = _get(data, "total", int) if "total" in data else 0
        synced = _get(data, "synced", bool) if "synced" in data else True
        return cls(_worker(data), round_id, commits, _get(data, "another", bool), total, synced)


@dataclass(frozen=True, slots=True)
class ServingReport:
    """``POST /v1/serving``: the server of this worker answers, at this port of its host."""

    worker: WorkerId
    port: int

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"worker": self.worker.key, "port": self.port}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        port = _get(data, "port", int)
        if not 0 < port < 1 << 16:
            raise RendezvousProtocolError(f"cannot read message: {port} is not a port")
        return cls(_worker(data), port)


@dataclass(frozen=True, slots=True)
class ServersRequest:
    """``POST /v1/servers``: the chief asks for the servers, when they are others than those of ``version``.

    Attributes:
        version: of the last answer; 0 for none.
        left: addresses of workers that it has taken out, and gives nothing any more.
    """

    version: int
    left: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"version": self.version, "left": list(self.left)}).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        return cls(_get(data, "version", int), _texts(data, "left"))


@dataclass(frozen=True, slots=True)
class Server:
    """A worker's server.

    Attributes:
        address: ``host:port``.
        leave_within_s: the seconds that are left until it is stopped, when it is to leave; None for no bound.
        leaving: whether it is to leave. It is stopped as soon as the chief says that it has taken it out.
    """

    address: str
    leave_within_s: float | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Servers:
    """The answer to a :class:`ServersRequest`: all servers that answer now.

    Attributes:
        version: grows with each change.
        parameter_servers: their addresses, in the order of TF_CONFIG.
        workers: those of the workers.
    """

    version: int
    parameter_servers: tuple[str, ...]
    workers: tuple[Server, ...]

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        workers = [[one.address, one.leave_within_s, one.leaving] for one in self.workers]
        return json.dumps(
            {"version": self.version, "parameter_servers": list(self.parameter_servers), "workers": workers}
        ).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Raises RendezvousProtocolError for anything that is not such a message."""
        data = parse_json(body)
        workers = []
        for row in _get(data, "workers", list):
            if not isinstance(row, list) or len(row) != 3:
                raise RendezvousProtocolError("cannot read message: a worker's server has three values")
            one = dict(zip(("address", "leave_within_s", "leaving"), row, strict=True))
            left_s = None if one["leave_within_s"] is None else _seconds(one, "leave_within_s")
            workers.append(Server(_get(one, "address", str), left_s, _get(one, "leaving", bool)))
        return cls(_get(data, "version", int), _texts(data, "parameter_servers"), tuple(workers))
