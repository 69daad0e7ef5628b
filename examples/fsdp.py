"""Trains a network on handwritten digits with FSDP2 (``fully_shard``), in place, on workers that may come and go.

    python examples/fsdp.py                                          alone
    elasticrun -np 2 --min-np 2 --max-np 4 --host-discovery-script examples/discover_hosts.sh \\
        python examples/fsdp.py                                      as many as the hosts file says

No worker has the whole model: each keeps its shards, and at each commit a copy of them goes to a worker on the next
host. A change of membership reaches the processes as they run: the model is built anew for the new number of workers,
and its weights and Adam's moments are gathered from those who hold them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import digits
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import elastic_driver.torch as hvd

LEARNING_RATE = 1e-3


def make(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model and its optimizer, for the workers of the mesh. Called again after each change."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(64, 256), nn.ReLU()),
        nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of pictures that the model reads correctly. All workers call it: each lends its shards."""
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits with FSDP2 while workers come and go.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default 30)")
    parser.add_argument("--step-sleep", type=float, default=0.0, metavar="S", help="makes each step longer (default 0)")
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="append a JSON line for each step")
    return parser.parse_args()


def main() -> None:
    """Trains, and prints how well it went."""
    options = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)  # several workers share this machine's cores
    data = digits.load()
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    test_images, test_labels = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    step_log = digits.StepLog(options.step_log)
    state = hvd.elastic.FSDPState(make, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.FSDPState) -> None:
        # After each change of membership this runs again from here. state.model and state.optimizer are this round's.
        model, optimizer = state.model, state.optimizer
        while state.epoch < options.epochs:
            order = np.random.default_rng(state.epoch).permutation(digits.TRAIN_SAMPLES)
            while state.batch < digits.TRAIN_SAMPLES // digits.GLOBAL_BATCH:
                begin = state.batch * digits.GLOBAL_BATCH
                mine = order[begin : begin + digits.GLOBAL_BATCH][hvd.rank() :: hvd.size()]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
                optimizer.step()
                time.sleep(options.step_sleep)
                state.batch += 1
                step_log.write(rank=hvd.rank(), size=hvd.size(), epoch=state.epoch, step=state.batch)
                state.commit()
            state.epoch, state.batch = state.epoch + 1, 0
            read = accuracy(model, test_images, test_labels)
            if hvd.rank() == 0:
                workers = f"{hvd.size()} worker{'' if hvd.size() == 1 else 's'}"
                print(f"epoch {state.epoch}: test accuracy {read:.4f}, {workers}", flush=True)
            state.commit()
        read = accuracy(model, test_images, test_labels)
        if hvd.rank() == 0:
            print(f"final test accuracy {read:.4f}", flush=True)

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
