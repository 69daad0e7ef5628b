"""Jobs with a chief, as processes: servers that listen and do nothing, and a chief that does what the test tells it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.errors import RendezvousError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.messages import Servers, ServersRequest, ServingReport
from tests.support.paths import PROGRAMS, ROOT, SUPPORT
from tests.support.processes import subcommands
from tests.support.processes.jobs import PATIENCE_S, Job

# What it asks of a job without its name is of its own folder, where no other job is.
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("runtime")]

A, B, C = "localhost", "127.0.0.1", "127.0.0.2"
Json = dict[str, Any]


class ChiefJob(Job):
    """A job whose chief is ``chief_program.py``."""

    def __init__(self, folder: Path, hosts: str, *flags: str, more: dict[str, str] | None = None) -> None:
        self.orders = folder / "orders"
        self._found = 0  # the number of the list of servers that was found last
        path = f"{SUPPORT / 'fake_tensorflow'}:{ROOT}"
        super().__init__(
            folder,
            hosts,
            "--parameter-servers",
            "1",
            *flags,
            command=[sys.executable, str(PROGRAMS / "chief_program.py"), str(self.orders)],
            env={"PYTHONPATH": path, **(more or {})},
        )

    def order(self, text: str) -> None:
        """The chief does it soon."""
        with self.orders.open("a") as file:
            file.write(f"{text}\n")

    def printed(self, word: str) -> list[Any]:
        """What all chiefs have said so far behind this word."""
        prefix = f"[chief]<stdout>:{word} "
        lines = self.stdout.read_text(errors="replace").splitlines(keepends=True)
        return [json.loads(line.removeprefix(prefix)) for line in lines if line.startswith(prefix) and line[-1] == "\n"]

    def clusters(self, count: int = 1) -> list[Json]:
        """The clusters that so many chiefs were started with; blocks until they were."""
        found: list[Json] = self.wait_for(f"chief {count}", lambda: self.printed("cluster")[count - 1 :])
        return found

    def servers(self, what: str, found: Any) -> Json:
        """The first list of servers of which this holds, from the one that was found last on. Blocks until it is there.

        It need not be the newest: that may be looked at too late.
        """

        def number() -> int | None:
            lists = enumerate(self.printed("servers"))
            return next((1 + at for at, servers in lists if at >= self._found and found(servers)), None)

        self._found = self.wait_for(what, number) - 1
        answer: Json = self.printed("servers")[self._found]
        return answer

    def pid(self, worker: str) -> int:
        """Of the newest process in this place."""
        pid: int = self.started(worker)[-1]["pid"]
        return pid

    def started(self, worker: str) -> list[Json]:
        """All processes in this place, in order."""
        return [event for event in self.events("worker_started") if event["worker"].startswith(worker)]

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(worker), number)

    def chief_pid(self) -> int:
        pid: int = self.wait_for("a chief", lambda: self.events("chief_started"))[-1]["pid"]
        return pid

    def wait_for_end_of(self, pids: list[int]) -> None:
        """Blocks until none of these processes is there any more."""
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=150)
        assert not alive

    def environ(self, pid: int) -> dict[str, str]:
        return psutil.Process(pid).environ()


def ask(url: str, credential: Credential, request: ServersRequest, *, patience_s: float = PATIENCE_S) -> Servers | None:
    """One request of whoever this is."""
    client = RendezvousClient(url, credential, patience_s=patience_s)
    try:
        return client.servers(request)
    finally:
        client.close()


def elasticrun(*words: str) -> str:
    """What a subcommand says."""
    ran = subcommands.elasticrun(*words)
    assert ran.returncode == 0, ran
    return ran.stdout


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=150).close()
    except OSError:
        return False
    return True


def test_servers_come_and_go(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1", "--protect", B)
    with ChiefJob(tmp_path, f"{A}:2\n{B}:1\n", *flags) as job:
        cluster = job.clusters()[0]["cluster"]
        assert {name: len(addresses) for name, addresses in cluster.items()} == {"chief": 1, "ps": 1, "worker": 2}
        assert all(answers(address) for address in (*cluster["ps"], *cluster["worker"]))
        assert not answers(cluster["chief"][0]), "the port is the chief's own to listen on"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", int(cluster["chief"][0].rpartition(":")[2])))
        assert job.environ(job.pid(B))["ELASTIC_DRIVER_TASK"] == "ps 0", "protected hosts first"
        first = job.servers("the servers of the start", lambda s: len(s["workers"]) == 2)
        assert first["ps"] == cluster["ps"]
        assert sorted(first["workers"]) == sorted(cluster["worker"])

        # A host comes.
        job.set_hosts(f"{A}:2\n{B}:1\n{C}:1\n")
        grown = job.servers("a third worker", lambda s: len(s["workers"]) == 3)
        (new,) = grown["workers"].keys() - first["workers"].keys()
        assert answers(new)

        # A server dies: it vanishes, and another one is there after its host's cooldown, at an address of its own.
        job.kill(f"{A}[0]")
        job.servers("two of them", lambda s: len(s["workers"]) == 2)
        again = job.servers("one in its place", lambda s: len(s["workers"]) == 3)
        assert len(again["workers"].keys() - grown["workers"].keys()) == 1

        # A host goes: its worker is to leave, and serves until the chief has taken it out.
        gone = job.pid(C)
        job.set_hosts(f"{A}:2\n{B}:1\n")
        going = job.servers("one that is to leave", lambda s: s["workers"].get(new, [False])[0])
        assert 0 < going["workers"][new][1] <= 300
        assert [address for address, (leaves, _) in going["workers"].items() if leaves] == [new]
        assert answers(new)
        assert job.events("worker_stopped") == []
        job.order("take-out")
        job.servers("it is gone", lambda s: new not in s["workers"])
        job.wait_for("its end", lambda: not psutil.pid_exists(gone))
        assert [event["reason"] for event in job.events("worker_stopped")] == [f"host {C} is no longer listed"]

        job.order("exit 0")
        assert job.wait() == 0
        assert "job succeeded: the chief exited with code 0" in job.said()
        assert job.events("job_ended")[-1]["exit_code"] == 0


def test_a_drained_worker_that_the_chief_keeps_is_stopped_in_the_end(tmp_path: Path) -> None:
    with ChiefJob(tmp_path, f"{A}:2\n{B}:1\n", "-np", "2", "--min-np", "1", "--drain-timeout", "1") as job:
        job.clusters()
        job.servers("both workers", lambda s: len(s["workers"]) == 2)
        assert "its workers are stopped when the chief no longer uses them" in elasticrun("drain", B)
        job.servers("it has left", lambda s: len(s["workers"]) == 1)
        (stopped,) = job.wait_for("its event", lambda: job.events("worker_stopped"))  # the chief hears sooner
        assert stopped["reason"] == f"host {B} is drained; the chief did not stop using it within 1 s (--drain-timeout)"
        said = elasticrun("status")
        assert "the chief runs with 1 worker and 1 parameter server" in said
        assert re.search(rf"^ps0 +{A}\[0\] +serving", said, re.M), said
        assert re.search(rf"^worker +{A}\[1\] +serving +\S+ s +[0-9.]+:\d+ ", said, re.M), said
        job.order("exit 0")
        assert job.wait() == 0


def test_a_lost_parameter_server_is_the_chiefs_to_say(tmp_path: Path) -> None:
    with ChiefJob(tmp_path, f"{A}:2\n", "-np", "1", "--drain-timeout", "60") as job:
        job.clusters()
        job.kill(f"{A}[0]")
        job.servers("none any more", lambda s: s["ps"] == [])
        job.order("exit 3")
        assert job.wait() == 1
        lost = f"parameter server 0 ({A}[0]) killed by SIGKILL, and its variables are lost"
        assert job.events("job_ended")[-1]["message"] == f"{lost}; then the chief exited with code 3"
        assert len(job.events("chief_started")) == 1
        warned = [line for line in job.said().splitlines() if "warning: " in line and "parameter server 0" in line]
        assert len(warned) == 1, warned


def test_a_chief_that_does_not_notice_ends_all_the_same(tmp_path: Path) -> None:
    with ChiefJob(tmp_path, f"{A}:2\n", "-np", "1", "--drain-timeout", "1") as job:
        job.clusters()
        job.kill(f"{A}[0]")
        assert job.wait() == 1
        assert "the chief was still running 1 s (--drain-timeout) later" in job.said()
        assert job.printed("sigterm") == [0]


def test_the_chief_is_started_again_with_another_parameter_server(tmp_path: Path) -> None:
    flags = ("-np", "1", "--restart-chief", "--blacklist-cooldown-range", "1", "1", "--output-filename", "out")
    with ChiefJob(tmp_path, f"{A}:2\n", *flags[:-1], str(tmp_path / "out")) as job:
        (first,) = job.clusters()
        link = Credential.of_chief(job.environ(job.chief_pid()))
        url = job.environ(job.chief_pid())["ELASTIC_DRIVER_RENDEZVOUS"]
        job.kill(f"{A}[0]")
        second = job.clusters(2)[0]
        assert job.printed("sigterm") == [0], "the first was told to end"
        assert second["cluster"]["ps"] != first["cluster"]["ps"]
        assert second["cluster"]["worker"] == first["cluster"]["worker"], "whoever lives stays"
        assert all(answers(address) for address in second["cluster"]["ps"])
        # The first one's word is worth nothing any more.
        assert link is not None
        with pytest.raises(RendezvousError, match="no longer belongs to the job"):
            ask(url, link, ServersRequest(0, tuple(second["cluster"]["worker"])))
        assert answers(second["cluster"]["worker"][0])
        # Its own failure: the same servers.
        job.order("exit 5")
        third = job.clusters(3)[0]
        assert third["cluster"]["ps"] == second["cluster"]["ps"]
        job.order("exit 0")
        assert job.wait() == 0
        kept = {path.name: (path / "stdout").read_text() for path in (tmp_path / "out").iterdir()}
        assert kept["chief"].count("cluster ") == 3
        assert {"chief", "ps0", "rank.0"} <= kept.keys()


def test_a_drained_parameter_server_moves_when_the_chief_has_saved(tmp_path: Path) -> None:
    flags = ("-np", "1", "--restart-chief", "--protect", B)
    with ChiefJob(tmp_path, f"{A}:1\n{B}:1\n", *flags) as job:
        (first,) = job.clusters()
        assert "parameter server 0 (127.0.0.1[0]) stays" in elasticrun("drain", B)
        assert job.printed("sigterm") == [], "there is no other place for it"
        job.set_hosts(f"{A}:1\n{B}:1\n{C}:1\n")
        second = job.clusters(2)[0]
        assert job.printed("sigterm") == [0]
        assert second["cluster"]["ps"] != first["cluster"]["ps"]
        assert job.environ(job.pid(C))["ELASTIC_DRIVER_TASK"] == "ps 0"
        assert re.search(r"^chief 2 running for \d+ s, 0 unplanned restarts$", elasticrun("status"), re.M), "planned"
        job.order("exit 0")
        assert job.wait() == 0
        assert [event["reason"] for event in job.events("chief_stopped")] == [
            f"parameter server 0 ({B}[0]) moves: host {B} is drained"
        ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_drivers_end_is_everybodys(tmp_path: Path, number: int, code: int) -> None:
    with ChiefJob(tmp_path, f"{A}:2\n", "-np", "1") as job:
        job.clusters()
        pids = [job.chief_pid(), job.pid(f"{A}[0]"), job.pid(f"{A}[1]")]
        job.process.send_signal(number)
        assert job.wait() == code
        job.wait_for_end_of(pids)
        assert job.printed("sigterm") == ([0] if number == signal.SIGTERM else [])


class TestWhatIsRefused:
    """In a job that goes on all the same, and ends well."""

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChiefJob]:
        flags = ("-np", "1", "--max-np", "1", "--blacklist-cooldown-range", "1", "1")
        with ChiefJob(tmp_path_factory.mktemp("refusals"), f"{A}:3\n", *flags) as job:
            job.clusters()
            yield job
            job.order("exit 0")
            assert job.wait() == 0

    def test_strangers_are_refused(self, job: ChiefJob) -> None:
        (cluster,) = job.clusters()
        environ = job.environ(job.chief_pid())
        url, own = environ["ELASTIC_DRIVER_RENDEZVOUS"], Credential.of_chief(environ)
        assert own is not None
        worker = Identity(Role.WORKER, WorkerId.parse(job.environ(job.pid(f"{A}[1]"))["ELASTIC_DRIVER_WORKER"]))
        left = ServersRequest(0, tuple(cluster["cluster"]["worker"]))
        for stranger in (Identity(Role.CHIEF, number="2"), worker, Identity(Role.OPERATOR)):
            with pytest.raises(RendezvousError):
                ask(url, Credential(stranger), left, patience_s=2)
        # Nor may the chief do what is an operator's; and what it says of others is not believed.
        client = RendezvousClient(url, own, patience_s=150)
        try:
            with pytest.raises(RendezvousError, match="403"):
                client.end()
            with pytest.raises(RendezvousError, match="400"):
                client._request("POST", "servers", b'{"version": []}', expected=(200,))
        finally:
            client.close()
        ask(url, own, ServersRequest(0, ("10.0.0.1:1", *cluster["cluster"]["ps"], *cluster["cluster"]["worker"])))
        assert all(answers(each) for each in (*cluster["cluster"]["worker"], *cluster["cluster"]["ps"]))

    def test_how_long_the_chief_may_wait_is_not_believed(self, job: ChiefJob) -> None:
        environ = job.environ(job.chief_pid())
        own = Credential.of_chief(environ)
        assert own is not None
        client = RendezvousClient(environ["ELASTIC_DRIVER_RENDEZVOUS"], own, patience_s=150)
        version = job.servers("the first", lambda s: len(s["workers"]) == 1)["version"]
        request = ServersRequest(version).to_json()

        def ask_for(wait_s: str) -> int:
            return client._request("POST", "servers", request, query={"wait_s": wait_s}, expected=(200, 204))[0]

        try:
            for wait_s in ("nan", "-nan", "x"):
                with pytest.raises(RendezvousError, match="400"):
                    ask_for(wait_s)
            for wait_s in ("-inf", "-1", "0"):
                assert ask_for(wait_s) == 204
        finally:
            client.close()
        # The driver goes on.
        job.kill(f"{A}[1]")
        job.servers("another", lambda s: s["version"] >= version + 2 and len(s["workers"]) == 1)


def test_a_server_is_killed_before_it_answers_and_another_claims_what_is_not_its_own(tmp_path: Path) -> None:
    held = tmp_path / "held"
    flags = ("-np", "1", "--max-np", "2", "--blacklist-cooldown-range", "1", "1")
    with ChiefJob(tmp_path, f"{A}:2\n", *flags, more={"HOLD_IMPORT": str(held)}) as job:
        (first,) = job.clusters()
        (address,) = first["cluster"]["worker"]
        own = Credential.of_chief(job.environ(job.chief_pid()))
        assert own is not None
        held.touch()
        job.set_hosts(f"{A}:2\n{B}:1\n")
        newcomer = job.wait_for("a newcomer", lambda: job.started(B))[0]
        environ = job.environ(newcomer["pid"])
        credential = Credential.of_worker(environ)
        me = credential.identity.worker
        assert me is not None
        client = RendezvousClient(environ["ELASTIC_DRIVER_RENDEZVOUS"], credential, patience_s=150)
        try:
            other = WorkerId.parse(job.environ(job.pid(f"{A}[1]"))["ELASTIC_DRIVER_WORKER"])
            with pytest.raises(RendezvousError, match="may not act for"):
                client.serving(ServingReport(other, 1))
            with pytest.raises(RendezvousError, match="serves at"):  # its host has the same address
                client.serving(ServingReport(me, int(address.rpartition(":")[2])))
            for rubbish in (b"", b"[]", b"{}", b'{"worker": "x", "port": 1}', b'{"worker": null, "port": []}'):
                with pytest.raises(RendezvousError, match="400"):
                    client._request("POST", "serving", rubbish, expected=(204,))
            for port in (0, -1, 1 << 16, 10**30):
                body = json.dumps({"worker": environ["ELASTIC_DRIVER_WORKER"], "port": port}).encode()
                with pytest.raises(RendezvousError, match="400"):
                    client._request("POST", "serving", body, expected=(204,))
            with pytest.raises(RendezvousError):  # of the chief only
                client.servers(ServersRequest(0))
        finally:
            client.close()
        job.kill(B)
        again = job.wait_for("another in its place", lambda: job.started(B)[1:])[0]
        assert job.printed("servers")[-1]["workers"].keys() == {address}
        held.unlink()
        both = job.servers("it answers", lambda s: len(s["workers"]) == 2)
        assert psutil.pid_exists(again["pid"])
        assert all(answers(one) for one in both["workers"])
        assert job.printed("servers")[-1]["ps"] == first["cluster"]["ps"]
        job.order("exit 0")
        assert job.wait() == 0


# Without another try it is as with one that is lost.
@pytest.mark.parametrize("restart", [pytest.param(False, marks=pytest.mark.release), True])
def test_two_parameter_servers_are_lost_at_once(tmp_path: Path, restart: bool) -> None:
    flags = ["-np", "1", "--parameter-servers", "2", "--blacklist-cooldown-range", "1", "1"]
    with ChiefJob(tmp_path, f"{A}:3\n", *flags, *["--restart-chief"] * restart) as job:
        first = job.clusters()[0]["cluster"]
        for pid in [job.pid(f"{A}[{slot}]") for slot in (0, 1)]:
            os.kill(pid, signal.SIGKILL)
        if restart:
            second = job.clusters(2)[0]["cluster"]
            assert len(second["ps"]) == 2
            assert not {*second["ps"]} & {*first["ps"]}
            assert second["worker"] == first["worker"]
            assert job.printed("sigterm") == [0]
            assert "1 unplanned restart" in elasticrun("status")
            job.order("exit 0")
            assert job.wait() == 0
            return
        job.servers("none any more", lambda s: s["ps"] == [])
        job.order("exit 3")
        assert job.wait() == 1
        assert len(job.events("chief_started")) == 1
        said = job.events("job_ended")[-1]["message"]
        assert re.search(r"parameter server [01] .* killed by SIGKILL.*; then the chief exited with code 3", said), said


def test_a_chief_that_is_killed(tmp_path: Path) -> None:
    with ChiefJob(tmp_path, f"{A}:2\n", "-np", "1") as job:
        job.clusters()
        pids = [job.pid(f"{A}[0]"), job.pid(f"{A}[1]")]
        os.kill(job.chief_pid(), signal.SIGKILL)
        assert job.wait() == 1
        assert job.events("job_ended")[-1]["message"] == "the chief killed by SIGKILL"
        job.wait_for_end_of(pids)


def test_a_chief_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1", "--drain-timeout", "1")
    with ChiefJob(tmp_path, f"{A}:2\n{B}:1\n", *flags, "--grace-time", "1") as job:
        job.clusters()
        chief = job.chief_pid()
        os.kill(chief, signal.SIGSTOP)
        job.kill(f"{A}[1]")
        job.wait_for("another in its place", lambda: job.started(f"{A}[1]")[1:])
        elasticrun("drain", B)
        assert job.wait_for("the drained one is stopped", lambda: job.events("worker_stopped"))
        os.kill(chief, signal.SIGCONT)
        # What it was sent before it was stopped it reads first: that list has the drained one, which has ended since.
        now = job.servers("all at once", lambda s: len(s["workers"]) == 1 and all(map(answers, s["workers"])))
        assert all(answers(one) for one in now["workers"])
        os.kill(chief, signal.SIGSTOP)
        pids = [chief, job.pid(f"{A}[0]"), job.pid(f"{A}[1]")]
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        job.wait_for_end_of(pids)
        assert job.printed("sigterm") == [], "it was killed"


def test_without_tensorflow_it_is_said_what_is_missing(tmp_path: Path) -> None:
    without = tmp_path / "without" / "tensorflow"
    without.mkdir(parents=True)
    (without / "__init__.py").write_text("raise ImportError('No module named tensorflow')\n")
    more = {"PYTHONPATH": f"{without.parent}:{ROOT}"}
    with ChiefJob(tmp_path, f"{A}:2\n", "-np", "1", more=more) as job:
        assert job.wait() == 1
        last = job.said().splitlines()[-1]
        assert "cannot continue: " in last
        assert "has no TensorFlow" in last


@pytest.mark.parametrize(
    "words", [pytest.param(["nosuch.py"], marks=pytest.mark.release), ["-u", "nosuch.py", "--epochs", "3"]]
)
def test_a_script_that_is_not_there_starts_nothing(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, *words]
    with Job(tmp_path, f"{A}:2\n", "--parameter-servers", "1", "-np", "1", command=command) as job:
        assert job.wait() == 2
        assert f"no file 'nosuch.py' in {ROOT}" in job.said()
        assert not job.events("worker_started")
