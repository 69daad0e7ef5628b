"""The first words on each connection of an agent, and who may come."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_driver.hosts import Host
from elastic_driver.launch.fleet.admission import Admission
from elastic_driver.launch.fleet.tickets import Tickets, User
from elastic_driver.rendezvous.agent_messages import AgentMessage, Close, Hello, Refused, Warning, Welcome
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.frames import Message
from tests.support.fakes.fleet_fakes import Dial, FakeFleet, hello, on_fleet, rest, welcome_facts

pytestmark = pytest.mark.unit

JOINER = Identity(Role.JOINER)


class Place:
    """The admission before a fleet.

    Args:
        world: the fleet, and what is around it.
        more: what agents are told of the job.
    """

    def __init__(self, world: FakeFleet, **more: Any) -> None:
        self.world, self.fleet, self.tickets = world, world.fleet, world.tickets
        self.listener, self.remote = world.listener, world.remote
        self.admission = Admission(self.tickets, welcome_facts(**more), self.fleet)

    def dial(self, identity: Identity = JOINER) -> Dial:
        assert self.tickets.key_of(identity) is not None, "a stranger"
        return Dial(self.admission, identity)

    def cut_off(self, identity: Identity = JOINER) -> Hello:
        """An agent says hello, and its connection breaks. Returns what it has said."""
        first, dial = _hello(), self.dial(identity)
        dial.says(first)
        dial.connection.connection_lost(None)
        return first


def on_place(test: Callable[[Place], Coroutine[Any, Any, None]], **more: Any) -> None:
    """Runs a test of the admission."""
    on_fleet(lambda world: test(Place(world, **more)))


def _hello(**more: Any) -> Hello:
    return hello(**({"key": os.urandom(32).hex(), "slots": 2, "host": "j"} | more))


def _refusal(answer: AgentMessage | None) -> str:
    assert isinstance(answer, Refused)
    return answer.why


def test_a_host_that_joins_is_welcomed_and_comes_back_with_a_key_of_its_own() -> None:
    async def main(place: Place) -> None:
        first = _hello()
        dial = place.dial()
        welcome = dial.says(first)
        assert isinstance(welcome, Welcome)
        assert (welcome.host, welcome.seen, welcome.cwd, welcome.preload) == ("j", 0, "/work", ["torch"])
        assert welcome.agent_timeout_s == 7.0
        assert place.fleet.joined() == (Host("j", 2),)
        dial.says(Warning("one"), first=1)
        assert place.listener.warnings == ["host j: one"]
        identity = Identity(Role.AGENT, number=first.agent)
        assert place.tickets.key_of(identity) == bytes.fromhex(first.key)
        again = place.dial(identity)
        back = again.says(hello(agent=first.agent, resumes=True))
        assert isinstance(back, Welcome)
        assert back.seen == 1
        assert dial.transport.is_closed
        assert place.listener.came == ["j"]

    on_place(main, cwd="/work", preload=("torch",), agent_timeout_s=7.0)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ("rack=1 rack=2", "host j: the label 'rack' is there twice"),
        ("a\x1bb", "host j: cannot read 'a\\x1bb' as a label"),
        ("slots=3", "host j: cannot use the label 'slots=3'"),
    ],
)
def test_who_joins_with_labels_that_are_none_is_told_so(labels: str, why: str) -> None:
    async def main(place: Place) -> None:
        assert _refusal(place.dial().says(_hello(labels=labels))).startswith(why)
        assert place.fleet.joined() == ()

    on_place(main)


async def _wants(place: Place, host: str) -> Identity:
    """The fleet wants the host, and has dialled it. Returns as whom its agent comes."""
    await place.fleet.want([host])
    await rest()
    return Identity.parse(place.remote.dials[-1][1].identity)


@pytest.mark.parametrize("after_s", [0.0, 59.0])
def test_a_ticket_that_a_stranger_has_used_first_is_revoked_when_the_agent_comes(after_s: float) -> None:
    async def main(place: Place) -> None:
        identity = await _wants(place, "a")
        stranger, agent = _hello(pid=66), _hello(pid=7)
        dial = place.dial(identity)
        assert isinstance(dial.says(stranger), Welcome)
        await rest()
        assert place.fleet.is_up("a")
        await asyncio.sleep(after_s)
        assert "already been used by another agent" in _refusal(place.dial(identity).says(agent))
        await rest()
        # Neither is in the job, and nobody is dialled there any more.
        assert dial.transport.is_closed
        assert not place.fleet.is_up("a")
        assert list(place.fleet.links()) == []
        await asyncio.sleep(1000)
        assert place.remote.hosts() == ["a"]
        [(host, failure)] = place.listener.unready
        assert (host, failure.permanent) == ("a", True)
        assert "process 66 at " in failure.reason
        assert "process 7 at " in failure.reason
        assert place.listener.useless, "there is no other host"
        # The stranger's own key is of no use either.
        again = place.dial(Identity(Role.AGENT, number=stranger.agent))
        assert "given up on this agent" in _refusal(again.says(hello(agent=stranger.agent, resumes=True)))
        # Nor does the host come back under the same name.
        await place.fleet.want([])
        await place.fleet.want(["a"])
        await asyncio.sleep(1000)
        assert place.remote.hosts() == ["a"]

    on_place(main)


def test_a_second_use_after_the_start_limit_is_rejected_and_harms_nobody() -> None:
    async def main(place: Place) -> None:
        identity = await _wants(place, "a")
        place.dial(identity).says(_hello(pid=7))
        await rest()
        await asyncio.sleep(61)
        for _ in range(3):
            assert "already been used by another agent" in _refusal(place.dial(identity).says(_hello(pid=66)))
        await rest()
        assert place.fleet.is_up("a")
        assert place.listener.unready == []
        [warning] = place.listener.warnings
        assert "process 66 at " in warning
        assert "process 7 at " in warning

    on_place(main)


def test_an_agent_that_has_not_heard_its_welcome_uses_its_ticket_again() -> None:
    async def main(place: Place) -> None:
        identity = await _wants(place, "a")
        first = place.cut_off(identity)
        welcome = place.dial(identity).says(first)
        assert isinstance(welcome, Welcome)
        assert place.tickets.key_of(Identity(Role.AGENT, number=first.agent)) == bytes.fromhex(first.key)
        await rest()
        assert place.fleet.is_up("a")
        assert place.listener.unready == []
        assert place.listener.warnings == []

    on_place(main)


def test_a_ticket_is_used_again_in_vain_once_the_host_is_not_wanted() -> None:
    async def main(place: Place) -> None:
        identity = await _wants(place, "a")
        first = place.cut_off(identity)
        await place.fleet.want([])
        await rest()
        assert "no longer wanted" in _refusal(place.dial(identity).says(first))

    on_place(main)


def test_a_number_alone_makes_no_retry() -> None:
    async def main(place: Place) -> None:
        identity = await _wants(place, "a")
        first = _hello()
        place.dial(identity).says(first)
        assert "already been used by another agent" in _refusal(place.dial(identity).says(_hello(agent=first.agent)))
        assert not place.fleet.is_up("a")
        # Who was revoked has no retry.
        assert "already been used by another agent" in _refusal(place.dial(identity).says(first))

    on_place(main)


def test_a_revoked_ticket_takes_with_it_whatever_else_was_dialled_there() -> None:
    async def main(place: Place) -> None:
        identity = await _wants(place, "a")
        place.cut_off(identity)  # it has seen enough
        await asyncio.sleep(2)
        assert place.remote.hosts() == ["a", "a"]
        place.world.arrives("a")
        joined = place.world.arrives("j", ticket=False)
        _refusal(place.dial(identity).says(_hello()))
        await rest()
        assert [link.facts.host for link in place.fleet.links()] == ["j"]
        assert not joined.link.is_lost
        assert all(dialled.closed for dialled in place.remote.dialled)

    on_place(main)


def test_who_was_given_up_is_told_so() -> None:
    async def main(place: Place) -> None:
        first = _hello()
        place.dial().says(first)
        link = place.fleet.known(first.agent)
        assert link is not None
        link.lose("a test")
        again = place.dial(Identity(Role.AGENT, number=first.agent))
        assert "given up on this agent" in _refusal(again.says(hello(agent=first.agent, resumes=True)))

    on_place(main)


def test_nobody_resumes_as_somebody_else() -> None:
    async def main(place: Place) -> None:
        one, two = _hello(), _hello(host="k")
        place.dial().says(one)
        place.dial().says(two)
        for identity in (JOINER, Identity(Role.AGENT, number=two.agent)):
            answer = place.dial(identity).says(hello(agent=one.agent, resumes=True))
            assert "given up on this agent" in _refusal(answer)
        # Nor begins anew with a key that is for coming back.
        anew = place.dial(Identity(Role.AGENT, number=two.agent)).says(_hello(host="x"))
        assert "no longer valid" in _refusal(anew)

    on_place(main)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_nobody_who_knows_a_number_begins_anew_in_its_place(is_given_up: bool) -> None:
    """Whoever has the join token may say any number. The key that goes with it is its agent's alone."""

    async def main(place: Place) -> None:
        first = place.cut_off()  # before it has heard anything
        if is_given_up:
            place.fleet.known(first.agent).lose("a test")  # type: ignore[union-attr]
        thief = place.dial()
        assert "already has an agent with this id" in _refusal(thief.says(_hello(agent=first.agent, host="k")))
        assert place.tickets.key_of(Identity(Role.AGENT, number=first.agent)) == bytes.fromhex(first.key)
        assert isinstance(place.dial().says(first), Welcome)
        assert place.fleet.joined() == (Host("j", 2),)

    on_place(main)


