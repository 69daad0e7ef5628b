"""What a change costs torchrun's own agents at ``elasticrun rendezvous``, beside its c10d rendezvous in the same run.

    python benchmarks/torchrun_handler.py [--runs 3] [--workers 2] [--scenarios kill,lose,grow,shrink]

Two agents with so many workers each run the loop of torchrun_loop.py (DDP over gloo, a checkpoint each step). c10d has
the tightest settings that it takes (monitor interval 0.05 s, last call 1 s, heartbeat 1 s x 3), and
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it does not come back at all. Ours: monitor interval 0.05 s,
grow=now, everything else by default. They take turns. Per scenario the median and the range of

- stall: the gap in rank 0's steps (no process survives a restart), less a normal step;
- join: from the start of the second agent to the first step at the new size (grow).

- kill: SIGKILL to a worker of the second agent.
- lose: SIGKILL to the second agent and to its workers: nobody says goodbye.
- grow: the second agent comes.
- shrink: SIGTERM to the second agent.

Most of each figure is the import of torch by the workers that are started again; ``imports`` is what that takes here,
with as many processes at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.processes.rendezvous_process import a_rendezvous
from tests.support.processes.torchrun import write_entry_point

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

PATIENCE_S = 180.0
STEPS = 20


class Agents:
    """Agents of torchrun, and the steps of their workers."""

    def __init__(self, folder: Path, workers: int, flags: list[str], env: dict[str, str]) -> None:
        self.steps_file = folder / "steps.jsonl"
        self.steps_file.touch()
        self._output = (folder / "output.txt").open("wb")
        write_entry_point(folder / "plugin")
        self._command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={workers}"]
        self._command += ["--max-restarts=9", "--monitor-interval=0.05", "--rdzv-id=bench", *flags]
        path = os.pathsep.join([str(folder / "plugin"), str(ROOT)])
        self._env = {**os.environ, **env, "PYTHONPATH": path, "STEP_LOG": str(self.steps_file), "OMP_NUM_THREADS": "1"}
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        command = [*self._command, *more, str(HERE / "torchrun_loop.py")]
        agent = subprocess.Popen(command, env=self._env, stdout=self._output, stderr=subprocess.STDOUT)
        self.agents.append(agent)
        return agent

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.steps_file.read_text().splitlines() if line.endswith("}")]

    def until_steps(self, size: int, *, since: float = 0.0) -> None:
        """Waits until rank 0 has done some steps at this size since then."""

        def count() -> int:
            return sum(one["rank"] == 0 and one["size"] == size and one["time"] > since for one in self.steps())

        deadline = time.time() + PATIENCE_S
        while count() < STEPS:
            if time.time() > deadline:
                raise SystemExit(f"no steps at size {size}:\n{Path(self._output.name).read_text()[-3000:]}")
            time.sleep(0.05)

    def workers_of(self, agent: subprocess.Popen[bytes]) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]

    def close(self) -> None:
        for agent in self.agents:
            pids = self.workers_of(agent) if agent.poll() is None else []
            agent.kill()
            agent.wait()
            for pid in {*pids, *(one["pid"] for one in self.steps())}:
                with contextlib.suppress(OSError):
                    if "torchrun_loop" in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)
        self._output.close()


@contextlib.contextmanager
def ours(folder: Path, workers: int) -> Iterator[Agents]:
    with a_rendezvous() as rendezvous:
        flags = ["--rdzv-backend=elastic", f"--rdzv-endpoint={rendezvous.endpoint}", "--rdzv-conf=grow=now"]
        agents = Agents(folder, workers, flags, {})
        try:
            yield agents
        finally:
            agents.close()


@contextlib.contextmanager
def c10d(folder: Path, workers: int) -> Iterator[Agents]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
    flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
    agents = Agents(folder, workers, flags, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        yield agents
    finally:
        agents.close()


KINDS: dict[str, Callable[[Path, int], contextlib.AbstractContextManager[Agents]]] = {"elastic": ours, "c10d": c10d}


def run(kind: str, scenario: str, workers: int) -> dict[str, float]:
    """One run: seconds."""
    with tempfile.TemporaryDirectory() as folder, KINDS[kind](Path(folder), workers) as agents:
        agents.start()
        if scenario == "grow":
            agents.until_steps(workers)
        else:
            time.sleep(1.0)  # the first one is to hold c10d's store
            agents.start()
            agents.until_steps(2 * workers)
        began = time.time()
        size = workers
        if scenario == "grow":
            agents.start()
            size = 2 * workers
        elif scenario == "kill":
            os.kill(agents.workers_of(agents.agents[1])[0], signal.SIGKILL)
            size = 2 * workers
        elif scenario == "lose":
            pids = agents.workers_of(agents.agents[1])
            agents.agents[1].kill()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            agents.agents[1].terminate()
        agents.until_steps(size, since=began + (0.5 if scenario == "kill" else 0.0))
        return figures(agents.steps(), began, size)


def figures(steps: list[dict[str, Any]], began: float, size: int) -> dict[str, float]:
    times = [one["time"] for one in steps if one["rank"] == 0]
    gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
    normal_s = statistics.median(gap for gap, at in gaps if at < began)
    first = min(one["time"] for one in steps if one["size"] == size and one["time"] > began)
    return {"stall": max(gap for gap, at in gaps if at > began) - normal_s, "join": first - began}


def imports_s(processes: int) -> float:
    began = time.time()
    started = [subprocess.Popen([sys.executable, "-c", "import torch.distributed"]) for _ in range(processes)]
    for process in started:
        process.wait()
    return time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="of each agent")
    parser.add_argument("--scenarios", default="kill,lose,grow,shrink")
    arguments = parser.parse_args()
    print(
        f"imports of {2 * arguments.workers} workers: {imports_s(2 * arguments.workers):.1f} s, of "
        f"{arguments.workers}: {imports_s(arguments.workers):.1f} s; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    for scenario in arguments.scenarios.split(","):
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(arguments.runs):
            for kind, runs in found.items():
                runs.append(run(kind, scenario, arguments.workers))
        for kind, runs in found.items():
            told = []
            for name in ("stall", "join") if scenario == "grow" else ("stall",):
                values = [one[name] for one in runs]
                told.append(f"{name} {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
            print(f"{scenario:8}{kind:10}{'   '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
