"""The guard: a small process that outlives the driver by a moment, to end the workers of a driver that was killed.

Reads its standard input: a line with a number is the pid of a worker that was started, ``done`` is the regular end.
When the pipe closes without ``done``, the driver has died: everything of the job is killed.

    python -m elastic_driver.launch.guard JOB_ID < pipe
"""

from __future__ import annotations

import signal
import sys

from elastic_driver.launch.tree import kill_all


def main() -> int:
    """Waits for the driver's end. The signals of a terminal or a service manager must not end the guard before it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    job_id = sys.argv[1]
    leaders: list[int] = []
    for line in sys.stdin:
        text = line.strip()
        if text == "done":
            return 0
        if text.isdecimal():
            leaders.append(int(text))
    kill_all(job_id, worker_key=None, leaders=leaders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
