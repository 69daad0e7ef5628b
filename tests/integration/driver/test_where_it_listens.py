"""Where a real driver listens: at a socket of its user's, and on TCP from the first on who needs that."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests

from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.system.local_socket import SocketFolder, path_of, url_of
from tests.support.network.ports import free_port, free_ports
from tests.support.processes.jobs import AFRESH, Job
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.integration

NOBODY = 65534
PATIENCE_S = 150.0
SLEEPS = ["sleep", "1000"]
OPERATOR = Credential(Identity(Role.OPERATOR))


@pytest.fixture(autouse=True)
def _own_runtime(runtime: Path) -> None:
    """The only job there is can be named by its absence."""


def listens(process: psutil.Process) -> set[tuple[str, int]]:
    """At which TCP addresses."""
    return {
        (each.laddr.ip, each.laddr.port)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


def started(job: Job) -> psutil.Process:
    """The driver's process, once it listens."""
    job.wait_for("its start", lambda: job.events("job_started"))
    return psutil.Process(job.process.pid)


def socket_of(job: Job) -> Path:
    """The driver's, as it is told where there is no port."""
    url: str = job.wait_for("its start", lambda: job.events("job_started"))[0]["rendezvous"]
    path = path_of(url)
    assert path is not None
    return path


def workers_sockets(job: Job) -> set[Path]:
    """Where the workers that run find their agents."""
    found = set()
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            if "ELASTIC_DRIVER_WORKER" in environ and (path := path_of(environ["ELASTIC_DRIVER_RENDEZVOUS"])):
                found.add(path)
    return found


def is_said(job: Job, text: str) -> bool:
    return text in job.said()


