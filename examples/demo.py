"""Shows an elastic training job at work: hosts are added, removed and killed while it trains.

    make demo

Runs examples/train_torch.py twice: alone, and with elasticrun on this machine, which plays two hosts, `localhost` and
`127.0.0.1`, of two slots each. The demo edits the file that examples/discover_hosts.sh prints and kills workers; what
the job did is read from its event log and from the workers' logs of steps, and checked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SCRIPT = HERE / "train_torch.py"
# How far the accuracies may be apart: 3 of the 357 test pictures (see train_torch.py).
TOLERANCE = 0.01
STEPS_PER_EPOCH = 15
PATIENCE_S = 120.0
BOLD, DIM, PLAIN = (
    ("\x1b[1;36m", "\x1b[2m", "\x1b[0m")
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    else ("", "", "")
)


def tell(text: str = "") -> None:
    """A line of the demo's own, to be told apart from the job's."""
    print(f"{BOLD}demo> {text}{PLAIN}" if text else "", flush=True)


def fail(text: str) -> NoReturn:
    """Ends the demo: something did not go as it should."""
    raise SystemExit(f"demo> FAILED: {text}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that others are writing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Change:
    """What the demo did to the job.

    Attributes:
        what: for the closing table.
        time: unix seconds at which it was done.
    """

    what: str
    time: float


class Job:
    """A running command: its output is shown, and its files are watched.

    Args:
        command: what to run.
        folder: where the files are.
        show: which lines of the output to show.
    """

    def __init__(self, command: list[str], folder: Path, *, show: Callable[[str], bool]) -> None:
        self.steps_file = folder / "steps.jsonl"
        self.events_file = folder / "events.jsonl"
        self.output: list[str] = []
        self._show = show
        self.began = time.time()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HOSTS_FILE": str(folder / "hosts")}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        # Ends with the command's output.
        self._reader = threading.Thread(target=self._read, name="demo-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line.rstrip("\n"))
            if self._show(line):
                sys.stdout.write(line)
                sys.stdout.flush()

    def steps(self) -> list[dict[str, Any]]:
        """All steps of all workers so far."""
        return read_lines(self.steps_file)

    def members(self) -> dict[int, dict[str, Any]]:
        """The workers of the present round by rank, each with its pid."""
        rounds = [event for event in read_lines(self.events_file) if event["event"] == "round_formed"]
        return {member["rank"]: member for member in rounds[-1]["members"]}

    def wait_for(self, what: str, found: Callable[[], bool]) -> None:
        """Waits until something shows in the job's files. Ends the demo when it does not come."""
        end = time.monotonic() + PATIENCE_S
        while not found():
            if self._process.poll() is not None:
                self._reader.join(5)
                code = self._process.returncode
                if code == 0:
                    fail(f"{what}: the training was over before; give it more time with --step-sleep")
                fail(f"{what}: the job ended with exit code {code}\n" + "\n".join(self.output[-20:]))
            if time.monotonic() > end:
                fail(f"{what}: did not happen within {PATIENCE_S:.0f} s\n" + "\n".join(self.output[-20:]))
            time.sleep(0.05)

    def wait_until_trains(self, size: int, since: float, *, steps: int = 10) -> None:
        """Waits until that many workers have each done some steps together."""

        def found() -> bool:
            counts = dict.fromkeys(range(size), 0)
            for line in self.steps():
                if line["size"] == size and line["time"] > since:
                    counts[line["rank"]] += 1
            return min(counts.values()) >= steps

        self.wait_for(f"{size} workers training", found)

    def wait(self) -> int:
        """Waits for the end; the exit code."""
        code = self._process.wait()
        self._reader.join(5)
        return code

    def close(self) -> None:
        """Ends the job if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def found(self, pattern: str) -> list[str]:
        """What a pattern's group matched in the lines of output."""
        return [match[1] for line in self.output if (match := re.search(pattern, line))]


@contextmanager
def running(command: list[str], folder: Path, *, show: Callable[[str], bool]) -> Iterator[Job]:
    """A job that does not outlive the block."""
    job = Job(command, folder, show=show)
    try:
        yield job
    except KeyboardInterrupt:
        # The terminal has told the job as well; let it end in its own way.
        job.wait()
        raise
    finally:
        job.close()


