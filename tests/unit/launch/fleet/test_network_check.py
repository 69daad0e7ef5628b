"""The check of the network, with agents that say what the test's network is like."""

from __future__ import annotations

import asyncio

import pytest

from elastic_driver.hosts import Host
from elastic_driver.launch.fleet.network_check import GATHER_S, LIMIT_S, TURNS
from elastic_driver.rendezvous.agent_messages import AgentMessage, Listen, Listening, Probe, Probed, Unlisten
from tests.support.fakes.fleet_fakes import FakeFleet, on_fleet, rest
from tests.support.fakes.network_fakes import PORT, network

pytestmark = pytest.mark.unit


def checks(fleet: FakeFleet) -> list[list[str]]:
    return [list(each.admitted) for each in fleet.listener.checks]


def test_the_first_host_has_nobody_to_reach() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a")
            await net.until_up("a")
            assert net.agents["a"].heard() == []
            assert fleet.listener.checks == []

    on_fleet(main, check=True)


def test_hosts_that_come_together_are_checked_together() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.want("a", "b", "c")
            for host in "abc":
                net.arrives(host)
                await asyncio.sleep(0.3)
                assert net.up() == ("abc" if host == "c" else "")
            assert checks(fleet) == [["a", "b", "c"]]
            (checked,) = fleet.listener.checks
            assert {link: (each.speed, each.rtt_s) for link, each in checked.links.items()} == dict.fromkeys(
                [("a", "b"), ("a", "c"), ("b", "c")], (1e8, 1e-4)
            )
            assert (checked.barred, checked.unheard, checked.slow) == ({}, [], [])
            for host in "abc":
                listen, reach, *measures, over = net.asked(host, (Listen, Probe, Unlisten))  # type: ignore[arg-type]
                assert isinstance(listen, Listen)
                assert listen.address == net.agents[host].link.facts.hello.address
                assert isinstance(reach, Probe)
                assert set(reach.ports) == set("abc") - {host}
                assert all(isinstance(each, Probe) and len(each.ports) == 1 for each in measures)
                assert over == Unlisten(listen.check)

    on_fleet(main, check=True)


def test_hosts_that_are_late_are_not_waited_for() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.want("a", "b", "c")
            net.arrives("a")
            net.arrives("b")
            await net.until_up("ab", within_s=GATHER_S + 0.5)
            net.arrives("c")
            await net.until_up("abc")
            assert checks(fleet) == [["a", "b"], ["c"]]
            # Those in use have only the newcomer to reach.
            assert {peer for each in net.asked("a")[-2:] for peer in each.ports} == {"c"}  # type: ignore[attr-defined]

    on_fleet(main, check=True)


def test_a_host_that_another_cannot_reach_is_barred_and_tried_again() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.broken = {("a", "c")}
            await net.has("c", "d")
            await net.until_up("abd")
            expected = (
                f"host a cannot reach it at 10.0.0.3:{PORT}: no answer within 3 s "
                "(check firewalls, routes and --network-interfaces)"
            )
            assert [(host, each.reason, each.permanent) for host, each in fleet.listener.unready] == [
                ("c", expected, False)
            ]
            assert fleet.listener.checks[-1].barred == {"c": expected}
            assert f"host c is not ready: {expected} (checked 1 time)" in fleet.fleet.remark()
            await asyncio.sleep(30)
            tries = len(net.asked("c", Listen))
            assert 4 <= tries <= 7, "with back-off"
            assert len(fleet.listener.unready) == 1, "told once"
            assert len(fleet.listener.checks) == 2
            net.broken = set()
            await net.until_up("abcd", within_s=11)
            assert fleet.fleet.remark() == ""
            assert checks(fleet)[-1] == ["c"]

    on_fleet(main, check=True)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({("c", "a")}, f"it cannot reach host a at 10.0.0.1:{PORT}: no answer"),
        ({("a", "c")}, f"host a cannot reach it at 10.0.0.3:{PORT}: no answer"),
        (
            {("a", "c"), ("c", "a")},
            f"it and host a cannot reach each other at 10.0.0.3:{PORT} and 10.0.0.1:{PORT}: no answer",
        ),
        ({("a", "c"), ("b", "c")}, "(check firewalls, routes and --network-interfaces); the same for 1 more host"),
    ],
)
def test_what_is_told_of_who_cannot_reach_whom(broken: set[tuple[str, str]], text: str) -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.broken = broken
            await net.has("c")
            await asyncio.sleep(1)
            assert net.up() == "ab"
            ((_, failure),) = fleet.listener.unready
            assert text in failure.reason

    on_fleet(main, check=True)


