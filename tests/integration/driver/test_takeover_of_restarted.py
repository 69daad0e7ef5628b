"""Drivers die that have workers restarted at each change: the workers of a script for torchrun. Real processes.

In a job hosts come and go, a worker dies, and the training comes to its end, and drivers die at each step of that
(tests/support/programs/dying_elasticrun.py). Wherever they do, one generation follows the other, each goes on from
where the last one has come to, and nothing is left of the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes.dying_drivers import ALL, Walk, check_generations

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PHASES = ("start", "growth", "loss", "drain", "end")


class Restarted(Walk):
    """Of workers that are restarted at each change. See Walk."""

    def __init__(self, folder: Path, *, once: bool, **places: str) -> None:
        program, checkpoint = PROGRAMS / "restarted_program.py", str(folder / "checkpoint")
        super().__init__(
            folder, "--on-change", "restart", once=once, places=places, program=program, CHECKPOINT=checkpoint
        )

    def change(self) -> Iterator[bool]:
        """All that happens between the start and the end; tells of each phase whether a driver has died in it."""
        yield self.grow()
        yield self.lose()
        yield self.shrink()

    def end(self) -> None:
        """Looks at the job, too."""
        self.end_well()
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
    with Restarted(tmp_path, once=True, **places) as job:
        job.begin()
        assert all(list(job.change()))
        job.end()
        assert [name.partition(":")[0] for name in job.died_at] == list(PHASES)


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_at_each_place_one_after_the_other(tmp_path: Path) -> None:
    """Whoever takes over dies at the next one: also those of a takeover are among them."""
    with Restarted(tmp_path, once=False, **dict.fromkeys(PHASES, ALL)) as job:
        job.begin()
        assert all(list(job.change()))
        job.end()
        print("\n".join(job.died_at))
        assert len(job.died_at) > 60
