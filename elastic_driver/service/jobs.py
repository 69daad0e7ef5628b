"""All jobs of one rendezvous, and the parked requests of their nodes.

Owns the parked requests, the timers, and the log messages. Decides nothing: requests become events of
:mod:`~elastic_driver.service.nodes`, whose state gives the answers. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.node_messages import NodeReply, NodeRequest, Saying, Standing
from elastic_driver.rendezvous.routes import RouteRequest
from elastic_driver.service.liveness import Liveness
from elastic_driver.service.nodes import (
    Event,
    Job,
    NodeClaimed,
    NodeJoined,
    NodeLeft,
    NodesLost,
    TimePassed,
    explain,
    is_forgotten,
    next_deadline,
    reply_to,
    standing_of,
    step,
)
from elastic_driver.system.job_clock import JobClock, Timer

POLL_S = 30.0
# The limit of remembered jobs: without a token, any process of this machine can create jobs.
_MOST_JOBS = 10_000

Answer = tuple[int, bytes]


@dataclass(slots=True)
class _Parked:
    request: NodeRequest
    answer: asyncio.Future[Answer]
    timer: Timer


@dataclass(slots=True)
class _Known:
    """A job's state, with its liveness, requests and timer."""

    job: Job
    liveness: Liveness
    joins: dict[str, _Parked] = field(default_factory=dict)
    beats: dict[str, _Parked] = field(default_factory=dict)
    timer: Timer | None = None
    told: str = ""  # the last message that was logged
    written: tuple[NodeReply, bytes] | None = None  # the last answer, and its encoded form


