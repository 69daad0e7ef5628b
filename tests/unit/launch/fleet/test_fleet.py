"""Which hosts have an agent, and what is done so that those wanted have one."""

from __future__ import annotations

import asyncio
import math

import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet.admission import RefusedError
from elastic_driver.rendezvous.agent_messages import Bye, Close, Exited, Finished, KillAll, Leaves, Started, Warning
from tests.support.fakes.fleet_fakes import AGENT_TIMEOUT_S, HOST_TIMEOUT_S, FakeAgent, FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit

A = WorkerId("a", 0, 0)


async def _runs(fleet: FakeFleet, agent: FakeAgent) -> None:
    await fleet.order(A)
    agent.say(Started(A.key, 5))


def test_a_wanted_host_is_dialled_and_is_up_when_its_agent_has_come() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "here"])
        await rest()
        assert (fleet.remote.hosts(), fleet.local.hosts()) == (["a"], ["here"])
        assert not fleet.fleet.is_up("a")
        before = fleet.fleet.changes.count
        agent, local = fleet.arrives("a"), fleet.arrives("here")
        assert [fleet.fleet.is_up(name) for name in ("a", "here", "b")] == [True, True, False]
        assert (agent.link.facts.local, local.link.facts.local) == (False, True)
        assert fleet.listener.came == ["a", "here"]
        assert fleet.fleet.changes.count > before

    on_fleet(main)


def test_agents_here_and_elsewhere_are_given_what_they_need() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "here"])
        await rest()
        (_, remote), (_, local) = fleet.remote.dials[0], fleet.local.dials[0]
        assert (remote.urls, remote.fingerprint, remote.owner) == (("http://a:1",), "f", "")
        assert (local.urls, local.fingerprint, local.owner) == (("http://loopback:1",), "", "owner")
        assert (remote.host, remote.job, remote.agent_timeout_s) == ("a", "job", AGENT_TIMEOUT_S)

    on_fleet(main)


def test_what_agents_warn_of_says_on_which_host_it_is() -> None:
    async def main(fleet: FakeFleet) -> None:
        there, here = await fleet.has("a", "here")
        there.say(Warning("no room"))
        here.say(Warning("no room"))
        assert fleet.listener.warnings == ["host a: no room", "no room"]

    on_fleet(main)


def test_all_names_of_this_machine_have_one_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["one", "two"])
        await rest()
        assert fleet.local.hosts() == ["one"]
        agent = fleet.arrives("one")
        assert fleet.fleet.link_of("two") is agent.link is fleet.fleet.link_of("one")

    on_fleet(main, local_names=("one", "two"))


def test_an_agent_that_is_lost_is_told_of_and_its_host_is_dialled_again() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.hang_up()
        await asyncio.sleep(0.9)
        assert fleet.fleet.is_up("a")
        await asyncio.sleep(0.2)
        assert not fleet.fleet.is_up("a")
        assert [host for host, _ in fleet.listener.lost] == ["a"]
        assert fleet.remote.hosts() == ["a", "a"]
        assert fleet.remote.dialled[0].closed
        fleet.arrives("a")
        assert fleet.fleet.is_up("a")

    on_fleet(main)


def test_an_agent_that_dials_in_again_goes_on() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.hang_up()
        await asyncio.sleep(0.5)
        agent.connect()
        await asyncio.sleep(1)
        assert fleet.fleet.is_up("a")
        assert fleet.listener.lost == []
        assert fleet.fleet.known(agent.link.agent) is agent.link

    on_fleet(main)


def test_a_lost_agent_is_not_known_any_more() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.link.lose("a test")
        assert fleet.fleet.known(agent.link.agent) is None

    on_fleet(main)


def test_which_addresses_are_of_the_jobs_hosts() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        fleet.arrives("a", addresses=["eth0 10.1.2.3/24", "eth1 fd00::7/64"], peer="192.168.0.9")
        asked = ("10.1.2.3", "fd00::7", "192.168.0.9", "10.1.2.4", "")
        assert [fleet.fleet.has_address(one) for one in asked] == [True, True, True, False, False]

    on_fleet(main)


