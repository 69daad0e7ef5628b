"""How long a round takes when there are thousands of workers.

    python benchmarks/scale.py [--workers 64,512,8000] [--runs 3] [--profile FILE]

The driver is the real one (server, fleet, core, events), in a process of its own; its hosts' agents are in this one,
with the real link to the driver, and each has eight simulated workers (see simulated.py). Measured, as medians:

    agents   from discovery's answer until the driver has taken all agents in: each proves itself and agrees on keys
    start    from then until the driver knows that every worker trains: all are told to start, ask for their round,
             watch it, learn where rank 0 listens, and report
    again    the same after a death, from a worker's end: its host is lost, all others are told to leave their
             round, ask for the next one, and report
    half     the same after the death of the workers of every second host, all at once
    end      from the end of all that are left, with code 0, until the driver is gone
    link     what the workers then tell each other through rank 0, with the native engine as rank 0 and dialers in
             this process for the others

The driver's CPU time is printed beside them: on a machine that does other things too it is the steadier figure. All
agents together have one processor here, where real ones have a machine each.
The yardstick does a part of that: N keep-alive connections to Python's threading HTTP server, on which Horovod's
rendezvous is built; each sets a key, gets two that are set when all have done so, and sets one more. It knows no
membership, no deadlines and no notices.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import multiprocessing
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rendezvous
from simulated import SLOTS_PER_HOST, simulation

spawn = multiprocessing.get_context("spawn")
_GREETING = struct.pack("<I", 0xE1A57002)


class Figures(NamedTuple):
    """Of one run, seconds and bytes."""

    agents_s: float
    agents_cpu_s: float
    start_s: float
    start_cpu_s: float
    again_s: float
    again_cpu_s: float
    half_s: float
    half_cpu_s: float
    end_s: float
    end_cpu_s: float
    bytes_of_agent: float


async def one_run(size: int, profile_to: str | None) -> Figures:
    """A start, a round after a death, one after many, and the end."""
    async with simulation(size, profile_to=profile_to) as job:
        driver = psutil.Process(job.driver_pid)
        await job.ready()

        def cpu_s() -> float:
            times = driver.cpu_times()
            return times.user + times.system

        cpu, began = cpu_s(), time.perf_counter()
        job.go()
        await job.until_agents(size // SLOTS_PER_HOST)
        agents_s, agents_cpu_s = time.perf_counter() - began, cpu_s() - cpu
        cpu, began = cpu_s(), time.perf_counter()
        assert await job.until_all_train(1) == size
        start_s, start_cpu_s = time.perf_counter() - began, cpu_s() - cpu
        received = job.received_bytes
        victim = sorted(job.workers)[size // 2]
        cpu, began = cpu_s(), time.perf_counter()
        job.kill(victim)
        assert await job.until_all_train(2) == size - SLOTS_PER_HOST
        again_s, again_cpu_s = time.perf_counter() - began, cpu_s() - cpu
        left = [agent for agent in job.agents if agent.workers]
        cpu, began = cpu_s(), time.perf_counter()
        for agent in left[::2]:
            agent.end_all(-9)
        assert await job.until_all_train(3) == SLOTS_PER_HOST * (len(left) // 2)
        half_s, half_cpu_s = time.perf_counter() - began, cpu_s() - cpu
        job.ends()
        cpu, began = cpu_s(), time.perf_counter()
        for agent in left[1::2]:
            agent.end_all(0)
        while driver.status() != psutil.STATUS_ZOMBIE:
            end_cpu_s = cpu_s() - cpu
            await asyncio.sleep(0.005)
        end_s = time.perf_counter() - began
        return Figures(
            *(agents_s, agents_cpu_s, start_s, start_cpu_s, again_s, again_cpu_s),
            *(half_s, half_cpu_s, end_s, end_cpu_s, received / (size // SLOTS_PER_HOST)),
        )


# --- the workers' own link -----------------------------------------------------------------------------------------


def _rank_0(size: int, pipe: Connection) -> None:
    from elastic_driver.worker.engine import native_loader

    native: Any = native_loader.load()
    engine = native.Engine(
        0,
        size,
        fusion_bytes=1 << 20,
        stall_warn_s=0.0,
        stall_fail_s=0.0,
        timeout_s=60.0,
        shared_memory=True,
        direct_reads=True,
        machine="rank 0's",
    )
    where = engine.prepare("127.0.0.1")
    pipe.send(where)
    began = time.perf_counter()
    engine.connect(where, 60.0)
    pipe.send((time.perf_counter() - began, len(engine.machines)))
    pipe.recv()
    engine.close()


def _text(value: bytes) -> bytes:
    assert len(value) < 128
    return bytes([len(value)]) + value


def _number(value: int) -> bytes:
    """As native/net/wire.h writes it."""
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += peer.recv(size - len(data)) or _cut_off()
    return data


def _cut_off() -> bytes:
    raise RuntimeError("rank 0 has closed a connection")


def link(size: int) -> float:
    """Seconds in which rank 0 connects to all others."""
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_rank_0, args=(size, theirs), daemon=True)
    process.start()
    where = ours.recv()
    # The host's length and the host, then the port in groups of seven bits.
    groups = where[1 + where[0] :]
    port = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(groups))
    peers = []
    nonce, name = bytes(16), hashlib.sha256(b"").digest()[:8]
    for rank in range(1, size):
        peer = socket.create_connection(("127.0.0.1", port))
        peer.sendall(_GREETING + struct.pack("<i", rank) + name + nonce)
        peers.append(peer)
    for rank, peer in enumerate(peers, 1):
        answer = _read(peer, 48)
        ends = [f"{host}:{number}".encode() for host, number in (peer.getsockname(), peer.getpeername())]
        told = (b"", b"", _number(rank), _number(0), nonce, answer[:16], *ends)
        texts = (_text(each) if place not in (2, 3) else each for place, each in enumerate(told))
        peer.sendall(hmac.digest(b"", b"elastic_driver handshake dials\n" + b"".join(texts), "sha256"))
    for rank, peer in enumerate(peers, 1):
        _read(peer, 1)
        machine = b"node%d" % (rank // SLOTS_PER_HOST)
        introduction = _text(machine) + bytes([1, 2, 3, 4])
        peer.sendall(struct.pack("<I", len(introduction)) + introduction)
    for peer in peers:
        (length,) = struct.unpack("<I", _read(peer, 4))
        _read(peer, length)
        agreed = bytes([1, 1, 0]) + _text(b"")
        peer.sendall(struct.pack("<I", len(agreed)) + agreed)
    for peer in peers:
        (length,) = struct.unpack("<I", _read(peer, 4))
        _read(peer, length)
    took_s, machines = ours.recv()
    assert machines == len({rank // SLOTS_PER_HOST for rank in range(1, size)}) + 1
    ours.send("end")
    for peer in peers:
        peer.close()
    process.join()
    return float(took_s)


# --- the yardstick ----------------------------------------------------------------------------------------------------


def http_threads(size: int) -> float:
    """Python's threading HTTP server."""
    server = rendezvous.Measured("threads", [0])
    try:
        began = time.perf_counter()
        peers = []
        for index in range(size):
            peers.append(server.connect())
            peers[-1].sendall(rendezvous.request("PUT", f"ready/{index}", rendezvous.VALUE))
        _answers(peers)
        server.ask(peers[0], rendezvous.request("PUT", "round/1", rendezvous.VALUE), 204)
        for _ in range(2):
            for peer in peers:
                peer.sendall(rendezvous.request("GET", "round/1?wait_s=60"))
            _answers(peers)
        for index, peer in enumerate(peers):
            peer.sendall(rendezvous.request("PUT", f"running/{index}", b"1"))
        _answers(peers)
        took_s = time.perf_counter() - began
        for peer in peers:
            peer.close()
        return took_s
    finally:
        server.close()