def write_hosts(folder: Path, *hosts: str) -> float:
    """Puts other hosts in the file, in one go; the time."""
    new = folder / "hosts.new"
    new.write_text("".join(f"{host}\n" for host in hosts))
    new.replace(folder / "hosts")
    return time.time()


def train_alone(folder: Path, epochs: int) -> tuple[float, float]:
    """The training without elasticrun.

    Returns:
        Its accuracy, and seconds from its start to its first step.
    """
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), "--epochs", str(epochs), "--step-log", str(folder / "steps.jsonl")]
    with running(command, folder, show=lambda line: "final" in line) as job:
        if job.wait() != 0:
            fail("the training failed even alone:\n" + "\n".join(job.output[-20:]))
        return float(job.found(r"final test accuracy ([\d.]+)")[0]), job.steps()[0]["time"] - job.began


def link_of_page(job: Job) -> str:
    """Where a browser sees the job live; "" where this elasticrun has no page for it."""
    started = [event for event in read_lines(job.events_file) if event["event"] == "job_started"]
    command = [sys.executable, "-m", "elastic_driver", "page", started[-1]["job_id"]]
    try:
        asked = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    found = re.search(r"https?://\S+", asked.stdout) if asked.returncode == 0 else None
    return found[0] if found else ""


def disturb(job: Job, folder: Path) -> list[Change]:
    """Everything that happens to the job, one after the other."""
    first, second = "localhost:2", "127.0.0.1:2"
    changes: list[Change] = []

    def change(what: str, act: Callable[[], float], size: int) -> None:
        at = act()
        changes.append(Change(what, at))
        job.wait_until_trains(size, at)

    def kill(rank: int) -> float:
        os.kill(job.members()[rank]["pid"], signal.SIGKILL)
        return time.time()

    def kill_and_see_it_come_back(rank: int, name: str, *explanation: str) -> None:
        member = job.members()[rank]
        host = member["worker"].split("[")[0]
        tell()
        tell(f"kill {name} with SIGKILL (process {member['pid']}, on host {host})")
        for line in explanation:
            tell(line)
        change(f"rank {rank} killed, host {host} out", lambda: kill(rank), 2)
        tell()
        tell(f"wait until {host} is let in again, by itself, after its cooldown")
        change(f"host {host} back after its cooldown", time.time, 4)

    job.wait_until_trains(2, 0.0)
    if link := link_of_page(job):
        tell()
        tell(f"look at it live: {link}")
    tell()
    tell("add host 127.0.0.1 to the hosts file; the job continues while two more workers start there")
    change("host 127.0.0.1 added", lambda: write_hosts(folder, first, second), 4)
    tell()
    tell("take host 127.0.0.1 out of the hosts file again")
    change("host 127.0.0.1 removed", lambda: write_hosts(folder, first), 2)
    tell()
    tell("add it once more")
    change("host 127.0.0.1 added again", lambda: write_hosts(folder, first, second), 4)
    kill_and_see_it_come_back(
        3,
        "rank 3",
        "a host on which a worker crashed is left out for a while, so rank 2 is stopped too; the workers on the other",
        "host go back to their last commit and train on, in the same processes",
    )
    kill_and_see_it_come_back(0, "rank 0, the one that prints,", "another worker becomes rank 0")
    tell()
    tell("enough; let it train to the end")
    return changes


def costs(lines: list[dict[str, Any]], change: Change, until: float) -> tuple[str, float, int]:
    """What a change cost those who lived through it.

    Args:
        lines: all steps.
        change: the change.
        until: when the next one was made.

    Returns:
        The sizes before and after, seconds without a step (less a normal step), and steps that were done twice.
    """
    lost_s, again, sizes = 0.0, 0, ""
    by_pid: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_pid.setdefault(line["pid"], []).append(line)
    for own in by_pid.values():
        normal_s = statistics.median([b["time"] - a["time"] for a, b in itertools.pairwise(own)] or [0.0])
        for before, after in itertools.pairwise(own):
            if change.time < after["time"] < until and before["size"] != after["size"]:
                sizes = f"{before['size']} -> {after['size']}"
                lost_s = max(lost_s, after["time"] - before["time"] - normal_s)
                again = max(again, before["step"] - after["step"] + 1)
    return sizes, lost_s, again


