"""What the journal of a real job has beside the state, and that nobody is shown its secrets."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from elastic_driver.driver.recording import may_come_back
from elastic_driver.journal.file import RecordFile, read
from elastic_driver.journal.folder import JOURNAL
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.system.process_name import lives
from tests.support.paths import ROOT
from tests.support.processes.jobs import PROGRAM, Job
from tests.support.processes.subcommands import elasticrun

pytestmark = [pytest.mark.integration]

SECRET = "a-word-that-nobody-may-read"


@dataclasses.dataclass
class Found:
    """A job while it trained, and when its driver was dead.

    Attributes:
        folder: of its journal.
        job: how it was started, and what it said.
        living, dead: what its journal said then.
        had_agent: whether its agent lived then.
        shown: all that was shown of it.
    """

    folder: Path
    job: Job
    living: Recorded
    dead: Recorded
    had_agent: bool
    shown: str


@pytest.fixture(scope="class")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("facts")
    kept, runtime = folder / "kept", folder / "runtime"
    runtime.mkdir(mode=0o700)
    flags = ("-np", "2", "--min-np", "1", "--on-change", "in-place", "--accept-agents")
    env = {"XDG_RUNTIME_DIR": str(runtime), "PASSWORD": SECRET}
    with Job(
        folder, "localhost:1\n127.0.0.1:1\n", *flags, "--journal", str(kept), "-x", f"TOKEN={SECRET}", env=env
    ) as job:
        job.wait_for_steps(2)
        job.wait_for("the round", lambda: job.events("round_resumed"))
        living = read_job(kept)
        assert isinstance(living, Recorded)
        had_agent = any(map(may_come_back, living.facts.agents.values()))
        answers = [
            elasticrun("status", *more, "--journal", str(kept), XDG_RUNTIME_DIR=where)
            for more in ((), ("--json",))
            for where in (str(runtime), str(folder))
        ]
        job.process.kill()
        job.wait()
        for agent in living.facts.agents.values():
            os.kill(agent.facts.hello.pid, signal.SIGTERM)
            while may_come_back(agent):
                time.sleep(0.02)
        while job.leftovers():
            time.sleep(0.02)
        answers += [elasticrun("status", *more, "--journal", str(kept)) for more in ((), ("--json",))]
    dead = read_job(kept)
    assert isinstance(dead, Recorded)
    assert [answer.returncode for answer in answers] == [0] * len(answers)
    shown = "".join(answer.stdout + answer.stderr for answer in answers) + job.said() + job.event_log.read_text()
    return Found(kept, job, living, dead, had_agent, shown)


class TestFacts:
    def test_what_does_not_change(self, found: Found) -> None:
        job, started = found.living.job, found.job.events("job_started")[0]
        assert (job.job_id, job.command[-1], job.directory) == (started["job_id"], str(PROGRAM), str(ROOT))
        assert (job.settings.num_proc, job.settings.min_num_proc, job.settings.journal_folder) == (2, 1, found.folder)
        assert job.settings.passed_env == {"TOKEN": SECRET}
        assert (job.environment["PASSWORD"], job.environment["PATH"]) == (SECRET, os.environ["PATH"])
        assert len(job.job_key.secret) == 32
        assert job.join_token

    def test_its_agent(self, found: Found) -> None:
        (agent,) = found.living.facts.agents.values()
        assert (agent.local, agent.joined, agent.ending, agent.given_up) == (True, False, False, False)
        assert agent.facts.host == "localhost"
        assert found.had_agent
        assert not lives(agent.facts.hello.owner)
        assert not may_come_back(agent)
        (ticket,) = found.living.facts.tickets.values()
        assert ticket.use is not None
        assert ticket.use.agent == agent.agent

    def test_its_hosts(self, found: Found) -> None:
        machines = found.living.facts.machines
        assert {name: each.incarnation for name, each in machines.items()} == {"localhost": 0, "127.0.0.1": 0}

    def test_where_it_is_reached(self, found: Found) -> None:
        ways = found.living.facts.ways
        assert ways.socket == str(found.folder / "driver.sock")
        assert ways.loopback_port in ways.ports.values(), "all have the same, where that is free"
        assert ways.certificate is not None
        assert ways.certificate.fingerprint in found.job.said(), "as hosts that join are told"

    def test_what_a_later_driver_begins_with(self, found: Found) -> None:
        assert found.dead.facts.agents.keys() == found.living.facts.agents.keys()
        past = found.dead
        assert past.job == found.living.job
        assert (past.epoch, past.state.round_id) == (1, found.living.state.round_id)
        assert past.clock >= found.living.clock
        assert past.away_s >= 0.0

    def test_a_driver_that_dies_at_each_record(self, found: Found, tmp_path: Path) -> None:
        """Whatever comes of a fact is not on disk without it."""
        whole = (found.folder / JOURNAL).read_bytes()
        records = read(found.folder / JOURNAL) or ()
        had_workers = 0
        for count in range(1, len(records) + 1):
            folder = tmp_path / str(count)
            folder.mkdir(mode=0o700)
            file = RecordFile.new(folder, records[0].sequence, records[0].body)
            for record in records[1:count]:
                file.append(record.sequence, record.body)
            file.close()
            recorded = read_job(folder)
            assert isinstance(recorded, Recorded)
            facts, state = recorded.facts, recorded.state
            assert recorded.job == found.living.job
            assert {host.name for host in state.hosts} <= facts.machines.keys()
            if state.workers:
                had_workers += 1
                (agent,) = facts.agents.values()
                assert facts.tickets
                assert facts.ways.socket == str(found.folder / "driver.sock")
                tickets = Tickets(lambda clock=recorded.clock: clock)  # type: ignore[misc]
                tickets.take_over(facts.agents.values(), facts.tickets.values())
                assert tickets.key_of(Identity(Role.AGENT, number=agent.agent)) == bytes.fromhex(agent.key)
        assert had_workers, "on a busy machine it may have been compacted, and be all in one"
        assert (found.folder / JOURNAL).read_bytes() == whole

    def test_nobody_is_shown_a_secret(self, found: Found) -> None:
        job, facts = found.dead.job, found.dead.facts
        secrets = {SECRET, job.key, job.join_token, facts.ways.pem, *(each.key for each in facts.tickets.values())}
        secrets |= {each.key for each in facts.agents.values()}
        assert "" not in secrets
        everything = f"{found.shown}{found.dead!r}"
        assert job.job_id in everything
        assert [secret for secret in secrets if secret in everything] == []

    def test_others_cannot_read_it(self, found: Found) -> None:
        assert (found.folder / JOURNAL).stat().st_mode & 0o777 == 0o600
        assert found.folder.stat().st_mode & 0o777 == 0o700


def recorded_in(folder: Path, epoch: int) -> Recorded | None:
    """What the journal of a job's n-th driver says; None until that has written its first file."""
    found = read_job(folder)
    return found if isinstance(found, Recorded) and found.epoch == epoch else None