def test_the_end_waits_for_the_agents_of_hosts_that_have_been_lost_before() -> None:
    """That there was a moment without any agent says nothing of those that have come since."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await rest()
        agent.link.lose("a test")
        await rest()
        agent = fleet.arrives("a")
        closing = asyncio.create_task(fleet.close())
        await rest()
        assert agent.of(Close)
        assert not closing.done()
        assert not agent.transport.is_closed
        agent.say(Bye())
        await closing

    on_fleet(main)


def test_the_end_waits_no_longer_than_for_a_lease() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await asyncio.wait_for(fleet.close(), 2 * AGENT_TIMEOUT_S + 5)
        assert agent.transport.is_closed
        assert fleet.remote.dialled[0].closed

    on_fleet(main)


def test_at_the_end_commands_that_start_agents_are_ended_too() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "b"])
        await rest()
        await fleet.close()
        assert [dialled.closed for dialled in fleet.remote.dialled] == [1, 1]

    on_fleet(main)


def test_commands_of_hosts_that_were_just_taken_off_the_list_end_with_the_job() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("a", "b")
        await fleet.order(A)
        await fleet.fleet.want([])  # b ends now, a when its worker has
        closing = asyncio.create_task(fleet.close())
        await asyncio.wait((closing,))
        assert [dialled.closed > 0 for dialled in fleet.remote.dialled] == [True, True]

    on_fleet(main)


def test_an_agent_that_comes_at_the_end_is_refused() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        await fleet.close()
        with pytest.raises(RefusedError, match="the job is over"):
            fleet.arrives("j", ticket=False)

    on_fleet(main)


def test_a_host_joins_leaves_and_joins_again() -> None:
    async def main(fleet: FakeFleet) -> None:
        for _ in range(2):
            agent = fleet.arrives("j", ticket=False)
            assert fleet.fleet.joined() == (Host("j", 2),)
            agent.say(Leaves("a test"))
            assert fleet.fleet.joined() == ()
            await agent.leaves()
            assert agent.transport.is_closed
        assert fleet.listener.leaves == [("j", "a test")] * 2
        assert fleet.listener.lost == []
        assert fleet.remote.dials == []

    on_fleet(main)


def test_hosts_that_are_not_dialled_are_waited_for() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "b", "here"])
        await rest()
        assert (fleet.remote.hosts(), fleet.local.hosts()) == ([], ["here"])
        fleet.arrives("here")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await fleet.fleet.settle(5)
        assert loop.time() == began, "nobody knows when they join"
        assert fleet.fleet.remark() == (
            "host a has not joined yet (elasticrun join); host b has not joined yet (elasticrun join)"
        )
        agent = fleet.arrives("a", ticket=False)
        assert fleet.fleet.is_up("a")
        assert not fleet.fleet.is_up("b")
        agent.link.lose("a test")
        await asyncio.sleep(100)
        assert fleet.remote.hosts() == []
        assert not fleet.fleet.is_up("a")
        fleet.arrives("a", ticket=False)
        await fleet.fleet.want(["here"])
        await fleet.fleet.want(["here", "a"])
        assert fleet.fleet.is_up("a"), "it is there still"
        assert fleet.listener.unready == []

    on_fleet(main, dials=False)


@pytest.mark.parametrize("dials", [True, False])
def test_a_host_that_is_listed_again_is_not_taken_for_the_one_whose_connection_is_broken(dials: bool) -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "b"])
        await rest()
        first = fleet.arrives("a", ticket=dials)
        other = fleet.arrives("b", ticket=dials)
        first.hang_up()
        other.hang_up()
        await fleet.fleet.want(["a", "b"])
        assert fleet.fleet.is_up("a"), "it may come back"
        await fleet.fleet.want(["b"])
        await fleet.fleet.want(["a", "b"])
        await rest()
        assert not fleet.fleet.is_up("a")
        assert fleet.fleet.is_up("b")
        fleet.arrives("a", ticket=dials)
        assert fleet.fleet.is_up("a")

    on_fleet(main, dials=dials)


def test_hosts_that_join_have_their_labels_and_are_in_the_order_of_their_names() -> None:
    async def main(fleet: FakeFleet) -> None:
        for number in (10, 2, 1):
            fleet.arrives(f"w-{number}", ticket=False, labels="rack=r1 spot" if number == 2 else "")
        assert fleet.fleet.joined() == (Host("w-1", 2), Host("w-2", 2, ("rack=r1", "spot")), Host("w-10", 2))

    on_fleet(main)


def test_nodes_that_were_told_their_place_come_first_and_in_its_order() -> None:
    async def main(fleet: FakeFleet) -> None:
        for name, node_rank in (("a", -1), ("b", 2), ("c", 0), ("d", 10)):
            fleet.arrives(name, ticket=False, node_rank=node_rank, alike={"--role": "x"})
        assert [host.name for host in fleet.fleet.joined()] == ["c", "b", "d", "a"]
        assert fleet.fleet.node_rank("nobody") == math.inf

    on_fleet(main)


def test_nodes_of_one_name_get_names_of_their_own() -> None:
    async def main(fleet: FakeFleet) -> None:
        # The driver's own has its name though its agent has not come yet.
        agents = [fleet.arrives("vm", ticket=False, alike={"--role": "x"}) for _ in range(3)]
        assert [agent.link.facts.host for agent in agents] == ["vm-2", "vm-3", "vm-4"]
        # A name is free again when its agent is gone, also where that is not known to be lost yet.
        agents[0].hang_up()
        again = fleet.arrives("vm", ticket=False, alike={"--role": "x"})
        assert again.link.facts.host == "vm-2"
        assert fleet.listener.came == ["vm-2", "vm-3", "vm-4"]
        await asyncio.sleep(1.1)
        assert fleet.listener.came == ["vm-2", "vm-3", "vm-4", "vm-2"]
        # A host that is no node is told to take another name.
        with pytest.raises(RefusedError, match="the job already has a host vm-3 "):
            fleet.arrives("vm-3", ticket=False)

    on_fleet(main, own_host="vm")


def test_agents_hear_what_has_become_of_the_job() -> None:
    async def main(fleet: FakeFleet) -> None:
        one, other = (fleet.arrives(name, ticket=False) for name in ("a", "b"))
        one.say(Leaves("a test"))
        await one.leaves()
        fleet.fleet.job_over(3, "as the test says")
        closing = asyncio.ensure_future(fleet.close())
        await other.leaves()
        await closing
        assert one.of(Close) == [Close()]
        assert other.of(Close) == [Close(3, "as the test says")]

    on_fleet(main)


def test_a_host_that_leaves_is_told_to_close_when_its_last_worker_has_ended() -> None:
    async def main(fleet: FakeFleet) -> None:
        agent = fleet.arrives("a", ticket=False)
        await _runs(fleet, agent)
        agent.say(Leaves("a test"))
        await rest()
        assert not agent.of(Close)
        assert fleet.fleet.joined() == (Host("a", 2),)
        agent.say(Exited(A.key, 0, []), Finished(A.key))
        assert fleet.fleet.joined() == ()
        await agent.leaves()

    on_fleet(main)


def test_the_end_of_the_drivers_own_machine_is_told() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("here")
        other = fleet.arrives("a", ticket=False)
        other.say(Leaves("the other's", 30.0))
        agent.say(Leaves("by hand"))
        assert fleet.listener.own_ends == []
        agent.say(Leaves("its cloud", 20.0))
        assert fleet.listener.own_ends == [("its cloud", 20.0)]
        assert fleet.listener.leaves == [("a", "the other's"), ("here", "by hand"), ("here", "its cloud")]

    on_fleet(main)


def test_a_listed_host_that_has_left_is_dialled_again_once_it_was_not_listed() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.say(Leaves("a test"))
        await agent.leaves()
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a"]
        await fleet.fleet.want([])
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a", "a"]

    on_fleet(main)


def test_a_listed_host_whose_machine_is_gone_is_dialled_again_under_its_name() -> None:
    """A pod is replaced before anybody has read a list without it."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.say(Leaves("first nobody knows when"))
        agent.say(Leaves("a test", 30.0))
        agent.say(Leaves("that is no sooner", 60.0))
        await agent.leaves()
        for _ in range(29):
            await asyncio.sleep(1.0)
            await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a"]
        await asyncio.sleep(1.0)
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a", "a"]
        fleet.arrives("a")
        assert fleet.fleet.is_up("a")

    on_fleet(main)


