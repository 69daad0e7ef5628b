"""A worker for the tests of vitals: it commits, and rank 1 holds Python's lock as long as FOLDER/hold is written to.

    vitals_program.py FOLDER

FOLDER/hold is a pipe. It ends when FOLDER/end is there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

FOLDER = Path(sys.argv[1])


def holds_the_lock(pipe: Path) -> None:
    """Until the other end is closed; a signal does not end the C library's read."""
    reader = os.open(pipe, os.O_RDONLY)
    pipe.unlink()
    assert ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1) == 0
    os.close(reader)


@hvd.elastic.run
def train(state: hvd.elastic.ObjectState) -> None:
    """Until the end."""
    while True:
        if hvd.rank() == 1 and (FOLDER / "hold").exists():
            holds_the_lock(FOLDER / "hold")
        end = hvd.allreduce(np.array([float((FOLDER / "end").exists())]), op=hvd.Max, name="is it over")
        if end[0]:
            return
        time.sleep(0.01)
        state.commit()


hvd.init()
train(hvd.elastic.ObjectState())
