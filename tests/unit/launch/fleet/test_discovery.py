"""The hosts that the core hears of."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Departure, Host
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from tests.support.fakes.fleet_fakes import FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit

A, B, J = Host("a", 2), Host("b", 2), Host("j", 2)


class Source:
    """A HostDiscovery that the test answers for.

    Attributes:
        answers: what it says, one after another; the last again and again.
        hangs: while it does, it answers nothing.
    """

    def __init__(self, *answers: tuple[Host, ...] | DiscoveryError) -> None:
        self.answers = list(answers)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = 0

    async def find_hosts(self) -> tuple[Host, ...]:
        self.asked += 1
        await self.may_answer.wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, DiscoveryError):
            raise answer
        return answer

    async def wait_change(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """None."""
        return ()

    def remark(self) -> str:
        return "a remark"


class Core:
    """Asks as the driver does, and keeps what it hears."""

    def __init__(self, fleet: FakeFleet, source: Source, *, only_listed: bool = False) -> None:
        self.settled = 0
        self.discovery = FleetDiscovery(source, fleet.fleet, on_settled=self._settle, only_listed=only_listed)
        self.heard: list[Any] = []
        self.task = fleet.tasks.start(self._ask())

    def _settle(self) -> None:
        self.settled += 1

    async def _ask(self) -> None:
        while True:
            try:
                self.heard.append(await self.discovery.find_hosts())
            except DiscoveryError as error:
                self.heard.append(str(error))
            await self.discovery.wait_change(1.0)


def test_a_listed_host_is_told_of_when_it_has_an_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source((A, B)))
        await rest()
        assert core.heard == []
        fleet.arrives("b")
        await asyncio.sleep(5.1)  # it does not wait for the other forever
        assert core.heard[0] == (B,)
        assert core.discovery.down() == {"a"}
        assert core.settled == 1
        fleet.arrives("a").link.lose("a test")
        await rest()
        assert core.heard[-1] == (B,)
        assert core.discovery.down() == {"a"}, "it is listed all the same"
        await asyncio.sleep(1)
        fleet.arrives("a")
        await rest()
        assert core.heard[-1] == (A, B)

    on_fleet(main)


def test_a_listed_host_that_is_another_machine_is_told_from_the_last() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source((A, B)))
        await rest()
        await asyncio.sleep(5.1)
        fleet.arrives("b")
        again = fleet.arrives("a", peer="10.0.0.1", address="10.0.0.1")
        await rest()
        assert core.heard[-1] == (A, B)
        again.link.lose("a reboot")
        await rest()
        await asyncio.sleep(1)
        before = len(core.heard)
        another = fleet.arrives("a", peer="10.0.0.1", address="10.0.0.1")
        await rest()
        assert core.heard[before:] == [(A, B)], "it is the same"
        another.link.lose("it is deleted")
        await rest()
        await asyncio.sleep(1)
        before = len(core.heard)
        fleet.arrives("a", peer="10.0.0.7", address="10.0.0.7")
        await rest()
        assert core.heard[before:] == [(replace(A, incarnation=1), B)]
        assert not core.discovery.down()

    on_fleet(main)


def test_the_first_answer_comes_at_once_when_no_host_can_have_an_agent_now() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source((A,)))
        await rest()
        fleet.remote.dialled[0].failed.set_result(DialFailure("refused"))
        await rest()
        assert core.heard == [()]
        assert core.discovery.remark() == "a remark; host a is not ready: refused (tried 1 time)"

    on_fleet(main)


def test_a_host_that_joins_is_told_of_while_the_source_does_not_answer() -> None:
    async def main(fleet: FakeFleet) -> None:
        source = Source(())
        core = Core(fleet, source)
        await rest()
        source.may_answer.clear()
        await asyncio.sleep(1.5)
        assert source.asked == 2
        joined = fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard == [(), (J,)]
        joined.link.lose("a test")
        await rest()
        assert core.heard == [(), (J,), ()]
        assert source.asked == 2
        source.may_answer.set()
        await rest()
        assert core.heard == [(), (J,), (), ()]

    on_fleet(main)


def test_a_host_that_joins_is_told_of_while_the_source_fails() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source((A,), DiscoveryError("no answer")))
        await rest()
        fleet.arrives("a")
        await rest()
        await asyncio.sleep(1.1)
        assert core.heard[-1] == "no answer"
        assert not core.discovery.answers()
        joined = fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard[-1] == (A, J)
        assert not core.discovery.answers(), "a change of the fleet is no answer"
        joined.link.lose("a test")
        await rest()
        assert core.heard[-1] == (A,)
        assert not core.discovery.down(), "who has joined, and is no longer up, has left"
        await asyncio.sleep(1.1)
        assert core.heard[-1] == "no answer"

    on_fleet(main)


def test_a_source_that_has_never_answered_keeps_nobody_from_joining() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source(DiscoveryError("no answer")))
        await rest()
        assert core.heard == ["no answer"]
        fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard[-1] == (J,)

    on_fleet(main)


def test_a_host_that_joins_and_is_listed_has_the_listed_slots() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source((Host("j", 7),)))
        fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard[-1] == (Host("j", 7),)

    on_fleet(main)


def test_asking_ends_with_who_asks() -> None:
    async def main(fleet: FakeFleet) -> None:
        source = Source(())
        source.may_answer.clear()
        core = Core(fleet, source)
        await rest()
        core.task.cancel()
        await rest()
        assert core.task.cancelled()
        assert not [task for task in asyncio.all_tasks() if "find_hosts" in repr(task) or "_ask" in repr(task)]

    on_fleet(main)


def test_a_host_that_joins_anew_before_its_loss_was_heard_of_is_told_from_the_last() -> None:
    """Or what is known of the machine that had its name (a failure, a drain) would hold for it, for good."""

    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source(()))
        joined = fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard == [(J,)]
        joined.link.lose("a test")
        fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard == [(J,), (replace(J, incarnation=1),)]

    on_fleet(main)


def test_a_host_that_joined_and_is_listed_is_the_same_machine_with_another_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        core = Core(fleet, Source((J,)))
        await rest()
        joined = fleet.arrives("j", ticket=False)
        await rest()
        joined.link.lose("a test")
        fleet.arrives("j", ticket=False)
        await rest()
        assert set(core.heard) == {(J,)}

    on_fleet(main)


def test_where_only_listed_hosts_are_used_others_may_join_and_wait() -> None:
    async def main(fleet: FakeFleet) -> None:
        source = Source((A,), (A, J))
        core = Core(fleet, source, only_listed=True)
        await rest()
        fleet.arrives("j", ticket=False)
        await rest()
        assert core.heard[-1] == ()
        fleet.arrives("a", ticket=False)
        await rest()
        assert core.heard[-1] == (A,)
        await asyncio.sleep(1.5)
        assert core.heard[-1] == (A, J)

    on_fleet(main, dials=False)
