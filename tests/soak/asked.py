"""What a soak asks of the processes that it trains with: a slow start, and a fault, once. For the programs themselves.

Environment: SLOW_START (file; while it is there, starting takes as many seconds as it says) and FAULTS (folder; a file
named like a process's job and worker is a fault it is to commit), if at all. Imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

SLOW_START, FAULTS = (Path(os.environ.get(name, "/nonexistent")) for name in ("SLOW_START", "FAULTS"))
WORKER, JOB = os.environ["ELASTIC_DRIVER_WORKER"], os.environ["ELASTIC_DRIVER_JOB"]


def start_slowly() -> None:
    """To be called before anything else is imported."""
    with contextlib.suppress(OSError, ValueError):
        time.sleep(float(SLOW_START.read_text()))


def commit_a_fault() -> None:
    """Does what this process was asked for, if anything."""
    fault = FAULTS / f"{JOB}-{WORKER}"
    try:
        what = fault.read_text()
        fault.unlink()
    except OSError:
        return
    match what:
        case "exception":
            raise RuntimeError("a fault that the soak asked for")
        case "sleep":
            time.sleep(1.5)
        case "exit":
            sys.exit(0)
        case "exit at once":
            os._exit(0)
