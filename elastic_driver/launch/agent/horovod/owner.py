"""The owner of a connection within this machine: the user of the process at its other end, according to the kernel.

A TCP connection carries no credentials as a unix socket does, so the kernel is asked for the socket with these two ends
(sock_diag, Linux 3.3), in microseconds; if it does not answer, its table of connections is read. A socket that its
process has closed may still have sent something, and has no owner: the kernel reports root, and no inode.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_SOCK_DIAG, _DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, sender
_WANTED = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_ENDS = struct.Struct("!HH16s16s")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface, cookie
_OWNER = struct.Struct("=II")  # user id, inode
_UID_AT = _HEADER.size + 4 + _ENDS.size + len(_ANY) + 12


def owner_of(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """Return the user id of the owner of the far end of a TCP connection over IPv4 within this machine.

    Args:
        near: address and port of our end.
        far: address and port of the other end.

    Returns:
        None if the connection no longer exists, or its far end is closed.
    """
    with contextlib.suppress(OSError):
        return _by_diag(near, far)
    return _by_table(near, far)


def _by_diag(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    body = _WANTED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    body += _ENDS.pack(far[1], near[1], socket.inet_aton(far[0]), socket.inet_aton(near[0])) + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as diag:
        diag.settimeout(1.0)
        diag.send(_HEADER.pack(_HEADER.size + len(body), _DIAG_BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = diag.recv(8192)
    kind = _HEADER.unpack_from(answer)[1]
    if kind != _DIAG_BY_FAMILY or len(answer) < _UID_AT + _OWNER.size:
        raise OSError("no such connection, or the kernel does not support the query")
    uid, inode = _OWNER.unpack_from(answer, _UID_AT)
    return int(uid) if inode else None


def _by_table(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    ours, theirs = _in_table(near), _in_table(far)
    for table, wanted in (("tcp", (theirs, ours)), ("tcp6", (f"{_MAPPED}{theirs}", f"{_MAPPED}{ours}"))):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as lines:
            for line in lines:
                fields = line.split()
                if (fields[1], fields[2]) == wanted:
                    return int(fields[7]) if fields[9] != "0" else None
    return None


_MAPPED = "0000000000000000FFFF0000" if sys.byteorder == "little" else "00000000000000000000FFFF"


def _in_table(end: tuple[str, int]) -> str:
    """Format an address and port as the table does: the address's bytes in the machine's order."""
    return f"{struct.unpack('=I', socket.inet_aton(end[0]))[0]:08X}:{end[1]:04X}"
