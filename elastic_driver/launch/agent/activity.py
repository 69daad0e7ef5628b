"""Activity around a worker that stands still: what its children use, and what its connections receive.

Owns the sums of that. A worker is not hung while it waits for a program that it has started, for processes that load
its data, or for a slow server. A look reads all processes, so only workers that stand still are looked at. Judges
nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator, Mapping

from elastic_driver.launch.agent import proc
from elastic_driver.launch.processes.sockets import connections

# Limits per worker; anything beyond is ignored. A socket costs ten microseconds, a process thirty.
_MOST_PROCESSES, _MOST_CONNECTIONS = 256, 1024
# tcpi_bytes_received of Linux's struct tcp_info (4.1 and later).
_RECEIVED_AT, _RECEIVED = 128, struct.Struct("=Q")


class Activity:
    """The activity around one worker.

    Attributes:
        cpu_ticks: CPU time that the worker's children have used since the first look, without the times between
            standstills.
        moved_bytes: bytes that they have read and written, and that its connections have received, likewise.
    """

    def __init__(self) -> None:
        self.cpu_ticks = 0
        self.moved_bytes = 0
        # The last look; None before the first look of a standstill, which is the base of the sums.
        self._children: dict[tuple[int, int], tuple[int, int]] | None = None
        self._received: dict[int, int] = {}

    def forget(self) -> None:
        """Drop the last look: the worker makes progress again."""
        self._children = None

    def look(self, pid: int, started: int, table: Mapping[int, proc.Entry]) -> None:
        """Look at all children and connections now, and add what has changed.

        Args:
            pid: of the worker's process.
            started: PID of the process that was started for it; all of its session belong to the worker.
            table: all processes.
        """
        children = {
            (child, table[child].started): (table[child].cpu, proc.moved(proc.lines(f"/proc/{child}/io")))
            for child in itertools.islice(family(pid, started, table), _MOST_PROCESSES)
        }
        everybody = (pid, *(child for child, _ in children))
        of_all = itertools.chain.from_iterable(map(connections, everybody))
        received = {}
        for number, sock in itertools.islice(of_all, _MOST_CONNECTIONS):
            received[number] = _received(sock)
        if self._children is not None:
            for key, (cpu, moved) in children.items():
                cpu_before, moved_before = self._children.get(key, (0, 0))
                self.cpu_ticks += max(0, cpu - cpu_before)
                self.moved_bytes += max(0, moved - moved_before)
            for number, size in received.items():
                self.moved_bytes += max(0, size - self._received.get(number, 0))
        self._children, self._received = children, received


def family(pid: int, started: int, table: Mapping[int, proc.Entry]) -> Iterator[int]:
    """Yield a process's descendants and the rest of the worker's session, even those whose parent has ended."""
    children: dict[int, list[int]] = {}
    for each, entry in table.items():
        children.setdefault(entry.parent, []).append(each)
    found = dict.fromkeys(each for each, entry in table.items() if entry.session == started)
    found[pid] = None
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found[child] = None
                waiting.append(child)
    yield from (each for each in found if each != pid)


def _received(sock: socket.socket) -> int:
    with contextlib.suppress(OSError, struct.error):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
    return 0
