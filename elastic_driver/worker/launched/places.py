"""The places of a launched job's ranks, and the addresses at which they reach each other. Pure.

Does not know how its inputs were collected.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import SlotInfo
from elastic_driver.system.interfaces import choose_address, without_loopback

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Member:
    """A rank's facts about its machine.

    Attributes:
        machine: distinguishes it from all other machines.
        hostname: for messages.
        addresses: from :func:`~elastic_driver.system.interfaces.host_addresses`.
    """

    machine: str
    hostname: str
    addresses: tuple[str, ...] = ()


def places(machines: Sequence[str]) -> list[SlotInfo]:
    """Return each rank's place.

    Args:
        machines: the machine of each rank, in any order and number.
    """
    on_each = Counter(machines)
    # Hosts are in the order of their first rank, as mpirun numbers them.
    hosts = list(on_each)
    taken: Counter[str] = Counter()
    slots = []
    for rank, machine in enumerate(machines):
        local_rank = taken[machine]
        taken[machine] += 1
        with_it = [host for host in hosts if on_each[host] > local_rank]
        slots.append(SlotInfo(rank, len(machines), local_rank, on_each[machine], with_it.index(machine), len(with_it)))
    return slots


def address_of_root(members: Sequence[Member], interface: str) -> str:
    """Return the address at which all ranks reach rank 0.

    Preferably one in a network in which all other machines have an address; else the choice of
    :func:`~elastic_driver.system.interfaces.choose_address`.

    Args:
        members: all ranks.
        interface: the only interface to use; "" for any.

    Raises:
        SettingsError: rank 0's machine has no address that others could reach.
    """
    root = members[0]
    others = {member.machine: member for member in members if member.machine != root.machine}
    if not others:
        return LOOPBACK
    words = [interface] if interface else []
    shared = [line for line in without_loopback(root.addresses) if all(_meet(line, other) for other in others.values())]
    if shared:
        try:
            return choose_address(shared, route="", words=words, host=root.hostname)
        except SettingsError:
            pass  # another interface was requested
    return _chosen(root, "", words)


def address_of(member: Member, interface: str, route: str) -> str:
    """Return the address of a rank on another machine than rank 0's.

    Args:
        member: the rank's machine.
        interface: the only interface to use; "" for any.
        route: this machine's own end of a connection to rank 0.

    Raises:
        SettingsError: its machine has no address that others could reach.
    """
    return _chosen(member, route, [interface] if interface else [])


def _chosen(member: Member, route: str, words: Sequence[str]) -> str:
    try:
        return choose_address(member.addresses, route=route, words=words, host=member.hostname)
    except SettingsError as error:
        raise SettingsError(str(error).replace("--network-interfaces", "HOROVOD_GLOO_IFACE")) from None


def _meet(line: str, other: Member) -> bool:
    """Return whether the other machine has an address in the network of this one.

    Networks local to each machine (of containers, of one link) look alike everywhere, but connect nothing.
    """
    here = ipaddress.ip_interface(line.rpartition(" ")[2])
    theirs = [ipaddress.ip_interface(each.rpartition(" ")[2]).ip for each in without_loopback(other.addresses)]
    return not here.is_link_local and here.ip not in theirs and any(ip in here.network for ip in theirs)