def report(job: Job, changes: list[Change], epochs: int, alone: float) -> None:
    """Says what was shown, and checks it."""
    lines = job.steps()
    tell()
    tell("what the changes cost the workers that lived through them, from their own logs of steps:")
    print(f"  {'change':38} {'workers':8} {'time lost':>10} {'steps done twice':>17}")
    for change, following in itertools.zip_longest(changes, changes[1:]):
        sizes, lost_s, again = costs(lines, change, following.time if following else float("inf"))
        print(f"  {change.what:38} {sizes:8} {lost_s:8.2f} s {again:17d}")
    accuracies = job.found(r"final test accuracy ([\d.]+)")
    agree = job.found(r"(parameters agree on .*)")
    exact = {int(epoch) for epoch in job.found(r"epoch (\d+):.* 1440 of 1440 samples used exactly once, 0 repeated")}
    if not accuracies or not agree:
        fail("the job did not print its results")
    accuracy = float(accuracies[-1])
    tell(f"epochs in which each of the 1440 samples was used exactly once: {len(exact)} of {epochs}")
    tell(f"at the end, {agree[-1]}")
    tell(f"test accuracy {accuracy:.4f} with {len(changes)} changes, {alone:.4f} undisturbed and alone")
    if exact != set(range(1, epochs + 1)):
        fail(f"epochs without that line: {sorted(set(range(1, epochs + 1)) - exact)}")
    if abs(accuracy - alone) > TOLERANCE:
        fail(f"the accuracies are more than {TOLERANCE} apart")
    tell(f"all of it as it should be; the files are in {job.steps_file.parent}")


def draw(folder: Path) -> None:
    """Makes a picture of the job from its event log."""
    picture = folder / "job.svg"
    command = [sys.executable, "-m", "elastic_driver", "report", str(folder / "events.jsonl"), "-o", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode or not picture.exists():
        fail(f"there is no picture of the job: {done.stderr.strip()}")
    tell(f"what it went through, as a picture for the browser: {picture}")


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description="Shows an elastic training job while hosts come, go and are killed.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default 30)")
    parser.add_argument("--step-sleep", type=float, metavar="S", help="pause in each step (default: by this machine)")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", metavar="DIR", help="for all files")
    options = parser.parse_args()
    # So that `kill` and a closed terminal end the job as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, lambda got, _frame: sys.exit(128 + got))
    folder: Path = options.output.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    tell("first, for comparison, the training alone and undisturbed: python examples/train_torch.py")
    alone, start_s = train_alone(folder / "alone", options.epochs)
    # The training must outlast the changes: four starts of workers beside it, two cooldowns, some steps in between.
    pause_s = options.step_sleep
    if pause_s is None:
        pause_s = round((8 * start_s + 15) / (options.epochs * STEPS_PER_EPOCH), 3)

    write_hosts(folder, "localhost:2")
    flags = ["-np", "2", "--min-np", "2", "--max-np", "4", "--blacklist-cooldown-range", "4", "10"]
    flags += ["--host-discovery-script", str(HERE / "discover_hosts.sh")]
    flags += ["--event-log", str(folder / "events.jsonl")]
    training = [sys.executable, str(SCRIPT), "--epochs", str(options.epochs), "--step-sleep", str(pause_s)]
    training += ["--step-log", str(folder / "steps.jsonl")]
    command = [sys.executable, "-m", "elastic_driver", *flags, *training]
    tell()
    tell(f"now with elasticrun on two workers, each step made {pause_s:.2f} s longer to have something to look at:")
    shown = shlex.join(["elasticrun", *flags, "python", *training[1:]]).replace(f"{ROOT}/", "")
    print(f"{DIM}  $ HOSTS_FILE={(folder / 'hosts')} {shown}{PLAIN}".replace(f"{ROOT}/", ""), flush=True)
    with running(command, folder, show=lambda line: True) as job:
        changes = disturb(job, folder)
        if (code := job.wait()) != 0:
            fail(f"the job ended with exit code {code}")
        report(job, changes, options.epochs, alone)
    draw(folder)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