def test_a_later_driver_is_in_the_place_of_the_first(tmp_path: Path, runtime: Path) -> None:
    """Whatever it is asked for now: the job is what it was, and is found where it was."""
    kept = tmp_path / "kept"
    flags = ("-np", "2", "--min-np", "1", "--on-change", "in-place", "--accept-agents", "--journal", str(kept))
    with Job(tmp_path, "localhost:2\n", *flags, env={"PASSWORD": SECRET}) as first:
        first.wait_for_steps(2)
        before = recorded_in(kept, 1)
        assert before is not None
        assert "--join-token-file FILE --agent-timeout 600\n" in first.said(), "a host that is to join waits as long"
        first.process.kill()
        first.process.wait()
        later = ("--grace-time", "3", "-x", "TOKEN=a-new-word")
        with Job(tmp_path, "localhost:2\n", *flags, *later, env={"PASSWORD": "a-new-word"}) as second:
            second.wait_for("it has taken over", lambda: "took over" in second.said())
            after = second.wait_for("its journal", lambda: recorded_in(kept, 2))
            assert after.job == before.job
            assert after.facts.ways == before.facts.ways
            assert after.facts.agents.keys() == before.facts.agents.keys()
            assert after.clock >= before.clock
            assert "changed settings have no effect: --grace-time, -x" in second.said()
            assert "a-new-word" not in second.said()
            # Who is started now has the variables of the job.
            second.set_hosts("localhost:3\n")
            lines = second.wait_for_steps(3)
            pid = next(line["pid"] for line in lines if line["rank"] == 2)
            assert psutil.Process(pid).environ()["PASSWORD"] == SECRET
            assert elasticrun("end", before.job.job_id).returncode == 0, "with the key that it had"
            assert second.wait() == 143
