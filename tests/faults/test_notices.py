"""Machines that say when they go away: what fits before is committed, what does not is said, and the others go on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import psutil
import pytest
import requests

from elastic_driver.launch.agent.clouds import ENV_AZURE, ENV_GCP
from elastic_driver.launch.agent.machine import addresses
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.rendezvous.messages import DrainHostRequest
from elastic_driver.rendezvous.operator_adapter import OperatorAdapter
from tests.support.clusters.fake_clouds import Asked, FakeCloud, Says, fake_cloud
from tests.support.processes.jobs import PATIENCE_S, Job, check_agreement
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.faults

THREE = "localhost:1\n127.0.0.1:2\n"
TWO = "localhost:1\n127.0.0.1:1\n"
FLAGS = ("-np", "3", "--min-np", "1", "--reset-limit", "0")
NEVER = "1000000"
# Until a machine goes away: longer than anything here waits, so that what comes does not wait for that.
LONG_S = 400


def drain(host: str, within_s: float) -> str:
    """What the driver of the one job answers."""
    [running] = running_jobs()
    client = RendezvousClient(running.url, Credential(Identity(Role.OPERATOR)))
    try:
        return client.drain(DrainHostRequest(host, undo=False, within_s=within_s)).text
    finally:
        client.close()


def no_step_is_repeated(job: Job) -> None:
    lines = job.steps()
    for worker in {line["worker"] for line in lines}:
        steps = [line["step"] for line in lines if line["worker"] == worker]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
    check_agreement(lines)


def told_to_have_left(job: Job, host: str) -> list[float]:
    """For how long a host's machine is there yet, each time that the driver has said so."""
    line = rf"host {host} is leaving at the next commit: .*; its machine goes away in ([\d.]+) s"
    return [float(left) for left in re.findall(line, job.said())]


def is_told_once(job: Job, host: str) -> bool:
    """Again only by a driver that was too busy to hear of it at once: it has less time then, by more than a second."""
    left = told_to_have_left(job, host)
    return bool(left) and all(before - after > 1 for before, after in itertools.pairwise(left))


def test_who_commits_in_time_loses_nothing(tmp_path: Path, runtime: Path) -> None:
    """A program of the user's says it, as docs/notices.md has it."""
    with Job(tmp_path, THREE, *FLAGS, env={"STEP_S": "0.05", "COMMIT_EVERY": "4"}) as job:
        job.wait_for_steps(3)
        token = tmp_path / "token"
        written = elasticrun("jobs", "--write-token", str(token))
        assert written.returncode == 0
        url = written.stdout.partition("--driver ")[2].split()[0]
        body = {"hostname": "127.0.0.1", "undo": False, "within_s": LONG_S}
        driver = OperatorAdapter.from_file(url, token)
        plain = driver.url.replace("https", "http")
        assert requests.post(f"{plain}/v1/drain", json=body, timeout=PATIENCE_S).status_code == 401
        at = time.time()
        with requests.Session() as session:
            session.mount(driver.url, driver)
            answer = session.post(f"{driver.url}/v1/drain", json=body, timeout=PATIENCE_S)
        told = answer.json()
        assert told["done"]
        said = "its workers leave at their next commit; workers still there one second before it goes away"
        assert said in told["text"]
        assert "already drained" in drain("127.0.0.1", LONG_S), "a notice that comes twice"
        job.wait_for_steps(1, after=at)  # long before the end
        no_step_is_repeated(job)
        exits = job.wait_for("their ends", lambda: (e := job.events("worker_exited")) and len(e) == 2 and e)
        assert [event["returncode"] for event in exits] == [0, 0]
        assert job.said().count("goes away in 400 s") == 1
        assert "killed" not in job.said()