def test_an_agent_of_another_version_is_told_so_whatever_else_its_hello_says() -> None:
    async def main(place: Place) -> None:
        later = Message("hello", {"protocol": 99, "version": "9.9", "agent": {"uuid": "x"}})
        dial = place.dial()
        said = _refusal(dial.says(later))
        assert said.startswith("this agent runs elastic_driver 9.9 (protocol 99), the driver runs ")
        assert said.endswith("install the same version on both")
        assert dial.transport.is_closed
        rubbish = place.dial()
        assert rubbish.says(Message("hello", {"agent": "x"})) is None
        assert rubbish.transport.is_closed

    on_place(main)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"version": "0.0.1"}, "install the same version on both"),
        ({"protocol": 99}, "protocol 99"),
        ({"slots": 0}, "offers no slots"),
        ({"host": "a b"}, "is not a valid host name"),
        ({"host": "", "machine": "\ud800"}, "'?' is not a valid host name"),
    ],
    ids=["version", "protocol", "slots", "name", "machine"],
)
def test_who_does_not_fit_is_told_why(more: dict[str, Any], why: str) -> None:
    async def main(place: Place) -> None:
        dial = place.dial()
        assert why in _refusal(dial.says(_hello(**more)))
        assert dial.transport.is_closed
        assert list(place.fleet.links()) == []

    on_place(main)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"slots": 5_000_000}, "host j has 5000000 slots: at most 4096 are allowed"),
        ({"slots": 1 << 62}, "at most 4096 are allowed"),
        ({"host": "h" * 256}, "is not a valid host name"),
        ({"cores": 0}, "host j has 0 cores: 1 to 65536 are allowed"),
        ({"cores": 1 << 62}, "1 to 65536 are allowed"),
        ({"node_rank": 1 << 62}, "has node rank 4611686018427387904: -1 to 65535 are allowed"),
        ({"node_rank": -2}, "has node rank -2: -1 to 65535 are allowed"),
        ({"address": "fe80::1%a\nb"}, "'fe80::1%a\\nb' is not an IP address"),
        ({"address": "x" * 300}, "is not an IP address"),
        ({"addresses": ["eth0 10.0.0.1/24"] * 4097}, "host j has 4097 addresses: at most 4096 are allowed"),
        ({"addresses": ["e" * 129]}, "is too long for an address"),
        ({"labels": " ".join(f"l{number}" for number in range(33))}, "33 labels are too many for a host"),
    ],
)
def test_a_host_beyond_what_a_host_can_be_is_told_why(more: dict[str, Any], why: str) -> None:
    async def main(place: Place) -> None:
        assert why in _refusal(place.dial().says(_hello(**more)))
        assert list(place.fleet.links()) == []

    on_place(main)