def test_of_two_newcomers_the_later_one_in_the_list_is_barred() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.broken = {("b", "c")}
            await net.want("a", "b", "c")
            for host in "cba":
                net.arrives(host)
            await net.until_up("ab")

    on_fleet(main, check=True)


def test_the_newcomer_that_most_cannot_reach_is_barred() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.broken = {("b", "a"), ("c", "a"), ("a", "d")}
            await net.has("a", "b", "c", "d")
            await net.until_up("bcd")
            assert [host for host, _ in fleet.listener.unready] == ["a"]

    on_fleet(main, check=True)


def test_slow_links_are_named_with_figures() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.speeds = {"ac": 9e6 / 8}
            net.rtts = {"bd": 0.025}
            await net.has("a", "b", "c", "d")
            await net.until_up("abcd")
            assert fleet.listener.checks[-1].slow == [
                "the link between hosts a and c is slow: 9 Mbit/s, others 800 Mbit/s",
                "the link between hosts b and d is slow to answer: 25 ms, others 0.1 ms",
            ]
            # Not told again of links that were there before.
            await net.has("e")
            await net.until_up("abcde")
            assert fleet.listener.checks[-1].slow == []

    on_fleet(main, check=True)


def test_a_host_all_of_whose_links_are_slow_is_named_once() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.speeds = {"bc": 1e6, "ab": 1e6, "bd": 1e6}
            await net.has("a", "b", "c", "d")
            await net.until_up("abcd")
            assert fleet.listener.checks[-1].slow == [
                "the links between host b and hosts a, c, d are slow: 8 Mbit/s, others 800 Mbit/s"
            ]

    on_fleet(main, check=True)


def test_what_looked_slow_once_is_looked_at_again() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.speeds = {"ab": 1e3}
            await net.want("a", "b", "c")
            for host in "abc":
                net.arrives(host)
            while len(net.asked("a")) < 4:  # reach, and two turns; the other has it off
                if len(net.asked("a")) == 3:
                    net.speeds = {}  # it was busy
                await asyncio.sleep(0.001)
            await net.until_up("abc")
            assert fleet.listener.checks[-1].slow == []

    on_fleet(main, check=True)


def test_a_host_in_use_whose_agent_is_stopped_is_in_nobodys_way() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.mute = {"a"}
            await net.has("c")
            await net.until_up("abc", within_s=LIMIT_S)
            assert fleet.listener.checks[-1].unheard == ["a"]

    on_fleet(main, check=True)


def test_a_host_that_the_job_has_left_out_is_in_nobodys_way() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.broken = {("b", "c"), ("c", "b")}
            fleet.listener.left_out = {"b"}
            await net.has("c")
            await net.until_up("abc")
            assert checks(fleet)[-1] == ["c"]
            assert not fleet.listener.unready
            # It is in use again, and a newcomer that it cannot reach waits outside.
            fleet.listener.left_out = set()
            net.broken |= {("b", "d")}
            await net.has("d")
            await asyncio.sleep(1)
            assert net.up() == "abc"

    on_fleet(main, check=True)


def test_a_newcomer_whose_agent_is_stopped_is_barred_in_time() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.mute = {"b"}
            await net.has("a", "b", "c")
            await net.until_up("ac", within_s=LIMIT_S)
            assert [(host, each.reason) for host, each in fleet.listener.unready] == [
                ("b", "its agent did not answer within 3 s")
            ]
            net.mute = set()
            await net.until_up("abc", within_s=LIMIT_S)

    on_fleet(main, check=True)


