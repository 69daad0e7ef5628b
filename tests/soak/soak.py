"""A real job under random faults, checked after each of them. Run by ``scripts/soak MINUTES SEED``.

Events come from a shuffled deck, so that a run of some minutes has all of them. After each, training must go on within
a minute. All the time the rules of history.py are looked at: ranks agree bit for bit, no more is lost than since the
last commit (none by a planned change), each sample of an epoch is used once, also by the jobs that go on from the
commits on disk when ``elasticrun`` was killed, was told to end, or ended because a rank left early. Nothing may be left
by a job or gather in one: processes, descriptors, shared memory, memory, files. The first thing that is wrong ends
it, as an AssertionError.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch  # noqa: F401 - else it is imported when the first commit is read, while the workers are frozen

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from follow import Follower  # noqa: E402
from history import Commit, History, digest  # noqa: E402
from leaks import Gathering, left_in_shared_memory, shared_names, zombies  # noqa: E402

from elastic_driver.journal.entries import Closed  # noqa: E402
from elastic_driver.journal.past import Recorded, read_job  # noqa: E402
from elastic_driver.worker.durable import format as durable_format  # noqa: E402
from elastic_driver.worker.durable.folder import commit_files  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.support.processes.jobs import FORKED, FORKING, Job  # noqa: E402

SAMPLES, PER_STEP, COMMIT_EVERY = 480, 12, 3  # as in program.py
GOES_ON_WITHIN_S = 60.0
# The guard ends a dead driver's workers within two seconds; the rest is for a busy machine.
GONE_WITHIN_S = 2.0 + 4.0
ENDS_WITHIN_S = 20.0
_MAY_HANG = ("no heartbeat", "stopped by a signal")


class Soak:
    """A training, the jobs that carry it on one after another, and what is done to them.

    Args:
        folder: for all files.
        seed: of the random choices.
        forking: whether all workers are forked, the first ones too, and never started afresh: more events in a short
            time, most of which otherwise goes into importing PyTorch.

    Attributes:
        hosts: that are listed for the job, of two slots each.
        gone_within_s: after this, workers of a driver that was killed are gone.
        files_at_most: how many commits the folder has at the end.
        preload: what the program imports.
    """

    hosts: tuple[str, ...] = ("localhost", "127.0.0.1")
    gone_within_s = GONE_WITHIN_S
    files_at_most = 3
    preload = "numpy,torch,torch._dynamo"

    def __init__(self, folder: Path, seed: int, *, forking: bool = False) -> None:
        self.random = random.Random(seed)
        self.forking = forking
        self.folder = folder
        self.faults, self.slow, self.mode = folder / "faults", folder / "slow", folder / "mode"
        self.durable, self.runtime = folder / "commits", folder / "runtime"
        self.step_log = folder / "steps.jsonl"
        self.faults.mkdir()
        self.runtime.mkdir(mode=0o700)
        self.step_log.touch()
        self.mode.write_text("")
        self.shared = shared_names()
        self.history = self.new_history()
        self.counts: collections.Counter[str] = collections.Counter()
        self.longest: dict[str, float] = collections.defaultdict(float)
        self.lived: dict[int, set[tuple[str, int]]] = collections.defaultdict(set)  # rounds that a process was seen in
        self.of_drivers = Gathering(descriptors=30, threads=10, memory_mb=60)
        self.of_workers = Gathering(descriptors=10, threads=6, memory_mb=40)
        self.follower = Follower(self.step_log, self.history)
        self.recent = self.follower.recent
        self.jobs = 0
        self.decks = 0
        self._judged = 0, 0  # which job, and how many of its events
        self.spared = ""  # a host whose workers nothing is done to, so that somebody lives through many rounds
        self.flags_there = subprocess.run(
            [sys.executable, "-m", "elastic_driver", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout
        self.job: Job
        self._again: Callable[[], Job]
        self.begin()

    def new_history(self) -> History:
        """The rules for what is trained."""
        return History(commit_every=COMMIT_EVERY, samples=SAMPLES, per_step=PER_STEP)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the job that goes on with the training."""
        self.jobs += 1
        self.spared = ""
        folder = self.folder / f"job{self.jobs}"
        folder.mkdir()
        self.job = self.start(folder)
        # The list is as the soak says; now and then the script fails or hangs instead.
        self.job.set_script(f"#!/bin/sh\n. {self.mode}\ncat {self.job.hosts_file}\n")
        self.follower.begin(self.job.event_log)
        end = time.monotonic() + ENDS_WITHIN_S
        while not self.look():
            assert self.job.process.poll() is None, f"the job does not start\n{self.job.said()[-3000:]}"
            assert time.monotonic() < end, "elasticrun does not start"
            time.sleep(0.05)
        self.job_id: str = self.seen[0]["job_id"]

    def start(self, folder: Path) -> Job:
        """Starts elasticrun; its files go into the folder."""
        flags = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2", "--heartbeat-timeout", "3"]
        flags += ["--elastic-timeout", "90", "--discovery-timeout", "1", "--grace-time", "2"]
        flags += ["--durable-dir", str(self.durable)]
        if "--standby" in self.flags_there and self.random.random() < 0.5:
            flags += ["--max-np", "3", "--standby", "1"]
            self.counts["(with a standby)"] += 1
        if "--journal" in self.flags_there and self.random.random() < 0.5:
            flags += ["--journal", str(folder / "journal"), "--on-change", "in-place"]
            self.counts["(with a journal)"] += 1
        afresh = "--no-preload" in self.flags_there and self.random.random() < 0.5
        if afresh and not self.forking:
            flags += ["--no-preload"]
            self.counts["(without preloading)"] += 1
        else:  # named, because what a script imports after a call, as ours do, is not preloaded by itself
            flags += ["--preload", self.preload]
        env = {"FAULTS": str(self.faults), "SLOW_START": str(self.slow), "OMP_NUM_THREADS": "1"}
        env |= {"STEP_LOG": str(self.step_log), "XDG_RUNTIME_DIR": str(self.runtime)}
        env["XDG_STATE_HOME"] = str(self.runtime / "state")  # not in the history of whoever runs this
        command = [sys.executable, str(HERE / "program.py")]
        elasticrun = FORKING if self.forking else FORKED
        given = {"command": command, "env": env, "elasticrun": elasticrun}
        self._again = functools.partial(Job, folder, self.listing(), *flags, **given)
        return self._again()

    def take_over(self) -> None:
        """Another driver goes on with the present job, whose driver is dead: its workers train all the while."""
        known = len(self.seen)
        script = self.job.script.read_text()
        hosts = self.job.hosts_file.read_text()
        self.job = self._again()
        self.job.set_hosts(hosts)
        self.job.set_script(script)
        self.until("a takeover", lambda: any(event["event"] == "took_over" for event in self.seen[known:]))

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The present job's events."""
        return self.follower.seen

    def look(self) -> bool:
        """Takes in what was written since the last time. Returns whether the present job has begun."""
        begun = self.follower.look()
        if (self.jobs, len(self.seen)) != self._judged:
            first = self._judged[1] if self._judged[0] == self.jobs else 0
            self._judged = self.jobs, len(self.seen)
            for event in self.seen[first:]:
                self.counts["(suspected)"] += event["event"] == "worker_suspected"
                # Nobody here hangs but those that the soak stops, and a busy machine may keep one silent.
                assert event["event"] != "worker_hung" or event["reason"].startswith(_MAY_HANG), (
                    f"an innocent worker counts as hung: {event}"
                )
        return begun

    def until(self, what: str, found: Callable[[], Any], *, within_s: float = GOES_ON_WITHIN_S) -> Any:
        """Blocks until it is so, looking all the while."""
        end = time.monotonic() + within_s
        while True:
            self.look()
            answer = found()
            if answer:
                return answer
            if self.job.process.poll() is not None:
                raise AssertionError(f"the job ended with {self.job.process.returncode}\n{self.job.said()[-3000:]}")
            assert time.monotonic() < end, f"{what}: not within {within_s:g} s\n{self.job.said()[-3000:]}"
            time.sleep(0.05)

    def goes_on(self, after: float) -> None:
        """Blocks until all ranks of the present round have done five steps after this time."""

        def found() -> bool:
            ranks: collections.Counter[int] = collections.Counter()
            last = self.recent[-1] if self.recent else None
            for line in self.recent:
                if last and line["time"] > after and (line["job"], line["round"]) == (self.job_id, last["round"]):
                    ranks[line["rank"]] += 1
            return bool(last) and len(ranks) == last["size"] and min(ranks.values()) >= 5

        began = time.monotonic()
        self.until("training goes on", found)
        self.longest["until training went on"] = max(self.longest["until training went on"], time.monotonic() - began)

    def ended(self, code: int, message: str) -> None:
        """Checks how the present job has ended, and that it left nothing."""
        began = time.monotonic()
        try:
            self.job.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.job.said()[-3000:]}") from None
        self.longest["until a job had ended"] = max(self.longest["until a job had ended"], time.monotonic() - began)
        said = self.job.said()
        assert self.job.process.returncode == code, f"ended with {self.job.process.returncode}\n{said[-3000:]}"
        assert message in said, f"not said: {message}\n{said[-3000:]}"
        self.left_nothing(within_s=0.0)
        files = [path.name for path in self.runtime.glob("elasticrun/*") if self.job_id in path.name]
        assert not files, f"job files were left: {files}"
        self.check_goodput()

    def check_goodput(self) -> None:
        """Checks that all seconds of the present job, which has ended, are booked, as a second program finds, too.

        A driver that takes a job over knows what the last one has booked as of some seconds before its death.
        """
        if self.job.events("took_over"):
            return
        script = [sys.executable, str(ROOT / "scripts" / "goodput"), "--check", str(self.job.event_log)]
        done = subprocess.run(script, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"goodput\n{done.stdout}{done.stderr}"
        booked, stood_s = self.job.events("goodput")[-1], sum(e["stood_s"] for e in self.job.events("stood_still"))
        unexplained = booked["seconds"]["unexplained"] - stood_s
        assert unexplained <= 0.01 * booked["wall_s"], f"unexplained: {unexplained:.2f} of {booked['wall_s']:.2f} s"
        self.counts["(logs whose goodput agrees)"] += 1

    def left_nothing(self, *, within_s: float, of: Job | None = None, since: float | None = None) -> None:
        """Checks that all processes of a job are gone by then."""
        began = time.monotonic() if since is None else since
        while left := (of or self.job).leftovers():
            assert time.monotonic() < began + within_s, f"left running after {within_s:g} s: {left}"
            time.sleep(0.05)
        if within_s:
            took_s = time.monotonic() - began
            self.longest["until workers were gone"] = max(self.longest["until workers were gone"], took_s)

    def newest_commit(self) -> Commit:
        """The last one on disk. Another may be on its way while processes live."""
        for _ in range(5):
            commits, path = commit_files(self.durable)[-1]
            try:
                _, values = durable_format.read(path)
            except FileNotFoundError:  # two newer ones have come meanwhile
                continue
            return Commit(commits, values["step"], self.weights_of(values))
        raise AssertionError("commits are removed faster than they can be read")

    def weights_of(self, values: dict[str, Any]) -> str:
        """The weights of a commit's state."""
        return digest(one.numpy() for one in values["model"].values())

    def begin_again(self) -> None:
        """Starts a job that must go on from what the one before has put on disk."""
        self.mode.write_text("")
        self.slow.unlink(missing_ok=True)
        self.look()  # the last that the driver wrote
        self.look_into_journal()
        self.history.on_disk = self.newest_commit()
        self.begin()

    def look_into_journal(self) -> None:
        """Of a job that has ended it says just that; of one whose driver was killed no less than that has told."""
        folder = self.job.folder / "journal"
        if not folder.exists():
            return
        found = read_job(folder)
        if self.job.process.returncode != -signal.SIGKILL:
            assert isinstance(found, Closed), f"the job has ended with {self.job.process.returncode}; journal: {found}"
            assert found.exit_code == self.job.process.returncode
            return
        assert isinstance(found, Recorded)
        told = max((event["round_id"] for event in self.seen if event["event"] == "round_formed"), default=0)
        assert found.state.round_id in (told, told + 1), f"round {told} was told of, and {found.state.round_id} is kept"
        assert not found.state.ended

    def close(self) -> None:
        """Ends the present job; for the end of a soak, good or bad."""
        self.job.__exit__()

    # --- who and where -----------------------------------------------------------------------------------------------

    def set_hosts(self, text: str) -> None:
        """Gives the list, and waits until the driver has it."""
        wanted = dict(line.split(":") for line in text.split())
        self.job.set_hosts(text)

        def there() -> bool:
            lists = [event["hosts"] for event in self.seen if event["event"] == "hosts_discovered"]
            known = lists[-1] if lists else {}
            return {name: str(slots) for name, slots in known.items() if name in self.hosts} == wanted

        self.until("the driver knows the hosts", there)

    def workers(self) -> list[dict[str, Any]]:
        """The last line of each living member of the present round."""
        last: dict[int, dict[str, Any]] = {}
        for line in self.recent:
            if line["job"] == self.job_id and line["round"] == self.recent[-1]["round"]:
                last[line["pid"]] = line
        return [line for line in last.values() if self.runs(line["pid"])]

    @staticmethod
    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() not in ("zombie", "stopped")
        except psutil.Error:
            return False

    def full(self) -> list[dict[str, Any]]:
        """Waits for a round on all hosts, so that one may be lost; its workers."""
        self.set_hosts(self.listing())
        since = time.time()

        def found() -> list[dict[str, Any]]:
            living = self.workers()
            hosts = {self.host(line) for line in living if line["time"] > since}
            whole = hosts.issuperset(self.hosts) and len(living) == living[0]["size"] > len(self.hosts)
            return living if whole else []

        answer: list[dict[str, Any]] = self.until("a round on all hosts", found)
        return answer

    def victims(self) -> list[dict[str, Any]]:
        """Those in a round on all hosts to whom something may be done."""
        return [line for line in self.full() if self.host(line) != self.spared and self.host(line) in self.hosts]

    def a_host(self) -> str:
        """One that may be taken away."""
        return self.random.choice([name for name in self.hosts if name != self.spared])

    def listing(self, *, without: str = "", less: str = "") -> str:
        """The list of hosts, without one of them, or with one that has a slot less."""
        names = [name for name in self.hosts if name != without]
        return "".join(f"{name}:{1 if name == less else 2}\n" for name in names)

    @staticmethod
    def host(line: dict[str, Any]) -> str:
        return str(line["worker"].split("[")[0])

    def fault(self, line: dict[str, Any], what: str) -> None:
        """Has a worker's program do something at its next step."""
        new = self.faults / "new"
        new.write_text(what)
        new.rename(self.faults / f"{self.job_id}-{line['worker']}")

    def back_on_the_list(self, host: str) -> None:
        """A drained host may be used again when it was off the list."""
        self.set_hosts(self.listing(without=host))
        self.set_hosts(self.listing())

    # --- what is done: unplanned -------------------------------------------------------------------------------------

    def kill(self) -> None:
        os.kill(self.random.choice(self.victims())["pid"], signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(self.random.choice(self.victims())["pid"], signal.SIGSTOP)

    def exception(self) -> None:
        self.fault(self.random.choice(self.victims()), "exception")

    def kill_a_newcomer(self) -> None:
        """While it boots, or just when it has joined."""
        self.full()
        self.set_hosts(self.listing(without=self.a_host()))
        self.goes_on(time.time())
        known = len(self.seen)
        self.set_hosts(self.listing())
        started = self.until(
            "newcomers", lambda: [event for event in self.seen[known:] if event["event"] == "worker_started"]
        )
        time.sleep(self.random.uniform(0.0, 4.0))
        try:
            os.kill(self.random.choice(started)["pid"], signal.SIGKILL)
        except ProcessLookupError:
            self.counts["(newcomer was gone)"] += 1

    def two_at_once(self) -> None:
        """Two of the faults, of workers of one host or of two (then nobody may be left who has the state)."""
        victims = self.victims()
        paused = self.random.random() < 0.3
        if paused:
            os.kill(self.job.process.pid, signal.SIGSTOP)
        for victim in self.random.sample(victims, min(2, len(victims))):
            what = self.random.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, "exception", "unlist"))
            if isinstance(what, signal.Signals):
                with contextlib.suppress(ProcessLookupError):  # it went with the first one's host
                    os.kill(victim["pid"], what)
            elif what == "exception":
                self.fault(victim, what)
            else:
                self.job.set_hosts(self.listing(without=self.host(victim)))
            time.sleep(self.random.choice((0.0, 0.0, 0.02, 0.2)))
        if paused:
            time.sleep(self.random.uniform(0.5, 5.0))
            os.kill(self.job.process.pid, signal.SIGCONT)
        time.sleep(1.0)
        for host in self.hosts:
            if host != self.spared:
                self.back_on_the_list(host)

    def all_lost(self) -> None:
        """Everybody who has the state; the job goes back to the disk by itself."""
        living = self.full()
        self.spared = ""
        for line in living:
            os.kill(line["pid"], signal.SIGSTOP)  # so that none of them writes after we have looked
        self.history.on_disk = self.newest_commit()
        for line in living:
            with contextlib.suppress(ProcessLookupError):  # its host went with the first one, or it was found frozen
                os.kill(line["pid"], signal.SIGKILL)
        at = self.history.from_disk
        self.until("a return to the disk", lambda: self.history.from_disk > at)

    # --- what is done: planned ---------------------------------------------------------------------------------------

    def drain(self) -> None:
        """By a signal to one worker."""
        victim = self.random.choice(self.victims())
        known = len(self.seen)
        os.kill(victim["pid"], self.random.choice((signal.SIGTERM, signal.SIGUSR1)))
        self.leave_with_zero([victim], known)
        self.back_on_the_list(self.host(victim))

    def drain_host(self) -> None:
        """By elasticrun drain."""
        living = self.full()
        host = self.a_host()
        known = len(self.seen)
        self.say_drain(host)
        self.leave_with_zero([line for line in living if self.host(line) == host], known)
        self.goes_on(time.time())
        if self.random.random() < 0.5:
            self.say_drain("--undo", host)
        else:
            self.back_on_the_list(host)

    def say_drain(self, *words: str) -> None:
        self.elasticrun("drain", "--job", self.job_id, *words)

    def elasticrun(self, *words: str) -> None:
        """Runs one of its subcommands beside the driver; it must succeed."""
        subprocess.run(
            [sys.executable, "-m", "elastic_driver", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)},
        )

    def leave_with_zero(self, lines: list[dict[str, Any]], known: int) -> None:
        workers = {line["worker"] for line in lines}

        def left() -> bool:
            ends = {e["worker"]: e["returncode"] for e in self.seen[known:] if e["event"] == "worker_exited"}
            wrong = {worker: ends[worker] for worker in workers if ends.get(worker)}
            assert not wrong, f"drained workers ended with {wrong}\n{self.job.said()[-3000:]}"
            return workers <= ends.keys()

        self.until(f"{sorted(workers)} leave", left)
        broken = [event for event in self.seen[known:] if event["event"] == "notice" and event["kind"] == "abort"]
        assert not broken, f"a drain broke a round: {broken}\n{self.job.said()[-3000:]}"

    def remove_host(self) -> None:
        self.set_hosts(self.random.choice((self.listing(without=self.a_host()), self.listing(less=self.hosts[-1]))))

    def all_hosts(self) -> None:
        self.set_hosts(self.listing())

    def flap(self) -> None:
        last = self.hosts[-1]
        lists = (self.listing(without=last), self.listing(), self.listing(less=last))
        for _ in range(6):
            self.job.set_hosts(self.random.choice(lists))
            time.sleep(self.random.uniform(0.05, 0.4))
        self.set_hosts(self.listing())

    def discovery_fails(self) -> None:
        self.mode.write_text("exit 3\n")
        time.sleep(2)
        self.mode.write_text("")

    def discovery_hangs(self) -> None:
        self.mode.write_text("sleep 60\n")
        time.sleep(2)
        self.mode.write_text("")

    def slow_starters(self) -> None:
        self.slow.write_text("3")
        self.flap()
        time.sleep(1)
        self.slow.unlink()

    def pause_driver(self) -> None:
        os.kill(self.job.process.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(1, 10))
        os.kill(self.job.process.pid, signal.SIGCONT)

    def straggle(self) -> None:
        self.fault(self.random.choice(self.victims()), "sleep")

    # --- what is done: the end of a job, and the next ----------------------------------------------------------------

    def exit_zero(self) -> None:
        """One worker says that it is done while the others train: by design the job ends with code 1."""
        victim = self.random.choice(self.victims())
        self.fault(victim, self.random.choice(("exit", "exit at once")))
        # A place's first worker is told without its number.
        self.ended(1, f"worker {victim['worker'].removesuffix('#0')} exited with code 0 while ")
        assert "a rank left early" in self.job.said()
        self.begin_again()

    def kill_driver(self) -> None:
        """Now and then while a worker is frozen, or a reset is under way."""
        living = self.full()
        how = self.random.choice(("", "", "freeze", "kill"))
        if how:
            os.kill(living[0]["pid"], signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
            time.sleep(self.random.uniform(0.0, 0.5))
        self.job.process.kill()
        self.job.process.wait()
        if (self.job.folder / "journal").exists():
            self.counts["(taken over)"] += 1
            time.sleep(self.random.choice((0.0, 0.5, 5.0)))
            self.take_over()
        elif self.random.random() < 0.5:
            # The next job does not wait for the workers of this one to be gone.
            old, began = self.job, time.monotonic()
            self.begin_again()
            self.left_nothing(of=old, since=began, within_s=self.gone_within_s)
        else:
            self.left_nothing(within_s=self.gone_within_s)
            self.begin_again()

    def interrupt(self) -> None:
        """elasticrun is told to end, and does."""
        self.job.process.send_signal(signal.SIGTERM)
        self.ended(143, "interrupted by SIGTERM")
        self.begin_again()

    # --- the run -----------------------------------------------------------------------------------------------------

    def deck(self) -> list[Callable[[], None]]:
        """All events, the important ones more than once, in a random order; drawn from the end.

        Every second deck lets the workers of one host live until the events that end them all, which then come last.
        """
        events: list[Callable[[], None]] = [self.kill, self.kill, self.freeze, self.freeze, self.exception]
        events += [self.kill_a_newcomer, self.two_at_once, self.two_at_once]
        events += [self.drain, self.drain, self.drain_host, self.remove_host, self.all_hosts, self.flap, self.flap]
        events += [self.discovery_fails, self.discovery_hangs, self.slow_starters, self.pause_driver, self.straggle]
        ends: list[Callable[[], None]] = [self.exit_zero, self.kill_driver, self.kill_driver, self.interrupt]
        ends += [self.all_lost, self.two_at_once]
        self.decks += 1
        if self.decks % 2:
            events += ends
            self.random.shuffle(events)
            return events
        self.spared = self.hosts[0]
        self.random.shuffle(events)
        self.random.shuffle(ends)
        return [*ends, *events]

    def check_gathering(self) -> None:
        """Of the driver, and of the members of the present round, each compared with itself in a round of this size."""
        self.of_drivers.look("the driver", self.job.process.pid)
        for line in self.workers():
            self.of_workers.look(f"worker {line['worker']}", line["pid"], (line["size"], line["rank"]))
            self.lived[line["pid"]].add((line["job"], line["round"]))

    def run(self, minutes: float) -> None:
        end = time.monotonic() + minutes * 60
        self.goes_on(0.0)
        self.check_gathering()
        events: list[Callable[[], None]] = []
        while time.monotonic() < end:
            events = events or self.deck()
            event = events.pop()
            time.sleep(self.random.uniform(0.1, 1.5))
            print(
                f"{time.strftime('%H:%M:%S')} step {self.history.last}: {event.__name__}", file=sys.stderr, flush=True
            )
            event()
            self.counts[event.__name__] += 1
            self.goes_on(time.time())
            self.check_gathering()
        self.set_hosts(self.listing())
        self.goes_on(time.time() + 4)
        self.check_gathering()
        self.until("children are waited for", lambda: not zombies(self.job.process.pid), within_s=10)
        self.job.process.send_signal(signal.SIGTERM)
        self.ended(143, "interrupted by SIGTERM")
        self.look()
        self.history.check_epochs(all_of_them=True)
        marks = ("job.lock", "begun", "folder.id")
        files = sorted(path.name for path in self.durable.iterdir() if path.name not in marks)
        assert len(files) <= self.files_at_most, f"left in the folder of commits: {files}"
        left = left_in_shared_memory(self.shared)
        assert not left, f"left in /dev/shm: {left}"

    def summary(self) -> str:
        """What was done and seen, for whoever writes it down."""
        history = self.history
        facts = {
            "jobs": self.jobs,
            "rounds": history.rounds,
            "steps": history.last,
            "epochs": history.epochs,
            "rounds_of_one_worker_at_most": max(map(len, self.lived.values()), default=0),
            "lost": history.lost,
            "lost_at_most": history.lost_at_most,
            "from_disk": history.from_disk,
            "lost_to_disk_at_most": history.lost_to_disk_at_most,
            "longest_s": {what: round(seconds, 2) for what, seconds in self.longest.items()},
        }
        done = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        events = sum(count for name, count in self.counts.items() if not name.startswith("("))
        gathered = f"drivers gathered at most {self.of_drivers}; workers {self.of_workers}"
        return f"{json.dumps(facts)}\n{events} events: {done}\n{gathered}"
