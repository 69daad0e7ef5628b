"""The soak over several machines: what soak.py does, and what can happen to machines and the networks between them.

Run by ``scripts/soak MINUTES SEED --hosts N``: N network namespaces, the driver on the first, the last of them a host
that joins and leaves by itself. The training is that of lineage_program.py. Beside the rules of history.py, the folder
of commits is looked at after each event: no two rounds may write into it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from follow import check_commits
from history import ON_DISK_AFTER_S, History, digest
from leaks import Gathering
from soak import HERE, Soak

from tests.support.network.machines import MachinesJob, kill
from tests.support.network.namespaces import NamespaceHost, Namespaces
from tests.support.network.network_faults import NameService, NetworkFaults
from tests.support.processes.jobs import Job

LEAST_HOSTS = 3
SAMPLES, PER_STEP, COMMIT_EVERY = 480, 12, 2  # as in lineage_program.py
HOST_TIMEOUT_S, AGENT_TIMEOUT_S = 2.0, 4.0
# How long a fault lasts: nobody need notice the shortest, and all limits run out in the longest.
_LASTS_S = (0.3, 9.0)
# A commit waits for the driver's word, and training does not. So long may it go on without: until the agents end it.
_NO_WORD_S = AGENT_TIMEOUT_S + 1.0
# Commits that are kept, for a look at who has written them.
_KEEP = 100


class HostsSoak(Soak):
    """See above.

    Args:
        folder: for all files.
        seed: of the random choices.
        machines: the hosts.
    """

    # Agents of a driver that was killed end their workers by the agent timeout.
    gone_within_s = AGENT_TIMEOUT_S + 6.0
    files_at_most = _KEEP + 1

    def __init__(self, folder: Path, seed: int, machines: Namespaces) -> None:
        self.machines = machines
        self.hosts = tuple(host.name for host in machines.hosts[:-1])
        self.joiner = machines[len(machines.hosts) - 1]
        self.joined: subprocess.Popen[Any] | None = None
        self.network = NetworkFaults()
        self.addresses = itertools.cycle(range(50, 250))
        self.token = folder / "token"
        self.token.write_text("the token of a soak\n")
        self.token.chmod(0o600)
        self.job_ids: list[str] = []
        self.of_agents = Gathering(descriptors=30, threads=10, memory_mb=40)
        super().__init__(folder, seed)

    def new_history(self) -> History:
        """See Soak."""
        return History(
            commit_every=COMMIT_EVERY, samples=SAMPLES, per_step=PER_STEP, on_disk_after_s=ON_DISK_AFTER_S + _NO_WORD_S
        )

    def weights_of(self, values: dict[str, Any]) -> str:
        """See Soak."""
        return digest([values["weights"]])

    # --- jobs --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See Soak. A host that has joined the job before has no job any more."""
        self.wait_for_the_joiner()
        super().begin()
        self.job_ids.append(self.job_id)

    def start(self, folder: Path) -> Job:
        """See Soak."""
        flags = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2", "--heartbeat-timeout", "3"]
        flags += ["--elastic-timeout", "90", "--discovery-timeout", "1", "--grace-time", "2"]
        flags += ["--durable-dir", str(self.durable), "--durable-keep", str(_KEEP), "--gloo-timeout-seconds", "10"]
        flags += ["--host-timeout", str(HOST_TIMEOUT_S), "--agent-timeout", str(AGENT_TIMEOUT_S)]
        flags += ["--accept-agents", "--join-token-file", str(self.token)]
        if self.random.random() < 0.5:
            flags.append("--no-preload")
            self.counts["(with --no-preload)"] += 1
        env = {"FAULTS": str(self.faults), "SLOW_START": str(self.slow), "STEP_LOG": str(self.step_log)}
        # Slower than the tests' training: a night's lines are to fit on the disk.
        env |= {"XDG_RUNTIME_DIR": str(self.runtime), "XDG_STATE_HOME": str(self.runtime / "state"), "STEP_S": "0.05"}
        command = [sys.executable, str(HERE / "lineage_program.py")]
        return MachinesJob(self.machines, folder, self.listing(), *flags, command=command, env=env)

    def elasticrun(self, *words: str) -> None:
        """See Soak."""
        env = self.machines[0].environment() | {"XDG_RUNTIME_DIR": str(self.runtime)}
        done = self.machines[0].run([sys.executable, "-m", "elastic_driver", *words], env=env)
        assert done.returncode == 0, done.stderr

    def left_nothing(self, *, within_s: float, of: Job | None = None, since: float | None = None) -> None:
        """See Soak. Other machines hear of the end of a job a moment later."""
        super().left_nothing(within_s=within_s or self.gone_within_s, of=of, since=since)

    def close(self) -> None:
        """See Soak."""
        self.network.heal()
        for host in self.machines:
            host.heal()
        if self.job.process.poll() is None:
            self.job.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.process.wait(20)
        self.left_nothing(within_s=self.gone_within_s)
        self.job.__exit__()
        self.wait_for_the_joiner()

    def check_gathering(self) -> None:
        """See Soak. And who has written the commits."""
        super().check_gathering()
        assert isinstance(self.job, MachinesJob)
        members = collections.Counter(self.host(line) for line in self.workers())
        for host in self.machines:
            # One that is just being started has nothing yet.
            for agent in self.job.agents(host) if members[host.name] else ():
                self.of_agents.look(f"the agent of {host.name}", agent, members[host.name])
        check_commits(self.durable, self.job_ids)

    # --- the host that joins -----------------------------------------------------------------------------------------

    def join(self) -> None:
        """The last machine joins, or does so again."""
        if self.joined is not None and self.joined.poll() is None:
            return
        self.wait_for_the_joiner()
        driver: str = self.until("where to join", lambda: self.job.said().partition("join --driver ")[2]).split()[0]
        flags = ["--driver", driver, "--slots", "2", "--join-token-file", str(self.token)]
        flags += ["--agent-timeout", str(AGENT_TIMEOUT_S)]
        with (self.folder / "joiner.txt").open("a") as said:
            self.joined = self.joiner.popen(
                [sys.executable, "-m", "elastic_driver", "join", *flags],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                # What reaches workers by this way is their host's.
                env=self.joiner.environment(),
            )
        since = time.time()

        def trains() -> bool:
            return any(self.host(line) == self.joiner.name and line["time"] > since for line in self.recent)

        self.until("the host that has joined trains", trains)

    def leave(self) -> None:
        """It leaves, by a command or by a signal."""
        self.join()
        assert self.joined is not None
        if self.random.random() < 0.5:
            self.joined.send_signal(signal.SIGTERM)
        else:
            done = self.joiner.run([sys.executable, "-m", "elastic_driver", "leave"])
            assert done.returncode == 0, done.stderr
        self.wait_for_the_joiner()
        assert self.joined is None

    def kill_the_joiner(self) -> None:
        """Its agent, and so its workers."""
        self.join()
        assert self.joined is not None
        self.joined.kill()

    def wait_for_the_joiner(self) -> None:
        """Blocks until the process that joined has ended, as it was asked to, or its job is over."""
        if self.joined is not None:
            self.joined.wait(60)
            self.joined = None

    # --- networks ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """For what lasts a while; nobody has to wait for its end to train."""
        yield
        time.sleep(self.random.uniform(*_LASTS_S))
        if self.random.random() < 0.5:
            self.goes_on(time.time())

    def heal(self) -> None:
        """The network is whole again, and so the hosts that were left out need not wait."""
        self.network.heal()
        said = self.job.said()
        for host in self.hosts:
            if f"host {host} is left out" in said:
                self.back_on_the_list(host)
        if f"host {self.joiner.name} is left out" in said and self.joined is not None:
            self.leave()

    def some(self, count: int) -> list[NamespaceHost]:
        """Hosts that something may be done to; with the driver's as well."""
        choice = [host for host in self.machines if host.name != self.spared]
        return self.random.sample(choice, min(count, len(choice)))

    def other(self) -> NamespaceHost:
        """One that is listed and not the driver's."""
        return self.random.choice([host for host in self.machines.hosts[1:-1] if host.name != self.spared])

    def cut_off(self) -> None:
        self.full()
        (host,) = self.some(1)
        self.counts["(the driver's)"] += host is self.machines[0]
        with self.lasting():
            host.cut()
        host.heal()

    def flapping_link(self) -> None:
        """A cut again and again, each too short to matter, or not quite."""
        self.full()
        (host,) = self.some(1)
        for _ in range(4):
            host.cut()
            time.sleep(self.random.uniform(0.1, HOST_TIMEOUT_S))
            host.heal()
            time.sleep(self.random.uniform(0.0, 1.0))

    def cut_between(self) -> None:
        self.full()
        with self.lasting():
            self.network.between(*self.random.sample(self.machines.hosts[:-1], 2))
        self.heal()

    def cut_one_way(self) -> None:
        self.full()
        with self.lasting():
            self.network.one_way(*self.random.sample(self.machines.hosts[:-1], 2))
        self.heal()

    def partition(self) -> None:
        self.full()
        hosts = list(self.machines)
        self.random.shuffle(hosts)
        middle = self.random.randrange(1, len(hosts))
        with self.lasting():
            self.network.partition(hosts[:middle], hosts[middle:])
        self.heal()

    def slow_link(self) -> None:
        host = self.random.choice(self.machines.hosts)
        with self.lasting():
            self.network.slow(host, f"{self.random.choice((2, 10, 50))}mbit")
        self.heal()

    def lossy_link(self) -> None:
        host = self.random.choice(self.machines.hosts)
        loss, seed = self.random.choice((0.0, 0.01, 0.05)), self.random.randrange(1 << 30)
        with self.lasting():
            self.network.lossy(host, delay_s=self.random.uniform(0.0, 0.1), loss=loss, seed=seed)
        self.heal()

    def names_are_not_answered(self) -> None:
        """While an agent is to be started again."""
        self.full()
        with NameService(self.machines[0], self.machines, timeout_s=1) as names:
            with self.lasting():
                names.go_silent()
                self.kill_an_agent()
            names.answer()
            self.full()

    # --- machines ----------------------------------------------------------------------------------------------------

    def kill_an_agent(self) -> None:
        kill(self.agent())

    def stop_an_agent(self) -> None:
        agent = self.agent()
        with self.lasting():
            kill(agent, signal.SIGSTOP)
        kill(agent, signal.SIGCONT)

    def agent(self) -> int:
        self.full()
        assert isinstance(self.job, MachinesJob)
        host = self.other()
        return self.job.agent(host)

    def vanish(self) -> None:
        """A machine goes without a word, and comes back, now and then under another address."""
        self.full()
        host = self.other()
        with self.lasting():
            host.power_off()
        if self.random.random() < 0.5:
            host.move(next(self.addresses))
        host.power_on()

    def move(self) -> None:
        """A living machine gets another address."""
        self.full()
        host = self.other()
        host.move(next(self.addresses))
        self.goes_on(time.time())
        self.full()
        host.end_sessions()

    def restart_sshd(self) -> None:
        host = self.other()
        host.stop_sshd()
        if self.random.random() < 0.5:
            self.kill_an_agent()
        time.sleep(self.random.uniform(0.1, 3.0))
        host.start_sshd()

    # --- the run -----------------------------------------------------------------------------------------------------

    def deck(self) -> list[Callable[[], None]]:
        """See Soak."""
        ours: list[Callable[[], None]] = [self.cut_off, self.cut_off, self.cut_between, self.cut_between]
        ours += [self.cut_one_way, self.cut_one_way, self.partition, self.partition, self.flapping_link]
        ours += [self.slow_link, self.lossy_link, self.lossy_link, self.names_are_not_answered]
        ours += [self.kill_an_agent, self.stop_an_agent, self.vanish, self.vanish, self.move, self.restart_sshd]
        ours += [self.join, self.leave, self.kill_the_joiner, self.join]
        base = super().deck()
        # A cut may take the host that is to be spared from its driver's side: each deck may do everything.
        self.spared = ""
        both = [*ours, *base]
        self.random.shuffle(both)
        return both

    def summary(self) -> str:
        """See Soak."""
        return f"{super().summary()}; agents {self.of_agents}"
