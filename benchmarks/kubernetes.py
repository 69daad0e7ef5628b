"""Pods as hosts: how long from an event at the API server until the driver's list of hosts has it.

    python benchmarks/kubernetes.py [--events 200] [--pods 1000] [--interval 1.0]

The API server is the tests' fake (tests/support/clusters/kubernetes_fake), in a process of its own, so figures
say what the client side costs and adds; a real server's own delays come on top for both ways. Side by side, for the
same events:

- watch: KubernetesDiscovery, asked as the driver asks it;
- poll: the whole list each second (--interval), as a discovery script around ``kubectl get pods`` does it.

An event is a pod that becomes ready ("in"), or that is gone ("out"); in between 20 to 60 ms, at random. Then the first
list of --pods pods, in a fresh process: its time, and what the process's memory grows by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from elastic_driver.discovery.kubernetes.access import Access
from elastic_driver.discovery.kubernetes.source import KubernetesDiscovery
from tests.support.clusters.kubernetes_fake import FakeKubernetes
from tests.support.clusters.pod_discovery import LABELS, reading

_GAP_S = (0.02, 0.06)
# As large as real pods are, 5 to 15 KB of JSON: what nobody reads of them is mostly managed fields.
_FILLER = {"example.org/filler": 8192 * "x"}
_NAMES = tuple(f"worker-{number}" for number in range(10000))


def serve(orders: Connection, config: str) -> None:
    """The server's process: does what it is told, and says when that was done."""
    with FakeKubernetes() as api:
        api.create_node("node-1")
        api.kubeconfig(Path(config))
        orders.send(None)
        while True:
            name, arguments = orders.recv()
            if name == "end":
                return
            if name == "fill":
                for each in _NAMES[: arguments[0]]:
                    api.create_pod(each, labels=LABELS, annotations=_FILLER)
                    api.run_pod(each)
            elif name == "create":
                api.create_pod(arguments[0], labels=LABELS)
            elif name == "in":
                api.run_pod(arguments[0])
            elif name == "out":
                api.finish_pod(arguments[0])
            orders.send(time.monotonic())


class Seen:
    """When a name was in a list, or not in it any more, for the first time."""

    def __init__(self) -> None:
        self.at: dict[tuple[str, str], float] = {}
        self._names: frozenset[str] = frozenset()

    def take(self, names: frozenset[str]) -> None:
        now = time.monotonic()
        self.at.update({("in", name): now for name in names - self._names})
        self.at.update({("out", name): now for name in self._names - names})
        self._names = names


async def watch(discovery: KubernetesDiscovery, seen: Seen) -> None:
    while True:
        seen.take(frozenset(host.name for host in await discovery.find_hosts()))
        await discovery.wait_change(1.0)


async def poll(access: Access, seen: Seen, interval_s: float) -> None:
    from kubernetes_asyncio.client import CoreV1Api

    async with await access.client() as client:
        read: Callable[..., Any] = CoreV1Api(client).list_namespaced_pod
        while True:
            answer = await read("default", label_selector="app=train", _preload_content=False)
            async with answer:
                listed = json.loads(await answer.read())["items"]
            ready = (
                each["metadata"]["name"]
                for each in listed
                for condition in each["status"].get("conditions", ())
                if condition["type"] == "Ready" and condition["status"] == "True"
            )
            seen.take(frozenset(ready))
            await asyncio.sleep(interval_s)


async def measure(orders: Connection, config: Path, events: int, interval_s: float) -> dict[str, Any]:
    def order(name: str, *arguments: object) -> float:
        orders.send((name, arguments))
        done: float = orders.recv()
        return done

    environ = {"KUBECONFIG": str(config)}
    names = _NAMES[:events]
    for name in names:
        await asyncio.to_thread(order, "create", name)
    discovery = KubernetesDiscovery("app=train", None, reading(), 10.0, access=Access(environ))
    watched, polled = Seen(), Seen()
    tasks = [
        asyncio.create_task(watch(discovery, watched)),
        asyncio.create_task(poll(Access(environ), polled, interval_s)),
    ]
    await asyncio.sleep(1)  # both have begun
    happened: dict[tuple[str, str], float] = {}
    chance = random.Random(1)
    for kind in ("in", "out"):
        for name in names:
            await asyncio.sleep(chance.uniform(*_GAP_S))
            happened[kind, name] = await asyncio.to_thread(order, kind, name)
        async with asyncio.timeout(30):
            while not (happened.keys() <= watched.at.keys() and happened.keys() <= polled.at.keys()):
                await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await discovery.close()

    def figures(seen: Seen, kind: str) -> dict[str, float]:
        took = sorted(1000 * (seen.at[key] - at) for key, at in happened.items() if key[0] == kind)
        return {"median_ms": statistics.median(took), "p99_ms": took[int(0.99 * (len(took) - 1))], "max_ms": took[-1]}

    return {
        f"{way}_{kind}": figures(seen, kind)
        for way, seen in (("watch", watched), ("poll", polled))
        for kind in ("in", "out")
    }


def first_list(config: str) -> None:
    """In a process of its own: prints what the first list took."""

    async def main() -> None:
        process = psutil.Process()
        discovery = KubernetesDiscovery("app=train", None, reading(), 60.0, access=Access({"KUBECONFIG": config}))
        before, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
        began = time.monotonic()
        hosts = await discovery.find_hosts()
        took_s = time.monotonic() - began
        began = time.monotonic()
        discovery._change()
        await discovery.find_hosts()
        again_s = time.monotonic() - began
        print(
            json.dumps(
                {
                    "hosts": len(hosts),
                    "first_list_ms": 1000 * took_s,
                    "cpu_ms": 1000 * (sum(process.cpu_times()[:2]) - cpu),
                    "decide_again_ms": 1000 * again_s,
                    "grown_MB": (process.memory_info().rss - before) / 1e6,
                    "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
                    "loaded_MB": before / 1e6,
                }
            )
        )
        await discovery.close()

    uvloop.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--first-list", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_list:
        first_list(arguments.first_list)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kubeconfig"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(theirs, str(config)))
        server.start()
        try:
            ours.recv()
            result = uvloop.run(measure(ours, config, arguments.events, arguments.interval))
            ours.send(("fill", (arguments.pods,)))
            ours.recv()
            command = [sys.executable, __file__, "--first-list", str(config)]
            said = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
            result["first_list"] = json.loads(said.stdout)
        finally:
            ours.send(("end", ()))
            server.join()
    for name, figures in result.items():
        print(f"{name:12}", "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    for kind in ("in", "out"):
        ratio = result[f"poll_{kind}"]["median_ms"] / result[f"watch_{kind}"]["median_ms"]
        print(f"a poll each {arguments.interval:g} s takes {ratio:.3g} times as long (median, {kind})")


if __name__ == "__main__":
    main()
