"""How fast a worker's output comes through its agent and the driver.

    python benchmarks/output.py [--megabytes 200] [--runs 3]

A worker prints lines of 100 bytes: under elasticrun, which puts a prefix before each, and into a plain pipe that is
read and thrown away, in turns. Printed are megabytes a second from the first line to the last, medians, and the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Writes as fast as it is read; joins no round.
_WRITER = """
import os, sys
line = b"x" * 99 + b"\\n"
block, left = line * 640, int(sys.argv[1]) * 1_000_000
while left > 0:
    view = memoryview(block)
    while view:
        view = view[os.write(1, view):]
    left -= len(block)
"""


def speed(command: list[str], megabytes: int) -> float:
    """Megabytes of the worker's a second."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "ELASTIC_DRIVER_HISTORY": "off"}
    process = subprocess.Popen(
        [*command, sys.executable, "-c", _WRITER, str(megabytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    assert process.stdout is not None
    read, began = len(os.read(process.stdout.fileno(), 1)), time.perf_counter()
    while data := os.read(process.stdout.fileno(), 1 << 20):
        read += len(data)
        ended = time.perf_counter()
    process.wait()
    process.stdout.close()
    assert read >= megabytes * 1_000_000, "some of it is missing"
    return megabytes / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="that the worker prints (default 200)")
    parser.add_argument("--runs", type=int, default=3, help="of each (default 3)")
    options = parser.parse_args()
    ours, plain = [], []
    for _ in range(options.runs):
        ours.append(speed([sys.executable, "-m", "elastic_driver", "-np", "1"], options.megabytes))
        plain.append(speed(["env"], options.megabytes))
    mine, pipe = statistics.median(ours), statistics.median(plain)
    print(f"through the agent {mine:.0f} MB/s, a plain pipe {pipe:.0f} MB/s: {pipe / mine:.1f} times as fast")


if __name__ == "__main__":
    main()
