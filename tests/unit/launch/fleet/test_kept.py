"""What the fleet keeps for a later driver, when, and what that one has of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_driver.hosts import Host
from elastic_driver.journal.entries import Dropped, Facts, Kept
from elastic_driver.launch.fleet.admission import Admission
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.kept import AgentKept, LeaverKept, MachineKept, TicketKept
from elastic_driver.launch.fleet.tickets import SecondUse, Tickets, User
from elastic_driver.rendezvous.agent_messages import Hello, Leaves, Welcome
from elastic_driver.rendezvous.credentials import Identity, Role
from tests.support.fakes.driver_fakes import FakeSource
from tests.support.fakes.facts_keeper import FactsKeeper
from tests.support.fakes.fleet_fakes import Dial, FakeFleet, hello, on_fleet, rest, welcome_facts
from tests.support.fakes.network_fakes import network

pytestmark = pytest.mark.unit

JOINER = Identity(Role.JOINER)


def kept(test: Callable[[FakeFleet, FactsKeeper], Coroutine[Any, Any, None]], **options: Any) -> Facts:
    """Runs a test on a fleet with a keeper. Returns what a later driver reads of it."""
    keeper = FactsKeeper()
    on_fleet(lambda fleet: test(fleet, keeper), keeper=keeper, **options)
    return keeper.facts


def joins(fleet: FakeFleet, keeper: FactsKeeper) -> tuple[Hello, Dial, Any]:
    """An agent says that it joins; its answer."""
    first = hello(key=os.urandom(32).hex(), slots=2, host="j")
    dial = Dial(Admission(fleet.tickets, welcome_facts(), fleet.fleet, keeper), JOINER)
    return first, dial, dial.says(first)


def test_an_agent_is_welcomed_when_it_is_on_disk_that_it_is_one() -> None:
    async def test(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        keeper.is_slow = True
        first, dial, answer = joins(fleet, keeper)
        assert answer is None
        agent = keeper.facts.agents[first.agent]
        assert (agent.facts.hello, agent.key, agent.joined, agent.given_up) == (first, first.key, True, False)
        assert not fleet.fleet.is_up("j")
        keeper.answers()
        assert isinstance(dial.answer(), Welcome)
        assert fleet.fleet.is_up("j")

    kept(test)


def test_an_agent_that_has_gone_before_its_welcome_is_not_waited_for() -> None:
    async def test(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        keeper.is_slow = True
        first, dial, _ = joins(fleet, keeper)
        dial.connection.connection_lost(None)
        keeper.answers()
        assert list(fleet.fleet.links()) == []
        assert keeper.facts.agents[first.agent].given_up
        await fleet.fleet.close()

    kept(test)


def test_what_an_agent_says_before_its_welcome_cuts_its_connection() -> None:
    async def test(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        keeper.is_slow = True
        first, dial, _ = joins(fleet, keeper)
        dial.says(first)
        assert dial.transport.is_closed
        assert len(fleet.fleet.links()) == 1

    kept(test)


def test_what_becomes_of_an_agent() -> None:
    async def test(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        (agent,) = await fleet.has("a")

        def fact() -> AgentKept:
            return keeper.facts.agents[agent.link.agent]

        assert (fact().facts, fact().ending, fact().given_up) == (agent.link.facts, False, False)
        agent.link.comes_from(hello(address="10.0.0.7"), "10.0.0.7", "10.0.0.9")
        fleet.fleet.link_back(agent.link)
        assert (fact().peer, fact().facts.hello.address) == ("10.0.0.7", "10.0.0.7")
        await fleet.fleet.want([])
        assert fact().ending
        agent.link.lose("a test")
        assert (fact().given_up, fact().hello, fact().key) == (True, None, agent.link.facts.hello.key)

    facts = kept(test)
    (agent,) = facts.agents
    later = Tickets(lambda: 0.0)
    later.take_over(facts.agents.values(), ())
    assert later.key_of(Identity(Role.AGENT, number=agent)) is not None, "it is told that it was given up"


def test_of_those_given_up_as_many_are_kept_as_are_remembered() -> None:
    keeper = FactsKeeper()
    tickets = Tickets(lambda: 0.0, keeper=keeper)
    for number in range(1001):
        tickets.admit(f"{number:x}", bytes(32))
        tickets.give_up(f"{number:x}")
    assert keeper.news == [Dropped("AgentKept", "0")]


def test_a_later_driver_knows_the_tickets() -> None:
    keeper, now = FactsKeeper(), [0.0]
    tickets = Tickets(lambda: now[0], keeper=keeper)
    unused, used, late, withdrawn = (tickets.issue(host, 10.0, frozenset({"10.0.0.1"})) for host in "abcd")
    user = User("1", b"\x01" * 32, "10.0.0.1", 12)
    assert tickets.take(used.identity, user) is used
    tickets.withdraw(withdrawn)
    now[0] = 5.0
    later = Tickets(lambda: now[0], keeper=(again := FactsKeeper()))
    later.take_over((), keeper.facts.tickets.values())
    assert [later.key_of(each.identity) for each in (unused, used, late, withdrawn)] == [
        unused.key, used.key, late.key, None,
    ]  # fmt: skip
    assert later.take(used.identity, user) == used, "it may not have heard the answer"
    second = later.take(used.identity, User("2", b"\x02" * 32, "10.0.0.1", 13))
    assert second == SecondUse("b", user, User("2", b"\x02" * 32, "10.0.0.1", 13), revokes=True, is_first=True)
    (fact,) = (each.fact for each in again.news if isinstance(each, Kept))
    assert isinstance(fact, TicketKept)
    assert fact.use is not None
    assert fact.use.reported, "and so is the second one"
    assert later.take(unused.identity, User("3", b"", "10.0.0.2", 1)) is None
    assert later.take(unused.identity, User("3", b"", "10.0.0.1", 1)) == unused
    now[0] = 11.0
    assert later.take(late.identity, user) is None
    assert again.news[-1] == Dropped("TicketKept", late.identity.number)
    tickets.issue("e", 10.0)
    assert [each.host for each in keeper.facts.tickets.values()] == ["b", "e"], "who has run out is forgotten"


def test_a_ticket_is_on_disk_before_anybody_has_it() -> None:
    async def test(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        keeper.is_slow = True
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == []
        assert [each.host for each in keeper.facts.tickets.values()] == ["a"]
        keeper.answers()
        await rest()
        assert fleet.remote.hosts() == ["a"]

    kept(test)


def test_a_host_that_is_kept_out_stays_so() -> None:
    async def revoked(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        await fleet.has("a")
        fleet.fleet.revoked("a", "its ticket was used twice")

    async def later(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        await fleet.fleet.want(["a"])
        await asyncio.sleep(1000)
        assert fleet.remote.hosts() == []
        assert [failure.reason for _, failure in fleet.listener.unready] == ["its ticket was used twice"]

    kept(later, before=kept(revoked))


@pytest.mark.parametrize("within_s", [None, 30.0])
def test_a_host_that_has_left_is_left_alone(within_s: float | None) -> None:
    async def leaves(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        (agent,) = await fleet.has("a")
        began = asyncio.get_running_loop().time()
        agent.say(Leaves("a test", within_s))
        assert keeper.facts.leavers == {"a": LeaverKept("a", None if within_s is None else began + within_s)}
        await agent.leaves()

    async def later(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == []
        if within_s is None:
            await fleet.fleet.want([])
        else:
            await asyncio.sleep(within_s + 1.0)
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a"]
        assert keeper.news[0] == Dropped("LeaverKept", "a")

    kept(later, before=kept(leaves))


def test_who_has_passed_the_check_of_the_network_is_not_checked_again() -> None:
    agents: list[str] = []

    async def checked(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            assert list(keeper.facts.admitted) == [net.agents[host].link.agent for host in "ab"]
            net.agents["b"].link.lose("a test")
            agents.extend(keeper.facts.admitted)
            assert agents == [net.agents["a"].link.agent]

    async def later(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        async with network(fleet) as net:
            await net.want("a", "b")
            net.arrives("a", agent=agents[0])
            assert net.up() == "a"
            assert net.agents["a"].heard() == []
            net.arrives("b")
            await net.until_up("ab")

    kept(later, check=True, before=kept(checked, check=True))


def test_a_host_is_the_machine_that_it_was() -> None:
    def discovery(fleet: FakeFleet, keeper: FactsKeeper, *hosts: Host, before: Facts) -> FleetDiscovery:
        return FleetDiscovery(
            FakeSource(*hosts),  # type: ignore[arg-type]
            fleet.fleet,
            keeper=keeper,
            machines=before.machines.values(),
        )

    async def first(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        found = discovery(fleet, keeper, Host("a", 1), Host("b", 1), before=Facts())
        asking = asyncio.ensure_future(found.find_hosts())
        await rest()
        for host in "ab":
            fleet.arrives(host, peer="10.0.0.1", address="10.0.0.1")
        await asking
        there = frozenset({"10.0.0.1"})
        assert keeper.facts.machines == {host: MachineKept(host, 0, "", there) for host in "ab"}
        count = len(keeper.news)
        await found.find_hosts()
        assert len(keeper.news) == count, "nothing has changed"

    async def later(fleet: FakeFleet, keeper: FactsKeeper) -> None:
        found = discovery(fleet, keeper, Host("a", 1), before=before)
        asking = asyncio.ensure_future(found.find_hosts())
        await rest()
        fleet.arrives("a", peer="10.0.0.2", address="10.0.0.2")
        (host,) = await asking
        assert host.incarnation == 1, "it is another one"
        assert keeper.news[-2:] == [
            Dropped("MachineKept", "b"),
            Kept(MachineKept("a", 1, "", frozenset({"10.0.0.2"}))),
        ]

    before = kept(first)
    kept(later)
