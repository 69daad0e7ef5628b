"""The jobs of a rendezvous: what strangers say to it, and what many nodes cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.node_messages import Member, NodeReply, NodeRequest, Saying, Standing, Terms
from elastic_driver.rendezvous.routes import RouteRequest
from elastic_driver.rendezvous.store_messages import MOST_PARTS, StoreOp, StoreRequest
from elastic_driver.service import jobs as jobs_module
from elastic_driver.service import nodes as nodes_module
from elastic_driver.service.jobs import Answer, Jobs
from elastic_driver.system.job_clock import JobClock

pytestmark = pytest.mark.unit


def request(node: int, *, saying: Saying = Saying.JOIN, job: str = "a job", of: int = 2, **more: Any) -> NodeRequest:
    member = Member(f"{node:x}", f"host{node}", "10.0.0.1", 1)
    return NodeRequest(saying, job, member, Terms(of, of), wait_s=30.0, **more)


def served(main: Callable[[Jobs], Any]) -> Any:
    async def inside() -> Any:
        clock = JobClock()
        jobs = Jobs(clock, tell=lambda job, text: None, forget=lambda scope: None, start=7)
        jobs._began -= 100.0  # long after its start
        return await main(jobs)

    return asyncio.run(inside())


def asked(jobs: Jobs, said: NodeRequest) -> Any:
    return jobs.answer(RouteRequest(Identity(Role.MEMBER), (), {}, said.to_json()))


@pytest.mark.parametrize(
    "changes",
    [
        {"wait_s": int("9" * 400)},
        {"number": int("9" * 4300)},
        {"version": int("9" * 4300)},
        {"number": -1},
        {"wait_s": 1e400},
        {"wait_s": -1},
        {"terms": [1, 1, int("9" * 400), False, 3.0]},
        {"terms": [1, 1, 1.0, False, int("9" * 400)]},
        {"terms": [1, int("9" * 4300), 1.0, False, 3.0]},
        {"formed": [int("9" * 4300), "a scope", [["0", "host0", "10.0.0.1", 1]]]},
    ],
)
def test_numbers_without_bounds_are_refused(changes: dict[str, Any]) -> None:
    body = json.dumps(json.loads(request(0).to_json()) | changes).encode()
    with pytest.raises(RendezvousProtocolError):
        NodeRequest.from_json(body)


def test_a_request_of_the_store_has_so_many_keys_at_most() -> None:
    keys = [b"%d" % number for number in range(MOST_PARTS + 1)]
    assert len(StoreRequest.from_bytes(StoreRequest(StoreOp.WAIT, "a", keys[:-1]).to_bytes()).parts) == MOST_PARTS
    with pytest.raises(RendezvousProtocolError, match="parts"):
        StoreRequest.from_bytes(StoreRequest(StoreOp.WAIT, "a", keys).to_bytes())


def test_nothing_is_kept_of_a_job_that_only_heartbeats_and_leaves_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_MOST_JOBS", 1)

    async def main(jobs: Jobs) -> None:
        for number in range(3):
            status, body = asked(jobs, request(1, saying=Saying.BEAT, job=f"job {number}", number=1))
            assert status == 200
            assert NodeReply.from_json(body).standing is Standing.UNKNOWN
            assert asked(jobs, request(1, saying=Saying.LEAVE, job=f"job {number}")) == (204, b"")
        assert jobs.status() == {}
        joins = asked(jobs, request(1))
        assert not isinstance(joins, tuple), "it waits for another"
        joins.cancel()

    served(main)


def test_a_join_costs_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what is looked at, and no time."""
    looked = 0
    standing_of = nodes_module.standing_of

    def counted(*args: Any, **named: Any) -> Standing:
        nonlocal looked
        looked += 1
        return standing_of(*args, **named)

    monkeypatch.setattr(jobs_module, "standing_of", counted)

    async def main(jobs: Jobs, count: int) -> tuple[int, list[Answer]]:
        nonlocal looked
        looked = 0
        answers = [asked(jobs, request(node, of=count)) for node in range(count)]
        given = [answer if isinstance(answer, tuple) else await answer for answer in answers]
        return looked, given

    few, _ = served(lambda jobs: main(jobs, 32))
    many, given = served(lambda jobs: main(jobs, 128))
    assert (few, many) == (2 * 32 - 1, 2 * 128 - 1)
    replies = [NodeReply.from_json(body) for _, body in given]
    assert {reply.standing for reply in replies} == {Standing.PLACED}
    assert all(reply.formed is not None and len(reply.formed.members) == 128 for reply in replies)
    assert len({id(body) for _, body in given}) == 1, "written once for all"
