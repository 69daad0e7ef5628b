"""Places and addresses of a launched job's ranks."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.worker.launched.places import Member, address_of, address_of_root, places

pytestmark = pytest.mark.unit

DOCKER = "docker0 172.17.0.1/16"
LINK = "eth0 fe80::1%eth0/64"


def member(name: str, *addresses: str) -> Member:
    return Member(name, name, ("lo 127.0.0.1/8", *addresses))


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ("a", [(0, 1, 0, 1, 0, 1)]),
        ("aa", [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
        # Unequal: the second local rank is there on one machine only.
        ("aab", [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]),
        ("abb", [(0, 3, 0, 1, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 0, 1)]),
        # Dealt out in turn, as mpirun --map-by node does.
        ("bab", [(0, 3, 0, 2, 0, 2), (1, 3, 0, 1, 1, 2), (2, 3, 1, 2, 0, 1)]),
    ],
)
def test_places_of_ranks(machines: str, expected: list[tuple[int, ...]]) -> None:
    assert [astuple(slot) for slot in places(machines)] == expected


def test_rank_0_is_where_all_others_have_an_address() -> None:
    root = member("a", DOCKER, "ib0 192.168.9.1/24", "eth0 10.0.0.1/24", LINK)
    others = [member("b", DOCKER, "eth0 10.0.0.2/24", LINK), member("c", "eth0 10.0.0.3/24", "ib0 192.168.9.3/24")]
    assert address_of_root([root, *others], "") == "10.0.0.1"
    assert address_of_root([root, root], "") == "127.0.0.1"


def test_without_a_network_that_all_have_it_is_the_first_that_leads_anywhere() -> None:
    assert address_of_root([member("a", LINK, "eth0 10.0.0.1/24"), member("b", "eth0 10.1.0.2/24")], "") == "10.0.0.1"
    with pytest.raises(SettingsError, match="cannot find an address of host a"):
        address_of_root([member("a"), member("b", "eth0 10.1.0.2/24")], "")


def test_the_interface_that_is_asked_for_wins() -> None:
    root = member("a", "eth0 10.0.0.1/24", "ib0 192.168.9.1/24")
    other = member("b", "eth0 10.0.0.2/24", "ib0 192.168.9.2/24")
    assert address_of_root([root, other], "ib0") == "192.168.9.1"
    assert address_of_root([root, member("b", "eth0 10.0.0.2/24")], "ib0") == "192.168.9.1"
    assert address_of(other, "ib0", "10.0.0.2") == "192.168.9.2"
    assert address_of(other, "", "192.168.9.2") == "192.168.9.2"
    with pytest.raises(SettingsError, match="cannot use HOROVOD_GLOO_IFACE wlan7 on host b"):
        address_of(other, "wlan7", "10.0.0.2")
