"""A script as torchrun starts it: says what it was told, and meets the other ranks at MASTER_ADDR:MASTER_PORT.

It goes on until the file END says with which code to end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

TOLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "NODE",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ELASTIC_DRIVER_JOIN_TOKEN",
)


def meet() -> list[str]:
    """Rank 0 hears of all others; returns who was there, to rank 0."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    end = time.monotonic() + 150
    if rank:
        while True:
            try:
                with socket.create_connection(place, timeout=150) as sock:
                    sock.sendall(f"{rank}\n".encode())
                    return []
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
    with socket.create_server(place) as server:
        server.settimeout(150)
        heard = ["0"]
        while len(heard) < size:
            sock, _ = server.accept()
            with sock, sock.makefile() as lines:
                heard.append(lines.readline().strip())
    return sorted(heard, key=int)


def say_signal(number: int, _: object) -> None:
    """Says which signal has come; SIGQUIT ends it, too."""
    print(f"rank {os.environ['RANK']} was sent {signal.Signals(number).name}", flush=True)
    if number == signal.SIGQUIT:
        sys.exit(0)


def main() -> int:
    """Says what it was told. Returns the code that it was told to end with."""
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, say_signal)
    told = {name: os.environ[name] for name in TOLD if name in os.environ}
    line = {"pid": os.getpid(), "cwd": os.getcwd(), "time": time.time(), "words": sys.argv[1:], **told}
    if "MASTER_PORT" in told:
        line["met"] = meet()
    with open(os.environ["LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")
    print(f"I am rank {told['RANK']} of {told['WORLD_SIZE']} on {told.get('NODE', '?')}", flush=True)
    end = Path(os.environ["END"])
    while not end.exists():
        time.sleep(0.05)
    return int(end.read_text())


if __name__ == "__main__":
    sys.exit(main())
