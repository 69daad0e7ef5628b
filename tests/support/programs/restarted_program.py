"""A training for torchrun, without torch: its ranks meet at MASTER_ADDR and MASTER_PORT, and do each step together.

Writes a JSON line a step, each rank its own. Rank 0 keeps the last step in a file, from which the next generation goes
on. Who has lost another waits forever, as in a collective: the launcher has to end it.

Environment: STEP_LOG, STEP_S, LAST (a file that says the last step once it is there), CHECKPOINT (rank 0's file).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MEETING = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
CHECKPOINT = Path(os.environ["CHECKPOINT"])
STEP_S = float(os.environ.get("STEP_S", "0.02"))
_STEP = struct.Struct("<q")


def meet() -> list[socket.socket]:
    """The connections of rank 0 to the others, or that of another to rank 0."""
    if RANK == 0:
        with socket.create_server(MEETING, backlog=SIZE) as server:
            return [server.accept()[0] for _ in range(SIZE - 1)]
    while True:
        try:
            return [socket.create_connection(MEETING)]
        except ConnectionRefusedError:
            time.sleep(0.01)


def hear(peer: socket.socket) -> int:
    """The step that another has come to."""
    data = b""
    while len(data) < _STEP.size:
        try:
            more = peer.recv(_STEP.size - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            signal.pause()
        data += more
    step: int = _STEP.unpack(data)[0]
    return step


def say(peer: socket.socket, step: int) -> None:
    try:
        peer.sendall(_STEP.pack(step))
    except (BrokenPipeError, ConnectionResetError):
        signal.pause()


def together(peers: list[socket.socket], step: int) -> int:
    """All have come to this step; of that of rank 0 all know then."""
    if RANK == 0:
        for peer in peers:
            hear(peer)
        for peer in peers:
            say(peer, step)
        return step
    say(peers[0], step)
    return hear(peers[0])


def is_last(step: int) -> bool:
    try:
        return step >= int(Path(os.environ["LAST"]).read_text())
    except (OSError, ValueError):
        return False


def keep(step: int) -> None:
    new = CHECKPOINT.with_suffix(".new")
    new.write_text(str(step))
    new.replace(CHECKPOINT)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    peers = meet()
    step = int(CHECKPOINT.read_text()) if RANK == 0 and CHECKPOINT.exists() else 0
    step = together(peers, step)
    with Path(os.environ["STEP_LOG"]).open("a", buffering=1) as log:
        while True:
            time.sleep(STEP_S)
            step += 1
            together(peers, step)
            line = {
                "time": time.time(),
                "pid": os.getpid(),
                "worker": os.environ["ELASTIC_DRIVER_WORKER"],
                "round": int(os.environ["ELASTIC_DRIVER_ROUND"]),
                "rank": RANK,
                "size": SIZE,
                "step": step,
            }
            log.write(json.dumps(line) + "\n")
            if RANK == 0:
                keep(step)
            # Whether it is the last is rank 0's to say: others may see the file earlier.
            if together(peers, -1 if RANK == 0 and is_last(step) else step) < 0:
                break


if __name__ == "__main__":
    main()
    sys.exit(0)