def test_no_check_takes_longer_than_its_limit() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            answer = net.answer

            def slowly(host: str, message: AgentMessage) -> AgentMessage | None:
                return None if isinstance(message, Probe) and message.burst_bytes else answer(host, message)

            net.answer = slowly  # type: ignore[method-assign]
            hosts = [chr(number) for number in range(ord("a"), ord("a") + 12)]
            await net.has(*hosts)
            began = asyncio.get_running_loop().time()
            await net.until_up("".join(hosts), within_s=LIMIT_S + 0.5)
            assert asyncio.get_running_loop().time() - began <= LIMIT_S + 0.1
            assert fleet.listener.checks[-1].links == {}

    on_fleet(main, check=True)


def test_a_newcomer_that_dies_meanwhile_accuses_nobody() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            answer = net.answer

            def dies(host: str, message: AgentMessage) -> AgentMessage | None:
                if host == "c" and isinstance(message, Probe):
                    net.agents["b"].link.lose("it dies")
                return answer(host, message)

            net.answer = dies  # type: ignore[method-assign]
            net.broken = {("c", "b")}  # as it is dead; of two living ones the later would go
            await net.has("b", "c")
            await net.until_up("c")
            assert fleet.listener.unready == []

    on_fleet(main, check=True)


def test_an_agent_that_is_lost_is_not_waited_for() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.mute = {"c", "d"}
            await net.has("c", "d", "e")
            await asyncio.sleep(0.1)
            for host in "cd":
                net.agents[host].link.lose("it dies")
            await net.until_up("abe", within_s=0.5)
            assert fleet.listener.unready == []

    on_fleet(main, check=True)


def test_a_connection_that_is_cut_costs_nothing() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.mute = {"b"}
            await net.has("a", "b")
            await asyncio.sleep(0.1)
            agent = net.agents["b"]
            agent.hang_up()
            await asyncio.sleep(0.3)
            agent.connect()
            net.mute = set()
            listen = next(each for each in agent.heard() if isinstance(each, Listen))
            agent.say(Listening(listen.check, PORT, ""))
            await net.until_up("ab")
            assert fleet.listener.unready == []

    on_fleet(main, check=True)


def test_who_was_barred_is_looked_at_when_one_in_use_is_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.broken = {("a", "c")}
            await net.has("c")
            await asyncio.sleep(20)  # it is tried each 10 s by now
            net.agents["a"].link.lose("it dies")
            await net.until_up("bc", within_s=GATHER_S + 0.5)

    on_fleet(main, check=True)


def test_a_new_agent_is_checked_anew() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.agents["b"].link.lose("it dies")
            await rest()
            await asyncio.sleep(0.1)
            net.broken = {("a", "b")}
            net.arrives("b")
            await asyncio.sleep(1)
            assert net.up() == "a"
            assert [host for host, _ in fleet.listener.unready] == ["b"]
            net.agents["b"].link.lose("it dies")
            await asyncio.sleep(0.1)
            net.arrives("b")
            await asyncio.sleep(1)
            assert [host for host, _ in fleet.listener.unready] == ["b", "b"], "of another agent it is news"

    on_fleet(main, check=True)


def test_ports_that_are_all_taken() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.full = {"b"}
            await net.has("a", "b")
            await net.until_up("a")
            await asyncio.sleep(0.1)
            ((host, failure),) = fleet.listener.unready
            assert (host, failure.reason) == (
                "b",
                "it cannot listen on 10.0.0.2 for the other hosts: no port in 100-199 is free",
            )
            # Workers of a host in use may have its ports. It looks for the newcomer all the same.
            net.full = {"a"}
            await net.until_up("ab", within_s=LIMIT_S)
            net.full = {"a", "b"}
            net.broken = {("b", "c")}
            await net.has("c")
            await asyncio.sleep(0.5)
            assert net.up() == "ab"
            net.broken = set()
            await net.until_up("abc", within_s=LIMIT_S)

    on_fleet(main, check=True)