@pytest.mark.parametrize("first", [(), ("10.0.0.1",), ("10.0.7.7", "fd00::7")])
def test_a_listed_host_that_another_machine_has_replaced_is_dialled_again(first: tuple[str, ...]) -> None:
    async def main(fleet: FakeFleet) -> None:
        fleet.resolved["a"] = first
        (agent,) = await fleet.has("a")
        agent.say(Leaves("a test", 30.0))
        await agent.leaves()
        # It does not resolve for a while, then to what it was, then to what the agent came from.
        for addresses in (first, (), first, (), ("10.0.0.1", "10.0.0.5")):
            fleet.resolved["a"] = addresses
            await asyncio.sleep(2.0)
            await fleet.fleet.want(["a"])
            await rest()
            assert fleet.remote.hosts() == ["a"], addresses
        seen = fleet.fleet.changes.count
        fleet.resolved["a"] = ("10.0.0.6",)
        await fleet.fleet.changes.wait(seen)
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a", "a"]

    on_fleet(main)


def test_who_leaves_for_good_is_not_looked_for() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.say(Leaves("nobody knows when its machine is gone"))
        await agent.leaves()
        fleet.resolved["a"] = ("10.0.0.6",)
        for _ in range(5):
            await asyncio.sleep(100.0)
            await fleet.fleet.want(["a"])
            await rest()
        assert fleet.remote.hosts() == ["a"]
        assert len(asyncio.all_tasks()) == 1

    on_fleet(main)


