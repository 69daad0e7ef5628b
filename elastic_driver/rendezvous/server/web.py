"""Requests of browsers and scrapers to the driver's port, and their answers: everything outside /v1.

Owns the shapes only. These peers do not authenticate with a key: :class:`Web` identifies them and decides what they may
see. The connection parses the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

BODY_BYTES = 4096
"""Limit of a request's body: its sender is not known yet."""
HEALTH_PATH = "/healthz"


@dataclass(frozen=True, slots=True)
class WebRequest:
    """A request.

    Attributes:
        method: the HTTP method.
        path: the path, unquoted.
        query: the parameters; of several with one name, the last.
        headers: by lower-case name; several with one name are joined with ", " ("; " for cookies).
        body: the raw body, at most BODY_BYTES.
        encrypted: whether the connection uses TLS.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """An answer. The sender adds its length.

    Attributes:
        status: the HTTP status.
        body: the body.
        content_type: the body's type.
        headers: further headers.
    """

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class WebStream(Protocol):
    """An endless answer, until either side closes it."""

    def write(self, data: bytes) -> bool:
        """Write data. False if the peer no longer reads: then, or if it leaves too much unread, the connection is
        cut.
        """

    def close(self) -> None:
        """Close the stream after what was written."""


@dataclass(frozen=True, slots=True)
class WebStreaming:
    """An answer that is streamed.

    Attributes:
        began: called with the stream once its head is sent.
        ended: called when the peer no longer reads, or the stream was closed.
        content_type: type of the data.
        headers: further headers.
    """

    began: Callable[[WebStream], None]
    ended: Callable[[WebStream], None]
    content_type: str = "text/event-stream"
    headers: tuple[tuple[str, str], ...] = ()


class Web(Protocol):
    """Answers requests outside /v1."""

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        """Answer at once. An exception ends the job, like any internal error."""


class Probed:
    """Answers health probes, such as those of Kubernetes: ``/healthz``, to anybody. The answer shows only that the
    server runs.

    Args:
        others: answers everything else; None to serve nothing else.
    """

    def __init__(self, others: Web | None) -> None:
        self._others = others

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        """Answer a probe, or pass the request on."""
        if request.path == HEALTH_PATH:
            if request.method not in ("GET", "HEAD"):
                return WebAnswer(405, b"ask with GET\n", headers=(("Allow", "GET, HEAD"),))
            return WebAnswer(200, b"ok\n", headers=(("Cache-Control", "no-store"),))
        return WebAnswer(404, b"not found\n") if self._others is None else self._others.answer(request)
