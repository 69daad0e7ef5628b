"""The door of a job whose ranks are all on one machine: where they learn from rank 0 how to reach it.

Owns an abstract unix socket, named by what the launcher says of the job. The kernel tells each end whose process the
other is, and only processes of one user talk to each other. The name is gone with the process that holds it: nothing
stale can be found, and there is no file that somebody else could put there before.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from elastic_driver.codec import decode, encode
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.credentials import KEY_BYTES

_AGAIN_S = 0.05
_ANSWER_S = 10.0
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a rank needs to reach rank 0.

    Attributes:
        url: of rank 0's server.
        secret: the job's, of which all keys are made, in hexadecimal digits.
        size: ranks of the job.
        owner: rank 0's process, as :mod:`elastic_driver.system.process_name` names it; "" on other machines.
        host: the address at which rank 0 is reached; on one machine loopback.
    """

    url: str
    secret: str = field(repr=False)
    size: int
    owner: str = ""
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.secret)) != KEY_BYTES:
            raise ValueError("its key has another length")


def door_name(job: str, ranks: Sequence[int]) -> str:
    """The name of a job's door, without the NUL byte.

    Args:
        job: what tells the launcher's job from others of this user on this machine.
        ranks: of the launcher's, that are this job; a launcher's ranks may be several jobs.
    """
    text = f"{os.geteuid()}\n{job}\n{','.join(map(str, ranks))}"
    return f"elastic_driver-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def listen(name: str) -> socket.socket:
    """Rank 0's end.

    Raises:
        SettingsError: somebody has this name.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(f"\0{name}")
        listening.listen(4096)
    except OSError as error:
        listening.close()
        raise SettingsError(
            f"cannot meet the other ranks of this machine: the socket @{name} is taken ({error.strerror}); another "
            "process has called init() as rank 0 of this job, or a stranger is in the way (ss -xlp)"
        ) from error
    return listening


class Door(asyncio.Protocol):
    """One process that has knocked: it is told at once, or cut off."""

    def __init__(self, welcome: Welcome) -> None:
        self._welcome = welcome

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        transport = cast("asyncio.Transport", transport)
        if _uid_of(transport.get_extra_info("socket")) != os.geteuid():
            transport.abort()
            return
        transport.write(encode(Welcome, self._welcome))
        transport.close()


def knock(name: str, *, timeout_s: float) -> Welcome:
    """What rank 0 says. Blocks until it listens.

    Raises:
        SettingsError: it does not in this time; or who listens is a process of another user, and is told nothing.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_S)
            try:
                connection.connect(f"\0{name}")
                owner = _uid_of(connection)
                if owner != os.geteuid():
                    raise SettingsError(
                        f"cannot meet rank 0: a process of user {owner} listens at @{name} in its place, and is not "
                        "believed (ss -xlp)"
                    )
                return decode(Welcome, _read(connection))
            except (OSError, ValueError) as error:  # not there yet, or it has just ended
                if isinstance(error, SettingsError):
                    raise
                if time.monotonic() > deadline:
                    raise SettingsError(
                        f"cannot meet rank 0 within {timeout_s:g} s (HOROVOD_START_TIMEOUT): it has not "
                        f"called init() on this machine, or is in another network namespace ({error})"
                    ) from error
        # Nothing tells when an abstract name is taken.
        time.sleep(_AGAIN_S)


def _read(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) <= _MOST_BYTES and (piece := connection.recv(_MOST_BYTES)):
        answer += piece
    return answer


def _uid_of(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("=iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
