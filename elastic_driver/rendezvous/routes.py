"""Routes: what can be asked of a server, by whom, and who answers.

Owns the shape of a route, the table that finds one, and how answers and errors are written. Whoever owns a matter gives
the routes for it (``Rounds.routes``). A server is made with all of its routes and knows paths and permissions only; the
requests that come over an agent's connection are found in the same table (:mod:`elastic_driver.driver.agent_requests`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from elastic_driver.errors import RendezvousClosedError, RendezvousError, RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import (
    API,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
    WatchRequest,
)

AGENT = frozenset({Role.TICKET, Role.JOINER, Role.AGENT})
WORKER = frozenset({Role.WORKER})
OPERATOR = frozenset({Role.OPERATOR})
MEMBER = frozenset({Role.MEMBER})
CHIEF = frozenset({Role.CHIEF})
ALL = frozenset({Role.WORKER, Role.OPERATOR, Role.READER})

ANY_PATH = "**"
# A wait that takes longer than a day is no wait any more.
_MAX_WAIT_S = 86400.0


class NotAllowedError(RendezvousError):
    """A peer asks for what its credential does not allow: it speaks for another worker."""


class Message(Protocol):
    """A message that can be written."""

    def to_json(self) -> bytes:
        """As JSON."""


class Deferred:
    """An answer that needs the connection itself: it is given there later, or the connection changes its protocol."""

    __slots__ = ()

    def begin(self, connection: Any) -> None:
        """Take over.

        Args:
            connection: a :class:`~elastic_driver.rendezvous.server.connection.Connection`.
        """
        raise NotImplementedError


RawAnswer = tuple[int, bytes]
"""Status and body."""
Answer = RawAnswer | Message | dict[str, object] | None
"""What a route answers: status and body; a message or JSON object, with status 200; or nothing, with status 204."""


@dataclass(slots=True)
class RouteRequest:
    """A request.

    Attributes:
        identity: of the peer, which has proven it.
        path: what the stars of the route's path stand for; all parts of the path for ANY_PATH.
        query: the query's parameters.
        body: as it came.
        has_hung_up: whether the peer's connection has been closed from its side; what an answer would take from a
            queue is for somebody else then.
    """

    identity: Identity
    path: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes
    has_hung_up: Callable[[], bool] = lambda: False

    def wait_s(self, default: float) -> float:
        """How long the peer is ready to wait for the answer, seconds.

        Raises:
            RendezvousProtocolError: it does not say that in a number from 0 to a day.
        """
        text = self.query.get("wait_s")
        if text is None:
            return default
        try:
            seconds = float(text)
        except ValueError:
            raise RendezvousProtocolError(f"cannot read wait_s {text!r}: not a number") from None
        if not 0 <= seconds <= _MAX_WAIT_S:  # also false for nan
            raise RendezvousProtocolError(f"cannot wait for {text} s: 0 to {_MAX_WAIT_S:g} s are allowed")
        return seconds


Answerer = Callable[[RouteRequest], Answer | Awaitable[Answer] | Deferred]


@dataclass(frozen=True, slots=True)
class Route:
    """One thing that can be asked.

    Attributes:
        method: of HTTP.
        path: under /v1, with ``*`` for a part that may be anything; or ANY_PATH, for what no other route has.
        roles: who may ask.
        answer: answers, at once or later. May raise RendezvousError; an awaitable is cancelled when nobody waits for it
            any more.
        is_polled: whether an answer that takes longer than the poll time is not waited for: 204, and the peer asks
            again.
    """

    method: str
    path: str
    roles: frozenset[Role]
    answer: Answerer
    is_polled: bool = False


Routes = Sequence[Route]


class RouteTable:
    """Finds the routes of a path.

    Args:
        routes: all there are.

    Raises:
        ValueError: two of them have the same method and path.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._paths: dict[str, list[_Path]] = {}
        self._any = _Path((ANY_PATH,))
        for route in routes:
            path, method = self._path(route.path), route.method.encode()
            if method in path.methods:
                raise ValueError(f"there are two routes {route.method} {route.path}")
            path.methods[method] = route

    def _path(self, text: str) -> _Path:
        if text == ANY_PATH:
            return self._any
        parts = tuple(text.split("/"))
        known = self._paths.setdefault(parts[0], [])
        path = next((each for each in known if each.parts == parts), None)
        if path is None:
            known.append(path := _Path(parts))
        return path

    def find(self, parts: Sequence[str]) -> tuple[Mapping[bytes, Route], tuple[str, ...]]:
        """The routes of a path by their methods (none for a path that does not exist), and what the stars stand for.

        Args:
            parts: of the path under /v1, with nothing quoted in them.
        """
        for path in self._paths.get(parts[0], ()):
            if len(parts) == len(path.parts):
                for index, word in path.words:
                    if parts[index] != word:
                        break
                else:
                    return path.methods, tuple([parts[index] for index in path.stars])
        return self._any.methods, tuple(parts)


