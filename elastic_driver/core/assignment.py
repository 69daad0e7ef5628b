"""Assignment of ranks. Pure: places and processes in, SlotInfo out.

Owns the order of hosts and the arithmetic of rank, local_rank and cross_rank (Horovod's meaning of the six numbers).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from elastic_driver.hosts import Host, SlotInfo, WorkerId


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker and its place in a round."""

    worker: WorkerId
    slot: SlotInfo


def order_hosts(known: Sequence[Host], listed: Sequence[Host], *, staying: Container[str] = ()) -> tuple[Host, ...]:
    """Order hosts: known hosts first, in their old order, then new ones, in the order given.

    So a script with an unstable order does not move ranks, and a new host never takes a low rank from a survivor. Hosts
    of one rack are adjacent: racks are in the order of their first hosts, and a new host of a rack follows the rack's
    last.

    Args:
        known: the hosts in their order so far.
        listed: the current hosts.
        staying: names of hosts that keep their place even if no longer listed, with what was known of them.
    """
    now = {host.name: host for host in listed}
    order = {host.name: now.get(host.name, host) for host in known if host.name in now or host.name in staying}
    order |= now
    racks: dict[tuple[str, str], list[Host]] = {}
    for host in order.values():
        racks.setdefault(rack_of(host), []).append(host)
    return tuple(host for rack in racks.values() for host in rack)


def rack_of(host: Host) -> tuple[str, str]:
    """Return the key of a host's rack; a host without a rack is its own rack."""
    return (host.rack, "") if host.rack else ("", host.name)


def assign_ranks(
    workers: Sequence[WorkerId], *, host_order: Sequence[Host], root: WorkerId | None
) -> tuple[Placed, ...]:
    """Assign ranks host by host, and within a host by slot; the root has rank 0.

    The root's host comes first, then the others of its rack, before all other racks: so the ranks of a rack are
    adjacent whatever the root.

    local_rank follows the slots of the host, even if the root is not in the lowest of them: processes choose their
    device by local_rank, so the choice of the root must not change it.

    Args:
        workers: the members of the round, each once, in any order.
        host_order: at least all their hosts, in rank order.
        root: the member whose state the round uses; None leaves the order as it is.

    Returns:
        The members by rank: element r has rank r.
    """
    position = {host.name: index for index, host in enumerate(host_order)}
    members = sorted(workers, key=lambda worker: (position[worker.hostname], worker.slot, worker.attempt))
    if root is not None:
        home = rack_of(host_order[position[root.hostname]])
        near = {host.name for host in host_order if rack_of(host) == home}
        members.sort(
            key=lambda worker: (
                worker.hostname not in near,
                worker.hostname != root.hostname,
                worker != root and worker.hostname == root.hostname,
            )
        )
    return places_of(members)


def places_of(members: Sequence[WorkerId]) -> tuple[Placed, ...]:
    """Return the places of a round's members, which are in the order of their ranks."""
    by_host: dict[str, list[WorkerId]] = {}
    for worker in sorted(members, key=lambda worker: (worker.slot, worker.attempt)):
        by_host.setdefault(worker.hostname, []).append(worker)
    local_rank = {worker: index for group in by_host.values() for index, worker in enumerate(group)}
    cross_rank: dict[WorkerId, int] = {}
    cross_size: dict[int, int] = {}  # so far, by local rank
    for name in dict.fromkeys(worker.hostname for worker in members):
        for index, worker in enumerate(by_host[name]):
            cross_rank[worker] = cross_size.get(index, 0)
            cross_size[index] = cross_rank[worker] + 1
    return tuple(
        Placed(
            worker,
            SlotInfo(
                rank=rank,
                size=len(members),
                local_rank=local_rank[worker],
                local_size=len(by_host[worker.hostname]),
                cross_rank=cross_rank[worker],
                cross_size=cross_size[local_rank[worker]],
            ),
        )
        for rank, worker in enumerate(members)
    )


def hosts_of(placed: Sequence[Placed]) -> tuple[str, ...]:
    """Return the hosts of these workers, in the order of their first ranks."""
    return tuple(dict.fromkeys(member.worker.hostname for member in placed))