class Jobs:
    """The jobs, and the answers to their nodes.

    Args:
        clock: stands still while this process does, so that no node counts as silent whose message is still unread.
        tell: logs a job's progress: called with its id and a sentence.
        forget: called with scopes of keys that are no longer needed.
        start: identifies this start of the service; not 0.
    """

    def __init__(
        self, clock: JobClock, *, tell: Callable[[str, str], object], forget: Callable[[str], object], start: int
    ) -> None:
        self._clock = clock
        self._start = start
        self._tell = tell
        self._forget = forget
        self._began = clock()
        self._jobs: dict[str, _Known] = {}

    def status(self) -> dict[str, object]:
        """Return all jobs, as JSON."""
        return {
            name: {
                "explain": explain(known.job),
                "generation": None if known.job.formed is None else known.job.formed.number,
                "nodes": [node.member.name for node in known.job.nodes.values()],
            }
            for name, known in sorted(self._jobs.items())
        }

    def answer(self, asked: RouteRequest) -> Answer | Awaitable[Answer]:
        """Answer a node's request, at once or later: 204 if there is nothing new in time.

        Raises:
            RendezvousProtocolError: the request is malformed or invalid.
        """
        request = NodeRequest.from_json(asked.body)
        now = self._clock()
        if request.job not in self._jobs and request.saying is not Saying.JOIN and request.formed is None:
            # Do not create a job for a node that may not be in it.
            unknown = reply_to(Job(request.terms), None, request.number, joins=False)
            return (
                (204, b"") if request.saying is Saying.LEAVE else (200, replace(unknown, start=self._start).to_json())
            )
        known = self._known(request, now)
        node = request.member.node
        if request.saying is Saying.LEAVE:
            known.liveness.forget(node)
            self._step(request.job, known, NodeLeft(node, request.outcome))
            return 204, b""
        joins = request.saying is Saying.JOIN
        if joins:
            self._step(request.job, known, NodeJoined(request.member, request.terms, request.number))
            if known.job.terms.lost_s != known.liveness.lost_s:  # the first node of a job whose id is used again
                known.liveness.lost_s = known.job.terms.lost_s
        elif request.formed is not None:
            self._step(request.job, known, NodeClaimed(request.member, request.terms, request.formed))
        if node in known.job.nodes:
            known.liveness.heard(node, now)
            self._schedule(request.job, known)
        if self._is_news(known, request):
            return 200, self._reply(known, request)
        return self._park(request.job, known, request)

    def _known(self, request: NodeRequest, now: float) -> _Known:
        known = self._jobs.get(request.job)
        if known is None:
            if len(self._jobs) >= _MOST_JOBS:
                raise RendezvousProtocolError(f"cannot accept another job: the maximum is {_MOST_JOBS}")
            lost_s = request.terms.lost_s
            quiet_until = self._began + lost_s  # nodes in a generation of an earlier start report first
            job = Job(request.terms, not_before=quiet_until if now < quiet_until else 0.0, empty_at=now)
            known = self._jobs[request.job] = _Known(job, Liveness(lost_s))
        return known

    # --- answers -----------------------------------------------------------------------------------------------------

    def _reply(self, known: _Known, request: NodeRequest) -> bytes:
        job, joins = known.job, request.saying is Saying.JOIN
        reply = reply_to(job, job.nodes.get(request.member.node), request.number, joins=joins)
        if known.written is None or known.written[0] != reply:
            # All members of a generation get the same answer: encode it once.
            known.written = reply, replace(reply, start=self._start).to_json()
        return known.written[1]

    def _is_news(self, known: _Known, request: NodeRequest) -> bool:
        job, joins = known.job, request.saying is Saying.JOIN
        standing = standing_of(job, job.nodes.get(request.member.node), request.number, joins=joins)
        if joins:
            return standing in (Standing.PLACED, Standing.OVER)
        if standing is Standing.UNKNOWN:
            return request.formed is None
        return (job.version, self._start) != (request.version, request.start)

    def _park(self, name: str, known: _Known, request: NodeRequest) -> Awaitable[Answer]:
        node, answer = request.member.node, asyncio.get_running_loop().create_future()
        place = known.joins if request.saying is Saying.JOIN else known.beats
        older = place.pop(node, None)
        if older is not None:
            older.timer.cancel()
            older.answer.cancel()

        def end() -> None:
            if not answer.done():
                # A joining node is told the reason for the wait: its time limit counts only while nothing runs.
                joins = request.saying is Saying.JOIN
                answer.set_result((200, self._reply(known, request)) if joins else (204, b""))

        parked = place[node] = _Parked(request, answer, self._clock.call_later(min(request.wait_s, POLL_S), end))

        def ended(future: asyncio.Future[Answer]) -> None:
            parked.timer.cancel()
            if place.get(node) is parked:
                del place[node]
                if future.cancelled() and request.saying is Saying.BEAT:
                    known.liveness.cut(node, self._clock())
                    self._schedule(name, known)

        answer.add_done_callback(ended)
        return answer

    # --- events ------------------------------------------------------------------------------------------------------

    def _step(self, name: str, known: _Known, event: Event) -> None:
        now = self._clock()
        before, known.job = known.job, step(known.job, event, now, secrets.token_hex(8))
        job = known.job
        if job.nodes is not before.nodes and job.formed is not before.formed:
            for node in job.nodes:
                known.liveness.heard(node, now)  # each has the full time to report
        if job.formed is not before.formed and before.formed is not None:
            self._forget(_scope(name, before.formed.scope))
        if job.version != before.version or job.nodes is not before.nodes:
            self._tell_people(name, known)
        if job.version != before.version:
            for place in (known.joins, known.beats):
                for parked in tuple(place.values()):
                    if not parked.answer.done() and self._is_news(known, parked.request):
                        parked.answer.set_result((200, self._reply(known, parked.request)))
        self._schedule(name, known)

    def _tell_people(self, name: str, known: _Known) -> None:
        job = known.job
        said = explain(job)
        if job.broken and not job.over:
            said = f"{job.broken}; {said}"
        if said != known.told:
            known.told = said
            self._tell(name, said)

    def _schedule(self, name: str, known: _Known) -> None:
        dues = [due for due in (next_deadline(known.job), known.liveness.next_deadline()) if due is not None]
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        if dues:
            known.timer = self._clock.call_later(max(0.0, min(dues) - self._clock()), lambda: self._due(name, known))

    def _due(self, name: str, known: _Known) -> None:
        now = self._clock()
        lost = known.liveness.take_lost(now)
        self._step(name, known, NodesLost(lost) if lost else TimePassed())
        if is_forgotten(known.job, now) and not known.joins:
            if known.timer is not None:
                known.timer.cancel()
            if known.job.formed is not None:
                self._forget(_scope(name, known.job.formed.scope))
            del self._jobs[name]
        else:
            self._schedule(name, known)


def _scope(job: str, scope: str) -> str:
    return f"torchrun/{job}/{scope}"
