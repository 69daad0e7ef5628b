"""What both examples share: the data, the record of the samples used, and a log of steps for tests and demos.

The data are scikit-learn's handwritten digits: 1,797 pictures of 8x8 pixels, which come with the package.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

TRAIN_SAMPLES = 1440
# The batch of the whole job. It stays the same whatever the number of workers is: they share it. So a change of
# membership changes neither the number of steps nor what a step means, and no hyper-parameter depends on the size.
# It divides TRAIN_SAMPLES, and 1, 2, 3, 4, 6, 8, 12 and more workers divide it.
GLOBAL_BATCH = 96


@dataclass(frozen=True)
class Digits:
    """Pictures as float32 in 0..1, shape (n, 8, 8), and the digits 0 to 9 that they show."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def load() -> Digits:
    """The data, always split in the same way: 1,440 pictures for training, 357 for the test."""
    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)
    labels = data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def count_samples(used: Sequence[int], *, exactly_once: bool) -> str:
    """Checks which samples an epoch used and says it in words.

    Args:
        used: the indices of all samples that all workers used, in any order.
        exactly_once: False where the batch did not divide by the number of workers, so that a few had to be repeated.

    Raises:
        AssertionError: a sample was left out, or was repeated without need.
    """
    counts = Counter(used)
    missing = TRAIN_SAMPLES - len(counts)
    repeated = sum(1 for count in counts.values() if count > 1)
    once = len(counts) - repeated
    text = f"{once} of {TRAIN_SAMPLES} samples used exactly once, {repeated} repeated"
    assert missing == 0, f"{text}, {missing} left out"
    assert repeated == 0 or not exactly_once, text
    return text


class StepLog:
    """Appends one JSON object for each step this process did. Several processes may share the file.

    Args:
        path: the file, or None to log nothing.
    """

    def __init__(self, path: Path | None) -> None:
        # O_APPEND and one write for each line: lines of different processes never mix.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path is not None else None

    def write(self, *, rank: int, size: int, epoch: int, step: int) -> None:
        """Notes that a step is done."""
        if self._fd is not None:
            line = {"time": time.time(), "pid": os.getpid(), "rank": rank, "size": size, "epoch": epoch, "step": step}
            os.write(self._fd, (json.dumps(line) + "\n").encode())
