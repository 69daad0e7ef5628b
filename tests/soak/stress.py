"""A job over three machines while this one is far too busy: nobody may be given up who is only slow.

    python tests/soak/stress.py MINUTES [--host-timeout S]

Three network namespaces with a worker each, and ``stress-ng --cpu 8 --io 4 --vm 2`` beside them for that long. The job
keeps its one round: no host is lost, nobody counts as frozen or hung, no round is broken. The rules of history.py hold.
How often somebody was suspected of a hang, and why, is printed: all of them are innocent. Needs root, and what
scripts/install-test-hosts installs. Ends with exit code 1 and the reason when a rule is broken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.support.network.machines import made_machines  # noqa: E402
from tests.support.processes.followed_job import FollowedJob  # noqa: E402

STRESS = ("stress-ng", "--cpu", "8", "--io", "4", "--vm", "2", "--quiet")
HOSTS = "node0:1\nnode1:1\nnode2:1\n"
# A step takes 20 ms on a machine that is not busy. So long without one is a hang.
_HANGS_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has seen that broke no rule.

    Attributes:
        longest_s: between two steps, seconds.
        steps: of rank 0.
        suspected: the events of who was suspected of a hang, all of them wrongly.
    """

    longest_s: float
    steps: int
    suspected: list[dict[str, Any]]


def run(folder: Path, minutes: float, host_timeout_s: float) -> Outcome:
    """Runs the job and the load.

    Args:
        folder: for the job's files.
        minutes: how long.
        host_timeout_s: of the job; its other limits are the usual ones.

    Raises:
        AssertionError: a host was given up, a worker ended as hung, or a rule is broken.
    """
    limits = ("--host-timeout", f"{host_timeout_s:g}", "--agent-timeout", "15", "--heartbeat-timeout", "60")
    flags = ("-np", "3", "--min-np", "1", "--durable-every", "50", *limits)
    with made_machines() as machines, FollowedJob(machines, folder, HOSTS, *flags) as job:
        job.goes_on(machines.hosts)
        end = time.monotonic() + minutes * 60
        load = subprocess.Popen([*STRESS, "--temp-path", str(folder)], start_new_session=True)
        try:
            done, since = 0, time.monotonic()
            while time.monotonic() < end:
                time.sleep(0.5)
                job.follow()
                assert job.process.poll() is None, f"the job has ended\n{job.said()[-3000:]}"
                assert load.poll() is None, f"stress-ng has ended with {load.returncode}"
                if job.history.last != done:
                    done, since = job.history.last, time.monotonic()
                assert time.monotonic() < since + _HANGS_AFTER_S, f"no step since {done}\n{job.said()[-3000:]}"
                assert not job.events("worker_hung"), f"an innocent worker counts as hung\n{job.said()[-3000:]}"
                rounds = len(job.events("round_formed"))
                assert (job.lost(), rounds) == ([], 1), f"a false verdict\n{job.said()[-3000:]}"
        finally:
            os.killpg(load.pid, signal.SIGTERM)
            load.wait()
        times = [line["time"] for line in job.steps() if line["rank"] == 0]
        suspected = job.events("worker_suspected")
        job.end()
    return Outcome(max(b - a for a, b in itertools.pairwise(times)), len(times), suspected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--host-timeout", type=float, default=5.0, metavar="S")
    options = parser.parse_args()
    if shutil.which(STRESS[0]) is None:
        parser.error("needs stress-ng (scripts/install-test-hosts)")
    with tempfile.TemporaryDirectory(prefix="elastic-stress-") as folder:
        try:
            outcome = run(Path(folder), options.minutes, options.host_timeout)
        except AssertionError as error:
            print(f"stress: FAILED: {error}", file=sys.stderr)
            return 1
    for event in outcome.suspected:
        print(f"stress: suspected wrongly: rank {event['rank']}, {event['kind']}: {event['why']} ({event['limit']})")
    print(
        f"stress: ok, {options.minutes:g} minutes, {outcome.steps} steps, no host given up, no worker ended; "
        f"{len(outcome.suspected)} suspicions; longest time between two steps {outcome.longest_s:.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