@pytest.mark.parametrize("more", [{"agent": ""}, {"agent": "../x"}, {"key": "xyz"}, {"key": ""}, {"key": "00" * 31}])
def test_a_hello_that_can_not_be_costs_the_connection(more: dict[str, Any]) -> None:
    async def main(place: Place) -> None:
        dial = place.dial()
        assert dial.says(_hello(**more)) is None
        assert dial.transport.is_closed
        assert list(place.fleet.links()) == []

    on_place(main)


@pytest.mark.parametrize("more", [{"cores": 0}, {"address": "x"}, {"node_rank": -2}], ids=["cores", "address", "rank"])
def test_the_limits_hold_for_a_host_that_was_dialled_too(more: dict[str, Any]) -> None:
    async def main(place: Place) -> None:
        assert "host a" in _refusal(place.dial(place.tickets.issue("a", 60).identity).says(_hello(**more)))
        assert list(place.fleet.links()) == []

    on_place(main)


def test_who_comes_back_with_addresses_that_are_none_is_refused() -> None:
    async def main(place: Place) -> None:
        first = _hello()
        place.dial().says(first)
        again = place.dial(Identity(Role.AGENT, number=first.agent))
        answer = again.says(hello(agent=first.agent, resumes=True, addresses=["eth0 10.0.0.1/24"] * 4097))
        assert "at most 4096 are allowed" in _refusal(answer)

    on_place(main)


