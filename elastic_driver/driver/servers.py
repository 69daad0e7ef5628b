"""The servers of a job with a chief: their reports, and the list for the chief.

Owns the list that the chief follows, its version, and the request that waits for the next one. Decides nothing: the
state says which servers are listed, and which are to leave; reports become events of the core.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from elastic_driver.core.events import WorkerReleased, WorkerServing
from elastic_driver.core.past import why_impossible
from elastic_driver.core.state import State, WorkerPhase, parameter_servers, serving_workers
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import LaunchError, RendezvousClosedError, RendezvousProtocolError
from elastic_driver.hosts import WorkerId, with_number
from elastic_driver.rendezvous.messages import Server, Servers, ServersRequest, ServingReport
from elastic_driver.rendezvous.routes import CHIEF, WORKER, Route, RouteRequest, Routes, read_own
from elastic_driver.system.job_clock import CallLater

# Below the idle limit of middleboxes; the chief asks again.
POLL_S = 30.0
# More versions than a driver ever has.
_VERSIONS = 1 << 32

_Answer = tuple[int, bytes]
# The content of a version: addresses; and for each worker when it is stopped, if it is to leave.
_Listed = tuple[tuple[str, ...], tuple[tuple[str, float | None], ...]]


class ServerList:
    """Maintains the list for the chief. Used on the event loop only.

    Args:
        stepper: takes the events, and has the state.
        clock: the job's time, seconds.
        call_later: measures how long requests wait.
        address_of: returns an address of a host, by name, that all other hosts of the job reach. Raises LaunchError.
        on_answer: called for each server that answers: the worker, its index as a parameter server, and its address.
        epoch: that of the driver: the versions of two drivers' lists never overlap.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        clock: Callable[[], float],
        call_later: CallLater,
        address_of: Callable[[str], str],
        on_answer: Callable[[WorkerId, int | None, str], None],
        epoch: int = 0,
    ) -> None:
        self._stepper = stepper
        self._clock = clock
        self._call_later = call_later
        self._address_of = address_of
        self._on_answer = on_answer
        self._version = 1 + epoch * _VERSIONS
        self._listed: _Listed = ((), ())
        self._waiting: asyncio.Future[_Answer] | None = None
        self._waits_since = 0  # the version that the chief knows

    @property
    def routes(self) -> Routes:
        """The routes for servers and the chief."""
        return (
            Route("POST", "serving", WORKER, read_own(ServingReport.from_json, self._serves)),
            Route("POST", "servers", CHIEF, self._servers),
        )

    def look(self) -> None:
        """Send the chief a new list, if there is one. To be called after each step."""
        listed = _listed(self._stepper.state)
        if listed != self._listed:
            self._listed = listed
            self._version += 1
            self._answer_waiting_request()

    def _answer_waiting_request(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(self._reply())

    async def _serves(self, report: ServingReport) -> None:
        """Record a report before this returns, whichever driver has the job then. Raises as _serving does."""
        self._serving(report)
        await self._stepper.settled()

    def _serving(self, report: ServingReport) -> None:
        """Report that a server answers.

        Raises:
            RendezvousProtocolError: it was never started.
            RendezvousClosedError: it is being stopped.
        """
        worker = report.worker
        self._stepper.catch_up()
        record = self._stepper.state.workers.find(worker)
        if self._stepper.is_over or record is None or record.phase is WorkerPhase.LEAVING:
            raise RendezvousClosedError(f"worker {worker} is being stopped")
        if record.phase is not WorkerPhase.BOOTING:
            return  # its answer was lost on the way
        try:
            host = self._address_of(worker.hostname)
        except LaunchError as error:
            raise RendezvousClosedError(str(error)) from error
        event = WorkerServing(worker, with_number(host, report.port))
        why = why_impossible(self._stepper.state, event) or self._who_else_serves(event)
        if why:
            raise RendezvousProtocolError(f"cannot accept this report: {why}")
        self._on_answer(worker, record.parameter_server, event.address)
        self._stepper.report(event)

    def _who_else_serves(self, event: WorkerServing) -> str:
        """Name another server with this address; "" if there is none. The chief would confuse the two."""
        for record in self._stepper.state.workers:
            if record.address == event.address and record.phase is not WorkerPhase.LEAVING:
                return f"worker {record.worker} already serves at {event.address}"
        return ""

    async def _servers(self, request: RouteRequest) -> _Answer:
        """Answer a request of the chief, which also names the workers that it has taken out of use.

        Raises:
            RendezvousClosedError: another chief is started, or the job has ended.
        """
        asked = ServersRequest.from_json(request.body)
        await self._stepper.settled()
        state = self._stepper.state
        if self._stepper.is_over or state.chief is None or request.identity.number != str(state.chief.number):
            raise RendezvousClosedError("this chief no longer belongs to the job")
        left = set(asked.left)
        for record in serving_workers(state) if left else ():
            if record.address in left:
                self._stepper.report(WorkerReleased(record.worker))
        await self._stepper.settled()
        self.look()
        if asked.version != self._version:
            return self._reply()
        wait_s = _seconds(request.query.get("wait_s", ""))
        if wait_s <= 0:
            return 204, b""
        self._answer_waiting_request()  # its connection was cut, unnoticed at this end
        waiting: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting = waiting

        def end() -> None:
            if not waiting.done():
                waiting.set_result((204, b""))

        timer = self._call_later(min(wait_s, POLL_S), end)
        waiting.add_done_callback(lambda _: timer.cancel())
        return await waiting

    def _reply(self) -> _Answer:
        servers, workers = self._listed
        now = self._clock()
        listed = tuple(
            Server(address) if by is None else Server(address, max(0.0, by - now), leaving=True)
            for address, by in workers
        )
        return 200, Servers(self._version, servers, listed).to_json()


def _listed(state: State) -> _Listed:
    there = [record for record in parameter_servers(state).values() if record.address]
    servers = tuple(record.address for record in there)
    return servers, tuple((record.address, record.leave_by) for record in serving_workers(state))


def _seconds(text: str) -> float:
    try:
        seconds = float(text or POLL_S)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):  # not valid for a timer
        raise RendezvousProtocolError(f"cannot read wait_s {text!r}: not a number")
    return seconds
