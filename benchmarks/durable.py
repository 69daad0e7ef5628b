"""What a commit costs training with and without durable commits: a model of 100 MB.

    python benchmarks/durable.py FOLDER [--turns 10]

Median milliseconds that commit() blocks: without; with a writer that is idle at each commit; with one that is busy
(the commit is skipped on disk). Then how long one commit takes to reach the disk.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import elastic_driver.torch as hvd
from elastic_driver.worker.durable import commits as module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where commits go; its commits are overwritten")
    parser.add_argument("--turns", type=int, default=10, help="turns that count (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    options.folder.mkdir(parents=True, exist_ok=True)
    made = module.Durable(options.folder, every=1, interval_s=None, keep=2, job_id="")
    state = hvd.elastic.TorchState(torch.nn.ParameterList([torch.ones(1 << 18) for _ in range(100)]), step=0)
    times: dict[str, list[float]] = {"without": [], "idle writer": [], "busy writer": [], "to disk": []}
    for turn in range(options.turns + 2):
        for name in ("without", "idle writer", "busy writer"):
            module._durable, module._read = (None if name == "without" else made), True
            began = time.perf_counter()
            state.commit()
            took = (time.perf_counter() - began) * 1e3
            if turn > 1:  # by then both sets of buffers are there
                times[name].append(took)
            if name == "idle writer":
                handed = began
        made.wait()
        if turn > 1:
            times["to disk"].append((time.perf_counter() - handed) * 1e3)
    for name, values in times.items():
        print(f"{name:12} {statistics.median(values):8.1f} ms")


if __name__ == "__main__":
    main()
