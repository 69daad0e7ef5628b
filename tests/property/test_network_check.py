"""Whatever happens to agents and to the network between them, a check ends, and says what is so."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_driver.launch.fleet.network_check import GATHER_S, LIMIT_S
from elastic_driver.rendezvous.agent_messages import Bye, Close
from tests.support.extent import examples
from tests.support.fakes.fleet_fakes import FakeFleet, on_fleet, rest
from tests.support.fakes.network_fakes import Net, network

pytestmark = pytest.mark.property

HOSTS = "abcde"
_HOST = st.sampled_from(HOSTS)
_STEPS = st.one_of(
    st.tuples(st.just("come"), _HOST, _HOST),
    st.tuples(st.just("come"), _HOST, _HOST),
    st.tuples(st.just("break"), _HOST, _HOST),
    st.tuples(st.just("mend"), _HOST, _HOST),
    st.tuples(st.just("mute"), _HOST, _HOST),
    st.tuples(st.just("speak"), _HOST, _HOST),
    st.tuples(st.just("die"), _HOST, _HOST),
    st.tuples(st.just("cut"), _HOST, _HOST),
    st.tuples(st.just("dial again"), _HOST, _HOST),
    st.tuples(st.just("fill"), _HOST, _HOST),
)


def _do(net: Net, fleet: FakeFleet, what: str, one: str, other: str) -> None:
    agent = net.agents.get(one)
    there = agent is not None and not agent.link.is_lost
    match what:
        case "come" if not there and one in fleet.remote.hosts() and fleet.fleet.link_of(one) is None:
            with contextlib.suppress(AssertionError):  # its ticket has been used: it is dialled again in a moment
                net.arrives(one)
        case "break" if one != other:
            net.broken.add((one, other))
        case "mend":
            net.broken -= {(one, other), (other, one)}
        case "mute":
            net.mute.add(one)
        case "speak":
            net.mute.discard(one)
        case "fill":
            net.full ^= {one}
        case "die" if there:
            assert agent is not None
            agent.link.lose("it dies")
        case "cut" if there and agent is not None and agent.link.connected:
            agent.hang_up()
        case "dial again" if there and agent is not None and not agent.link.connected:
            agent.connect()


@given(st.lists(st.tuples(_STEPS, st.sampled_from([0.0, 0.05, 0.5, 2.0])), max_size=25))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_all_come_in_at_last_and_none_that_is_not_reached(steps: list[tuple[tuple[str, str, str], float]]) -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            await net.want(*HOSTS)
            for (what, one, other), pause_s in steps:
                _do(net, fleet, what, one, other)
                await asyncio.sleep(pause_s)
                await rest()
            for checked in fleet.listener.checks:
                assert not set(checked.admitted) & set(checked.barred)
            # All is well again: everybody comes in.
            net.broken, net.mute, net.full = set(), set(), set()
            end = asyncio.get_running_loop().time() + 3 * (LIMIT_S + GATHER_S) + 30
            while net.up() != HOSTS:
                assert asyncio.get_running_loop().time() < end, (net.up(), fleet.fleet.remark())
                for host in HOSTS:
                    _do(net, fleet, "dial again", host, host)
                    _do(net, fleet, "come", host, host)
                await asyncio.sleep(0.1)
            assert fleet.fleet.remark() == ""
            assert not any(agent.of(Close) or agent.of(Bye) for agent in net.agents.values())

    on_fleet(main, check=True)


@given(st.sets(st.tuples(_HOST, _HOST).filter(lambda link: link[0] != link[1])), st.lists(_HOST, unique=True))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_those_that_are_used_reach_each_other(broken: set[tuple[str, str]], order: list[str]) -> None:
    async def main(fleet: FakeFleet) -> None:
        async with network(fleet) as net:
            net.broken = broken
            await net.want(*HOSTS)
            for host in order:
                net.arrives(host)
                await asyncio.sleep(GATHER_S)  # so that not all are checked together
            await asyncio.sleep(2 * GATHER_S)
            used = net.up()
            assert not [(one, other) for one, other in broken if one in used and other in used]
            assert bool(used) == bool(order)
            told = {host for host, _ in fleet.listener.unready}
            assert set(order) - set(used) <= told

    on_fleet(main, check=True)
