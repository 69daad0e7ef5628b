"""The service of ``elasticrun rendezvous``: its server, its jobs and its Stores.

Owns their assembly, and the expiry of Stores. State is in memory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass

from elastic_driver.rendezvous.credentials import Role, member
from elastic_driver.rendezvous.routes import MEMBER, Route, RouteRequest, Routes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.rendezvous.server.store_route import StoreRoute
from elastic_driver.rendezvous.server.values import Values
from elastic_driver.rendezvous.server.web import Probed
from elastic_driver.service.jobs import Jobs
from elastic_driver.system.job_clock import JobClock

# Scopes without a request in this time are dropped: Stores of jobs that have long ended.
IDLE_S = 24 * 3600.0
_SWEEP_S = 600.0

__all__ = ["Place", "serve"]


@dataclass(frozen=True, slots=True)
class Place:
    """The service's address, and its token.

    Attributes:
        host: local address.
        port: 0 for any free one.
        token: of the service; "" if it requires none.
    """

    host: str
    port: int
    token: str


async def serve(place: Place, *, tell: Callable[[str], None], on_listening: Callable[[int, str], object]) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        place: the address and the token.
        tell: logs a line for people.
        on_listening: called with the port, and the fingerprint of the service's certificate.

    Returns:
        The exit code: 0, or 70 after an error of its own.

    Raises:
        SettingsError: it cannot listen there.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def failed(error: BaseException) -> None:
        tell(f"internal error of the rendezvous: {error!r}")
        end(70)

    def failed_with_a_request(error: BaseException) -> None:
        # The request has been answered with it. One member's request must not affect the others.
        tell(f"internal error of the rendezvous while handling a request: {error!r}")

    loop.set_exception_handler(
        lambda _, context: failed(context.get("exception") or RuntimeError(str(context["message"])))
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, 0)
    clock = JobClock()
    values = Values(secrets.randbits(63) | 1)
    used: dict[str, float] = {}

    def use(scope: str) -> None:
        used[scope] = clock()

    store = StoreRoute(values, call_later=clock.call_later, on_use=use)

    def forget(scope: str) -> None:
        used.pop(scope, None)
        values.drop(scope)

    jobs = Jobs(clock, tell=lambda job, text: tell(f"job {job}: {text}"), forget=forget, start=values.instance)
    key = member(place.token).key
    server = RendezvousServer(
        _routes(store, jobs),
        key_of=lambda identity: key if identity.role is Role.MEMBER else None,
        on_error=failed_with_a_request,
        on_full=tell,
        web=Probed(None),
    )
    fingerprint = await server.certificate.make()
    port = await server.start(place.host, place.port)
    keeper = asyncio.ensure_future(clock.keep(lambda lost_s: tell(f"this process was suspended for {lost_s:.0f} s")))
    sweeper = asyncio.ensure_future(_sweep(clock, used, forget))
    on_listening(port, fingerprint)
    try:
        return await ended
    finally:
        for task in (keeper, sweeper):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await server.close()


def _routes(store: StoreRoute, jobs: Jobs) -> Routes:
    def status(_: RouteRequest) -> tuple[int, bytes]:
        return 200, json.dumps(jobs.status()).encode()

    return (
        Route("POST", "store", MEMBER, store.answer),
        Route("POST", "nodes", MEMBER, jobs.answer),
        Route("GET", "jobs", MEMBER, status),
    )


async def _sweep(clock: JobClock, used: dict[str, float], forget: Callable[[str], object]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        for scope in [scope for scope, at in used.items() if clock() - at > IDLE_S]:
            forget(scope)
