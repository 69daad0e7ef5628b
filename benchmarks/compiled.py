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

For each round, in seconds: a step; for how long the survivors stood still, from the end of their last step in the
round before to the end of their first one, and that as a multiple of a step; the newcomer's first step; and the most
graphs that any of them compiled in it. Between two steps there are 20 ms of sleep and a commit.
"""

from __future__ import annotations

import argparse
import itertools
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

    def batch(rows: int) -> torch.Tensor:  # none is a slice of another tensor: that is other code
        return torch.randn(rows, WIDTH)

    if way == "ahead":
        hvd.compile_ahead(model, lambda model: model(batch(BATCH // 2)).square().mean().backward())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        trained = torch.compile(state.ddp) if way == "outside" else state.ddp
        own = batch(BATCH // 2 if fixed else BATCH // hvd.size())
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
                every = job.steps()
                by_pid: dict[int, list[dict[str, Any]]] = {}
                for line in every:
                    if line["size"] == size and line["time"] > since:
                        by_pid.setdefault(line["pid"], []).append(line)
                normal_s = statistics.median(line["took_s"] for mine in by_pid.values() for line in mine[2:])
                first = {pid: mine[0]["took_s"] for pid, mine in by_pid.items() if pid not in known}
                stood = []
                for pid in known & by_pid.keys():
                    times = [line["time"] for line in every if line["pid"] == pid]
                    last = max(time for time in times if time <= since)
                    stood.append(max(b - a for a, b in itertools.pairwise(times) if a >= last))
                graphs = max(sum(line["graphs"] for line in mine) for mine in by_pid.values())
                new, old = max(first.values(), default=None), max(stood, default=None)
                shown = [f"{value:{form}}" if value is not None else "" for value, form in ((old, ".3f"), (new, ".3f"))]
                ratio = f"{old / normal_s:.0f}" if old is not None else ""
                print(f"{way:8}{size:6}{normal_s:10.4f}{shown[0]:>10}{ratio:>8}{shown[1]:>10}{graphs:8}", flush=True)
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
    print(f"{'way':8}{'size':>6}{'step':>10}{'stood':>10}{'x step':>8}{'newcomer':>10}{'graphs':>8}")
    for way in options.ways.split(","):
        if way not in WAYS:
            sys.exit(f"no such way: {way}; there are {', '.join(WAYS)}")
        measure(way, options.layers, fixed=options.fixed_batch)


if __name__ == "__main__":
    main()