def test_who_has_no_commit_before_the_end_is_killed_a_second_before(tmp_path: Path, runtime: Path) -> None:
    with Job(tmp_path, THREE, *FLAGS[:4], env={"COMMIT_EVERY": NEVER}) as job:
        job.wait_for_steps(3)
        at = time.time()
        drain("127.0.0.1", 3.0)
        job.wait_for_steps(1, after=at)
        killed = [event for event in job.events("worker_stopped") if "had not left" in event["reason"]]
        assert len(killed) == 2
        assert all(at + 1.9 < event["time"] for event in killed), [e["time"] - at for e in killed]
        job.wait_to_say("about to go: its work since the last commit is lost")
        job.wait_to_say("resumed from commit 0 in")
        assert "127.0.0.1[0] had not left when its host was about to go" in job.said().partition("round 2: 3 -> 1")[2]
        assert "blacklisted" not in job.said()
        assert "removed from the job" not in job.said()


def test_a_notice_while_a_reset_is_under_way(tmp_path: Path, runtime: Path) -> None:
    hosts = "localhost:1\n127.0.0.1:1\n127.0.0.2:1\n"
    with Job(tmp_path, hosts, "-np", "3", "--min-np", "1", env={"STEP_S": "0.05", "COMMIT_EVERY": "4"}) as job:
        before = job.wait_for_steps(3)
        at = time.time()
        os.kill(next(line["pid"] for line in before if line["rank"] == 2), signal.SIGKILL)
        drain("127.0.0.1", LONG_S)
        job.wait_for_steps(1, after=at)
        check_agreement(job.steps())
        drained = {"127.0.0.1[0]#0": 0}.items()
        job.wait_for(
            "ends", lambda: drained <= {e["worker"]: e["returncode"] for e in job.events("worker_exited")}.items()
        )


RESTARTED = """
import json, os, signal, sys, time

def say(what):
    line = {"what": what, "rank": int(os.environ["RANK"]), "size": int(os.environ["WORLD_SIZE"]), "time": time.time()}
    with open(os.environ["STEP_LOG"], "a") as file:
        file.write(json.dumps(line) + "\\n")

def told(*_):
    time.sleep(SAVES[int(os.environ["RANK"])])
    say("saved")
    sys.exit(0)

SAVES = json.loads(os.environ["SAVES"])
signal.signal(signal.SIGTERM, told)
say("began")
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("slow", [False, True])
def test_restarted_workers_checkpoint_before_it(tmp_path: Path, runtime: Path, slow: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(RESTARTED)
    hosts = "localhost:1\n127.0.0.1:1\n"
    env = {"SAVES": "[0.1, 1000]" if slow else "[0.1, 0.5]"}
    flags = ("-np", "2", "--min-np", "1", "--on-change", "restart")
    with Job(tmp_path, hosts, *flags, command=[sys.executable, str(program)], env=env) as job:
        job.wait_for("the start", lambda: [line["what"] for line in job.steps()] == ["began", "began"])
        at = time.time()
        # All but the slow one have a second less than that; without it nobody waits for its end.
        drain("127.0.0.1", 8.0 if slow else LONG_S)
        job.wait_for("one goes on", lambda: [line for line in job.steps() if line["size"] == 1])
        saved = [line["rank"] for line in job.steps() if line["what"] == "saved"]
        [began] = [line for line in job.steps() if line["size"] == 1]
        assert saved == ([0] if slow else [0, 1])
        if slow:
            assert at + 6.9 < began["time"]
            assert "round 1 is over, and one of its hosts goes away" in job.said()


# --- hosts that join, each with an endpoint of its own ---------------------------------------------------------------

# As on machines of their own, agents do not see each other's processes.
HOST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
TOKEN = "a token of the test's own"

hosts_that_join = pytest.mark.skipif(
    not addresses() or os.getuid() != 0, reason="needs an address beside loopback, and namespaces of processes"
)


class Spot:
    """Azure, for one machine. It is asked each second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[dict[str, object]] = []

    def ends_in(self, seconds: float) -> None:
        not_before = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
        event = {"EventId": "e", "EventType": "Preempt", "EventStatus": "Scheduled", "NotBefore": not_before}
        self.events = [event | {"Resources": [self.name, "another"]}]

    def __call__(self, asked: Asked) -> Says:
        if "/compute/name" in asked.path:
            return Says(body=self.name)
        return Says(body=json.dumps({"DocumentIncarnation": 1, "Events": self.events}))


