"""How soon the driver knows of a death on another host.

    python benchmarks/deaths.py [--deaths 200]

Two network namespaces on a bridge, an agent on the second over ssh. The driver's side (server, fleet, keeper of
workers) has workers started there that sleep; they are killed one after another, and for each: from kill(2) until its
keeper says that the worker is dying or dead, milliseconds. The yardstick is a bare TCP connection over the same links,
held by a process that is killed in the same way: from kill(2) until the other end has read the end of the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_driver.core.events import StartWorker
from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.driver.agents import DriverAddresses
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.launch.fleet.addresses import Addresses
from elastic_driver.launch.fleet.admission import Admission, WelcomeFacts
from elastic_driver.launch.fleet.dialling import AgentReach
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.meetings import Meetings
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.launch.fleet.warming import Warming
from elastic_driver.launch.fleet.worker import Worker
from elastic_driver.launch.fleet.workers import WorkerContext, Workers
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.rendezvous.server.kept_socket import KeptSocket
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.interfaces import host_addresses, listening_addresses
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import OnChange
from tests.support.network.namespaces import Namespaces

ROOT = Path(__file__).resolve().parents[1]
_SETTLED_S = 0.02
_HOLDER = "import socket, sys, time; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); time.sleep(600)"


class _Nobody:
    """Takes what the fleet tells, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *words: False

    def failed(self, error: BaseException) -> None:
        raise error


class _Watch:
    """See WorkerListener: when the latest worker runs, and when it is known to be dying or dead."""

    def begin(self) -> None:
        """The next worker is going to be started."""
        loop = asyncio.get_running_loop()
        self.runs: asyncio.Future[int] = loop.create_future()
        self.dies: asyncio.Future[None] = loop.create_future()

    def started(self, worker: Worker) -> None:
        self.runs.set_result(worker.pid)

    def not_started(self, worker: WorkerId, error: Exception) -> None:
        self.runs.set_exception(error)

    def dying(self, worker: Worker, status: Any) -> None:
        self.dies.set_result(None)

    def exited(self, worker: Worker, status: Any) -> None:
        if not self.dies.done():
            self.dies.set_result(None)

    def lost(self, workers: Any, why: str) -> None:
        raise ConnectionError(why)

    def killed(self, order: Any) -> None:
        """Nobody asks for it."""

    spared = killed


class _Dialect:
    """See Dialect."""

    on_change = OnChange.IN_PLACE

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        return dict(os.environ)


async def of_workers(host: str, deaths: int) -> list[float]:
    """Milliseconds from each kill to the driver's knowledge."""
    tasks, tickets = Tasks(), Tickets(JobClock())
    certificate = OwnCertificate()
    ways = DriverAddresses(
        "127.0.0.1",
        addresses=lambda: listening_addresses(host_addresses(), words=()),
        certificate=certificate,
        is_wide=False,
    )
    fleet = Fleet(
        tickets=tickets,
        reach=AgentReach(
            ways.to, agent_timeout_s=15.0, host_timeout_s=5.0, fingerprint=certificate.make, job="", owner=""
        ),
        local=SshDialler(),
        remote=SshDialler(),
        is_local=lambda name: False,
        addresses_of=lambda name: (),
        address=lambda facts, route: route,
        tasks=tasks,
    )
    nobody: Any = _Nobody()
    addresses = Addresses(fleet, print)
    meetings = Meetings(fleet, addresses, None)
    send_all: Any = lambda facts, env: dict(env)  # noqa: E731
    warming = Warming(fleet, variables=send_all, on_warm=nobody.warmed, on_prepared=nobody.prepared)
    around = WorkerContext(fleet, addresses, meetings, warming, send_all, nobody, StandardInput(None, None), tasks)
    job = JobAddress("", JobKey.new(), "deaths")
    welcome_facts = WelcomeFacts(
        job_id="deaths",
        poll_s=0.0,
        cwd="/",
        umask=0o22,
        warm=False,
        preload=None,
        prefix_timestamp=False,
        agent_timeout_s=15.0,
    )
    admission = Admission(tickets, welcome_facts, fleet)
    watch = _Watch()
    workers = Workers(around, _Dialect(), command=["sleep", "600"], grace_s=1.0, drain_s=1.0, listener=watch)
    fleet.serve(nobody, workers, meetings, warming)
    server = RendezvousServer((), key_of=tickets.key_of, agents=admission.take_over, certificate=certificate)
    local = KeptSocket(server.listeners, "deaths.sock", say=print)
    await server.start_local(local.listen())
    await ways.begin(server.listeners, local.path)
    took: list[float] = []
    try:
        await fleet.want([host])
        await fleet.settle(30)
        for number in range(deaths):
            worker = WorkerId(host, 0, number)
            watch.begin()
            workers.start(StartWorker(worker, SlotInfo(0, 1, 0, 1, 0, 1)), job, 0)
            pid = await watch.runs
            await asyncio.sleep(_SETTLED_S)
            at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            await watch.dies
            took.append((time.perf_counter() - at) * 1e3)
    finally:
        await fleet.close()
        await tasks.end()
        await server.close()
        local.close()
    return took


async def of_connections(nodes: Sequence[str], address: str, deaths: int) -> list[float]:
    """The same for bare connections; ``nodes`` are the words before a command there."""
    accepted: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
    server = await asyncio.start_server(lambda reader, writer: accepted.put_nowait(reader), address, 0)
    port = server.sockets[0].getsockname()[1]
    took: list[float] = []
    for _ in range(deaths):
        holder = subprocess.Popen([*nodes, sys.executable, "-c", _HOLDER, address, str(port)])
        reader = await accepted.get()
        await asyncio.sleep(_SETTLED_S)
        at = time.perf_counter()
        holder.kill()
        await reader.read()
        took.append((time.perf_counter() - at) * 1e3)
        holder.wait()
    server.close()
    return took


def show(name: str, took: list[float]) -> None:
    ordered = sorted(took)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{name:22} {statistics.median(took):9.2f} {p99:9.2f} {ordered[-1]:9.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=200, help="of each (default 200)")
    parser.add_argument("--driver", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.driver:
        host, address, *nodes = options.driver
        print(f"{'milliseconds':22} {'median':>9} {'p99':>9} {'most':>9}", flush=True)
        show("a worker, to the driver", uvloop.run(of_workers(host, options.deaths)))
        show("a bare connection", uvloop.run(of_connections(nodes, address, options.deaths)))
        return
    with Namespaces(2, sshd=True) as nodes:
        first, second = nodes
        command = [sys.executable, __file__, "--deaths", str(options.deaths)]
        # Of the prefix's words one begins with a dash.
        command += ["--driver", second.name, first.ipv4, "ip", "netns", "exec", second.namespace]
        first.popen(command, env=first.environment() | {"PYTHONPATH": str(ROOT)}).wait()


if __name__ == "__main__":
    main()
