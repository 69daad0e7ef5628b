"""A training that stands still once or more, in the way that it is told. Run by the tests under elasticrun.

Environment: STEP_LOG (file: a JSON line a step), STEPS, STEP_S (seconds of work a step), STANDS ("KIND RANK STEP...";
a RANK of -1 stands for all), ONCE (beginning of the names of files that mark that it has happened), MARK_FILE (gets a
line whenever it begins), and for some kinds WHERE (a file) and LASTS_S (seconds; forever without it). It lasts longer
where the machine is so busy that steps are slow: always at least 25 of the slowest ones (a suspicion takes 10; but who
looks once a second takes a step of half a second for one of a whole one). One rank alone stands later than told, where
steps have taken QUICK_S or longer lately: the proof against it takes 60 of the slowest.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

STEPS = int(os.environ.get("STEPS", "100000"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))
KIND, _, _rest = os.environ.get("STANDS", "nothing -1 0").partition(" ")
RANK, *AT = map(int, _rest.split())
QUICK_S = 1.0
WHERE = Path(os.environ.get("WHERE", "/nonexistent"))


class Standstill:
    """How long one takes.

    Attributes:
        lasts_s: seconds.
    """

    lasts_s = float(os.environ.get("LASTS_S", "inf"))


def is_due(step: int, slowest_s: float) -> bool:
    if KIND == "nothing" or not AT or step < AT[0] or RANK not in (-1, hvd.rank()):
        return False
    if slowest_s >= QUICK_S and RANK >= 0:
        return False
    try:
        Path(f"{os.environ['ONCE']}.{hvd.rank()}.{AT.pop(0)}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def checkpoint() -> None:
    """Writes and rests in turn, as a serializer does on a slow disk."""
    end = time.monotonic() + Standstill.lasts_s
    with WHERE.open("wb") as file:
        while time.monotonic() < end:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)


def evaluate() -> None:
    """Computes."""
    end, total = time.monotonic() + Standstill.lasts_s, 0.0
    while time.monotonic() < end:
        total += float(np.arange(10000.0).sum())
    assert total > 0


def poll() -> None:
    """Looks again and again whether something is there, without a pause that is worth the name."""
    end = time.monotonic() + Standstill.lasts_s
    while time.monotonic() < end and not WHERE.exists():
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        time.sleep(0.1)


def rest() -> None:
    """Looks once a second whether something is there."""
    end = time.monotonic() + Standstill.lasts_s
    while time.monotonic() < end and not WHERE.exists():
        time.sleep(1)


def lock() -> None:
    """Waits for a lock of a file that somebody outside the job holds."""
    with WHERE.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def spin() -> None:
    """Computes in Python and never comes to an end."""
    while True:
        pass


def idle() -> None:
    """Waits for what comes from nowhere."""
    threading.Event().wait(min(Standstill.lasts_s, threading.TIMEOUT_MAX))


def call_c() -> None:
    """A call into C that holds the interpreter's lock, and goes on with what it does when a signal has come."""
    libc = ctypes.PyDLL(None)
    reader, writer = os.pipe()
    with subprocess.Popen(["sleep", str(Standstill.lasts_s)], pass_fds=[writer]):
        os.close(writer)
        assert libc.read(reader, ctypes.create_string_buffer(1), 1) == 0
    os.close(reader)


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


def write_to_the_disk() -> None:
    """The disk does not answer."""
    with WHERE.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())


KINDS = {
    "checkpoint": checkpoint,
    "evaluate": evaluate,
    "poll": poll,
    "rest": rest,
    "lock": lock,
    "spin": spin,
    "idle": idle,
    "c_call": call_c,
    "inversion": invert_locks,
    "disk": write_to_the_disk,
}


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        since = time.monotonic()
        steps_s: collections.deque[float] = collections.deque([0.0], maxlen=110)
        while state.step < STEPS:
            time.sleep(STEP_S)
            if is_due(state.step, max(steps_s)):
                Standstill.lasts_s = max(Standstill.lasts_s, 25 * max(steps_s))
                with Path(os.environ["MARK_FILE"]).open("a") as mark:
                    mark.write(f"{hvd.rank()} {os.getpid()} {time.time()} {Standstill.lasts_s}\n")
                KINDS[KIND]()
                since = float("inf")
            hvd.allreduce(np.ones(100), name="gradient")
            state.step += 1
            state.commit()
            now = time.monotonic()
            steps_s.append(now - since)
            since = now
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")

    train(state)


main()