@contextmanager
def joined(folder: Path, host: str, driver: str, *words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """An agent that joins by itself."""
    flags = ("--driver", driver, "--slots", "1", "--host", host, "--join-token-file", "-", "--agent-timeout", "20")
    command = [*HOST, sys.executable, "-m", "elastic_driver", "join", *flags, *words]
    with (folder / f"{host}.txt").open("w") as said:
        agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True, env={**os.environ, **env}
        )
    try:
        assert agent.stdin is not None
        with agent.stdin:
            agent.stdin.write(TOKEN)
        yield agent
    finally:
        if agent.poll() is None:
            agent.kill()
        agent.wait(PATIENCE_S)


class Spots:
    """A job without hosts of its own, that machines join which have a cloud each."""

    def __init__(self, folder: Path, stack: ExitStack, *flags: str, **env: str) -> None:
        self.folder, self.stack = folder, stack
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        flags = (*flags, "--accept-agents", "--join-token-file", str(token))
        self.job = stack.enter_context(Job(folder, None, *flags, env=env))
        said: str = self.job.wait_for("where to join", lambda: self.job.said().partition("--driver ")[2])
        self.driver = said.split()[0]

    def join(self, host: str) -> tuple[Spot, FakeCloud, subprocess.Popen[str]]:
        spot = Spot(host)
        fake = self.stack.enter_context(fake_cloud(spot))
        words = ("--spot-notices", "azure")
        agent = self.stack.enter_context(joined(self.folder, host, self.driver, *words, **{ENV_AZURE: fake.url}))
        return spot, fake, agent


@hosts_that_join
def test_two_clouds_take_machines_back_at_once(tmp_path: Path, runtime: Path) -> None:
    with ExitStack() as stack:
        spots = Spots(tmp_path, stack, "-np", "3", "--min-np", "1", STEP_S="0.05", COMMIT_EVERY="4")
        (x, _, first), (y, _, second), _ = (spots.join(f"node-{name}") for name in "xyz")
        spots.job.wait_for_steps(3)
        at = time.time()
        x.ends_in(LONG_S)
        y.ends_in(LONG_S)
        spots.job.wait_for_steps(1, after=at)
        no_step_is_repeated(spots.job)
        assert first.wait(PATIENCE_S) == second.wait(PATIENCE_S) == 0, "they have left long before"
        for name in ("node-x", "node-y"):
            line = f"host {name} is leaving at the next commit: Azure is evicting this spot VM (Preempt); its machine"
            assert line in spots.job.said()
            assert is_told_once(spots.job, name)
        assert "node-z" not in spots.job.said().partition("Azure")[2]


@hosts_that_join
@pytest.mark.slow
def test_a_machine_without_which_there_are_too_few_stays_until_its_end(tmp_path: Path, runtime: Path) -> None:
    with ExitStack() as stack:
        spots = Spots(tmp_path, stack, "-np", "2", "--min-np", "2", COMMIT_EVERY=NEVER)
        (x, _, agent), _ = (spots.join(f"node-{name}") for name in "xy")
        spots.job.wait_for_steps(2)
        x.ends_in(10)
        spots.job.wait_for(
            "what that means",
            lambda: "host node-x goes away, its workers train until then; that leaves 1 slot" in spots.job.said(),
        )
        assert "it waits for more, and ends after" in spots.job.said()
        at = time.time()
        spots.job.wait_for("its end has passed", lambda: time.time() > at + 11)
        assert agent.poll() is None
        last = time.time()
        spots.job.wait_for_steps(2, after=last)
        assert "had not left" not in spots.job.said(), "nobody is killed for nothing"
        psutil.Process(agent.pid).kill()
        spots.job.wait_for("the loss", lambda: "waiting for 2 workers (--min-np)" in spots.job.said())


