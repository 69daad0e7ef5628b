"""A real job under random faults, checked after each of them. Run by ``scripts/soak MINUTES SEED``.

    python tests/soak/soak.py 30 1

After each event training must go on within a minute, ranks of one step must have the same weights bit for bit, no more
steps may be lost than since the last commit (none by a planned change), and at the end nothing may be left: processes,
descriptors, shared memory, memory of the driver. Ends with exit code 1 and the reason at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integration"))

from jobs import Job  # noqa: E402

COMMIT_EVERY = 3
GOES_ON_WITHIN_S = 60.0
BOTH = "localhost:2\n127.0.0.1:2\n"


class Soak:
    """One job and what is done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults, self.slow = folder / "faults", folder / "slow"
        self.faults.mkdir()
        self.mode = folder / "mode"
        self.mode.write_text("")
        self.shared = set(os.listdir("/dev/shm"))
        flags = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2", "--heartbeat-timeout", "3"]
        flags += ["--elastic-timeout", "90", "--discovery-timeout", "1", "--grace-time", "2"]
        self.job = Job(
            folder,
            BOTH,
            *flags,
            command=[sys.executable, str(HERE / "program.py")],
            env={"FAULTS": str(self.faults), "SLOW_START": str(self.slow), "OMP_NUM_THREADS": "1"},
        )
        # The list is as the soak says; now and then the script fails or hangs instead.
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\n. {self.mode}\ncat {self.job.hosts_file}\n")
        self.counts: collections.Counter[str] = collections.Counter()
        self.checked_lines = 0
        self.weights: dict[tuple[float, int], str] = {}
        self.lost = 0
        self.highest = 0

    # --- what is seen ------------------------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        return [line for line in self.job.steps() if "step" in line]

    def living(self) -> list[dict[str, Any]]:
        """The last line of each process that lives, by pid."""
        last: dict[int, dict[str, Any]] = {}
        for line in self.lines()[-400:]:
            last[line["pid"]] = line
        return [line for line in last.values() if psutil.pid_exists(line["pid"]) and self.is_ours(line["pid"])]

    @staticmethod
    def is_ours(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() not in ("zombie", "stopped")
        except psutil.Error:
            return False

    def goes_on(self, after: float) -> None:
        """Blocks until all ranks of some round have done five steps after this time."""

        def found() -> bool:
            sizes: dict[int, collections.Counter[int]] = {}
            for line in self.lines()[-400:]:
                if line["time"] > after:
                    sizes.setdefault(line["size"], collections.Counter())[line["rank"]] += 1
            return any(len(c) == size and min(c.values()) >= 5 for size, c in sizes.items())

        end = time.monotonic() + GOES_ON_WITHIN_S
        while not found():
            if self.job.process.poll() is not None:
                raise AssertionError(f"the job ended with {self.job.process.returncode}\n{self.job.said()[-3000:]}")
            assert time.monotonic() < end, f"training does not go on\n{self.job.said()[-3000:]}"
            time.sleep(0.05)

    def check(self, *, planned: bool) -> None:
        """Looks at all lines since the last check: equal weights, steps lost."""
        lines = self.job.steps()
        fresh, self.checked_lines = lines[self.checked_lines :], len(lines)
        by_step: dict[tuple[int, int, int], set[str]] = {}
        for line in fresh:
            if "missing" in line:
                assert line["missing"] == 0, f"samples were not used: {line}"
                self.counts["epochs"] += line["rank"] == 0
                continue
            by_step.setdefault((line["step"], line["size"], line["epoch"]), set()).add(line["weights"])
        for key, weights in by_step.items():
            # A step that was lost and repeated at the same size may differ from itself; more than that may not be.
            assert len(weights) <= (1 if planned else 2), f"ranks differ at (step, size, epoch) {key}"
        steps = [line["step"] for line in fresh if "step" in line and line["rank"] == 0]
        for step in steps:
            back = self.highest + 1 - step
            if back > 0:
                assert not planned, f"step {step} came after {self.highest} without a fault"
                assert back <= COMMIT_EVERY, f"{back} steps were lost: {step} came after {self.highest}"
                self.lost += back
            self.highest = step

    # --- what is done ------------------------------------------------------------------------------------------------

    def victim(self) -> dict[str, Any] | None:
        """Somebody whose loss leaves another host: the whole host goes with it. None when that is not to be had."""
        self.all_hosts()
        end = time.monotonic() + 20
        since = time.time()
        while not any(line["size"] >= 3 and line["time"] > since for line in self.lines()[-50:]):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        now = time.time()
        living = [line for line in self.living() if line["size"] >= 3 and now - line["time"] < 1]
        hosts = {line["worker"].split("[")[0] for line in living}
        return self.random.choice(living) if len(hosts) == 2 else None

    def kill(self) -> bool:
        victim = self.victim()
        if victim:
            os.kill(victim["pid"], signal.SIGKILL)
        return bool(victim)

    def freeze(self) -> bool:
        victim = self.victim()
        if victim:
            os.kill(victim["pid"], signal.SIGSTOP)
        return bool(victim)

    def exception(self) -> bool:
        victim = self.victim()
        if victim:
            (self.faults / victim["worker"]).write_text("exception")
        return bool(victim)

    def drain(self) -> bool:
        victim = self.victim()
        if victim:
            os.kill(victim["pid"], self.random.choice((signal.SIGTERM, signal.SIGUSR1)))
        return bool(victim)

    def remove_host(self) -> bool:
        self.job.set_hosts(self.random.choice(("localhost:2\n", "127.0.0.1:2\n", "localhost:2\n127.0.0.1:1\n")))
        return True

    def all_hosts(self) -> bool:
        self.job.set_hosts(BOTH)
        return True

    def flap(self) -> bool:
        for _ in range(6):
            self.job.set_hosts(self.random.choice(("localhost:2\n", BOTH, "localhost:2\n127.0.0.1:1\n")))
            time.sleep(self.random.uniform(0.05, 0.4))
        self.job.set_hosts(BOTH)
        return True

    def discovery_fails(self) -> bool:
        self.mode.write_text("exit 3\n")
        time.sleep(2)
        self.mode.write_text("")
        return True

    def discovery_hangs(self) -> bool:
        self.mode.write_text("sleep 60\n")
        time.sleep(2)
        self.mode.write_text("")
        return True

    def slow_starters(self) -> bool:
        self.slow.write_text("3")
        self.flap()
        time.sleep(1)
        self.slow.unlink()
        return True

    def pause_driver(self) -> bool:
        os.kill(self.job.process.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(1, 6))
        os.kill(self.job.process.pid, signal.SIGCONT)
        return True

    def straggle(self) -> bool:
        for line in self.living()[:1]:
            (self.faults / line["worker"]).write_text("sleep")
        return True

    def run(self, minutes: float) -> None:
        unplanned: list[Callable[[], bool]] = [self.kill, self.freeze, self.exception]
        planned = [self.drain, self.remove_host, self.flap, self.discovery_fails, self.discovery_hangs]
        planned += [self.slow_starters, self.pause_driver, self.straggle, self.all_hosts]
        self.goes_on(0.0)
        driver = psutil.Process(self.job.process.pid)
        descriptors, memory = driver.num_fds(), driver.memory_info().rss
        end = time.monotonic() + minutes * 60
        while time.monotonic() < end:
            time.sleep(self.random.uniform(0.1, 1.5))
            event = self.random.choice(self.random.choice((unplanned, planned)))
            self.check(planned=False)
            if not event():
                # Both hosts have to be there for that.
                self.all_hosts()
                time.sleep(0.5)
                continue
            self.counts[event.__name__] += 1
            self.goes_on(time.time())
            if event is self.drain or event is self.remove_host:
                # A drained place is free again when its host was off the list.
                self.job.set_hosts(self.random.choice(("localhost:2\n", "127.0.0.1:2\n")))
                time.sleep(0.5)
                self.all_hosts()
            self.check(planned=False)
        self.all_hosts()
        self.goes_on(time.time() + 4)
        self.check(planned=False)
        assert driver.num_fds() - descriptors < 30, f"descriptors of the driver: {descriptors} -> {driver.num_fds()}"
        grown = driver.memory_info().rss - memory
        assert grown < 60 << 20, f"memory of the driver has grown by {grown >> 20} MB"
        self.job.process.send_signal(signal.SIGTERM)
        self.job.process.wait(30)
        assert not self.job.leftovers(), self.job.leftovers()
        left = set(os.listdir("/dev/shm")) - self.shared
        assert not left, f"left in /dev/shm: {left}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-soak-") as folder:
        soak = Soak(Path(folder), options.seed)
        try:
            with soak.job:
                soak.run(options.minutes)
        except AssertionError as error:
            keep = Path(tempfile.gettempdir()) / f"elastic-soak-failed-{options.seed}-{os.getpid()}"
            Path(folder).rename(keep)
            Path(folder).mkdir()
            print(f"soak: FAILED with seed {options.seed}: {error}\nsoak: its files are in {keep}", file=sys.stderr)
            return 1
        rounds = len(soak.job.events("round_formed"))
        done = ", ".join(f"{count} {name}" for name, count in sorted(soak.counts.items()))
        print(json.dumps({"steps": soak.highest, "lost": soak.lost, "rounds": rounds}), f"events: {done}")
        print(f"soak: ok, {options.minutes:g} minutes, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
