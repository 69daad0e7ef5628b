"""What the scripts of this folder tell the test: a line a step."""

import json
import os
import time


def tell(step: int, rank: int, size: int) -> None:
    """Appends it to the test's log."""
    line = {"step": step, "rank": rank, "size": size, "pid": os.getpid(), "time": time.time()}
    with open(os.environ["STEP_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
