"""A job whose drivers die again and again, each at another place of what it does, and what has to come of its steps."""

from __future__ import annotations

import collections
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast
from unittest import mock

import psutil

from elastic_driver.journal.entries import Closed
from elastic_driver.journal.past import read_job
from elastic_driver.launch.agent.control import AgentHere, agents_here
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import PATIENCE_S, PROGRAM, Job

DYING = (str(PROGRAMS / "dying_elasticrun.py"),)
ALL = "."


def agents_of(runtime: Path) -> dict[Path, AgentHere]:
    """The agents of jobs with this runtime folder that are there."""
    with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(runtime)}):
        return agents_here()


class DyingDrivers:
    """A job in a folder. Use as a context manager: in the end nothing of it may be left.

    Args:
        folder: of the job.
        hosts: at first.
        flags: of each of its drivers.
        kept: of its journal; None for one in that folder.
        program: of its workers.
        options: of that program.
        env: of the job.

    Attributes:
        job: with its present driver, which may be dead.
        drivers: how many there have been.
    """

    def __init__(
        self,
        folder: Path,
        hosts: str,
        *flags: str,
        kept: Path | None = None,
        program: Path = PROGRAM,
        options: Sequence[str] = (),
        **env: str,
    ) -> None:
        self.folder = folder
        self.kept, self.runtime = kept or folder / "kept", folder / "runtime"
        self._dies = folder / "dies"
        self._flags = (*flags, "--journal", str(self.kept))
        self._env = {"LAST": str(folder / "last"), "XDG_RUNTIME_DIR": str(self.runtime), "DIES": str(self._dies)} | env
        self._hosts = hosts
        self._command = [sys.executable, str(program), *options]
        self.drivers = 0
        self._takeovers = 0  # before the present one
        for path in (self.runtime, self._dies):
            path.mkdir(mode=0o700)
        self.job: Job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.disarm()
        if kind is not None:
            self._give_up()
        end = time.monotonic() + PATIENCE_S
        while left := [*self.job.leftovers(), *map(str, agents_of(self.runtime).values())]:  # no children of a driver's
            assert time.monotonic() < end, f"left running: {left}"
            time.sleep(0.05)

    def _give_up(self) -> None:
        """The test has failed."""
        self.die()
        for agent in agents_of(self.runtime).values():
            os.kill(agent.pid, signal.SIGTERM)

    # --- drivers ---------------------------------------------------------------------------------------------------

    def arm(self, phase: str, places: str = ALL, *, once: bool = False) -> None:
        """From now on drivers die.

        Args:
            phase: what the job does. In each phase they die at each place anew.
            places: a pattern: only at those whose names it is found in.
            once: only the first of them does.
        """
        new = self._dies / "armed.new"
        new.write_text(f"{phase}\n{places}\n{'once' if once else 'always'}")
        new.replace(self._dies / "armed")

    def disarm(self) -> None:
        """From now on none does."""
        (self._dies / "armed").unlink(missing_ok=True)

    def die(self) -> float:
        """The present driver is killed. Returns when it was dead."""
        self.job.process.kill()
        self.job.process.wait()
        return time.time()

    def start(self) -> Job:
        """Starts a driver, like the one before."""
        said = self.said() if self.drivers else ""
        self._takeovers = len(self.job.events("took_over")) if self.drivers else 0
        self.job = Job(
            self.folder,
            self._hosts,
            *self._flags,
            command=self._command,
            env=self._env,
            elasticrun=DYING,
        )
        self.drivers += 1
        with (self.folder / "said").open("a") as file:
            file.write(said)
        return self.job

    def has_taken_over(self) -> dict[str, Any]:
        """Blocks until the present driver has. Returns what it has told of that."""
        return cast("dict[str, Any]", self.job.wait_for("it has taken over", self._takeover))

    def _takeover(self) -> dict[str, Any] | None:
        takeovers = self.job.events("took_over")
        return takeovers[-1] if len(takeovers) > self._takeovers else None

    def said(self) -> str:
        """By the present driver."""
        return self.job.said()

    @property
    def died_at(self) -> list[str]:
        """The places, in their order."""
        try:
            return (self._dies / "died").read_text().splitlines()
        except FileNotFoundError:
            return []

    def has_died_at(self, places: Sequence[str]) -> None:
        """Drivers of other jobs have died at these."""
        (self._dies / "died").write_text("".join(f"{name}\n" for name in places))

    def until(self, what: str, found: Callable[[], Any]) -> Any:
        """Blocks until something is found, and starts another driver whenever one has died where it was to."""
        end = time.monotonic() + PATIENCE_S
        while not (answer := found()):
            assert time.monotonic() < end, f"{what}: not seen; {self._where()}"
            if (code := self.job.process.poll()) is not None:
                assert code == -signal.SIGKILL, f"{what}: the driver has ended with {code}; {self._where()}"
                end += PATIENCE_S / 10
                self.start()
            time.sleep(0.01)
        return answer

    def _where(self) -> str:
        said = (self.folder / "said").read_text() + self.said()
        agents = self._dies / "agents"
        of_agents = agents.read_text() if agents.exists() else ""
        return f"drivers have died at {self.died_at}\n{said[-6000:]}\nagents: {of_agents[-4000:]}"

    def until_ended(self, jobs: Sequence[Job]) -> Job:
        """Blocks until the driver of one has ended. Returns that one."""
        found: list[Job] = jobs[0].wait_for("an end", lambda: [job for job in jobs if job.process.poll() is not None])
        return found[0]

    def set_clock(self, wrong_s: float) -> None:
        """For drivers from now on the clock of the system is wrong."""
        (self._dies / "clock").write_text(str(wrong_s))

    def set_hosts(self, text: str) -> None:
        self._hosts = text
        self.job.set_hosts(text)

    # --- the job ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[dict[str, Any]]:
        """All that its workers have done, as check_steps takes it."""
        return self.job.steps()

    def trains(self, size: int, count: int = 3, *, without: int = 0) -> list[dict[str, Any]]:
        """Blocks until all of a round of this size have done so many steps from now on. Returns these.

        Args:
            size: of the round.
            count: of steps.
            without: a process that is not in it.
        """
        since = time.time()

        def found() -> list[dict[str, Any]]:
            lines = [line for line in self.steps() if line["size"] == size and line["time"] > since]
            done = collections.Counter(line["rank"] for line in lines if line["pid"] != without)
            return lines if len(done) == size and min(done.values()) >= count else []

        answer: list[dict[str, Any]] = self.until(f"steps of {size}", found)
        return answer

    def worker(self, name: str) -> int:
        """The process that has this place."""
        return next(int(line["pid"]) for line in reversed(self.steps()) if line["worker"].startswith(f"{name}#"))

    def step_after(self, since: float) -> None:
        """Blocks until there is a step of after that time, with or without a driver."""
        self.wait_until("a step", lambda: self.steps()[-1]["time"] > since)

    def wait_for_end_of(self, pid: int) -> None:
        """Blocks until a process has ended, with or without a driver."""
        self.wait_until(f"the end of process {pid}", lambda: not psutil.pid_exists(pid))

    def wait_until(self, what: str, found: Callable[[], bool]) -> None:
        """Blocks until something is so, with or without a driver."""
        end = time.monotonic() + PATIENCE_S
        while not found():
            assert time.monotonic() < end, f"{what}: not seen; {self._where()}"
            time.sleep(0.02)

    def last_step(self) -> int:
        return max(int(line["step"]) for line in self.steps())

    def end_at(self, step: int) -> None:
        """The training ends with this step."""
        new = self.folder / "last.new"
        new.write_text(str(step))
        new.replace(self.folder / "last")

    def ended(self) -> int:
        """Blocks until the job has ended, by whichever of its drivers. Returns the exit code that it has ended with."""

        def is_closed() -> bool:
            return isinstance(read_job(self.kept), Closed) and self.job.process.poll() is not None

        end = time.monotonic() + PATIENCE_S
        while not is_closed():
            assert time.monotonic() < end, f"no end; {self._where()}"
            if self.job.process.poll() == -signal.SIGKILL and not is_closed():
                self.start()
            time.sleep(0.01)
        closed = read_job(self.kept)
        assert isinstance(closed, Closed)
        assert self.job.process.poll() in (closed.exit_code, -signal.SIGKILL), self._where()
        return closed.exit_code

    def check_steps(self, losses: int = 0) -> None:
        """See check_steps."""
        try:
            check_steps(self.steps(), losses)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._where()}") from None


