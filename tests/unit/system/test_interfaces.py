"""Which address a host's workers listen on: by route, by the user's words, of either family, and never loopback."""

from __future__ import annotations

import ipaddress

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.system.interfaces import choose_address, host_addresses

pytestmark = pytest.mark.unit

LO = ["lo 127.0.0.1/8", "lo ::1/128"]
HOST = [
    *LO,
    "eth0 10.0.0.2/24",
    "eth0 fe80::2%eth0/64",
    "ib0 192.168.7.2/16",
    "ib0 fd00:7::2/64",
    "docker0 172.17.0.1/16",
]


def choose(*words: str, route: str = "10.0.0.2", addresses: list[str] | None = None) -> str:
    return choose_address(HOST if addresses is None else addresses, route=route, words=words, host="worker-3")


@pytest.mark.parametrize(
    ("route", "chosen"),
    [
        ("10.0.0.2", "10.0.0.2"),
        ("192.168.7.2", "192.168.7.2"),
        ("fd00:7::2", "fd00:7::2"),
        ("fe80::2%eth0", "fe80::2%eth0"),
        ("fe80::2", "fe80::2%eth0"),  # the end of a connection may come without its zone
        ("203.0.113.9", "203.0.113.9"),  # not in the list
        ("127.0.0.1", "10.0.0.2"),  # the driver's own host
        ("::1", "10.0.0.2"),
        ("", "10.0.0.2"),
    ],
)
def test_by_route(route: str, chosen: str) -> None:
    assert choose(route=route) == chosen


@pytest.mark.parametrize(
    ("words", "route", "chosen"),
    [
        (["ib0"], "10.0.0.2", "192.168.7.2"),
        (["ib0"], "fd00:99::1", "fd00:7::2"),
        (["eth0"], "10.0.0.2", "10.0.0.2"),
        (["eth0"], "fe80::2%eth0", "fe80::2%eth0"),
        (["192.168.0.0/16"], "10.0.0.2", "192.168.7.2"),
        (["192.168.7.9/16"], "10.0.0.2", "192.168.7.2"),
        (["fd00:7::/32"], "10.0.0.2", "fd00:7::2"),
        (["fe80::/10"], "10.0.0.2", "fe80::2%eth0"),
        (["192.168.7.2"], "10.0.0.2", "192.168.7.2"),
        (["fe80::2%eth0"], "10.0.0.2", "fe80::2%eth0"),
        (["fe80::2"], "10.0.0.2", "fe80::2%eth0"),
        (["eth7", "ib0", "eth0"], "127.0.0.1", "192.168.7.2"),  # the first that is there
        (["ib0", "eth0"], "10.0.0.2", "10.0.0.2"),  # of those that fit, the route's
        (["lo", "docker0"], "10.0.0.2", "172.17.0.1"),
    ],
)
def test_by_the_users_words(words: list[str], route: str, chosen: str) -> None:
    assert choose(*words, route=route) == chosen


@pytest.mark.parametrize("words", [["eth7"], ["lo"], ["127.0.0.1"], ["10.1.0.0/16"], ["nonsense/99"], ["fe80::2%ib0"]])
def test_words_that_fit_nothing_name_host_words_and_what_it_has(words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        choose(*words)
    said = str(caught.value)
    assert f"cannot use --network-interfaces {','.join(words)} on host worker-3" in said
    assert said.endswith("docker0 172.17.0.1")


def test_a_host_that_nobody_could_reach() -> None:
    with pytest.raises(
        SettingsError, match=r"worker-3 that other hosts can reach; its addresses: lo 127\.0\.0\.1, lo ::1"
    ):
        choose(route="127.0.0.1", addresses=LO)
    with pytest.raises(SettingsError, match="its addresses: none"):
        choose(route="", addresses=["rubbish", ""])


def test_a_links_own_address_is_the_last_choice() -> None:
    addresses = [*LO, "eth0 169.254.3.4/16", "eth0 fe80::2%eth0/64", "eth1 fd00::5/64"]
    assert choose(route="", addresses=addresses) == "fd00::5"
    assert choose(route="", addresses=addresses[:4]) == "169.254.3.4"
    assert choose(route="", addresses=["eth0 fe80::2/64"]) == "fe80::2%eth0"


def test_the_addresses_of_this_host() -> None:
    found = host_addresses()
    assert "lo 127.0.0.1/8" in found
    for line in found:
        interface, address = line.split(" ")
        assert interface
        ipaddress.ip_interface(address)
