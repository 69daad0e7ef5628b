"""How long a job on one machine takes to start, and what that costs.

    python benchmarks/start.py [--runs 20] [--trees DIR,DIR,...] [--journal]

From the exec of ``elasticrun -np 1 -H localhost:1`` to the first line of its worker, a shell; and the processor time
that the driver (with ``--journal`` its parent, too) and its agent have used by then. Of each the median and the range
over the runs. With ``--trees`` the package is taken from each of these checkouts in turns, so that what else the
machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Start:
    """One start; seconds.

    Attributes:
        first_line: from the exec to the worker's first line.
        driver, agent: processor time until then.
    """

    first_line: float
    driver: float
    agent: float


def processor_s(pid: int) -> float:
    """Of all threads of a process."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ours(pid: int) -> list[int]:
    """The driver, and with a journal its parent too: the process that was started, and what it has forked of itself."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    forked = [each for each in children(pid) if Path(f"/proc/{each}/cmdline").read_bytes() == command]
    return [pid, *(each for child in forked for each in ours(child))]


def start(tree: Path, folder: Path, *, journal: bool) -> Start:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "elastic_driver", "-np", "1", "-H", "localhost:1"]
    command += ["--on-change", "in-place", "--journal", str(folder / "journal")] if journal else []
    command += ["sh", "-c", f"echo > {pipe}; exec sleep 1000"]
    env = {**os.environ, "PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder)}
    with (folder / "output").open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            with pipe.open() as written:
                written.read(1)
            first_line = time.perf_counter() - began
            drivers = ours(process.pid)
            agents = [each for driver in drivers for each in children(driver) if each not in drivers]
            return Start(first_line, sum(map(processor_s, drivers)), sum(map(processor_s, agents)))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            pipe.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--trees", default=str(ROOT))
    parser.add_argument("--journal", action="store_true", help="with one, which is in memory where /tmp is")
    arguments = parser.parse_args()
    trees = [Path(text).resolve() for text in arguments.trees.split(",")]
    found: dict[Path, list[Start]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(arguments.runs + 1):
            for tree in trees if run % 2 else reversed(trees):
                one = start(tree, Path(folder), journal=arguments.journal)
                if run:  # the first compiles, and fills the system's cache
                    found[tree].append(one)
    for tree, starts in found.items():
        print(tree)
        for name in ("first_line", "driver", "agent"):
            values = [1000 * getattr(each, name) for each in starts]
            print(f"  {name:10} {statistics.median(values):6.0f} ms  ({min(values):.0f} to {max(values):.0f})")


if __name__ == "__main__":
    main()