def inodes(path: Path) -> set[str]:
    """Of the sockets that are bound there, or have come of those."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    # It is bound through /proc/self/fd, under the name that it had before it was found.
    return {words[6] for words in lines if len(words) > 7 and words[7].endswith(f"/.{path.name}")}


def held(process: psutil.Process) -> set[str]:
    """The inodes of its sockets."""
    found = set()
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            found |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(each)))
        except OSError:
            continue
    return found


def remove(folder: Path) -> None:
    """At one stroke: who looks at it while it is removed would make anew what is missing in it."""
    gone = folder.rename(folder.with_name(f"gone-{folder.name}"))
    shutil.rmtree(gone, ignore_errors=True)  # whose it was may remove what it has made anew elsewhere


def put_a_file_in_place_of(folder: Path) -> None:
    """Likewise."""
    while True:
        remove(folder)
        with contextlib.suppress(FileExistsError):  # it was made anew just before
            folder.touch(exist_ok=False)
            return


def lacks(process: psutil.Process, sockets: set[str]) -> bool:
    return not sockets & held(process)


def test_no_tcp_port_until_somebody_asks_and_nothing_inherits_the_socket(tmp_path: Path) -> None:
    with Job(tmp_path, "localhost:2\n", "-np", "2") as job:
        job.wait_for_steps(2)
        driver = started(job)
        assert listens(driver) == set()
        for child in driver.children():  # its agent; and the discovery script, now and then
            with contextlib.suppress(psutil.NoSuchProcess):
                assert listens(child) == set()
        assert socket_of(job).parent.stat().st_mode & 0o777 == 0o700
        ours = inodes(socket_of(job)) & held(driver)
        assert ours
        for child in driver.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                # One that has just been forked has them until it becomes another program.
                what = f"that {child.cmdline()} cannot answer in the driver's place"
                job.wait_for(what, functools.partial(lacks, child, ours))
        for words in (("status",), ("stacks",), ("drain", "elsewhere"), ("jobs",)):
            assert elasticrun(*words).stdout, words
        refused = elasticrun("jobs", "--write-join-token", str(tmp_path / "join"))
        assert "accepts no joining hosts: it was started without --accept-agents" in refused.stderr
        assert listens(driver) == set()

        link = elasticrun("page").stdout
        port = int(link.removeprefix("http://127.0.0.1:").partition("/")[0])
        assert listens(driver) == {("127.0.0.1", port)}
        token = tmp_path / "reader"
        url = elasticrun("jobs", "--write-reader-token", str(token)).stdout.strip()
        assert url == f"http://127.0.0.1:{port}/metrics"
        bearer = {"Authorization": f"Bearer {token.read_text().strip()}"}
        assert requests.get(url, headers=bearer, timeout=PATIENCE_S).status_code == 200
        assert listens(driver) == {("127.0.0.1", port)}, "all who ask have one port"
        with contextlib.closing(RendezvousClient(url_of(socket_of(job)), OPERATOR)) as client:
            with pytest.raises(
                RendezvousProtocolError, match="unknown token: expected one of operator, reader, joiner"
            ):
                client.token(Role.WORKER)
            assert client.token(Role.OPERATOR).url.startswith(f"https://127.0.0.1:{port}#sha256:")


def test_a_job_of_one_worker_with_its_log_in_a_file_listens_nowhere_on_tcp(tmp_path: Path) -> None:
    """None of its processes: the driver, the agent, the worker and what belongs to them."""
    with Job(tmp_path, "localhost:1\n", "-np", "1") as job:
        job.wait_for_steps(1)
        driver = started(job)
        processes = [driver, *driver.children(recursive=True)]
        assert job.steps()[-1]["pid"] in {each.pid for each in processes}
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                assert listens(each) == set(), each.cmdline()


def test_what_opens_a_port_at_the_start(tmp_path: Path) -> None:
    key = tmp_path / "operator"
    key.write_text("0123456789abcdef" * 4)
    port = free_port()
    cases = {
        "named": (("--rendezvous-port", str(port)), {("127.0.0.1", port)}),
        "operator": (("--operator-token-file", str(key)), {("127.0.0.1", None)}),
        "page": (("--page-address", "127.0.0.2"), {("127.0.0.2", None)}),
    }
    for name, (flags, expected) in cases.items():
        folder = tmp_path / f"job-{name}"
        folder.mkdir()
        with Job(folder, "localhost:1\n", "-np", "1", *flags, command=SLEEPS) as job:
            found = listens(started(job))
            assert {ip for ip, _ in found} == {ip for ip, _ in expected}, name
            assert len(found) == 1
            assert next(iter(expected))[1] in (None, next(iter(found))[1])


def test_a_port_range_holds_for_a_port_that_is_opened_later(tmp_path: Path) -> None:
    first, second, last = free_ports(3)
    taken = socket.create_server(("127.0.0.1", last))
    flags = ("-np", "1", "--port-range", f"{first}-{last}")
    with taken, Job(tmp_path, "localhost:1\n", *flags, command=SLEEPS) as job:
        started(job)
        assert re.match(rf"http://127\.0\.0\.1:({first}|{second})/login", elasticrun("page").stdout)


def test_where_no_port_is_free_whoever_asks_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    low, high = free_ports(2)
    taken = [socket.create_server(("127.0.0.1", port)) for port in (low, high)]
    with Job(tmp_path, "localhost:1\n", "-np", "1", "--port-range", f"{low}-{high}", command=SLEEPS) as job:
        started(job)
        for words in (["page"], ["jobs", "--write-token", str(tmp_path / "token")]):
            refused = elasticrun(*words)
            assert refused.returncode == 2
            assert f"ports {low} to {high} are all in use (--port-range)" in refused.stderr
        assert not (tmp_path / "token").exists()
        assert job.process.poll() is None
        for each in taken:
            each.close()
        assert elasticrun("page").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_to_no_socket(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys; sock = socket.socket(socket.AF_UNIX); os.setgroups([]); "
        f"os.setgid({NOBODY}); os.setuid({NOBODY}); sock.connect(sys.argv[1])"
    )
    with Job(tmp_path, "localhost:1\n", "-np", "1", command=SLEEPS) as job:
        where = str(socket_of(job))
        command = [sys.executable, "-I", "-c", code, where]
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert tried.returncode == 1
        assert "PermissionError: [Errno 13]" in tried.stderr


def test_what_a_killed_driver_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    with Job(tmp_path, "localhost:1\n", "-np", "1", command=SLEEPS, elasticrun=AFRESH) as job:
        left = socket_of(job)
        agents = psutil.Process(job.process.pid).children()
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        psutil.wait_procs(agents)
        while job.leftovers():  # the worker ends a moment later
            time.sleep(0.02)
        # Whoever makes the next folder there, of this user's processes.
        SocketFolder.new([left.parent.parent]).close()
        assert not left.parent.exists()


def test_what_somebody_removes_of_it_comes_back(tmp_path: Path, runtime: Path) -> None:
    """As systemd-tmpfiles does, or who empties /tmp: the sockets' folders and the job's file."""
    with Job(tmp_path, "localhost:1\n", "-np", "1") as job:
        job.wait_for_steps(1)
        job_id = job.events("job_started")[0]["job_id"]
        where, file = socket_of(job), runtime / "elasticrun" / f"{job_id}.json"
        (agent,) = workers_sockets(job)
        for path in (where, agent):
            remove(path.parent)
        remove(file.parent)
        for path in (where, agent):
            told = f"{path} was removed (does a cleanup job run there?); it was re-created"
            job.wait_for("a word of it", functools.partial(is_said, job, told))
        job.wait_for("the job's file", file.exists)
        assert ", running, " in elasticrun("status").stdout
        job.set_hosts("localhost:2\n")  # whose second worker finds its agent
        job.wait_for_steps(2)
        assert "the job is ending" in elasticrun("end", job_id).stdout
        assert job.wait() == 128 + signal.SIGTERM
        assert not where.parent.exists()
        assert not agent.parent.exists()
        assert not file.exists()


def test_a_driver_whose_path_another_has_by_now_is_found_elsewhere(tmp_path: Path) -> None:
    with Job(tmp_path, "localhost:1\n", "-np", "1") as job:
        job.wait_for_steps(1)
        where = socket_of(job)
        put_a_file_in_place_of(where.parent)
        try:
            job.wait_for("a word of it", lambda: f"{where} was removed" in job.said())
            job.wait_for("the job's new file", lambda: not elasticrun("status").returncode)
            job.process.send_signal(signal.SIGTERM)
            assert job.wait() == 128 + signal.SIGTERM
        finally:
            where.parent.unlink()


@pytest.fixture
def lonely() -> tuple[str, ...]:
    """A network without anything in it, not even loopback."""
    words = ("unshare", "--net")
    is_there = shutil.which("unshare") is not None
    if not is_there or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, and a kernel with network namespaces")
    return words


def test_a_job_needs_no_network_and_no_cipher_and_is_found_from_another(
    tmp_path: Path, lonely: tuple[str, ...]
) -> None:
    with Job(tmp_path, "localhost:1\n", "-np", "1", prefix=lonely) as job:
        job.wait_for_steps(1)
        driver = started(job)
        for process in (driver, *driver.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                loaded = [each.path for each in process.memory_maps()]
                assert not [path for path in loaded if "cryptography" in path], "a tenth of the start"
        assert ", running, " in elasticrun("status").stdout
        assert "the job is ending" in elasticrun("end", job.events("job_started")[0]["job_id"]).stdout
        assert job.wait() == 128 + signal.SIGTERM


def test_whoever_reads_that_the_job_has_started_finds_it(tmp_path: Path) -> None:
    found: list[list[str]] = []
    driver: Any = SimpleNamespace(
        page=None,
        job=SimpleNamespace(job_id="1f"),
        settings=SimpleNamespace(quiet=False, command=("true",), accept_agents=False, journal_folder=None),
        agents=SimpleNamespace(ways=SimpleNamespace(url="unix:/a/driver.sock"), meets_at=0),
        chronicle=SimpleNamespace(started=lambda *_, again: found.append([job.job_id for job in running_jobs()])),
        takeover=None,
        end=SimpleNamespace(is_abandoned=False),
    )
    driver._take_down = lambda posting: ElasticDriver._take_down(driver, posting)

    async def post() -> None:
        async with contextlib.AsyncExitStack() as way_out:
            await ElasticDriver._post(driver, tmp_path / "driver.sock", way_out)

    asyncio.run(post())
    assert found == [["1f"]]
    assert running_jobs() == []
