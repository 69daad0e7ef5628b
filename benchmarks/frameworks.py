"""What a killed worker costs scripts of accelerate, Lightning and transformers, under elasticrun and under torchrun.

    scripts/install-frameworks && .venv-frameworks/bin/python benchmarks/frameworks.py [--runs 3]

The scripts are those of tests/frameworks: two workers on one machine, a step of 50 ms and more, a checkpoint every four
steps. Once both ranks have done six steps, rank 1 is killed. Printed is the time from that until rank 0 of the new
workers has done its first step: the median of some runs, the least and the most, and the ratio of torchrun's to ours.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "frameworks" / "scripts"
PATIENCE_S = 300.0
LAUNCHERS = {
    "elasticrun": ("-m", "elastic_driver"),
    # As fast as it goes, and without the store that a restart hangs over.
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.05"),
}


def stall_s(launcher: str, script: str, log: Path) -> float:
    """Runs the script, kills rank 1, and returns the seconds until rank 0 goes on."""
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as said:
        steps = Path(folder) / "steps.jsonl"
        steps.touch()
        env = {**os.environ, "STEP_LOG": str(steps), "CHECKPOINTS": f"{folder}/checkpoints", "STEPS": "1000"}
        env |= {
            "ELASTIC_DRIVER_HISTORY": "off",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [
            sys.executable,
            *LAUNCHERS[launcher],
            "--nproc-per-node=2",
            "--max-restarts=3",
            str(SCRIPTS / script),
        ]
        job = subprocess.Popen(command, stdout=said, stderr=said, env=env, cwd=ROOT, start_new_session=True)
        try:
            lines = wait_for(job, steps, lambda lines: all(sum(one["rank"] == r for one in lines) > 5 for r in (0, 1)))
            pids = {one["rank"]: one["pid"] for one in lines}
            # What would be forked from is there by now in a job that has trained for a while.
            time.sleep(5.0)
            killed = time.time()
            os.kill(pids[1], signal.SIGKILL)
            old = set(pids.values())
            found = wait_for(job, steps, lambda lines: any(o["rank"] == 0 and o["pid"] not in old for o in lines))
            return float(next(o["time"] for o in found if o["rank"] == 0 and o["pid"] not in old) - killed)
        finally:
            job.send_signal(signal.SIGTERM)
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


def wait_for(job: subprocess.Popen[bytes], steps: Path, found: Any) -> list[dict[str, Any]]:
    """The lines of the scripts, when they are as asked for."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and job.poll() is None:
        lines = [json.loads(line) for line in steps.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if found(lines):
            return lines
        time.sleep(0.01)
    raise RuntimeError(f"the job does not go on (exit code {job.poll()})")


def main() -> None:
    """Prints a line for each script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--scripts", default="accelerate,lightning,trainer", help="comma list (default all)")
    options = parser.parse_args()
    log = Path(tempfile.gettempdir()) / "elastic-driver-frameworks.log"
    print(f"seconds from a kill to the next step; what the jobs said is in {log}")
    for name in options.scripts.split(","):
        measured: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        for _ in range(options.runs):
            for launcher, figures in measured.items():
                figures.append(stall_s(launcher, f"with_{name}.py", log))
        shown = [f"{who} {statistics.median(f):.2f} ({min(f):.2f} to {max(f):.2f})" for who, f in measured.items()]
        ratio = statistics.median(measured["torchrun"]) / statistics.median(measured["elasticrun"])
        print(f"{name}: {', '.join(shown)}; torchrun/elasticrun {ratio:.1f}", flush=True)


if __name__ == "__main__":
    main()
