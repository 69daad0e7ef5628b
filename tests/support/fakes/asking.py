"""Asks routes as a server does, without one."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from elastic_driver.rendezvous.credentials import Identity
from elastic_driver.rendezvous.routes import (
    Answer,
    Deferred,
    NotAllowedError,
    RawAnswer,
    RouteRequest,
    Routes,
    RouteTable,
    written,
)


def ask(
    routes: Routes,
    identity: Identity,
    method: str,
    path: str,
    body: bytes = b"",
    query: Mapping[str, str] | None = None,
) -> RawAnswer | Awaitable[Answer] | Deferred:
    """Status and body, or what will give them.

    Raises:
        LookupError: there is no such route.
        NotAllowedError: it is for others.
    """
    found, words = RouteTable(routes).find(path.split("/"))
    route = found[method.encode()]
    if identity.role not in route.roles:
        raise NotAllowedError(path)
    answer = route.answer(RouteRequest(identity, words, query or {}, body))
    return answer if isinstance(answer, Awaitable | Deferred) else written(answer)
