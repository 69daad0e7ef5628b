"""What browsers and scrapers ask of the driver's port, and are answered: everything that is not under /v1.

Owns the shapes only. They prove nothing by a key: who they are, and what they may see, is the business of whoever
answers (:class:`Web`). How bytes become requests is the connection's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

BODY_BYTES = 4096
"""Of one request, at most: nobody knows yet who sends it."""
HEALTH_PATH = "/healthz"


@dataclass(frozen=True, slots=True)
class WebRequest:
    """A request.

    Attributes:
        method: of HTTP.
        path: with what is quoted in it made plain.
        query: its parameters; of several with one name the last.
        headers: by name in small letters; of several with one name all, with ", " between them ("; " for cookies).
        body: as it came, at most BODY_BYTES.
        encrypted: whether the connection is.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """An answer. Its length is told by who sends it.

    Attributes:
        status: of HTTP.
        body: of it.
        content_type: of the body.
        headers: more of them.
    """

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class WebStream(Protocol):
    """An answer without an end, until either side ends it."""

    def write(self, data: bytes) -> bool:
        """Sends that. False when nobody reads any more: then, or when too much is unread, the connection is cut."""

    def close(self) -> None:
        """Ends it, after what was written."""


@dataclass(frozen=True, slots=True)
class WebStreaming:
    """An answer that goes on.

    Attributes:
        began: takes the stream, once its head is sent.
        ended: told when nobody reads any more, or it was closed.
        content_type: of what comes.
        headers: more of them.
    """

    began: Callable[[WebStream], None]
    ended: Callable[[WebStream], None]
    content_type: str = "text/event-stream"
    headers: tuple[tuple[str, str], ...] = ()


class Web(Protocol):
    """Whoever answers."""

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        """At once. An error that it raises ends the job, as any of ours."""


class Probed:
    """Answers probes, as Kubernetes has them: ``/healthz``, to anybody. That it answers is all that it says.

    Args:
        others: answers everything else; None for nobody.
    """

    def __init__(self, others: Web | None) -> None:
        self._others = others

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        """See Web."""
        if request.path == HEALTH_PATH:
            if request.method not in ("GET", "HEAD"):
                return WebAnswer(405, b"ask with GET\n", headers=(("Allow", "GET, HEAD"),))
            return WebAnswer(200, b"ok\n", headers=(("Cache-Control", "no-store"),))
        return WebAnswer(404, b"not found\n") if self._others is None else self._others.answer(request)
