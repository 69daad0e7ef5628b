"""Keeping an agent on one host: when it is dialled, and again."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet import dialling
from elastic_driver.launch.fleet.tickets import Ticket, User
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.credentials import Identity
from tests.support.fakes.fleet_fakes import FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit


def test_tries_come_slower_and_slower() -> None:
    async def main(fleet: FakeFleet) -> None:
        loop = asyncio.get_running_loop()
        fleet.remote.error = LaunchError("no memory")
        times = [loop.time()]
        await fleet.fleet.want(["a"])
        for number in range(1, 9):
            while len(fleet.remote.dials) <= number:
                await asyncio.sleep(0.05)
            times.append(loop.time())
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert pauses[0] < 0.5
        assert max(pauses) == pytest.approx(10, abs=0.2)
        assert fleet.listener.unready == [("a", DialFailure("no memory"))]

    on_fleet(main)


def test_what_can_not_get_better_by_itself_is_tried_seldom() -> None:
    async def main(fleet: FakeFleet) -> None:
        fleet.remote.error = CommandNotFoundError("no ssh")
        await fleet.fleet.want(["a"])
        await asyncio.sleep(29)
        assert len(fleet.remote.dials) == 1
        assert fleet.listener.unready == [("a", DialFailure("no ssh", permanent=True))]
        await asyncio.sleep(2)
        assert len(fleet.remote.dials) == 2

    on_fleet(main)


def test_an_agent_that_does_not_dial_in_is_started_anew_with_a_new_ticket() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await asyncio.sleep(61)
        first, second = (bootstrap.identity for _, bootstrap in fleet.remote.dials)
        assert fleet.remote.dialled[0].closed
        assert fleet.listener.unready[0][1].reason.startswith("no agent connected from there within 60 s")
        assert fleet.tickets.key_of(Identity.parse(first)) is None
        assert fleet.tickets.key_of(Identity.parse(second)) is not None

    on_fleet(main)


def test_a_ticket_is_good_for_nothing_once_the_host_is_not_wanted() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        identity = Identity.parse(fleet.remote.dials[0][1].identity)
        assert fleet.tickets.key_of(identity) is not None
        await fleet.fleet.want([])
        await rest()
        assert fleet.tickets.key_of(identity) is None

    on_fleet(main)


def test_an_agent_that_can_not_be_taken_is_told_of_at_once() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a"])
        await rest()
        fleet.fleet.turned_away("a", "another version")
        fleet.fleet.turned_away("nobody", "another version")
        await rest()
        assert fleet.listener.unready == [("a", DialFailure("another version", permanent=True))]
        assert fleet.listener.useless == ["a: another version"]

    on_fleet(main)


def test_the_end_of_the_command_of_an_agent_that_is_there_means_nothing_elsewhere_and_its_death_here() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("a", "here")
        await rest()
        fleet.remote.dialled[0].failed.set_result(DialFailure("the connection was closed"))
        await rest()
        assert fleet.fleet.is_up("a")
        fleet.local.dialled[0].failed.set_result(DialFailure("killed"))
        await rest()
        assert not fleet.fleet.is_up("here")
        assert fleet.listener.lost == [("here", "its agent has died")]
        assert fleet.local.hosts() == ["here", "here"]

    on_fleet(main)


def test_a_ticket_that_others_can_read_is_good_from_the_hosts_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_resolve", lambda host: frozenset({"10.0.0.1"}))

    async def main(fleet: FakeFleet) -> None:
        fleet.remote.shows = True
        await fleet.fleet.want(["a"])
        await rest()
        user = User("1", b"", "10.0.0.1", 1)
        ticket = fleet.tickets.take(Identity.parse(fleet.remote.dials[0][1].identity), user)
        assert isinstance(ticket, Ticket)
        assert ticket.addresses == {"10.0.0.1"}

    on_fleet(main)


def test_a_host_where_nothing_arrives_is_dialled_again_at_once_with_a_ticket_that_others_can_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialling, "_resolve", lambda host: frozenset({"10.0.0.1"}))

    async def main(fleet: FakeFleet) -> None:
        began = asyncio.get_running_loop().time()
        await fleet.fleet.want(["a", "b"])
        await rest()
        fleet.remote.shows = True
        for dialled in tuple(fleet.remote.dialled):
            dialled.failed.set_result(DialFailure("nothing has arrived"))
        await rest()
        assert fleet.remote.hosts() == ["a", "b", "a", "b"]
        assert asyncio.get_running_loop().time() == began
        assert fleet.listener.unready == [], "that is no failed try"
        [warning] = fleet.listener.warnings
        assert "every user of the job's machines can read it" in warning
        old, _, new, _ = (Identity.parse(bootstrap.identity) for _, bootstrap in fleet.remote.dials)
        assert fleet.tickets.key_of(old) is None
        ticket = fleet.tickets.take(new, User("1", b"", "10.0.0.1", 1))
        assert isinstance(ticket, Ticket)
        assert ticket.addresses == {"10.0.0.1"}
        # What fails now has failed.
        fleet.remote.dialled[2].failed.set_result(DialFailure("no"))
        await rest()
        assert fleet.listener.unready == [("a", DialFailure("no"))]

    on_fleet(main)