@hosts_that_join
@pytest.mark.slow
def test_a_driver_that_stood_still_when_the_notice_came(tmp_path: Path, runtime: Path) -> None:
    """It hears of it late, and counts from the machine's end, not from when it has heard."""
    with ExitStack() as stack:
        spots = Spots(tmp_path, stack, "-np", "2", "--min-np", "1", "--agent-timeout", "300", COMMIT_EVERY=NEVER)
        (x, fake, _), _ = (spots.join(f"node-{name}") for name in "xy")
        job = spots.job
        job.wait_for_steps(2)
        driver = psutil.Process(job.process.pid)
        driver.suspend()
        try:
            end = time.time() + 20
            x.ends_in(20)
            asked = len(fake.asked)
            job.wait_for("ten seconds of looks", lambda: len(fake.asked) >= asked + 10)
        finally:
            resumed = time.time()
            driver.resume()
        job.wait_for_steps(1, after=resumed)
        killed = [event for event in job.events("worker_stopped") if "had not left" in event["reason"]]
        assert len(killed) == 1
        # Counted from when it has heard, it would have all of the twenty seconds.
        *_, left = told_to_have_left(job, "node-x")
        assert left < max(0.0, end - resumed) + 2, "Azure's times are whole seconds, and what is said is rounded"


@hosts_that_join
@pytest.mark.parametrize("has_hook", [False, True])
def test_a_pod_that_is_deleted(tmp_path: Path, runtime: Path, has_hook: bool) -> None:
    """SIGTERM with a grace period, after a preStop hook or without: its workers commit, and it ends in time."""
    with ExitStack() as stack:
        spots = Spots(tmp_path, stack, "-np", "2", "--min-np", "1", STEP_S="0.05", COMMIT_EVERY="4")
        agents = [
            stack.enter_context(joined(tmp_path, f"node-{name}", spots.driver, ELASTIC_DRIVER_GRACE=str(LONG_S)))
            for name in "xy"
        ]
        spots.job.wait_for_steps(2)
        at = time.time()
        agent = psutil.Process(agents[0].pid).children()[0]
        if has_hook:
            words = ("leave", "--host", "node-x", "--within", str(LONG_S))
            hook = subprocess.Popen([sys.executable, "-m", "elastic_driver", *words], stdout=subprocess.DEVNULL)
            spots.job.wait_for("the hook", lambda: "host node-x is leaving" in spots.job.said())
            with contextlib.suppress(psutil.NoSuchProcess):  # it has left by then, as it should
                agent.send_signal(signal.SIGTERM)
            assert hook.wait(PATIENCE_S) == 0
        else:
            agent.send_signal(signal.SIGTERM)
        assert agents[0].wait(PATIENCE_S) == 0
        spots.job.wait_for_steps(1, after=at)
        no_step_is_repeated(spots.job)
        said = (
            "elasticrun leave was run there; its machine goes away in 400 s"
            if has_hook
            else "SIGTERM; its machine goes away in 400 s"
        )
        assert is_told_once(spots.job, "node-x")
        assert said in spots.job.said()


def test_the_drivers_own_machine_goes_away(tmp_path: Path, runtime: Path) -> None:
    def google(asked: Asked) -> Says:
        value = "NONE" if "maintenance" in asked.path else "TRUE" if (tmp_path / "go").exists() else "FALSE"
        return Says(body=value, headers={"Metadata-Flavor": "Google", "ETag": value})

    with fake_cloud(google) as fake:
        flags = ("-np", "1", "--min-np", "1", "--spot-notices", "gcp")
        with Job(tmp_path, "localhost:1\n", *flags, env={ENV_GCP: fake.place}) as job:
            job.wait_for_steps(1)
            (tmp_path / "go").touch()
            text = (
                "warning: the driver's own machine goes away in 30 s (Google is preempting this spot VM): the job ends "
                "with it, on all hosts; its progress will be lost (--durable-dir would keep it)"
            )
            job.wait_for("what it means", lambda: text in job.said())
            job.wait_for("what is short", lambda: "that leaves 0 slots of the 1 that the job needs" in job.said())
            assert job.said().count("the driver's own machine") == 1
            assert job.process.poll() is None