def test_a_host_without_an_address_for_the_others() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("a")
            assert [(host, each.reason) for host, each in fleet.listener.unready] == [("b", "host b has no address")]

    on_fleet(main, check=True, no_address=("b",))


def test_hosts_that_join_are_checked_too() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a")
            await net.until_up("a")
            net.broken = {("a", "b")}
            for host in "bc":
                net.arrives(host, ticket=False)
            await asyncio.sleep(0.5)
            assert fleet.fleet.joined() == (Host("c", 2),)
            assert [host for host, _ in fleet.listener.unready] == ["b"]

    on_fleet(main, check=True)


def test_a_host_that_is_wanted_no_more_ends_in_the_middle() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.mute = {"b"}
            await net.has("a", "b")
            await asyncio.sleep(0.1)
            await fleet.fleet.want(["a"])
            net.mute = set()
            await net.agents["b"].leaves()
            await net.until_up("a")
            assert fleet.listener.unready == []

    on_fleet(main, check=True)


def test_answers_that_nobody_has_asked_for_change_nothing() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.mute = {"b"}
            await net.has("a", "b")
            await asyncio.sleep(0.1)
            check = net.asked("b", Listen)[0].check  # type: ignore[attr-defined]
            net.agents["b"].say(
                Listening(77, 1, ""),
                Probed(check, {}, {}, {}),  # another answer than was asked for
                Listening(check, PORT, ""),  # too late
                Probed(99, {"a": -1.0}, {"z": []}, {}),
            )
            await net.until_up("a")
            assert [host for host, _ in fleet.listener.unready] == ["b"]
            net.mute = set()
            await net.until_up("ab", within_s=LIMIT_S)

    on_fleet(main, check=True)


def test_settling_waits_for_the_verdict() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.want("a", "b", "c")
            settling = asyncio.create_task(fleet.fleet.settle(5.0))
            net.broken = {("a", "c")}
            for host in "abc":
                net.arrives(host)
            await settling
            assert net.up() == "ab"

    on_fleet(main, check=True)


def test_the_job_ends_in_the_middle_of_a_check() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            await net.until_up("ab")
            net.broken = {("a", "c"), ("b", "c")}
            await net.has("c")
            await asyncio.sleep(0.5)
            net.mute = {"a", "d"}
            await net.has("d")
            await asyncio.sleep(0.1)
            closing = asyncio.create_task(fleet.close())
            await asyncio.sleep(0.1)
            before = len(net.asked("c", Listen))
            for agent in net.agents.values():
                await agent.leaves()
            await closing
            await asyncio.sleep(30)
            assert len(net.asked("c", Listen)) == before
            assert len(asyncio.all_tasks()) == 2, "the test, and the agents' answers"

    on_fleet(main, check=True)


def test_a_hundred_hosts_at_a_time_are_bounded_work() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            hosts = [f"h{number:03}" for number in range(100)]
            net.broken = {("h007", "h042")}
            await net.has(*hosts)
            await net.until_up("".join(host for host in hosts if host != "h042"), within_s=LIMIT_S)
            for host in hosts:
                probes = net.asked(host)
                assert len(probes) <= 1 + TURNS
                assert all(len(each.ports) == 1 for each in probes[1:])  # type: ignore[attr-defined]
            links = fleet.listener.checks[-1].links
            assert len(links) >= 99 * (TURNS - 1) // 2
            # A late one has some partners, and the others are asked for one look at it.
            before = {host: len(net.asked(host)) for host in hosts}
            await net.has("late")
            await net.until_up("".join([*(host for host in hosts if host != "h042"), "late"]))
            assert all(len(net.asked(host)) - before[host] <= 3 for host in hosts if host != "h042")
            assert len(fleet.listener.checks[-1].links) == TURNS

    on_fleet(main, check=True)


def test_without_the_flag_nobody_is_asked() -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.has("a", "b")
            assert net.up() == "ab"
            await asyncio.sleep(5)
            assert net.agents["a"].heard() == []

    on_fleet(main)
