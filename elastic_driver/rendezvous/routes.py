"""Routes: the requests that a server accepts, from which roles, and the functions that answer them.

Owns the shape of a route, the table that finds one, and how answers and errors are written. Each component provides its
own routes (``Rounds.routes``). A server is made with all of its routes and knows only paths and permissions; requests
that arrive over an agent's connection use the same table (:mod:`elastic_driver.driver.agent_requests`).
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
# Waits of more than a day are rejected as mistakes.
_MAX_WAIT_S = 86400.0


class NotAllowedError(RendezvousError):
    """The peer's credential does not allow the request: it speaks for another worker."""


class Message(Protocol):
    """A message that can be encoded."""

    def to_json(self) -> bytes:
        """Encode as JSON."""


class Deferred:
    """An answer that needs the connection itself: it is sent there later, or the connection changes its protocol."""

    __slots__ = ()

    def begin(self, connection: Any) -> None:
        """Take over the connection.

        Args:
            connection: a :class:`~elastic_driver.rendezvous.server.connection.Connection`.
        """
        raise NotImplementedError


RawAnswer = tuple[int, bytes]
"""Status and body."""
Answer = RawAnswer | Message | dict[str, object] | None
"""A route's answer: status and body; a message or JSON object, with status 200; or None, with status 204."""


@dataclass(slots=True)
class RouteRequest:
    """A request.

    Attributes:
        identity: the peer's authenticated identity.
        path: the parts matched by the stars of the route's path; all parts of the path for ANY_PATH.
        query: the query's parameters.
        body: the raw body.
        has_hung_up: whether the peer has closed its connection; if so, an item of a queue must go to another client.
    """

    identity: Identity
    path: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes
    has_hung_up: Callable[[], bool] = lambda: False

    def wait_s(self, default: float) -> float:
        """Return how long the peer is ready to wait for the answer, in seconds.

        Raises:
            RendezvousProtocolError: the value is not a number from 0 to a day.
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
    """A request that the server accepts.

    Attributes:
        method: the HTTP method.
        path: the path under /v1, with ``*`` for a part that may be anything; or ANY_PATH, for all that no other route
            matches.
        roles: the roles that may send it.
        answer: answers it, at once or later. May raise RendezvousError; an awaitable is canceled when nobody waits for
            it any more.
        is_polled: whether the request is long-polled: after the poll time it is answered 204, and the peer repeats it.
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
        routes: all routes.

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
        """Return the routes of a path by method (empty for an unknown path), and the parts that its stars match.

        Args:
            parts: parts of the path under /v1, unquoted.
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
        words: fixed parts and their positions, without the first.
        stars: positions at which any part matches.
    """

    __slots__ = ("methods", "parts", "stars", "words")

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts
        self.words = tuple((index, part) for index, part in enumerate(parts) if part != "*" and index)
        self.stars = tuple(index for index, part in enumerate(parts) if part == "*")
        self.methods: dict[bytes, Route] = {}


# --- for the owners of routes ----------------------------------------------------------------------------------------

_Request = TypeVar("_Request")


class _OfWorker(Protocol):
    """A message of a worker."""

    @property
    def worker(self) -> WorkerId:
        """The worker that the message is from."""


_OfWorkerT = TypeVar("_OfWorkerT", bound=_OfWorker)


def read(parse: Callable[[bytes], _Request], answer: Callable[[_Request], Answer | Awaitable[Answer]]) -> Answerer:
    """Make an answerer for requests whose body is a message.

    Args:
        parse: decodes the body. Raises RendezvousProtocolError.
        answer: answers the message.
    """
    return lambda request: answer(parse(request.body))


def read_own(
    parse: Callable[[bytes], _OfWorkerT],
    answer: Callable[[_OfWorkerT], Answer | Awaitable[Answer]],
) -> Answerer:
    """Like :func:`read`, for messages that name their worker: a worker may speak for itself only."""

    def check(request: RouteRequest) -> Answer | Awaitable[Answer]:
        said = parse(request.body)
        if said.worker != request.identity.worker:
            raise NotAllowedError(f"{peer_name(request.identity)} may not act for worker {said.worker}")
        return answer(said)

    return check


class WorkerRounds(Protocol):
    """The requests of workers that the driver and each agent serve."""

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """Answer a READY worker once its round is formed."""

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """Answer with the round's next notice. May raise StaleRoundError or RendezvousClosedError, at once or later."""

    def running(self, report: RunningReport) -> None:
        """Record that a member trains."""


def routes_of_rounds(rounds: WorkerRounds) -> Routes:
    """Return the routes that bring a worker into a round, and through it."""
    return (
        Route("POST", "next-round", WORKER, read_own(NextRoundRequest.from_json, rounds.next_round), is_polled=True),
        Route("POST", "watch", WORKER, read_own(WatchRequest.from_json, rounds.watch), is_polled=True),
        Route("POST", "running", WORKER, read_own(RunningReport.from_json, rounds.running)),
    )


def integer(text: str, name: str) -> int:
    """Parse a non-negative integer of a path or query.

    Raises:
        RendezvousProtocolError: it is not one.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise RendezvousProtocolError(f"cannot read {name} {text!r}: not a number")
    return int(text)


# --- for servers -----------------------------------------------------------------------------------------------------


def written(answer: Answer) -> RawAnswer:
    """Return status and body of an answer."""
    if answer is None:
        return 204, b""
    if isinstance(answer, tuple):
        return answer
    return 200, json.dumps(answer).encode() if isinstance(answer, dict) else answer.to_json()


def error_body(error: Exception | str) -> bytes:
    """Return the JSON body of an error (status 400 and above)."""
    data: dict[str, object] = {"error": str(error)}
    if isinstance(error, StaleRoundError):
        data |= {"round_id": error.round_id, "current_round_id": error.current_round_id}
    return json.dumps(data).encode()


def refusal(error: RendezvousError) -> RawAnswer:
    """Return status and body for an error that a route raises on purpose."""
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
    """Return status and body for an unknown path under /v1."""
    return 404, error_body(f"no such path: {API}/{path}")


def peer_name(identity: Identity) -> str:
    """Name a peer in a sentence: a worker by its name, others by their role."""
    return role_name(identity.role) if identity.worker is None else f"worker {identity.worker}"


def role_name(role: Role) -> str:
    """Name a role in a sentence, with its article."""
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"
