"""A driver is killed at each step of what it does, and the same command again takes its job over: real processes.

In a job hosts come, a commit gets on disk, a worker dies, a slot goes, a worker is told to leave, and training comes to
its end. At which places drivers can die is in tests/support/programs/dying_elasticrun.py. Wherever they do, the job
ends well, no step is lost or done by two rounds, and nothing is left of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.dying_drivers import ALL, Walk

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PHASES = ("start", "growth", "commit", "loss", "drain", "leave", "end")


class InPlace(Walk):
    """Of workers that reset in place, and commit to disk. See Walk."""

    def __init__(self, folder: Path, *, once: bool, **places: str) -> None:
        durable = ("--durable-dir", str(folder / "durable"), "--durable-every", "5")
        super().__init__(folder, "--on-change", "in-place", *durable, once=once, places=places)
        self.losses = 0

    def on_disk(self) -> set[str]:
        """The commits."""
        return {path.name for path in (self.folder / "durable").glob("commit-*.state")}

    def change(self) -> Iterator[bool]:
        """All that happens between the start and the end; tells of each phase whether a driver has died in it."""
        yield self.grow()
        died = self.phase("commit")
        before = self.on_disk()
        self.until("commits on disk", lambda: len(self.on_disk() - before) >= 2)  # asked for since then
        yield len(self.died_at) > died
        self.losses += 1
        yield self.lose()
        yield self.shrink()
        died = self.phase("leave")
        os.kill(self.worker("127.0.0.1[0]"), signal.SIGTERM)
        self.trains(1)
        yield len(self.died_at) > died

    def end(self) -> None:
        """Looks at the job, too."""
        self.end_well()
        self.check_steps(self.losses)


@pytest.mark.slow
def test_at_one_place_of_each_phase(tmp_path: Path) -> None:
    places = {
        "start": "^carried out StartWorker",
        "growth": "^carried out PublishRound",
        "commit": "^a permit is to be given",
        "loss": "^written .*WorkerExited",
        "drain": "^carried out SetNotice",
        "leave": "^said notice",
        "end": "^carried out EndJob",
    }
    with InPlace(tmp_path, once=True, **places) as job:
        job.begin()
        assert all(list(job.change()))
        job.end()
        assert [name.partition(":")[0] for name in job.died_at] == list(PHASES)


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_at_each_place_one_after_the_other(tmp_path: Path) -> None:
    """Whoever takes over dies at the next one: also those of a takeover are among them."""
    with InPlace(tmp_path, once=False, **dict.fromkeys(PHASES, ALL)) as job:
        job.begin()
        assert all(list(job.change()))
        job.end()
        print("\n".join(job.died_at))
        assert len(job.died_at) > 100


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_at_each_place_of_a_change(tmp_path: Path) -> None:
    """Whoever takes over goes on. The same happens to the job until there is no place at which none has died."""
    with InPlace(tmp_path, once=True, **dict.fromkeys(PHASES[1:-1], ALL)) as job:
        job.begin()
        while any(list(job.change())):
            job.disarm()
            # A place that was left can be used again when it was off the list.
            job.set_hosts("localhost:1\n")
            job.until("a list", lambda: job.job.events("hosts_discovered")[-1]["hosts"] == {"localhost": 1})
            job.set_hosts(job.TWO)
            job.trains(2)
        job.end()
        print("\n".join(job.died_at))
        assert len(job.died_at) > 60


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("phase", ["start", "end"])
def test_at_each_place_of_a_start_and_an_end(tmp_path: Path, phase: str) -> None:
    """Likewise, in a job for each."""
    died: list[str] = []
    while True:
        folder = tmp_path / str(len(died))
        folder.mkdir()
        with InPlace(folder, once=True, **{phase: ALL}) as job:
            job.has_died_at(died)
            job.begin()
            job.end()
            if len(job.died_at) == len(died):
                break
            died = job.died_at
    print("\n".join(died))
    assert len(died) > 15
