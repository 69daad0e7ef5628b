"""How the ranks of a job on a single machine learn how to reach rank 0.

Owns the name of the folder where rank 0 listens, derived from the launcher's description of the job, and the message
sent there. Only processes of one user are served (local_socket.py). Rank 0 holds the folder exclusively as long as it
serves: a second one is rejected, and a killed one does not answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from elastic_driver.codec import decode, encode
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.credentials import KEY_BYTES
from elastic_driver.system.local_socket import OtherUserError, SocketFolder, connect, is_ours, named_paths
from elastic_driver.system.process_name import network_id

SOCKET = "meeting.sock"
"""The socket in rank 0's folder that sends the welcome."""

_AGAIN_S = 0.05
_ANSWER_S = 10.0
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Welcome:
    """The parameters for reaching rank 0.

    Attributes:
        url: URL of rank 0's server, with its certificate's fingerprint if it is reached over a network.
        secret: the job's secret, from which all keys are derived, in hexadecimal digits.
        size: ranks of the job.
        owner: rank 0's process (:mod:`elastic_driver.system.process_name`); "" on other machines.
        host: the address at which rank 0 is reached; on one machine loopback.
    """

    url: str
    secret: str = field(repr=False)
    size: int
    owner: str = ""
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.secret)) != KEY_BYTES:
            raise ValueError("its key has the wrong length")


def meeting_name(job: str, ranks: Sequence[int]) -> str:
    """Return the name of the folder where a job's ranks meet.

    Args:
        job: distinguishes the launcher's job from others of this user on this machine.
        ranks: the launcher's ranks that form this job; a launcher's ranks may form several jobs.
    """
    # Containers may share /tmp, but not the loopback interface.
    text = f"{network_id()}\n{job}\n{','.join(map(str, ranks))}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def claim(name: str) -> SocketFolder:
    """Hold rank 0's folder, for as long as it serves.

    Raises:
        SettingsError: another process has it, or it cannot be made.
    """
    try:
        return SocketFolder.named(name)
    except BlockingIOError as error:
        raise SettingsError(
            "cannot serve the other ranks on this machine: another process has called init() as rank 0 of this job"
        ) from error


class WelcomeSender(asyncio.Protocol):
    """Sends the welcome to another rank that connects; a stranger is cut off."""

    def __init__(self, welcome: Welcome) -> None:
        self._welcome = welcome

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the welcome, unless another user connects."""
        transport = cast("asyncio.Transport", transport)
        if not is_ours(transport.get_extra_info("socket")):
            transport.abort()
            return
        transport.write(encode(Welcome, self._welcome))
        transport.close()


def ask_rank_0(name: str, *, timeout_s: float) -> Welcome:
    """Return the welcome that rank 0 sends. Blocks until it listens.

    Raises:
        SettingsError: it does not listen within this time; or another user has its place, and is sent nothing.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        problems: list[Exception] = []
        for folder in named_paths(name):
            try:
                with connect(folder / SOCKET, _ANSWER_S) as connection:
                    return decode(Welcome, _read(connection))
            except (OSError, ValueError) as error:  # not there yet, or just ended
                problems.append(error)
        why = "; ".join(map(in_words, problems))
        if all(isinstance(error, OtherUserError) for error in problems):
            raise SettingsError(f"cannot reach rank 0: {why}") from problems[0]
        if time.monotonic() > deadline:
            raise SettingsError(
                f"cannot reach rank 0 within {timeout_s:g} s (HOROVOD_START_TIMEOUT): it has not called init() on "
                f"this machine, or it is in another container, which requires mpi4py ({why})"
            ) from problems[0]
        # No event announces the socket.
        time.sleep(_AGAIN_S)


def _read(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) <= _MOST_BYTES and (piece := connection.recv(_MOST_BYTES)):
        answer += piece
    return answer
