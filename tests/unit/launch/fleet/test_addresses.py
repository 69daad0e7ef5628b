"""Where the workers of one host listen for those of the others."""

from __future__ import annotations

import pytest

from tests.support.fakes.fleet_fakes import FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit


def test_workers_of_one_machine_listen_on_loopback() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("here")
        assert fleet.addresses.of(["here", "too"]) == {"here": "127.0.0.1", "too": "127.0.0.1"}
        await fleet.fleet.want(["here", "a"])
        await rest()
        fleet.arrives("a", address="10.0.0.2", peer="10.0.0.2")
        # The driver's own machine is where the other has reached it.
        assert fleet.addresses.of(["here", "a"]) == {"here": "10.0.0.9", "a": "10.0.0.2"}
        assert fleet.addresses.of(["a"]) == {"a": "127.0.0.1"}

    on_fleet(main, local_names=("here", "too"))


def test_a_round_with_a_host_that_has_no_address_for_others_is_no_error_of_the_drivers() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.fleet.want(["a", "b"])
        await rest()
        fleet.arrives("a")
        fleet.arrives("b", peer="10.0.0.2", address="10.0.0.2")
        assert fleet.addresses.of(["a", "b"]) == {"a": "10.0.0.1", "b": "10.0.0.2"}
        assert fleet.warnings == ["host a has no address"]

    on_fleet(main, no_address=("a",))
