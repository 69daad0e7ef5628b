"""What a change of the world costs a compiled model: its first step in a round, and the graphs compiled for it.

    python benchmarks/compiled.py [--ways plain,inside,ahead] [--layers 8] [--fixed-batch]

Two workers train under DDP, a third one joins, and it leaves again. In the ways

- plain: nothing is compiled;
- outside: ``torch.compile(state.ddp)`` in the training function, so once in each round;
- inside: ``model.compile()`` before the state is made;
- dynamic: ``model.compile(dynamic=True)``, which compiles code for batches of any size;
- ahead: the same, and ``hvd.compile_ahead`` before the training function.

The global batch is divided among the ranks, so that a rank's part has another size in each world (``--fixed-batch``: it
has the same). A way's workers begin with an empty cache of compiled code (TORCHINDUCTOR_CACHE_DIR), which they share.

For each round: the slowest survivor's first step, and the newcomer's, in seconds; the first step as a multiple of the
median of later ones; and the most graphs that any of them compiled in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("plain", "outside", "inside", "dynamic", "ahead")
SIZES = (2, 3, 2)
STEPS = 8  # that all ranks have done before the next change
BATCH = 96
WIDTH = 32


def train() -> None:
    import torch
    from torch._dynamo.utils import counters

    import elastic_driver.torch as hvd

    way, layers, fixed = os.environ["BENCH_WAY"], int(os.environ["BENCH_LAYERS"]), os.environ["BENCH_FIXED"] == "1"

    class Net(torch.nn.Module):  # modules of torch.nn alone are not compiled under DDP: their forward is torch's own
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    if way == "inside":
        model.compile()
    elif way in ("dynamic", "ahead"):
        model.compile(dynamic=True)
    state = hvd.elastic.DDPState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), step=0)
    log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    data = torch.randn(BATCH, WIDTH)
    if way == "ahead":
        hvd.compile_ahead(model, lambda model: model(data[: BATCH // 2]).square().mean().backward())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        trained = torch.compile(state.ddp) if way == "outside" else state.ddp
        own = data if fixed else data[: BATCH // hvd.size()]
        former = counters["stats"]["unique_graphs"]
        while True:
            time.sleep(0.02)
            hvd.barrier()
            began = time.perf_counter()
            state.optimizer.zero_grad()
            trained(own).square().mean().backward()
            state.optimizer.step()
            took_s = time.perf_counter() - began
            state.step += 1
            graphs = counters["stats"]["unique_graphs"]
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "took_s": took_s}
            log.write(json.dumps({**line, "step": state.step, "graphs": graphs - former}) + "\n")
            former = graphs
            state.commit()

    loop(state)


def measure(way: str, layers: int, *, fixed: bool) -> None:
    """Prints a line for each round."""
    from elastic_jobs import ElasticJob

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            BENCH_WAY=way,
            BENCH_LAYERS=str(layers),
            BENCH_FIXED=str(int(fixed)),
            TORCHINDUCTOR_CACHE_DIR=str(Path(folder) / "cache"),
            OMP_NUM_THREADS="1",
        )
        with ElasticJob(Path(folder), 1, 2, loop=Path(__file__).name) as job:
            since, known = 0.0, set[int]()
            for number, size in enumerate(SIZES):
                if number:
                    since = time.time()
                    job.set_hosts(size)
                job.wait_for_steps(size, steps=STEPS, since=since)
                lines = [line for line in job.steps() if line["size"] == size and line["time"] > since]
                by_pid = {
                    pid: [line for line in lines if line["pid"] == pid] for pid in {line["pid"] for line in lines}
                }
                if number and size < SIZES[number - 1]:
                    # A survivor of the larger world may finish a step of it; these are of this size, so none of them.
                    assert by_pid.keys() <= known
                normal_s = statistics.median(line["took_s"] for mine in by_pid.values() for line in mine[2:])
                firsts = {pid: max(line["took_s"] for line in mine[:2]) for pid, mine in by_pid.items()}
                old = max((firsts[pid] for pid in firsts if pid in known), default=None)
                new = max((firsts[pid] for pid in firsts if pid not in known), default=None)
                graphs = max(sum(line["graphs"] for line in mine) for mine in by_pid.values())
                shown = [f"{value:8.3f}" if value is not None else f"{'':8}" for value in (old, new)]
                ratio = max(firsts.values()) / normal_s
                print(f"{way:8}{size:6}{normal_s:10.4f}  {shown[0]}  {shown[1]}{ratio:8.0f}{graphs:8}", flush=True)
                known |= by_pid.keys()


def main() -> None:
    """Reads the command line and measures."""
    if "BENCH_WAY" in os.environ:
        train()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default all)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--fixed-batch", action="store_true", help="a rank's batch does not depend on the world")
    options = parser.parse_args()
    print(f"{'way':8}{'size':>6}{'step, s':>10}  {'survivor':>8}  {'newcomer':>8}{'x step':>8}{'graphs':>8}")
    for way in options.ways.split(","):
        if way not in WAYS:
            sys.exit(f"no such way: {way}; there are {', '.join(WAYS)}")
        measure(way, options.layers, fixed=options.fixed_batch)


if __name__ == "__main__":
    main()
