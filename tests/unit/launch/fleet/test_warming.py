"""Having hosts import what workers import."""

from __future__ import annotations

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.agent_messages import Prepare, Prepared, Warmed, WarmUp
from tests.support.fakes.fleet_fakes import FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit


def test_all_agents_warm_up_once_also_those_that_come_later() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        for _ in range(2):
            fleet.warming.warm_up()
        later = fleet.arrives("j", ticket=False)
        await rest()
        assert (agent.of(WarmUp), later.of(WarmUp)) == ([WarmUp()], [WarmUp()])
        agent.say(Warmed(7, 0.5))
        assert fleet.warmed == [(7, 0.5)]

    on_fleet(main)


def test_a_host_without_workers_imports_what_they_import_once() -> None:
    async def main(fleet: FakeFleet) -> None:
        busy, fresh = await fleet.has("a", "b")
        samples: list[str] = []

        def prepares(name: str) -> bool:
            def sample() -> tuple[list[str], dict[str, str]]:
                samples.append(name)
                return ["python", "train.py"], {"NAME": name, "HERE": "1"}

            return fleet.warming.prepare(name, sample)

        await fleet.order(WorkerId("a", 0, 0))
        assert [prepares(name) for name in ("a", "b", "b", "nowhere")] == [False, True, True, False]
        assert samples == ["b"]
        await rest()
        assert fresh.of(Prepare) == [Prepare(["python", "train.py"], {"NAME": "b"})]
        assert busy.of(Prepare) == []
        changes = fleet.fleet.changes.count
        fresh.say(Prepared())
        assert fleet.fleet.changes.count > changes
        assert not prepares("b")
        # Another agent of that name knows nothing of it.
        fresh.link.lose("a test")
        await rest()
        again = fleet.arrives("b")
        assert prepares("b")
        await rest()
        assert len(again.of(Prepare)) == 1

    on_fleet(main)