def test_a_machine_that_is_not_gone_when_it_had_said_so_stays_until_its_workers_have_ended() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await _runs(fleet, agent)
        agent.say(Leaves("a test", 3.0))
        for _ in range(6):
            await asyncio.sleep(1.0)
            await fleet.fleet.want(["a"])
        assert fleet.remote.hosts() == ["a"]
        agent.say(Exited(A.key, 0, []), Finished(A.key))
        await agent.leaves()
        await fleet.fleet.want(["a"])
        await rest()
        assert fleet.remote.hosts() == ["a", "a"]

    on_fleet(main)


def test_this_machine_that_has_left_stays_away_while_another_of_its_names_is_listed() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("one")
        await fleet.fleet.want(["two"])
        agent.say(Leaves("a test"))
        await agent.leaves()
        await fleet.fleet.want(["two"])
        await rest()
        assert fleet.local.hosts() == ["one"]

    on_fleet(main, local_names=("one", "two"))


def test_a_name_that_is_taken_can_not_be_joined_under() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("a")
        fleet.arrives("j", ticket=False)
        for name in ("a", "j"):
            with pytest.raises(RefusedError, match=f"the job already has a host {name} "):
                fleet.arrives(name, ticket=False)

    on_fleet(main)


def test_who_joins_while_the_host_of_its_name_is_silent_waits_for_the_verdict() -> None:
    async def main(fleet: FakeFleet) -> None:
        older = fleet.arrives("j", ticket=False)
        older.hang_up()
        newer = fleet.arrives("j", ticket=False)
        assert fleet.fleet.link_of("j") is older.link
        await asyncio.sleep(1.1)
        assert fleet.fleet.link_of("j") is newer.link
        assert fleet.fleet.joined() == (Host("j", 2),)
        assert fleet.listener.came == ["j", "j"]

    on_fleet(main)


def test_of_two_who_wait_for_one_name_the_later_is_refused() -> None:
    """Else it would belong to the job, and no host would be its."""

    async def main(fleet: FakeFleet) -> None:
        fleet.arrives("j", ticket=False).hang_up()
        newer = fleet.arrives("j", ticket=False)
        with pytest.raises(RefusedError, match="the job already has a host j "):
            fleet.arrives("j", ticket=False)
        newer.hang_up()
        newest = fleet.arrives("j", ticket=False)
        await asyncio.sleep(1.1)
        assert fleet.fleet.link_of("j") is newest.link
        assert list(fleet.fleet.links()) == [newest.link]

    on_fleet(main)


def test_an_agent_that_has_not_heard_its_welcome_comes_once_more() -> None:
    async def main(fleet: FakeFleet) -> None:
        first = fleet.arrives("j", ticket=False)
        first.hang_up()
        again = fleet.arrives("j", ticket=False, agent=first.link.agent)
        await asyncio.sleep(5)
        assert fleet.fleet.link_of("j") is again.link
        assert fleet.fleet.known(again.link.agent) is again.link
        assert list(fleet.fleet.links()) == [again.link]

    on_fleet(main)


def test_nobody_takes_another_agents_number() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        with pytest.raises(RefusedError, match="already has an agent with this id"):
            fleet.arrives("j", ticket=False, agent=agent.link.agent)
        agent.say(Leaves("a test"))
        agent.hang_up()
        with pytest.raises(RefusedError, match="already has an agent with this id"):
            fleet.arrives("j", ticket=False, agent=agent.link.agent)
        assert fleet.fleet.known(agent.link.agent) is agent.link

    on_fleet(main)


