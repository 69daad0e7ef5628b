"""commit() of a model of 100 MB with Adam's state (300 MB in all): TorchState against deep copies.

    python benchmarks/commit.py [--turns 10]

Deep copies are what a state costs that keeps ``copy.deepcopy(model.state_dict())`` and that of the optimizer, as
Horovod's does. One process and one thread; the two take turns. Median times in milliseconds; then how much memory the
commits after the first have allocated, by the growth of the process.

``copy`` is the same bytes copied tensor by tensor into memory that is there: what the memory can do. A commit is within
a tenth of it, so nothing that copies everything is much cheaper. Tried for 307 MB on 2 cores, best of 8 in ms, and not
kept: torch's grouped copy 18, tensor by tensor 24, libc's memcpy (which does not read what it overwrites) 21, buffers
in huge pages 18, halves in two threads 22, torch with two threads 25.
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import time

import torch
from optimizer import with_adams_state

import elastic_driver.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="turns that count (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    model, optimizer = with_adams_state()
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.commit()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(options.turns):
        state.commit()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    times: dict[str, list[float]] = {"commit": [], "deep copies": [], "copy": []}
    kept: object = None
    ours = [torch.empty_like(param) for _ in range(3) for param in model.parameters()]
    tensors = [*model.parameters()] * 3
    for turn in range(options.turns + 1):
        for name in times:
            began = time.perf_counter()
            if name == "commit":
                state.commit()
            elif name == "deep copies":
                kept = (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
            else:
                with torch.no_grad():
                    for target, source in zip(ours, tensors, strict=True):
                        target.copy_(source)
            if turn:
                times[name].append((time.perf_counter() - began) * 1e3)
    assert kept is not None
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("  ".join(f"{name} {value:.0f} ms" for name, value in medians.items()))
    print(f"deep copies / commit {medians['deep copies'] / medians['commit']:.1f}x; pages touched first by")
    print(f"{options.turns} commits after the first: {faults}")


if __name__ == "__main__":
    main()
