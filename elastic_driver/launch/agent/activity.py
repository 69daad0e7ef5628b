"""What goes on around a worker that stands still: what its children do, and what its connections receive.

Owns the sums of that. A worker that waits for a program that it has started, for processes that load its data, or for
a slow server does not hang. It costs a look at all processes, so it is asked only of workers that stand still. Judges
nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator, Mapping

from elastic_driver.launch.agent import proc
from elastic_driver.launch.processes.sockets import connections

# Of one worker: what is behind that is not looked at. A socket costs ten microseconds, a process thirty.
_MOST_PROCESSES, _MOST_CONNECTIONS = 256, 1024
# tcpi_bytes_received of Linux's struct tcp_info (4.1 and later).
_RECEIVED_AT, _RECEIVED = 128, struct.Struct("=Q")


class Activity:
    """Of one worker.

    Attributes:
        cpu_ticks: what the worker's children have used since the looks began, without the times in which it was not
            looked at.
        moved_bytes: what they have read and written, and what came on connections, likewise.
    """

    def __init__(self) -> None:
        self.cpu_ticks = 0
        self.moved_bytes = 0
        # As they were seen last; None before the first look of a standstill, from which on things count.
        self._children: dict[tuple[int, int], tuple[int, int]] | None = None
        self._received: dict[int, int] = {}

    def forget(self) -> None:
        """It goes on by itself: nobody need know."""
        self._children = None

    def look(self, pid: int, started: int, table: Mapping[int, proc.Entry]) -> None:
        """Looks at all now.

        Args:
            pid: of the worker's process.
            started: of the one that was started for it; others of its session are the worker's, too.
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
    """The children of a process, theirs, and who else is of the worker's session: whose parent has ended, too."""
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