def test_another_first_word_costs_the_connection() -> None:
    async def main(place: Place) -> None:
        for word, first in ((Warning("x"), 0), (Close(), 0), (_hello(), 1)):
            dial = place.dial()
            assert dial.says(word, first=first) is None
            assert dial.transport.is_closed

    on_place(main)


def test_who_says_nothing_is_cut_and_so_is_who_says_too_much() -> None:
    async def main(place: Place) -> None:
        silent, loud = place.dial(), place.dial()
        loud.connection.data_received((2 << 20).to_bytes(4, "big"))  # an agent that was taken in may say as much
        assert loud.transport.is_closed
        assert not silent.transport.is_closed
        await asyncio.sleep(11)
        assert silent.transport.is_closed

    on_place(main)


def test_those_that_have_not_said_hello_end_with_the_job() -> None:
    async def main(place: Place) -> None:
        silent, admitted = place.dial(), place.dial()
        admitted.says(_hello())
        place.admission.close()
        assert silent.transport.is_closed
        assert not admitted.transport.is_closed

    on_place(main)


def test_a_resuming_agent_that_has_seen_what_was_never_said_is_cut_and_lost() -> None:
    async def main(place: Place) -> None:
        first = _hello()
        place.dial().says(first)
        dial = place.dial(Identity(Role.AGENT, number=first.agent))
        dial.says(hello(agent=first.agent, resumes=True, seen=99))
        assert dial.transport.is_closed
        await asyncio.sleep(1.1)
        assert [host for host, _ in place.listener.lost] == ["j"]

    on_place(main)


def test_a_ticket_from_another_place_is_refused_and_stays_good() -> None:
    async def main(place: Place) -> None:
        ticket = place.tickets.issue("a", 60, frozenset({"10.9.9.9"}))
        assert "or not valid from " in _refusal(place.dial(ticket.identity).says(_hello()))
        assert place.tickets.take(ticket.identity, User("1", b"", "10.9.9.9", 1)) == ticket

    on_place(main)


def test_tickets_run_out_and_are_forgotten() -> None:
    now = [0.0]
    tickets = Tickets(lambda: now[0], join_key=None)
    issued = [tickets.issue("a", 10) for _ in range(3)]
    assert tickets.key_of(issued[0].identity) == issued[0].key
    assert issued[0].key.hex() not in repr(issued[0])
    assert repr(issued[0].key) not in repr(issued[0])
    tickets.withdraw(issued[2])
    now[0] = 11.0
    assert [tickets.key_of(ticket.identity) for ticket in issued] == [None] * 3
    assert tickets.take(issued[0].identity, User("1", b"", "10.0.0.1", 1)) is None
    tickets.issue("a", 10)
    assert len(tickets._tickets) == 1
    assert tickets.key_of(JOINER) is None
    assert tickets.key_of(Identity(Role.OPERATOR)) is None


