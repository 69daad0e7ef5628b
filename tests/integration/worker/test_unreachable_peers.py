"""Workers on hosts of their own, between which the network is cut while both have the driver."""

from __future__ import annotations

import pytest

from elastic_driver.rendezvous.environment import ENV_HOST_TIMEOUT
from elastic_driver.rendezvous.messages import NextRoundRequest
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.network.namespaces import Namespaces
from tests.support.processes.backends import EACH

pytestmark = [pytest.mark.integration, pytest.mark.machines]


@pytest.mark.parametrize("backend", [each for each in EACH if each is Backend.NATIVE])
def test_both_ends_of_a_cut_tell_the_driver(backend: Backend) -> None:
    """In a round, and when the next one is built with both of them again; without one of them the training goes on."""
    workers = workers_on(node0=1, node1=1, node2=1)
    with Namespaces(3) as hosts, FakeJob(backend=backend, machines=list(hosts)) as job:

        def accusations(after_round: int) -> dict[str, tuple[int, ...]]:
            asked: list[NextRoundRequest] = [one for one in job.requests if one.after_round == after_round]
            return {one.worker.hostname: one.unreachable for one in asked if one.cause is ReadyCause.INTERNAL_ERROR}

        job.start(workers, "train", "1000000", env={ENV_HOST_TIMEOUT: "2"})
        for worker in workers:
            job.wait_for(
                lambda worker=worker: any(line.get("step") == 5 for line in job.processes[worker].lines), "five steps"
            )
        assert [worker.hostname for worker in job.rounds[0]] == ["node0", "node1", "node2"]
        hosts[1].cut_from(hosts[2])
        job.wait_for(lambda: len(accusations(1)) == 3, "the end of the round")
        assert accusations(1) == {"node0": (), "node1": (2,), "node2": (1,)}
        texts = [one.detail for one in job.requests if one.unreachable]
        assert any("has acknowledged nothing to rank" in text for text in texts), texts

        job.plan(workers)
        job.wait_for(lambda: any(accusations(2).values()), "the round that cannot be built")
        first = next(host for host, ranks in accusations(2).items() if ranks)
        order = [worker.hostname for worker in job.rounds[1]]
        assert accusations(2)[first] == (order.index({"node1": "node2", "node2": "node1"}[first]),)

        steps = len(job.processes[workers[0]].lines)
        left = [worker for worker in workers if worker.hostname != "node2"]
        job.auto = False
        job.processes[workers[2]].popen.kill()
        # The others still build it: they hear that it is over.
        job.notify(NoticeKind.ABORT, "two workers cannot reach each other")
        job.plan(left)
        job.wait_for(lambda: len(job.rounds) == 3, "a round without one of them")
        job.wait_for(lambda: len(job.processes[workers[0]].lines) > steps + 5, "more steps")
