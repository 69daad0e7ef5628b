"""Real agents of torchrun at a rendezvous of ours, and what their workers have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes.rendezvous_process import RendezvousProcess

PATIENCE_S = 150.0

# Trains forever, and ends when all have seen that the file is there. Each step is a line.
SCRIPT = """
import json, os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
folder = pathlib.Path(os.environ["TEST_FOLDER"])
log = open(folder / "steps", "a", buffering=1)
me = {
    "pid": os.getpid(),
    "agent": os.environ["TEST_AGENT"],
    "rank": dist.get_rank(),
    "group": int(os.environ["GROUP_RANK"]),
    "size": dist.get_world_size(),
    "groups": int(os.environ["GROUP_WORLD_SIZE"]),
    "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "run": os.environ["TORCHELASTIC_RUN_ID"],
}
while True:
    total = torch.tensor([1.0, float((folder / "stop").exists())])
    dist.all_reduce(total)
    assert total[0] == dist.get_world_size()
    log.write(json.dumps(me | {"time": time.time()}) + "\\n")
    if total[1] > 0:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""


class Torchrun:
    """A job of torchrun's agents.

    Args:
        folder: of its files.
        rendezvous: where it meets.
        nnodes: of torchrun.
        workers: of each agent.
        conf: --rdzv-conf.
        flags: other flags.
    """

    def __init__(
        self,
        folder: Path,
        rendezvous: RendezvousProcess,
        *,
        nnodes: str,
        workers: int = 1,
        conf: str = "",
        job: str = "job",
        flags: tuple[str, ...] = ("--max-restarts=3",),
    ) -> None:
        self.folder, self.rendezvous = folder, rendezvous
        self._flags = [
            "--rdzv-backend=elastic",
            f"--rdzv-endpoint={rendezvous.endpoint}",
            f"--rdzv-id={job}",
            f"--nnodes={nnodes}",
            f"--nproc-per-node={workers}",
            *([f"--rdzv-conf={conf}"] if conf else []),
            *flags,
        ]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "train.py").write_text(SCRIPT)
        write_entry_point(folder / "plugin")

    def start(self, *names: str, env: dict[str, str] | None = None) -> None:
        """Starts agents."""
        for name in names:
            path = os.pathsep.join([str(self.folder / "plugin"), os.environ.get("PYTHONPATH", os.getcwd())])
            with open(self.folder / f"{name}.log", "ab") as log:
                self.agents[name] = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *self._flags, str(self.folder / "train.py")],
                    env={
                        **os.environ,
                        "PYTHONPATH": path,
                        "TEST_FOLDER": str(self.folder),
                        "TEST_AGENT": name,
                        "OMP_NUM_THREADS": "1",
                        "TORCH_CPP_LOG_LEVEL": "ERROR",
                        **(env or {}),
                    },
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What workers have written, in order."""
        file = self.folder / "steps"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, condition: Callable[[list[dict[str, Any]]], Any], *, after: int = 0, what: str = "") -> Any:
        """Blocks until it holds of the steps after so many."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            steps = self.steps[after:]
            found = condition(steps)
            if found:
                return found
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.story()}"
            time.sleep(0.05)

    def until_trains(self, *agents: str, after: int | None = None, workers: int = 1) -> list[dict[str, Any]]:
        """Blocks until just these agents train together. Returns a step of each rank, in the order of ranks."""
        begin = 0 if after is None else after

        def together(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
            size = len(agents) * workers
            last = {step["pid"]: step for step in steps if step["size"] == size}
            by_rank = {step["rank"]: step for step in last.values()}
            rows = [by_rank[rank] for rank in sorted(by_rank)]
            return rows if len(rows) == size and {row["agent"] for row in rows} == set(agents) else []

        rows: list[dict[str, Any]] = self.until(together, after=begin, what=f"{agents} train")
        return rows

    def finish(self, *agents: str) -> None:
        """Has the training end, and the agents with success."""
        (self.folder / "stop").touch()
        for name in agents:
            assert self.agents[name].wait(PATIENCE_S) == 0, self.story()

    def story(self) -> str:
        """For failures."""
        parts = [f"steps: {self.steps[-8:]}", *self.rendezvous.lines]
        for name in self.agents:
            parts.append(f"--- {name}: {self.agents[name].poll()}")
            parts.append((self.folder / f"{name}.log").read_text()[-3000:])
        return "\n".join(parts)

    def close(self) -> None:
        """Nothing of it is left: agents first, then their workers, which have sessions of their own."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for pid in {step["pid"] for step in self.steps}:
            try:
                if "train.py" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue


def write_entry_point(folder: Path) -> None:
    """What an installed package has: here the plug-in is found without."""
    info = folder / "elastic_driver_under_test-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elastic-driver-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.handlers]\nelastic = elastic_driver.torchelastic.plugin:get_handler\n"
    )
