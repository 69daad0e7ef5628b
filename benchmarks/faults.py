"""What each fault of networks and machines costs those that it leaves alone.

    python benchmarks/faults.py [--runs 5] [--host-timeout 5] [--agent-timeout 15] [--faults cut,vanish,...]

Four network namespaces on a bridge, one worker on each, the driver on the first; agents are started over ssh. In one
job fault after fault is done, healed, and done again, and for each: from the fault to the next step of those that go
on, seconds, median and range over the runs; that as a ratio to the limit that the job was given (for a worker's death,
which is seen and not waited for, to the goal of 0.15 s); and what the driver says. Where nobody is lost, it is the
longest gap between two steps, to the same limit. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "soak"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.network.machines import made_machines
from tests.support.network.namespaces import Namespaces
from tests.support.network.network_faults import NameService, NetworkFaults, WallClock
from tests.support.processes.followed_job import FollowedJob

ROOT = Path(__file__).resolve().parents[1]
DEATH_S = 0.15
HOSTS = "node0:1\nnode1:1\nnode2:1\nnode3:1\n"
# How long a fault lasts that costs nobody a host, seconds.
_HARMLESS_S = 3.0


@dataclass
class Scene:
    """What the faults are done to."""

    machines: Namespaces
    job: FollowedJob
    faults: NetworkFaults
    clock: WallClock


@dataclass
class Fault:
    """One fault.

    Attributes:
        does: it.
        heals: what a network's repair does not; also after a run that went wrong.
        survivors: on which hosts training may go on; none where nobody is to be lost.
        limit: of which setting a ratio is told: "host" or "death".
    """

    does: Callable[[Scene], Any]
    survivors: tuple[tuple[int, ...], ...] = ()
    heals: Callable[[Scene], Any] = lambda scene: None
    limit: str = "host"


def kill_worker(scene: Scene) -> None:
    os.kill(scene.job.workers(scene.machines[3])[-1], signal.SIGKILL)


def kill_agent(scene: Scene) -> None:
    os.kill(scene.job.agent(scene.machines[3]), signal.SIGKILL)


def between(scene: Scene) -> None:
    scene.faults.between(scene.machines[2], scene.machines[3])


def one_way(sender: int, receiver: int) -> Callable[[Scene], None]:
    return lambda scene: scene.faults.one_way(scene.machines[sender], scene.machines[receiver])


def partition(scene: Scene) -> None:
    node0, node1, node2, node3 = scene.machines
    scene.faults.partition([node0, node1], [node2, node3])


def silence(scene: Scene) -> Any:
    names = NameService(scene.machines[0], scene.machines)
    names.go_silent()
    return names


def jump(scene: Scene) -> None:
    scene.clock.jump(86400.0)


_ADDRESSES = itertools.cycle(range(50, 250))

FAULTS: dict[str, Fault] = {
    "worker-killed": Fault(kill_worker, ((0, 1, 2),), limit="death"),
    "agent-killed": Fault(kill_agent, ((0, 1, 2),)),
    "cut-off": Fault(lambda s: s.machines[3].cut(), ((0, 1, 2),), lambda s: s.machines[3].heal()),
    "vanished": Fault(lambda s: s.machines[3].power_off(), ((0, 1, 2),), lambda s: s.machines[3].power_on()),
    "cut-to-driver": Fault(one_way(3, 0), ((0, 1, 2),)),
    "cut-from-driver": Fault(one_way(0, 3), ((0, 1, 2),)),
    "cut-between": Fault(between, ((0, 1, 2), (0, 1, 3))),
    "cut-between-one-way": Fault(one_way(3, 2), ((0, 1, 2), (0, 1, 3))),
    "partition": Fault(partition, ((0, 1),)),
    "address-changes": Fault(
        lambda s: s.machines[3].move(next(_ADDRESSES)), ((0, 1, 2),), lambda s: s.machines[3].end_sessions()
    ),
    "slow-link": Fault(lambda s: s.faults.slow(s.machines[3], "5mbit")),
    "lossy-link": Fault(lambda s: s.faults.lossy(s.machines[3], delay_s=0.02, loss=0.01)),
    "names-silent": Fault(silence),
    "clock-jumps": Fault(jump, heals=lambda s: s.clock.jump(0.0)),
}


def took(scene: Scene, fault: Fault) -> tuple[float, str]:
    """Does the fault once. What it cost, and what was said."""
    job, hosts = scene.job, scene.machines.hosts
    job.goes_on(hosts, steps=20)
    known, lines_before = len(job.said()), len(job.steps())
    at = time.time()
    undo = fault.does(scene)
    try:
        if fault.survivors:
            job.goes_on_one_of(*([hosts[index] for index in choice] for choice in fault.survivors))
        else:
            time.sleep(_HARMLESS_S)
            job.goes_on(hosts)
    finally:
        if undo is not None:
            undo.__exit__()
        scene.faults.heal()
        fault.heals(scene)
    lines = job.steps()[lines_before:]
    if fault.survivors:
        before = max(line["round"] for line in job.steps()[: max(1, lines_before)])
        cost_s = next(line["time"] for line in lines if line["round"] > before) - at
    else:
        mine = sorted(line["time"] for line in lines if line["worker"].startswith("node1["))
        cost_s = max(b - a for a, b in itertools.pairwise(mine))
    if "is left out" in job.said()[known:]:
        # Off the list and back, a host need not wait until it is tried again.
        job.set_hosts(HOSTS.replace("node2:1\nnode3:1\n", ""))
        job.goes_on(hosts[:2])
        job.set_hosts(HOSTS)
    said = [line for line in job.said()[known:].splitlines() if re.search(r"warning|is lost", line)]
    job.goes_on(hosts)
    return cost_s, said[0].partition("elasticrun: ")[2] if said else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each fault (default 5)")
    parser.add_argument("--host-timeout", type=float, default=5.0, metavar="S")
    parser.add_argument("--agent-timeout", type=float, default=15.0, metavar="S")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma list (default all)")
    options = parser.parse_args()
    os.environ |= {"PYTHONPATH": str(ROOT), "ELASTIC_DRIVER_HISTORY": "off"}
    limits = {"host": options.host_timeout, "death": DEATH_S}
    flags = ["-np", "4", "--min-np", "1", "--heartbeat-timeout", "60", "--gloo-timeout-seconds", "30"]
    flags += ["--host-timeout", str(options.host_timeout), "--agent-timeout", str(options.agent_timeout)]
    # The clock that jumps is the driver's and its agent's; the workers tell the time of their steps.
    flags += ["-x", "LD_PRELOAD="]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machines = stack.enter_context(made_machines(4))
        clock = WallClock(folder)
        job = stack.enter_context(FollowedJob(machines, folder, HOSTS, *flags, env=clock.environment))
        scene = Scene(machines, job, stack.enter_context(NetworkFaults()), clock)
        print(f"{'fault':20} {'seconds: median (range)':26} {'limit':>6} {'ratio':>6}  what is said", flush=True)
        for name in options.faults.split(","):
            fault, runs = FAULTS[name], [took(scene, FAULTS[name]) for _ in range(options.runs)]
            costs, limit = [cost_s for cost_s, _ in runs], limits[fault.limit]
            median = statistics.median(costs)
            spread = f"{median:.3f} ({min(costs):.3f}..{max(costs):.3f})"
            print(f"{name:20} {spread:26} {limit:6.2f} {median / limit:6.2f}  {runs[-1][1]}", flush=True)
        job.end()


if __name__ == "__main__":
    main()