def _answers(peers: list[socket.socket]) -> None:
    for peer in peers:
        data = b""
        while not (data.startswith(b"HTTP/1.1 2") and b"\r\n\r\n" in data):
            data += peer.recv(65536) or _cut_off()


def measured(measure: Callable[[int], float], size: int, runs: int) -> str:
    """Median of the runs in seconds; why not, where it cannot be."""
    try:
        return f"{statistics.median(measure(size) for _ in range(runs)):8.3f}"
    except (OSError, RuntimeError, AssertionError) as error:
        return f"fails ({str(error).splitlines()[0][:30]})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="64,512,8000", help="comma list of numbers of workers")
    parser.add_argument("--runs", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--profile", help="where the driver's profile of the last run is written; spoils the figures")
    options = parser.parse_args()
    head = [f"{'workers':>7}", f"{'agents s':>9} {'(cpu)':>8}"]
    head += [f"{name + ' s':>9} {'(cpu)':>8} {'us each':>8}" for name in ("start", "again", "half", "end")]
    print("  ".join([*head, f"{'link s':>8}", f"{'bytes/agent':>11}", f"{'threads s':>9}"]), flush=True)
    before: tuple[int, Figures] | None = None
    for size in map(int, options.workers.split(",")):
        runs = [uvloop.run(one_run(size, options.profile)) for _ in range(options.runs)]
        now = Figures(*(statistics.median(values) for values in zip(*runs, strict=True)))
        row = [f"{size:7}", f"{now.agents_s:9.3f} {now.agents_cpu_s:8.3f}"]
        for took_s, cpu_s in zip(now[2:-1:2], now[3:-1:2], strict=True):
            row.append(f"{took_s:9.3f} {cpu_s:8.3f} {took_s / size * 1e6:8.0f}")
        row += [measured(link, size, options.runs), f"{now.bytes_of_agent:11.0f}"]
        print("  ".join([*row, f"{measured(http_threads, size, options.runs):>9}"]), flush=True)
        if before is not None:
            more = size / before[0]
            growth = [new / old for new, old in zip(now, before[1], strict=True)]
            told = zip(("start", "again", "half", "end"), growth[2:-1:2], strict=True)
            print(f"         {more:.0f} times the workers: {', '.join(f'{what} {by:.1f} times' for what, by in told)}")
        before = size, now


if __name__ == "__main__":
    main()
