"""A sampler that tracks the progress of an epoch, and redistributes the rest when ranks join or leave."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from elastic_driver.worker.rounds.current import is_initialized, rank, size


class ElasticSampler(Sampler[int]):
    """Distributes a data set's samples to the ranks, in an order determined by (seed, epoch) alone.

    The positions of the order go to the ranks in turn. Processed samples are counted, not those handed out, so that a
    DataLoader may prefetch: call ``record_batch`` after each step, then commit the state. After a reset the samples
    from the count on are distributed to the new ranks. Each sample of an epoch is used exactly once, except that the
    last ones are repeated if their number is not divisible by the ranks (``padding``).

    Args:
        dataset: anything with a length.
        shuffle: whether epochs have a random order.
        seed: of that order; the same on all ranks.

    Attributes:
        epoch: the current epoch.
        processed_num: samples of it that all ranks together have processed.
        padding: samples that are repeated by the end of the epoch, on all ranks together.
        rank_padding: how many of this rank's last samples are such repetitions.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - Horovod's signature
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.rank = 0
        self.num_replicas = 1
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.padding = 0
        self.rank_padding = 0
        self._dealt: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with nothing processed. Call it at an epoch's end, for the next (as in Horovod)."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed: this rank's and, at the same step, every other rank's.

        Args:
            batch_idx: for Horovod's signature.
            batch_size: samples in this rank's batch.
        """
        self._record(batch_size)

    def record_indices(self, indices: list[int]) -> None:
        """Count samples as processed, like :meth:`record_batch`, given their indices."""
        self._record(len(indices))

    def _record(self, count: int) -> None:
        self.processed_num = min(len(self.dataset), self.processed_num + count * self.num_replicas)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch with that number, counted from the last reset or ``set_epoch``."""
        return self._dealt[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its progress."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the epoch and progress from a :meth:`state_dict`, and redistribute the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the unprocessed samples to the current ranks."""
        self.rank, self.num_replicas = (rank(), size()) if is_initialized() else (0, 1)
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed},{self.epoch}").shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        remaining = len(self.remaining_indices)
        self.num_samples = -(-remaining // self.num_replicas)
        total = self.num_samples * self.num_replicas
        self.padding = total - remaining
        # Position p goes to rank p % num_replicas, and the repetitions are the last positions: at most one per rank.
        self.rank_padding = 1 if self.padding and self.rank >= self.num_replicas - self.padding else 0
        repeats = (
            [self.remaining_indices[position % remaining] for position in range(self.padding)] if remaining else []
        )
        self._dealt = (self.remaining_indices + repeats)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's share of the samples that were unprocessed at the last reset."""
        return iter(self._dealt)

    def __len__(self) -> int:
        return self.num_samples
