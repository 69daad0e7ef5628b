"""``horovod.runner.common.util.hosts``: hosts and slots as text, and the assignment of ranks to them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.core.assignment import assign_ranks
from elastic_driver.hosts import Host, WorkerId

__all__ = [
    "INVALID_SLOT_INFO",
    "HostInfo",
    "SlotInfo",
    "get_host_assignments",
    "parse_host_files",
    "parse_hosts",
    "parse_hosts_and_slots",
]


class HostInfo:
    """A host and its slots."""

    def __init__(self, hostname: str, slots: int) -> None:
        self.hostname, self.slots = hostname, slots

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse ``host:slots``. Raises ValueError."""
        hostname, slots = host_string.strip().split(":")
        return HostInfo(hostname, int(slots))


@dataclass
class SlotInfo:
    """A process's place, with its host's name, which elastic_driver.hosts.SlotInfo does not have."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Encode it as Horovod's driver sends it to its workers."""
        order = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, order))


INVALID_SLOT_INFO = SlotInfo("", *[-1] * 6)


def parse_host_files(filename: str) -> str:
    """Return ``host:slots,host:slots`` from a file with lines of the form ``host slots=2``."""
    lines = Path(filename).read_text().splitlines()
    return ",".join(f"{line.split()[0]}:{line.split('=')[1].strip()}" for line in lines if line.strip())


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Return the names in ``host:slots,host:slots``, and name -> slots. Raises ValueError."""
    texts = [text.strip() for text in hosts.split(",")]
    if not all(re.fullmatch(r"[\w.-]+:[0-9]+", text) for text in texts):
        raise ValueError(f"Invalid host input {hosts!r}: expected the form worker-0:2,worker-1:2.")
    infos = [HostInfo.from_string(text) for text in texts]
    return [info.hostname for info in infos], {info.hostname: info.slots for info in infos}


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse ``host:slots,host:slots``. Raises ValueError."""
    return [HostInfo.from_string(text) for text in hosts_string.split(",")]


def get_host_assignments(
    hosts: Iterable[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Return the places of processes, in rank order: all slots, host by host, at most ``max_num_proc``.

    Raises:
        ValueError: there are fewer slots than ``min_num_proc``.
    """
    hosts = list(hosts)
    workers = [WorkerId(host.hostname, slot, 0) for host in hosts for slot in range(host.slots)][:max_num_proc]
    if len(workers) < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available slots ({len(workers)})")
    placed = assign_ranks(workers, host_order=[Host(host.hostname, host.slots) for host in hosts], root=None)
    return [
        SlotInfo(
            hostname=member.worker.hostname,
            rank=member.slot.rank,
            local_rank=member.slot.local_rank,
            cross_rank=member.slot.cross_rank,
            size=member.slot.size,
            local_size=member.slot.local_size,
            cross_size=member.slot.cross_size,
        )
        for member in placed
    ]