class _Path:
    """A path, and its routes by method.

    Attributes:
        words: what has to be where, but for the first part.
        stars: where anything may be.
    """

    __slots__ = ("methods", "parts", "stars", "words")

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts
        self.words = tuple((index, part) for index, part in enumerate(parts) if part != "*" and index)
        self.stars = tuple(index for index, part in enumerate(parts) if part == "*")
        self.methods: dict[bytes, Route] = {}


# --- what owners of routes say ---------------------------------------------------------------------------------------

_Request = TypeVar("_Request")


class _OfWorker(Protocol):
    """What a worker says, and whose words they are."""

    @property
    def worker(self) -> WorkerId:
        """The worker that speaks."""


_OfWorkerT = TypeVar("_OfWorkerT", bound=_OfWorker)


def read(parse: Callable[[bytes], _Request], answer: Callable[[_Request], Answer | Awaitable[Answer]]) -> Answerer:
    """Answers requests whose body is a message.

    Args:
        parse: reads the body. Raises RendezvousProtocolError.
        answer: answers it.
    """
    return lambda request: answer(parse(request.body))


def read_own(
    parse: Callable[[bytes], _OfWorkerT],
    answer: Callable[[_OfWorkerT], Answer | Awaitable[Answer]],
) -> Answerer:
    """Likewise, for messages that name the worker they are of: a worker speaks for itself only."""

    def check(request: RouteRequest) -> Answer | Awaitable[Answer]:
        said = parse(request.body)
        if said.worker != request.identity.worker:
            raise NotAllowedError(f"{peer_name(request.identity)} may not speak for worker {said.worker}")
        return answer(said)

    return check


class WorkerRounds(Protocol):
    """What workers ask of the server that they know, whoever that is."""

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY; the answer comes when its round is formed."""

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """The next notice of the round. May raise StaleRoundError or RendezvousClosedError, at once or later."""

    def running(self, report: RunningReport) -> None:
        """A member trains."""


def routes_of_rounds(rounds: WorkerRounds) -> Routes:
    """What takes a worker into a round, and through it."""
    return (
        Route("POST", "next-round", WORKER, read_own(NextRoundRequest.from_json, rounds.next_round), is_polled=True),
        Route("POST", "watch", WORKER, read_own(WatchRequest.from_json, rounds.watch), is_polled=True),
        Route("POST", "running", WORKER, read_own(RunningReport.from_json, rounds.running)),
    )


def integer(text: str, name: str) -> int:
    """A number of a path or query that is not below 0.

    Raises:
        RendezvousProtocolError: it is none.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise RendezvousProtocolError(f"cannot read {name} {text!r}: not a number")
    return int(text)


# --- what servers do with it -----------------------------------------------------------------------------------------


def written(answer: Answer) -> RawAnswer:
    """Status and body of an answer."""
    if answer is None:
        return 204, b""
    if isinstance(answer, tuple):
        return answer
    return 200, json.dumps(answer).encode() if isinstance(answer, dict) else answer.to_json()


def error_body(error: Exception | str) -> bytes:
    """The JSON object that every answer from 400 up has."""
    data: dict[str, object] = {"error": str(error)}
    if isinstance(error, StaleRoundError):
        data |= {"round_id": error.round_id, "current_round_id": error.current_round_id}
    return json.dumps(data).encode()


def refusal(error: RendezvousError) -> RawAnswer:
    """Status and body for an error that a route raises on purpose."""
    match error:
        case StaleRoundError():
            status = 409
        case NotAllowedError():
            status = 403
        case RendezvousClosedError():
            status = 410
        case _:
            status = 400
    return status, error_body(error)


def unknown(path: str) -> RawAnswer:
    """Status and body for a path under /v1 that does not exist."""
    return 404, error_body(f"no such path: {API}/{path}")


def peer_name(identity: Identity) -> str:
    """A peer in a sentence: a worker by its name, others by their role."""
    return role_name(identity.role) if identity.worker is None else f"worker {identity.worker}"


def role_name(role: Role) -> str:
    """A role in a sentence."""
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"
