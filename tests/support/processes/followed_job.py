"""A job over several machines that is looked at all the while: nothing that is done to it may break a training's rules.

Three things must never be, whatever happens to machines and networks: a job that hangs, two rounds that train side by
side (two rank 0s), two writers in one folder of commits. The first is for the test to see: it waits for steps, or for
the line that says what the job waits for. The others are looked for by ``history.py`` and ``follow.py``, at each look.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from follow import Follower, check_commits
from history import History

from tests.support.network.machines import MachinesJob, is_dead, wait_for
from tests.support.network.namespaces import NamespaceHost, Namespaces
from tests.support.paths import ROOT

SOAK = ROOT / "tests" / "soak"
SAMPLES, PER_STEP, COMMIT_EVERY = 480, 12, 2  # as in lineage_program.py
# Short, so that tests are: what they show holds for longer ones.
TIMEOUTS = ("--host-timeout", "2", "--agent-timeout", "4", "--gloo-timeout-seconds", "10", "--ssh-connect-timeout", "2")
COOLDOWN = ("--blacklist-cooldown-range", "1", "2")


class FollowedJob(MachinesJob):
    """``elasticrun`` on the first machine, with the training of ``lineage_program.py``, and commits on disk.

    Args:
        machines: for the job.
        folder: of its files.
        hosts: that a discovery script lists; None for no script.
        flags: more.
        more: see MachinesJob.

    Attributes:
        durable: the folder of commits; all of them are kept.
        history: of the training.
    """

    def __init__(self, machines: Namespaces, folder: Path, hosts: str | None, *flags: str, **more: Any) -> None:
        self.durable = folder / "durable"
        self.history = History(commit_every=COMMIT_EVERY, samples=SAMPLES, per_step=PER_STEP)
        flags = ("--durable-dir", str(self.durable), "--durable-keep", "10000", *TIMEOUTS, *COOLDOWN, *flags)
        program = [sys.executable, str(SOAK / "lineage_program.py")]
        super().__init__(machines, folder, hosts, *flags, command=more.pop("command", program), **more)
        self._follower = Follower(self.step_log, self.history)
        self._follower.begin(self.event_log)

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        super().__exit__()
        if kind is None:
            self.follow()
            self.history.check_epochs(all_of_them=True)
            assert check_commits(self.durable, [self.events("job_started")[0]["job_id"]]) > 0

    def follow(self) -> None:
        """Takes in what the job has done since the last time. Raises AssertionError when a rule is broken."""
        self._follower.look()

    def wait_for(self, what: str, found: Callable[[], Any]) -> Any:
        def looked() -> Any:
            self.follow()
            return found()

        return super().wait_for(what, looked)

    def goes_on(self, hosts: Sequence[NamespaceHost], *, steps: int = 5) -> int:
        """Blocks until all ranks of a round on exactly these hosts have done some steps from now on.

        Returns:
            The round's number.
        """
        return self.goes_on_one_of(hosts, steps=steps)

    def goes_on_one_of(self, *choices: Sequence[NamespaceHost], steps: int = 5) -> int:
        """As goes_on, on the hosts of any of these choices."""
        self.follow()
        before, recent = self._follower.steps, self._follower.recent
        wanted = [{host.name for host in hosts} for hosts in choices]

        def found() -> int:
            new = list(recent)[-(self._follower.steps - before) :] if self._follower.steps > before else []
            lines = [line for line in new if line["round"] == new[-1]["round"]]
            done = collections.Counter(line["rank"] for line in lines)
            there = {line["worker"].partition("[")[0] for line in lines}
            enough = there in wanted and len(done) == lines[-1]["size"] and min(done.values()) >= steps
            return int(lines[-1]["round"]) if enough else 0

        answer: int = self.wait_for(f"training on one of {wanted}", found)
        return answer

    def waits(self) -> None:
        """Blocks until the job has said anew that it waits for workers, slots or a host."""
        known = len(self.said())
        self.wait_for("that it waits", lambda: "--min-np" in self.said()[known:])

    def ended(self, workers: Sequence[int]) -> None:
        """Blocks until these processes have ended: they have done their last step."""
        assert workers
        self.wait_for("the end of those that were given up", lambda: all(map(is_dead, workers)))

    def lost(self) -> list[str]:
        """Hosts that were lost, one for each time."""
        return [event["host"] for event in self.events("host_lost")]

    def clean(self, host: NamespaceHost) -> None:
        """Blocks until none of the job's processes runs on a machine."""
        wait_for(f"{host.name} has none", lambda: not self.agents(host) and not self.workers(host))