def test_a_host_that_is_dialled_and_joins_by_itself_has_one_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        joined = fleet.arrives("a", ticket=False)
        with pytest.raises(RefusedError, match="the job already has a host a "):
            fleet.arrives("a")
        await asyncio.sleep(100)
        assert fleet.fleet.link_of("a") is joined.link
        assert fleet.remote.hosts() == ["a"]

    on_fleet(main)


def test_a_host_that_joins_between_two_tries_is_not_dialled_any_more() -> None:
    async def main(fleet: FakeFleet) -> None:
        fleet.remote.error = None
        await fleet.fleet.want(["a"])
        await rest()
        fleet.remote.dialled[0].failed.set_result(DialFailure("refused"))
        await rest()
        joined = fleet.arrives("a", ticket=False)
        assert fleet.fleet.remark() == ""
        await asyncio.sleep(100)
        assert fleet.remote.hosts() == ["a"]
        assert fleet.fleet.link_of("a") is joined.link
        joined.link.lose("a test")
        await rest()
        assert fleet.remote.hosts() == ["a", "a"]

    on_fleet(main)


def test_a_host_that_has_joined_stays_when_a_list_that_has_it_no_longer_does() -> None:
    async def main(fleet: FakeFleet) -> None:
        joined = fleet.arrives("a", ticket=False)
        await fleet.fleet.want(["a"])
        await fleet.fleet.want([])
        await rest()
        assert not joined.of(Close)
        assert fleet.fleet.joined() == (Host("a", 2),)

    on_fleet(main)


def test_a_host_that_is_not_wanted_any_more_ends_and_may_come_back() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.fleet.want([])
        assert not fleet.fleet.is_up("a")
        await fleet.fleet.want(["a"])  # listed again while its agent ends
        await agent.leaves()
        await rest()
        assert fleet.listener.lost == []
        assert fleet.remote.dialled[0].closed
        assert fleet.remote.hosts() == ["a", "a"]
        fleet.arrives("a")
        assert fleet.fleet.is_up("a")

    on_fleet(main)


def test_the_command_of_a_host_that_nobody_wants_is_ended() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        await fleet.fleet.want([])
        await rest()
        assert fleet.remote.dialled[0].closed

    on_fleet(main)


def test_why_a_host_is_not_ready_is_told_once() -> None:
    async def main(fleet: FakeFleet) -> None:
        fleet.remote.error = None
        await fleet.fleet.want(["a"])
        for _ in range(3):
            await rest()
            fleet.remote.dialled[-1].failed.set_result(DialFailure("refused"))
            await asyncio.sleep(11)
        assert fleet.listener.unready == [("a", DialFailure("refused"))]
        assert fleet.fleet.remark() == "host a is not ready: refused (tried 3 times)"

    on_fleet(main)


def test_that_no_host_can_be_used_is_told_when_no_try_can_help() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "b"])
        await rest()
        fleet.remote.dialled[0].failed.set_result(DialFailure("denied", permanent=True))
        await rest()
        assert fleet.listener.useless == []
        fleet.remote.dialled[1].failed.set_result(DialFailure("no Python", permanent=True))
        await rest()
        assert fleet.listener.useless == ["a: denied; b: no Python"]

    on_fleet(main)


def test_of_a_host_that_is_not_wanted_any_more_nothing_is_told() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        fleet.fleet._dialling.unready("b", DialFailure("denied", permanent=True))
        await fleet.fleet.want([])
        fleet.fleet._dialling.unready("a", DialFailure("denied", permanent=True))
        assert (fleet.listener.unready, fleet.listener.useless) == ([], [])

    on_fleet(main)


def test_settling_waits_for_an_agent_or_a_failure() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "b"])
        settling = asyncio.create_task(fleet.fleet.settle(5))
        await rest()
        fleet.arrives("a")
        await rest()
        assert not settling.done()
        fleet.remote.dialled[1].failed.set_result(DialFailure("refused"))
        await rest()
        assert settling.done()

    on_fleet(main)


