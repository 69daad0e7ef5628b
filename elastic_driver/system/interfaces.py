"""Which of a host's addresses its workers listen on, so that other hosts reach them.

Owns the choice, which is pure, and reading the present addresses. They are written ``INTERFACE ADDRESS/PREFIX``: "eth0
10.0.0.2/24", "eth0 fe80::1%eth0/64".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.errors import SettingsError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class _Own:
    """An address of the host."""

    interface: str
    address: _Address

    def __str__(self) -> str:
        return f"{self.interface} {self.address}"

    @property
    def text(self) -> str:
        """The address to listen on: a link-local one needs its link."""
        is_bare = self.address.version == 6 and self.address.is_link_local and "%" not in str(self.address)
        return f"{self.address}%{self.interface}" if is_bare else str(self.address)


def host_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, in the system's order."""
    import psutil  # late: workers that choose nothing need not load it

    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            mask = one.netmask
            try:
                version = ipaddress.ip_address(one.address).version
                bits = int(ipaddress.ip_address(mask)).bit_count() if mask else 32 if version == 4 else 128
            except ValueError:
                continue  # a hardware address
            found.append(f"{interface} {one.address}/{bits}")
    return found


def without_loopback(addresses: Sequence[str]) -> list[str]:
    """Return the addresses from :func:`host_addresses` except loopback; invalid ones are omitted."""
    return [line for line in addresses if (one := _read(line)) is not None and not one.address.is_loopback]


def interface_of(addresses: Sequence[str], address: str) -> str:
    """Return the name of the interface that has an address; "" if none has.

    Args:
        addresses: the host's, from :func:`host_addresses`.
        address: with its zone or without.
    """
    wanted = _without_zone(address)
    own = (one for one in map(_read, addresses) if one is not None)
    return next((one.interface for one in own if wanted is not None and _without_zone(one.text) == wanted), "")


def choose_address(addresses: Sequence[str], *, route: str, words: Sequence[str] = (), host: str) -> str:
    """Return the address on which a host's workers listen when a job has several machines.

    Of the addresses that the words allow (without any: of all), the one of the route; else one of its family; one that
    is reachable from beyond its link before a link-local one; in the order of the words, then of the addresses.

    Args:
        addresses: the host's, from :func:`host_addresses`; invalid ones are ignored.
        route: the host's own end of its connection to the driver; "" if not known. On the driver's own host that is a
            loopback address, and gives no information.
        words: of --network-interfaces: names of interfaces, addresses, and networks as CIDRs.
        host: the host's name, for messages.

    Returns:
        The address, with its zone if it is link-local.

    Raises:
        SettingsError: none of the host's addresses matches the words, or it has none that other hosts could reach.
    """
    own, usable = _own(addresses)
    way = _without_zone(route)
    if words:
        fits = [one for word in words for one in usable if _fits(one, word)]
        if not fits:
            raise SettingsError(
                f"cannot use --network-interfaces {','.join(words)} on host {host}: it matches no address that other "
                f"hosts can reach; the host's addresses: {', '.join(map(str, own)) or 'none'}"
            )
    elif way is not None and not way.is_loopback and all(way != _without_zone(one.text) for one in usable):
        return route  # the list may lack it, as in some sandboxes, but the kernel has it
    else:
        fits = usable
    if not fits:
        raise SettingsError(
            f"cannot find an address of host {host} that other hosts can reach; its "
            f"addresses: {', '.join(map(str, own)) or 'none'}"
        )
    is_way_known = way is not None and not way.is_loopback

    def misfit(one: _Own) -> tuple[bool, bool, bool]:
        if way is None or not is_way_known:
            return False, one.address.is_link_local, one.address.version == 6
        return (
            _without_zone(one.text) != way,
            one.address.version != way.version,
            one.address.is_link_local and not way.is_link_local,
        )

    return min(fits, key=misfit).text  # the first of several


def listening_addresses(addresses: Sequence[str], *, words: Sequence[str] = ()) -> list[str]:
    """Return the addresses on which the driver listens for other hosts: all that the words allow, IPv4 first.

    Args:
        addresses, words: see :func:`choose_address`.

    Raises:
        SettingsError: there is none.
    """
    own, usable = _own(addresses)
    fits = [one for one in usable if not words or any(_fits(one, word) for word in words)]
    if not fits:
        allowed = f" that --network-interfaces {','.join(words)} allows" if words else ""
        raise SettingsError(
            f"cannot listen for other hosts: this machine has no address{allowed} that they can reach; its "
            f"addresses: {', '.join(map(str, own)) or 'none'}"
        )
    # Link-local addresses only if they are asked for, or there are no others.
    beyond = [one for one in fits if words or not one.address.is_link_local] or fits
    return [one.text for one in sorted(beyond, key=lambda one: (one.address.is_link_local, one.address.version))]


def _own(addresses: Sequence[str]) -> tuple[list[_Own], list[_Own]]:
    """Return all valid addresses, and those of them that other hosts could reach."""
    own = [one for one in map(_read, addresses) if one is not None]
    return own, [one for one in own if not one.address.is_loopback and not one.address.is_unspecified]


def address_in(line: str) -> str:
    """Return the address of such a line, with its zone and without its prefix."""
    return line.rpartition(" ")[2].partition("/")[0]


def _read(line: str) -> _Own | None:
    try:
        return _Own(line.rpartition(" ")[0], ipaddress.ip_address(address_in(line)))
    except ValueError:
        return None


def _fits(one: _Own, word: str) -> bool:
    if word == one.interface or _without_zone(word) == _without_zone(one.text):
        return "%" not in word or word == one.text
    network = _network(word)
    address = _without_zone(one.text)
    return network is not None and address is not None and address.version == network.version and address in network


def _network(word: str) -> _Network | None:
    if "/" not in word:
        return None
    try:
        return ipaddress.ip_network(word, strict=False)
    except ValueError:
        return None


def _without_zone(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
