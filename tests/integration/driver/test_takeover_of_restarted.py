"""Drivers die that have workers restarted at each change: the workers of a script for torchrun. Real processes.

In a job hosts come and go, a worker dies, and the training comes to its end, and drivers die at each step of that
(tests/support/programs/dying_elasticrun.py). Wherever they do, one generation follows the other, each goes on from
where the last one has come to, and nothing is left of the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes.dying_drivers import ALL, DyingDrivers, check_generations

pytestmark = [pytest.mark.integration, pytest.mark.faults]

FLAGS = ("-np", "2", "--min-np", "1", "--on-change", "restart", "--blacklist-cooldown-range", "1", "1")
TWO, THREE = "localhost:1\n127.0.0.1:1\n", "localhost:2\n127.0.0.1:1\n"
PHASES = ("start", "growth", "loss", "drain", "end")


class Walk(DyingDrivers):
    """A job whose drivers die at some places.

    Args:
        folder: of the job.
        once: whether one dies in each phase, or one after the other at each place.
        places: a pattern for each phase in which any dies.
    """

    def __init__(self, folder: Path, *, once: bool, **places: str) -> None:
        checkpoint = str(folder / "checkpoint")
        program = PROGRAMS / "restarted_program.py"
        super().__init__(folder, TWO, *FLAGS, program=program, STEP_S="0.05", CHECKPOINT=checkpoint)
        self._once = once
        self._places = places

    def phase(self, name: str) -> int:
        """Arms the drivers, if they are to die in it. Returns how often they have died before."""
        self.disarm()
        if name in self._places:
            self.arm(name, self._places[name], once=self._once)
        return len(self.died_at)

    def begin(self) -> None:
        self.phase("start")
        self.start()
        self.trains(2)

    def change(self) -> Iterator[bool]:
        """All that happens between the start and the end; tells of each phase whether a driver has died in it."""
        died = self.phase("growth")
        self.set_hosts(THREE)
        self.trains(3)
        yield len(self.died_at) > died
        died = self.phase("loss")
        victim = self.worker("127.0.0.1[0]")
        os.kill(victim, signal.SIGKILL)
        self.trains(3, without=victim)
        yield len(self.died_at) > died
        died = self.phase("drain")
        self.set_hosts(TWO)
        self.trains(2)
        yield len(self.died_at) > died

    def end(self) -> None:
        """Looks at the job, too."""
        self.phase("end")
        self.end_at(self.last_step() + 5)
        assert self.ended() == 0
        check_generations(self.job.steps())


@pytest.mark.slow
def test_at_one_place_of_each_phase(tmp_path: Path) -> None:
    places = {
        "start": "^carried out StartWorker",
        "growth": "^written .*WorkerStarted",
        "loss": "^said start",
        "drain": "^carried out StopWorker",
        "end": "^carried out EndJob",
    }
    with Walk(tmp_path, once=True, **places) as job:
        job.begin()
        assert all(list(job.change()))
        job.end()
        assert [name.partition(":")[0] for name in job.died_at] == list(PHASES)


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_at_each_place_one_after_the_other(tmp_path: Path) -> None:
    """Whoever takes over dies at the next one: also those of a takeover are among them."""
    with Walk(tmp_path, once=False, **dict.fromkeys(PHASES, ALL)) as job:
        job.begin()
        assert all(list(job.change()))
        job.end()
        print("\n".join(job.died_at))
        assert len(job.died_at) > 60
