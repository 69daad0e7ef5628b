"""Who gets which rank. Pure: places and processes in, SlotInfo out.

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
    """Puts hosts that were known before first, in their old order, and new ones behind, in the order given.

    So that a script whose order wanders does not move ranks, and a newcomer never takes a low rank from a survivor.
    Hosts of one rack are next to each other: racks are in the order of their first hosts, and a newcomer of a rack
    comes behind its last.

    Args:
        known: the hosts in their order so far.
        listed: those that there are now.
        staying: names of those that keep their place also where they are no longer listed, with what was known of them.
    """
    now = {host.name: host for host in listed}
    order = {host.name: now.get(host.name, host) for host in known if host.name in now or host.name in staying}
    order |= now
    racks: dict[tuple[str, str], list[Host]] = {}
    for host in order.values():
        racks.setdefault(rack_of(host), []).append(host)
    return tuple(host for rack in racks.values() for host in rack)


def rack_of(host: Host) -> tuple[str, str]:
    """What its rack is told from others by; a host without a rack is one for itself."""
    return (host.rack, "") if host.rack else ("", host.name)


def assign_ranks(
    workers: Sequence[WorkerId], *, host_order: Sequence[Host], root: WorkerId | None
) -> tuple[Placed, ...]:
    """Ranks run over host by host, within a host by slot; the root has rank 0.

    Its host comes first, and behind that the others of its rack, before all other racks: so ranks of a rack are next to
    each other whoever the root is.

    local_rank follows the slots of the host, also where the root is not the lowest of them: processes choose their
    device by local_rank, so a choice of root must not move it.

    Args:
        workers: the members of the round, each once, in any order.
        host_order: at least all their hosts, in rank order.
        root: the member whose state the round goes on from; None leaves the order as it is.

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
    """The places of a round's members, which are in the order of their ranks."""
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
    """The hosts of these workers, in the order of their first ranks."""
    return tuple(dict.fromkeys(one.worker.hostname for one in placed))
