"""The routes of the driver's server: what may be asked there, and with which credential.

Owns the driver's own routes, and the putting together of the one table that the server asks. Which routes the workers
have is the business of their dialect (:mod:`elastic_driver.dialects`), and is passed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from elastic_driver.rendezvous.credentials import Identity, Role

AGENT = frozenset({Role.TICKET, Role.JOINER, Role.AGENT})
WORKER = frozenset({Role.WORKER})
OPERATOR = frozenset({Role.OPERATOR})
MEMBER = frozenset({Role.MEMBER})
CHIEF = frozenset({Role.CHIEF})
ALL = frozenset({Role.WORKER, Role.OPERATOR, Role.READER})


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request to a route that the server does not know itself.

    Attributes:
        identity: who asks, and has proven it.
        method: of HTTP.
        path: what stands behind the route's name, part by part.
        query: the query's parameters.
        body: as it came.
    """

    identity: Identity
    method: bytes
    path: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """Who may ask for what.

    Attributes:
        methods: the methods there are, and whose they are.
        answer: gives status and body, at once or later; may raise RendezvousError. None for a route that the server
            answers itself, see docs/design.md, "Wire".
    """

    methods: Mapping[bytes, frozenset[Role]]
    answer: Callable[[RouteRequest], tuple[int, bytes] | Awaitable[tuple[int, bytes]]] | None = None


Routes = Mapping[str, Route]

DRIVER_ROUTES: Routes = {
    "agent": Route({b"GET": AGENT}),
    "drain": Route({b"POST": OPERATOR}),
    "end": Route({b"POST": OPERATOR}),
    "status": Route({b"GET": ALL}),
}


def table_of(worker_routes: Routes, own: Routes = DRIVER_ROUTES) -> Routes:
    """Who may do what: the driver's own routes and the workers'. A route that is not in it does not exist.

    Args:
        worker_routes: of the workers' dialect.
        own: the driver's own.

    Raises:
        ValueError: one of the workers' routes has the name of one of the driver's, or is open to others than workers.
    """
    for name, route in worker_routes.items():
        if name in own:
            raise ValueError(f"the route {name} is the driver's own")
        if any(roles != WORKER for roles in route.methods.values()):
            raise ValueError(f"the workers' route {name} is open to others")
    return {**worker_routes, **own}