def test_agents_that_come_and_go_for_weeks_leave_nothing_behind() -> None:
    async def main(fleet: FakeFleet) -> None:
        for number in range(1500):
            await fleet.fleet.want([f"host{number}"])
            agent = fleet.arrives(f"joined{number}", ticket=False)
            agent.say(Leaves("a test"))
            await agent.leaves()
        await fleet.fleet.want([])
        await rest()
        inside = (fleet.fleet._roster, fleet.fleet._dialling, fleet.fleet._names, fleet.fleet._leaving)
        parts = (fleet.tickets, fleet.workers, fleet.warming, fleet.meetings)
        kept = {
            name: len(value)
            for one in (fleet.fleet, *inside, fleet.fleet.changes, *parts)
            for name, value in vars(one).items()
            if isinstance(value, dict | set | list) and value
        }
        assert (kept.pop("_given_up"), kept.pop("_grace_s")) == (1000, 3)
        assert kept == {}

    on_fleet(main)


def test_the_second_interrupt_kills_on_all_hosts() -> None:
    async def main(fleet: FakeFleet) -> None:
        agents = await fleet.has("a", "b")
        fleet.workers.kill_all()
        await rest()
        assert [len(agent.of(KillAll)) for agent in agents] == [1, 1]

    on_fleet(main)


def test_hosts_that_may_be_silent_for_the_same_reason_are_told_of_before() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b, c = await fleet.has("a", "b", "c")
        a.vanishes()
        await asyncio.sleep(1)
        b.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S - 1 - 0.1)
        assert fleet.listener.silent == []
        await asyncio.sleep(0.2)
        assert fleet.listener.silent == [("b", False), ("a", True)]
        b.is_back()
        await asyncio.sleep(0.6)
        assert fleet.listener.heard == ["b"]
        assert fleet.fleet.works_for_s("a") == 0.0
        assert 0.0 < fleet.fleet.works_for_s("b") < 1.2, "since it is back"
        assert fleet.fleet.works_for_s("c") > HOST_TIMEOUT_S
        assert fleet.fleet.works_for_s("nobody") == math.inf
        assert fleet.listener.lost == []
        c.link.close("the test is over")

    on_fleet(main)


def test_a_silent_host_is_given_up_and_heard_when_it_begins_anew() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await _runs(fleet, agent)
        fleet.fleet.give_up("a", "it is heard")
        fleet.fleet.give_up("nobody", "there is none")
        assert fleet.listener.lost == []
        agent.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 0.1)
        fleet.fleet.give_up("a", "it did not respond for 5.0 s")
        assert fleet.listener.lost == [("a", "it did not respond for 5.0 s")]
        assert not fleet.fleet.is_up("a")
        assert fleet.story.told[-1] == ("lost", A, "it did not respond for 5.0 s")
        assert fleet.fleet.known(agent.link.agent) is None
        await rest()
        assert (fleet.remote.hosts(), fleet.listener.heard) == (["a", "a"], [])
        fleet.arrives("a")
        assert fleet.listener.heard == ["a"]

    on_fleet(main)


def test_a_host_that_is_heard_again_is_not_given_up() -> None:
    """The order comes a moment later."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 0.1)
        agent.beat()
        fleet.fleet.give_up("a", "too late")
        assert (fleet.listener.lost, fleet.listener.heard) == ([], ["a"])

    on_fleet(main)


def test_a_host_that_joined_and_one_that_is_listed_no_more_are_told_of_as_well() -> None:
    async def main(fleet: FakeFleet) -> None:
        (a,) = await fleet.has("a")
        j = fleet.arrives("j", ticket=False)
        await _runs(fleet, a)
        await fleet.fleet.want([])
        a.vanishes()
        j.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 0.1)
        assert sorted(host for host, sure in fleet.listener.silent if sure) == ["a", "j"]

    on_fleet(main)


class Name(str):
    """A host's name that counts how often it is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("dials", [True, False])
def test_a_long_list_of_hosts_is_not_compared_with_itself(dials: bool) -> None:
    """20,000 hosts had the driver stand still for 10 s, each time that they were listed."""

    async def main(fleet: FakeFleet) -> None:
        fleet.remote.error = LaunchError("a test's")
        Name.compared = 0
        for _ in range(2):
            await fleet.fleet.want([Name(f"a{number}") for number in range(number_of_hosts)])
            await rest()
            fleet.fleet.remark()
        await fleet.fleet.want([])
        assert Name.compared < 40 * number_of_hosts

    number_of_hosts = 1000
    on_fleet(main, dials=dials)
