"""The connected TCP sockets of another process, as this process's own for a moment.

Owns how they are had: by who may trace the process, as its ancestor may unless the system says otherwise. Where it may
not, there are none. Of what is on this machine only (unix sockets, pipes), a unix socket's other end is all that is
asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator

from elastic_driver.system.kernel import pidfd_getfd, pidfd_open
from elastic_driver.system.local_socket import peer_of

_IN_KERNEL = re.compile(r"(socket|pipe):\[(\d+)\]")


def in_kernel(pid: int, descriptor: int | str) -> tuple[str, int]:
    """What a descriptor of a process is: "socket" or "pipe", and the number by which the system knows it; or ("", 0).

    Never waits: to ask for the status of a file on a network's file system (stat) would wait for its server.
    """
    with contextlib.suppress(OSError):
        if found := _IN_KERNEL.fullmatch(os.readlink(f"/proc/{pid}/fd/{descriptor}")):
            return found[1], int(found[2])
    return "", 0


def connections(pid: int) -> Iterator[tuple[int, socket.socket]]:
    """The number of each by which the system knows it, and a copy that is closed when the next one is asked for.

    Blocks for some ten microseconds each.
    """
    with contextlib.suppress(OSError):  # it is gone, may not be traced, or the kernel knows no pidfds
        process = pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    kind, number = in_kernel(pid, name)
                    if kind == "socket" and (sock := _copy(process, int(name))) is not None:
                        with sock:
                            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                                yield number, sock
        finally:
            os.close(process)


def peer_process(pid: int, descriptor: int) -> int:
    """The process that the other end of a unix socket was connected by; 0 where that is not to be had."""
    with contextlib.suppress(OSError):
        process = pidfd_open(pid)
        try:
            if (sock := _copy(process, descriptor)) is not None:
                with sock:
                    if sock.family == socket.AF_UNIX:
                        return peer_of(sock)[0]
        finally:
            os.close(process)
    return 0


def _copy(process: int, descriptor: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.socket(fileno=pidfd_getfd(process, descriptor))
    return None