class Walk(DyingDrivers):
    """A job that goes through phases, in which its drivers die at some places.

    Args:
        folder: of the job.
        flags: of its drivers, beside those for two hosts.
        once: whether one dies in each phase, or one after the other at each place.
        places: a pattern for each phase in which any dies.
        more: see DyingDrivers.
    """

    TWO, THREE = "localhost:1\n127.0.0.1:1\n", "localhost:2\n127.0.0.1:1\n"

    def __init__(self, folder: Path, *flags: str, once: bool, places: Mapping[str, str], **more: Any) -> None:
        least = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1")
        super().__init__(folder, self.TWO, *least, *flags, STEP_S="0.05", **more)
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

    def grow(self) -> bool:
        """A slot comes. Returns, as the others do, whether a driver has died meanwhile."""
        died = self.phase("growth")
        self.set_hosts(self.THREE)
        self.trains(3)
        return len(self.died_at) > died

    def lose(self) -> bool:
        """A worker dies."""
        died = self.phase("loss")
        victim = self.worker("127.0.0.1[0]")
        os.kill(victim, signal.SIGKILL)
        self.trains(3, without=victim)
        return len(self.died_at) > died

    def shrink(self) -> bool:
        """The slot goes."""
        died = self.phase("drain")
        self.set_hosts(self.TWO)
        self.trains(2)
        return len(self.died_at) > died

    def end_well(self) -> None:
        self.phase("end")
        self.end_at(self.last_step() + 5)
        assert self.ended() == 0


def check_steps(lines: Iterable[dict[str, Any]], losses: int = 0) -> None:
    """No step was lost, or done by two rounds: for a job that commits at each step.

    What is trained is the same whatever the size, so all have the same weights after the same step, bit for bit. Each
    step was done by all of one round, once; but for one of each round that a loss has broken.
    """
    by_step: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        by_step[line["step"]].append(line)
    assert sorted(by_step) == list(range(1, max(by_step) + 1)), "a step was left out"
    broken = []
    for step, done in sorted(by_step.items()):
        assert len({line["weights"] for line in done}) == 1, f"not the same after step {step}: {done}"
        if sorted(line["rank"] for line in done) != list(range(done[0]["size"])):
            broken.append((step, [(line["rank"], line["size"], line["pid"]) for line in done]))
    assert len(broken) <= losses, f"steps not done once by all: {broken}"


def check_generations(lines: list[dict[str, Any]]) -> None:
    """None trains beside another; each goes on where the last one has come to, and all of it train."""
    rounds = {number: list(there) for number, there in itertools.groupby(lines, key=lambda line: int(line["round"]))}
    assert list(rounds) == sorted(rounds), "two generations side by side"
    last = 0
    for there in rounds.values():
        first = min(int(line["step"]) for line in there)
        assert first in (last, last + 1), f"after step {last} came {first}"
        last = max(int(line["step"]) for line in there)
        assert len({line["pid"] for line in there}) == there[0]["size"]
