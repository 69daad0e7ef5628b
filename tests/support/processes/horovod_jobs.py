"""A job of real Horovod workers, under elasticrun or under horovodrun, on the same script and flags."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.support.paths import PROGRAMS
from tests.support.processes.carriers import carriers_of, in_words
from tests.support.processes.jobs import AFRESH, Job

PROGRAM = PROGRAMS / "horovod_program.py"
TENSORFLOW_PROGRAM = PROGRAM.with_name("horovod_tensorflow_program.py")
MARK = "HOROVOD_TEST_MARK"
LINGER_S = 30.0


class HorovodJob(Job):
    """Starts a program; see horovod_program.py for the variables.

    Args:
        launcher: elasticrun, or horovodrun.
        folder: for its files.
        hosts: what the discovery script prints; None for none.
        flags: of the launcher's, such as both know.
        program: what the workers run.
        python: what runs it.
        env: variables of the program's.
    """

    def __init__(
        self,
        launcher: str,
        folder: Path,
        hosts: str | None,
        *flags: str,
        program: Path = PROGRAM,
        python: Sequence[str] = (sys.executable,),
        **env: str,
    ) -> None:
        self.by = launcher
        self._mark = uuid.uuid4().hex
        if launcher == "horovodrun":
            self.discovery_flags = ()  # it asks each second
        folder.mkdir(exist_ok=True)
        once = folder / "once"
        once.mkdir()
        env = {"ONCE": str(once), MARK: self._mark, **env}
        super().__init__(folder, hosts, *flags, command=[*python, str(program)], env=env, elasticrun=AFRESH)

    def launcher(self, elasticrun: Sequence[str]) -> list[str]:
        if self.by == "horovodrun":
            # Without an interface it waits for a second host.
            return [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "--network-interface", "lo"]
        return super().launcher(elasticrun)

    @property
    def is_ours(self) -> bool:
        """Whether elasticrun runs it."""
        return self.by == "elasticrun"

    def printed(self) -> str:
        """Its workers' output, and under horovodrun some of its own."""
        return self.stdout.read_text(errors="replace")

    def all_said(self) -> str:
        """Both streams."""
        return self.printed() + self.said()

    def sizes(self) -> list[int]:
        """The size at the end of each epoch."""
        found = {line["epoch"]: line["size"] for line in self.steps()}
        return [found[epoch] for epoch in sorted(found)]

    def leaders(self) -> list[int]:
        """The rank that rank 0 was started with, at the end of each epoch."""
        found = {line["epoch"]: line["first_rank"] for line in self.steps() if line["rank"] == 0}
        return [found[epoch] for epoch in sorted(found)]

    def wait_for_epoch(self, epoch: int) -> None:
        """Waits for the first batch of this epoch."""
        self.wait_for(f"epoch {epoch}", lambda: any(line["epoch"] >= epoch for line in self.steps()))

    def kill(self, lines: list[dict[str, Any]], rank: int, number: int = signal.SIGKILL) -> int:
        """Sends the worker of this rank a signal.

        Args:
            lines: of steps, the last of which tell who that is.
            rank: whose.
            number: of the signal.

        Returns:
            Its process.
        """
        pid = int(next(line["pid"] for line in reversed(lines) if line["rank"] == rank))
        os.kill(pid, number)
        return pid

    def leftovers(self) -> list[str]:
        """Processes of the job that still run; horovodrun's may take a while after it."""
        end = time.monotonic() + (0.0 if self.is_ours else LINGER_S)
        while (found := self._running()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _running(self) -> list[str]:
        return super().leftovers() + in_words(carriers_of(MARK, self._mark.__eq__))


class Start(Protocol):
    """Starts a job."""

    launcher: str

    def __call__(
        self,
        hosts: str | None,
        *flags: str,
        program: Path = PROGRAM,
        python: Sequence[str] = (sys.executable,),
        **env: str,
    ) -> HorovodJob: ...