def test_of_those_given_up_the_last_thousand_are_remembered() -> None:
    tickets = Tickets(lambda: 0.0)
    for number in range(1500):
        tickets.admit(f"{number:x}", bytes([number % 250]) * 32)
        tickets.give_up(f"{number:x}")
    tickets.give_up("nobody")
    assert tickets.key_of(Identity(Role.AGENT, number="0")) is None
    assert tickets.key_of(Identity(Role.AGENT, number=f"{1499:x}")) is not None


ALIKE = {"--rdzv-id": "one", "--nnodes": "2:3", "the command": "python train.py"}


@pytest.mark.parametrize(
    ("alike", "said", "why"),
    [
        (ALIKE, ALIKE, ""),
        (ALIKE, ALIKE | {"new": "x"}, ""),
        (ALIKE, {}, ""),  # elasticrun join
        (ALIKE, ALIKE | {"--nnodes": "2"}, "node j has --nnodes 2, and the job 2:3"),
        (ALIKE, ALIKE | {"--rdzv-id": "x" * 999}, f"node j has --rdzv-id {'x' * 300}, and the job one"),
        (ALIKE, {"new": "x"}, "node j has --rdzv-id (nothing), and the job one"),
        (None, ALIKE, "node j was started as one of several (--nnodes), but the job that it tried to join was"),
        (None, {}, ""),
    ],
)
def test_nodes_have_to_be_started_alike(alike: dict[str, str] | None, said: dict[str, str], why: str) -> None:
    async def main(place: Place) -> None:
        answer = place.dial().says(_hello(alike=said))
        if why:
            assert why in _refusal(answer)
            # Who waits for the node is told, too.
            assert [why in told for told in place.listener.refused] == [True]
        else:
            assert place.listener.unready == []
            assert isinstance(answer, Welcome)

    on_place(main, alike=alike)


def test_who_comes_too_late_is_told_so() -> None:
    async def main(place: Place) -> None:
        await place.fleet.close()
        answer = place.dial().says(_hello())
        assert isinstance(answer, Refused)
        assert answer.is_over

    on_place(main)


@pytest.mark.parametrize("same", [True, False])
def test_an_agent_that_has_obeyed_this_driver_comes_back_to_it_as_to_no_other(*, same: bool) -> None:
    async def main(place: Place) -> None:
        first = _hello()
        dial = place.dial()
        welcome = dial.says(first)
        assert isinstance(welcome, Welcome)
        assert (welcome.epoch, welcome.driver, welcome.driver_timeout_s) == (3, "this one", 600.0)
        again = place.dial(Identity(Role.AGENT, number=first.agent))
        back = again.says(hello(agent=first.agent, resumes=True, seen=0, driver="this one" if same else "another"))
        assert isinstance(back, Welcome) is same
        assert again.transport.is_closed is not same

    on_place(main, epoch=3, driver="this one", driver_timeout_s=600.0)


def test_an_agent_that_obeys_a_later_driver_is_told_nothing() -> None:
    async def main(place: Place) -> None:
        first = _hello()
        place.dial().says(first)
        again = place.dial(Identity(Role.AGENT, number=first.agent))
        assert again.says(hello(agent=first.agent, resumes=True, epoch=3, driver="another")) is None
        assert again.transport.is_closed
        assert place.listener.superseded_by == [3]
        assert place.fleet.known(first.agent) is not None, "it was not given up"

    on_place(main, epoch=2)


def test_nobody_is_told_anything_by_a_driver_that_has_left_its_job_to_another() -> None:
    """It listens a little longer. Who was refused would end its workers, or not look for the next one."""

    async def main(place: Place) -> None:
        first = _hello()
        place.dial().says(first)
        waits = place.dial()
        place.admission.abandon()
        place.fleet.abandon()
        assert waits.transport.is_closed
        again = place.dial(Identity(Role.AGENT, number=first.agent))
        assert again.says(hello(agent=first.agent, resumes=True, epoch=2)) is None
        assert again.transport.is_closed
        newcomer, other_version = place.dial(), place.dial()
        assert newcomer.says(_hello(host="k")) is None
        assert newcomer.transport.is_closed
        assert other_version.says(_hello(host="k", protocol=1)) is None
        assert other_version.transport.is_closed

    on_place(main, epoch=2)
