"""Drivers die of jobs whose workers do on the wire what Horovod's own library does (programs/horovod_worker.py).

What these ask their agent, it answers while there is no driver, or holds until there is another one. Wherever a driver
dies, no step is lost or done by two rounds, and nothing is left of the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import PROGRAMS
from tests.support.processes.dying_drivers import ALL, Walk

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PHASES = ("start", "growth", "loss", "drain", "end")
ASKS = "--asks-first"


class OfHorovod(Walk):
    """Of workers that are served in Horovod's protocol. See Walk."""

    def __init__(self, folder: Path, *options: str, once: bool = True, **places: str) -> None:
        self._over = folder / "over"
        super().__init__(
            folder,
            "--horovod-protocol",
            "on",
            "--gloo-timeout-seconds",
            "1000",  # longer than a test waits: nobody goes on since that is over
            once=once,
            places=places,
            program=PROGRAMS / "horovod_worker.py",
            options=("--step-s", "0.05", "--end-when", str(self._over), *options),
        )

    def told(self, what: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.job.steps() if line["what"] == what]

    def steps(self) -> list[dict[str, Any]]:
        """See DyingDrivers. What is trained is the number of steps itself."""
        return [
            {**line, "worker": f"{line['host']}[{line['local_rank']}]#", "weights": line["step"]}
            for line in self.told("step")
        ]

    def change(self) -> Iterator[bool]:
        """All that happens between the start and the end; tells of each phase whether a driver has died in it."""
        yield self.grow()
        yield self.lose()
        yield self.shrink()

    def end(self, losses: int) -> None:
        """Looks at the job, too."""
        self.phase("end")
        self._over.touch()
        assert self.ended() == 0
        self.check_steps(losses)
        if not losses:
            assert "removed from the job" not in self.said()


def test_training_goes_on(tmp_path: Path) -> None:
    with OfHorovod(tmp_path) as job:
        job.begin()
        before = {line["pid"] for line in job.trains(2)}
        job.step_after(job.die())
        job.start()
        told = job.has_taken_over()
        assert (told["workers"], told["pids"].keys()) == (2, {"localhost[0]#0", "127.0.0.1[0]#0"})
        assert {line["pid"] for line in job.trains(2)} == before
        job.end(losses=0)
        assert not job.told("error")


def test_a_worker_dies_while_there_is_no_driver(tmp_path: Path) -> None:
    """The others leave the round at once, also who is no neighbor of the dead, and get the next one later."""
    with OfHorovod(tmp_path) as job:
        job.begin()
        job.set_hosts("localhost:3\n127.0.0.1:2\n")
        job.trains(5)
        job.die()
        victim = job.worker("127.0.0.1[1]")
        os.kill(victim, signal.SIGKILL)
        job.wait_until("all others have lost the round", lambda: len(job.told("error")) == 4)
        job.start()
        job.trains(5, without=victim)
        job.end(losses=1)


def test_one_that_was_started_for_another_place_gets_its_own(tmp_path: Path) -> None:
    """It asks while there is no driver. What the next one answers has its process started again."""
    go = tmp_path / "go"
    go.touch()
    with OfHorovod(tmp_path, "--boot-until", str(go)) as job:
        job.begin()
        go.unlink()
        for slots in (1, 2):
            job.set_hosts(f"localhost:2\n127.0.0.1:{slots}\n")
            job.wait_until(f"{slots} more", lambda count=2 + slots: len(job.told("boot")) == count)
        job.die()
        go.touch()
        job.start()
        job.has_taken_over()
        job.trains(4)
        boots = [(line["rank"], line["size"]) for line in job.told("boot") if line["local_rank"] == 1]
        assert boots == [(1, 3), (3, 4), (1, 4)]
        job.end(losses=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param((), id="trusts-its-environment"), pytest.param((ASKS,), id=ASKS)])
def test_at_one_place_of_each_phase(tmp_path: Path, options: tuple[str, ...]) -> None:
    places = {
        "start": "^carried out StartWorker",
        "growth": "^carried out PublishRound",
        "loss": "^written .*WorkerExited",
        "drain": "^said notice",
        "end": "^carried out EndJob",
    }
    with OfHorovod(tmp_path, *options, **places) as job:
        job.begin()
        assert all(list(job.change()))
        job.end(losses=1)
        assert [name.partition(":")[0] for name in job.died_at] == list(PHASES)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [pytest.param((), id="trusts-its-environment"), pytest.param((ASKS,), id=ASKS)])
def test_at_each_place_one_after_the_other(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Whoever takes over dies at the next one: also those of a takeover are among them."""
    with OfHorovod(tmp_path, *options, once=False, **dict.fromkeys(PHASES, ALL)) as job:
        job.begin()
        assert all(list(job.change()))
        job.end(losses=1)
        print("\n".join(job.died_at))
        assert len(job.died_at) > 60
