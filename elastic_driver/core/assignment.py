"""Who gets which rank. Pure: places and processes in, SlotInfo out.

Owns the order of hosts and the arithmetic of rank, local_rank and cross_rank (Horovod's meaning of the six numbers).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.hosts import Host, SlotInfo, WorkerId


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker and its place in a round."""

    worker: WorkerId
    slot: SlotInfo


def order_hosts(known: Sequence[str], hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Puts hosts that were known before first, in their old order, and new ones behind, in the order given.

    So that a script whose order wanders does not move ranks, and a newcomer never takes a low rank from a survivor.
    Newcomers whose names differ in numbers only are put in the order of these (worker-2 before worker-10): a script
    that lists them sorted as text means that. Which kind of name comes first is the lister's choice.
    """
    by_name = {host.name: host for host in hosts}
    old = [by_name[name] for name in dict.fromkeys(known) if name in by_name]
    known_names = frozenset(known)
    new = [host for host in hosts if host.name not in known_names]
    kinds = list(dict.fromkeys(_kind(host.name) for host in new))
    return (*old, *sorted(new, key=lambda host: (kinds.index(_kind(host.name)), _numbers(host.name), host.name)))


def _kind(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"[0-9]+", name))


def assign_ranks(
    workers: Sequence[WorkerId], *, host_order: Sequence[str], root: WorkerId | None
) -> tuple[Placed, ...]:
    """Ranks run over host by host, within a host by slot; the root's host comes first and the root has rank 0.

    local_rank follows the slots of the host, also where the root is not the lowest of them: processes choose their
    device by local_rank, so a choice of root must not move it.

    Args:
        workers: the members of the round, each once, in any order.
        host_order: names of at least all their hosts, in rank order.
        root: the member whose state the round goes on from; None leaves the order as it is.

    Returns:
        The members by rank: element r has rank r.
    """
    position = {name: index for index, name in enumerate(host_order)}
    members = sorted(workers, key=lambda worker: (position[worker.hostname], worker.slot, worker.attempt))
    by_host: dict[str, list[WorkerId]] = {}
    for worker in members:
        by_host.setdefault(worker.hostname, []).append(worker)
    local_rank = {worker: index for group in by_host.values() for index, worker in enumerate(group)}
    if root is not None:
        members.sort(
            key=lambda worker: (worker.hostname != root.hostname, worker != root and worker.hostname == root.hostname)
        )
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
