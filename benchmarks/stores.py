"""HTTPStore beside TCPStore: the pattern of gloo, and how many may wait.

    python benchmarks/stores.py [--runs 3] [--ranks 4,8,32] [--parked 1000]

Each server is a process of its own; the ranks are threads of another one, each with a Store of its own, and take as
much time as all N ranks on one processor. So what the server itself spends is told as well: that is what it has for
each of N ranks on N machines.

- gloo: N ranks set a key each, then wait for and get each of the N keys: N sets, N^2 waits, N^2 gets. Seconds until
  the last rank is through, and what the server spent, in microseconds of its processor for each of these operations.
- multi_get: each rank gets all N keys at once.
- parked: so many wait for one key on a connection of their own; from the set to the last answer, and the memory that
  the server has for each of them, its connection included. HTTPStore only: so many clients of TCPStore take minutes to
  connect where the system cannot look their names up.

Medians of the runs; the servers take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_driver.torch import HTTPStore
from elastic_driver.torch_private.groups import c10d
from tests.support.processes.rendezvous_process import RendezvousProcess

VALUE = b"v" * 170  # what gloo puts there for two ranks
LIMIT = timedelta(seconds=300)

TCP_SERVER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Http:
    name = "HTTPStore"

    def __init__(self) -> None:
        self._rendezvous = RendezvousProcess()
        self.process = psutil.Process(self._rendezvous.process.pid)

    def store(self, scope: str) -> Any:
        return HTTPStore(self._rendezvous.endpoint, scope=scope, timeout=LIMIT)

    def close(self) -> None:
        self._rendezvous.stop()


class Tcp:
    name = "TCPStore"

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-c", TCP_SERVER]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self._port = int(self._server.stdout.readline())
        self.process = psutil.Process(self._server.pid)

    def store(self, scope: str) -> Any:
        inner = c10d.TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False, timeout=LIMIT)
        return c10d.PrefixStore(scope, inner)

    def close(self) -> None:
        self._server.communicate()


def in_threads(stores: list[Any], work: Callable[[int, Any], None]) -> float:
    """Seconds until the last is done."""
    threads = [threading.Thread(target=work, args=(rank, store)) for rank, store in enumerate(stores)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def gloo(server: Http | Tcp, ranks: int, scope: str) -> tuple[float, float, float]:
    stores = [server.store(scope) for _ in range(ranks)]
    for store in stores:
        store.check([])  # connected

    def meet(rank: int, store: Any) -> None:
        store.set(f"rank {rank}", VALUE)
        for other in range(ranks):
            store.wait([f"rank {other}"])
            assert len(store.get(f"rank {other}")) == len(VALUE)

    def meet_at_once(rank: int, store: Any) -> None:
        store.set(f"again {rank}", VALUE)
        store.multi_get([f"again {other}" for other in range(ranks)])

    before = spent(server.process)
    whole_s = in_threads(stores, meet)
    each_us = (spent(server.process) - before) / (2 * ranks**2 + ranks) * 1e6
    at_once_s = in_threads(stores, meet_at_once)
    close(stores)
    return whole_s, each_us, at_once_s


def parked(server: Http | Tcp, number: int, scope: str) -> tuple[float, float]:
    memory = server.process.memory_info().rss
    stores = [server.store(scope) for _ in range(number)]
    setter = server.store(scope)
    setter.set("begun", "0")
    done: list[float] = []

    def wait(_: int, store: Any) -> None:
        store.add("begun", 1)
        store.wait(["key"])
        done.append(time.monotonic())

    threads = [threading.Thread(target=wait, args=each) for each in enumerate(stores)]
    for thread in threads:
        thread.start()
    while int(setter.get("begun")) < number:
        time.sleep(0.1)
    time.sleep(1.0)  # their last step into the wait
    each_kb = (server.process.memory_info().rss - memory) / number / 1024
    began = time.monotonic()
    setter.set("key", VALUE)
    for thread in threads:
        thread.join()
    close([*stores, setter])
    return max(done) - began, each_kb


def close(stores: list[Any]) -> None:
    for store in stores:
        if isinstance(store, HTTPStore):
            store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", default="4,8,32")
    parser.add_argument("--parked", type=int, default=1000)
    arguments = parser.parse_args()
    servers: list[Http | Tcp] = [Http(), Tcp()]
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors", flush=True)
    try:
        for ranks in map(int, arguments.ranks.split(",")):
            rows = {server.name: [] for server in servers}  # type: dict[str, list[tuple[float, float, float]]]
            for number in range(arguments.runs):
                for server in servers:
                    rows[server.name].append(gloo(server, ranks, f"{ranks}-{number}"))
            medians = {
                name: [statistics.median(column) for column in zip(*row, strict=True)] for name, row in rows.items()
            }
            for name, (whole_s, each_us, at_once_s) in medians.items():
                figures = f"{whole_s * 1e3:8.1f} ms   server {each_us:6.1f} us an operation"
                print(f"gloo, {ranks:3} ranks   {name}   {figures}   multi_get {at_once_s * 1e3:7.1f} ms", flush=True)
            print(f"  ratio {medians['HTTPStore'][0] / medians['TCPStore'][0]:.1f}", flush=True)
        for server in servers[:1]:
            waits = [parked(server, arguments.parked, f"parked-{number}") for number in range(arguments.runs)]
            last_s, each_kb = statistics.median(one[0] for one in waits), waits[0][1]
            print(
                f"parked, {arguments.parked}   {server.name}   last after {last_s * 1e3:.1f} ms   {each_kb:.1f} kB each"
            )
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    main()
