"""What the processes of test_late_join.py run: they call init(), wait for the test, and only then need the others."""

from __future__ import annotations

import sys

import numpy as np
import worker_program
from worker_program import say

import elastic_driver as hvd


def place() -> list[int]:
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]


def build() -> None:
    """Stands for the building of a model: takes as long as the test wants it to."""
    say(initialized=hvd.is_initialized(), place=place())
    sys.stdin.readline()


def joins_at_run(steps: str) -> None:
    hvd.init()
    build()
    worker_program.train(steps)


def joins_at_collective() -> None:
    hvd.init()
    build()
    total = hvd.allreduce(np.ones(1), op=hvd.Sum)
    say(total=int(total[0]), place=place())


def starts_again_for_it() -> None:
    """A member that leaves its round for one with the joiner in it."""
    hvd.init()
    build()
    hvd.shutdown()
    joins_at_collective()


def never_joins() -> None:
    hvd.init()
    build()
    hvd.shutdown()
    say(initialized=hvd.is_initialized())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
