"""A worker for the tests of vitals: it commits, and rank 1 holds Python's lock as long as a file is there.

    vitals_program.py FOLDER

It ends when FOLDER/end is there.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

FOLDER = Path(sys.argv[1])


def holds_the_lock(for_s: float) -> None:
    """A signal ends a sleep of the C library's; then it sleeps on."""
    usleep, end = ctypes.PyDLL(None).usleep, time.monotonic() + for_s
    while (left_s := end - time.monotonic()) > 0:
        usleep(int(left_s * 1e6) + 1)


@hvd.elastic.run
def train(state: hvd.elastic.ObjectState) -> None:
    """Until the end."""
    while True:
        if hvd.rank() == 1 and (FOLDER / "hold").exists():
            seconds = float((FOLDER / "hold").read_text())
            (FOLDER / "hold").unlink()
            holds_the_lock(seconds)
        end = hvd.allreduce(np.array([float((FOLDER / "end").exists())]), op=hvd.Max, name="is it over")
        if end[0]:
            return
        time.sleep(0.01)
        state.commit()


hvd.init()
train(hvd.elastic.ObjectState())
