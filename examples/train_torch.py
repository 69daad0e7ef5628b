"""Trains a small convolutional network on handwritten digits with PyTorch, on workers that may come and go.

    python examples/train_torch.py                                   alone
    elasticrun -np 2 python examples/train_torch.py                  two workers
    elasticrun -np 2 --min-np 2 --max-np 4 --host-discovery-script examples/discover_hosts.sh \\
        python examples/train_torch.py                               as many as the hosts file says

Whatever happens to the workers, each epoch uses each of the 1,440 training pictures exactly once, which rank 0 checks
and prints, and the final test accuracy is the same within 0.01 (3 of 357 pictures): sums are rounded in
another order with another number of workers, so the last bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from pathlib import Path

import digits
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import elastic_driver.torch as hvd

LEARNING_RATE = 3e-3  # of the first epoch; it goes down to 0 along a cosine


class Pictures(Dataset[tuple[int, Tensor, Tensor]]):
    """The training pictures; each comes with its index, so that the workers can prove which ones they used."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self._images[index], self._labels[index]


def build_model() -> nn.Module:
    """46,000 parameters; learns the digits in a second or two."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of pictures that the model reads correctly."""
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def fingerprint(model: nn.Module) -> str:
    """A hash of every bit of the model's parameters."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits while workers come and go.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of first parameters and of the data's order (default 1)")
    parser.add_argument(
        "--commit-every", type=int, default=1, metavar="K", help="steps from commit to commit (default 1)"
    )
    parser.add_argument("--loader-workers", type=int, default=0, metavar="N", help="DataLoader processes (default 0)")
    parser.add_argument("--step-sleep", type=float, default=0.0, metavar="S", help="makes each step longer (default 0)")
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="append a JSON line for each step")
    return parser.parse_args()


def main() -> None:
    """Trains, and prints how well it went."""
    options = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)  # several workers share this machine's cores
    torch.manual_seed(options.seed)
    data = digits.load()
    train_set = Pictures(torch.from_numpy(data.train_images).unsqueeze(1), torch.from_numpy(data.train_labels))
    test_images, test_labels = torch.from_numpy(data.test_images).unsqueeze(1), torch.from_numpy(data.test_labels)
    step_log = digits.StepLog(options.step_log)

    model = build_model()
    # Adam forgives: other roundings in the sums, which come with other numbers of workers, do not change the outcome.
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(train_set, shuffle=True, seed=options.seed)
    # Everything that must survive is in the state: a worker that joins gets it, a crash goes back to its last commit.
    # So a sample that `used` lists is one whose step counts.
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, loss=0.0, used=[], exactly_once=True
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        # After each change of membership this runs again from here, and resumes from the state.
        batch = math.ceil(digits.GLOBAL_BATCH / hvd.size())
        loader = DataLoader(train_set, batch_size=batch, sampler=sampler, num_workers=options.loader_workers)
        state.exactly_once = state.exactly_once and digits.GLOBAL_BATCH % hvd.size() == 0
        while state.epoch < options.epochs:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE / 2 * (1 + math.cos(math.pi * state.epoch / options.epochs))
            for index, (samples, images, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                time.sleep(options.step_sleep)
                sampler.record_batch(index, batch)
                state.used = state.used + hvd.allgather(samples).tolist()
                state.loss += float(hvd.allreduce(loss.detach()))
                state.step += 1
                step_log.write(rank=hvd.rank(), size=hvd.size(), epoch=state.epoch, step=state.step)
                if state.step % options.commit_every == 0:
                    state.commit()
            end_epoch(state)
        finish()

    def end_epoch(state: hvd.elastic.TorchState) -> None:
        counts = digits.count_samples(state.used, exactly_once=state.exactly_once)
        if hvd.rank() == 0:
            loss = state.loss * digits.GLOBAL_BATCH / digits.TRAIN_SAMPLES
            workers = f"{hvd.size()} worker{'' if hvd.size() == 1 else 's'}"
            print(
                f"epoch {state.epoch + 1}: loss {loss:.4f}, "
                f"test accuracy {accuracy(model, test_images, test_labels):.4f}, {workers}, {counts}",
                flush=True,
            )
        state.epoch += 1
        state.loss, state.used, state.exactly_once = 0.0, [], digits.GLOBAL_BATCH % hvd.size() == 0
        sampler.set_epoch(state.epoch)
        state.commit()

    def finish() -> None:
        # Still inside elastic.run: a worker that dies here is no harm either.
        hashes = hvd.allgather_object(fingerprint(model))
        assert len(set(hashes)) == 1, f"the ranks' parameters differ: {hashes}"
        if hvd.rank() == 0:
            ranks = "1 rank" if len(hashes) == 1 else f"all {len(hashes)} ranks"
            print(f"parameters agree on {ranks} (sha256 {hashes[0]})")
            print(f"final test accuracy {accuracy(model, test_images, test_labels):.4f}", flush=True)

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
