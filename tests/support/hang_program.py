"""A training that stands still once, in the way that it is told, and says so. Run by the tests under elasticrun.

Environment: STEP_LOG (file: a JSON line a step), STEPS, STEP_S (seconds of work a step), STANDS ("KIND RANK STEP"; a
RANK of -1 stands for all), ONCE (a file that marks that it has happened), MARK_FILE (a file that is written when it
begins), and for some kinds WHERE (a file) and LASTS_S (seconds; for ever without it).
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

STEPS = int(os.environ.get("STEPS", "100000"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))
KIND, _, _rest = os.environ.get("STANDS", "nothing -1 0").partition(" ")
RANK, STEP = map(int, _rest.split())
LASTS_S = float(os.environ.get("LASTS_S", "inf"))
WHERE = Path(os.environ.get("WHERE", "/nonexistent"))


def is_due(step: int) -> bool:
    if KIND == "nothing" or step != STEP or RANK not in (-1, hvd.rank()):
        return False
    try:
        Path(f"{os.environ['ONCE']}.{hvd.rank()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def checkpoint() -> None:
    """Writes and rests in turn, as a serializer does on a slow disc."""
    end = time.monotonic() + LASTS_S
    with WHERE.open("wb") as file:
        while time.monotonic() < end:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)


def evaluate() -> None:
    """Computes."""
    end, total = time.monotonic() + LASTS_S, 0.0
    while time.monotonic() < end:
        total += float(np.arange(10000.0).sum())
    assert total > 0


def call_c() -> None:
    """A call into C that holds the interpreter's lock."""
    libc = ctypes.PyDLL(None)
    libc.sleep(int(LASTS_S))


def invert_locks() -> None:
    """Two threads that take two locks, each the other's first."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(one: threading.Lock, other: threading.Lock) -> None:
        with one:
            both.wait()
            other.acquire()

    threads = [threading.Thread(target=take, args=pair, daemon=True) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    threads[0].join()


def write_to_the_disc() -> None:
    """The disc does not answer."""
    with WHERE.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())


KINDS = {
    "checkpoint": checkpoint,
    "evaluate": evaluate,
    "c_call": call_c,
    "inversion": invert_locks,
    "disc": write_to_the_disc,
}


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while state.step < STEPS:
            time.sleep(STEP_S)
            if is_due(state.step):
                with Path(os.environ["MARK_FILE"]).open("a") as mark:
                    mark.write(f"{hvd.rank()} {os.getpid()} {time.time()}\n")
                KINDS[KIND]()
            hvd.allreduce(np.ones(100), name="gradient")
            state.step += 1
            state.commit()
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")

    train(state)


main()
