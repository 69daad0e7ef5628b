"""Jobs that a real mpirun starts, on one machine and, with mpi4py, on three: Open MPI's and MPICH's, where they are."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.network.namespaces import Namespaces
from tests.support.processes.launched_jobs import (
    PROGRAM,
    answers,
    environment,
    flavours,
    mpi_environment,
    nothing_left,
    why_no_mpi,
    why_no_mpi4py,
)

pytestmark = [pytest.mark.integration, pytest.mark.mpi]

FLAVOURS = ("openmpi", "mpich")
PATIENCE_S = 100


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if why := why_no_mpi(name):
        pytest.skip(why)
    return name


@pytest.fixture
def with_mpi4py(flavour: str) -> str:
    if why := why_no_mpi4py(flavour):
        pytest.skip(why)
    return flavour


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with nothing_left(tmp_path):
        yield tmp_path


def start(flavour: str, folder: Path, size: int, what: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*flavours()[flavour], "-np", str(size), sys.executable, str(PROGRAM), what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(folder, **(mpi_environment(flavour) | more)),
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, _ = job.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        said, _ = job.communicate(timeout=30)
        raise AssertionError(f"the job does not end: {said[-3000:]}") from None
    return job.returncode, said


def elasticrun(
    flavour: str, folder: Path, *flags: str, what: Sequence[str], prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """``elasticrun --mpi`` with this mpirun as the only one on the PATH; it becomes that mpirun."""
    program = folder / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {flavours()[flavour][0]} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "elastic_driver", "--mpi", *flags, *what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(folder, **(mpi_environment(flavour) | {"PATH": path})),
    )


def test_two_jobs_at_once_on_one_machine(flavour: str, folder: Path) -> None:
    folders = [folder / name for name in ("one", "two")]
    jobs = []
    for each in folders:
        each.mkdir()
        jobs.append(start(flavour, each, 3, "meet", TOKEN=each.name))
    for each, job in zip(folders, jobs, strict=True):
        code, said = finish(job)
        assert code == 0, said
        assert answers(each, "ranks") == {rank: [[rank, rank, 0]] for rank in range(3)}
        assert answers(each, "sizes") == {rank: [[3, 3, 1]] for rank in range(3)}
        assert answers(each, "token") == {rank: [each.name] for rank in range(3)}
        assert all(values[0][0] for values in answers(each, "mpi").values())


def test_a_rank_that_dies_ends_the_job(flavour: str, folder: Path) -> None:
    code, said = finish(start(flavour, folder, 3, "train", DIES="1"))
    assert code != 0, said
    assert 1 in answers(folder, "trains")


def test_a_communicator_is_the_job(with_mpi4py: str, folder: Path) -> None:
    code, said = finish(start(with_mpi4py, folder, 4, "split"))
    assert code == 0, said
    # Each half backwards.
    assert answers(folder, "ranks") == {0: [[1, 1, 0]], 1: [[1, 1, 0]], 2: [[0, 0, 0]], 3: [[0, 0, 0]]}
    assert {tuple(values[0]) for values in answers(folder, "sizes").values()} == {(2, 2, 1)}
    assert answers(folder, "threads") == answers(folder, "same")


class Hosts:
    """Three machines, and how mpirun gets to them."""

    def __init__(self, hosts: Namespaces) -> None:
        self.hosts = hosts
        self.agent = hosts.folder / "agent"
        cases = "".join(f'{host.name}|{host.ipv4}) exec {shlex.join(host.prefix)} sh -c "$*" ;;\n' for host in hosts)
        self.agent.write_text(
            'while [ "${1#-}" != "$1" ]; do shift; done\n'  # ssh's options
            f'host=$1; shift\ncase $host in\n{cases}esac\necho "no host $host" >&2\nexit 1\n'
        )
        self.agent.write_text("#!/bin/sh\n" + self.agent.read_text())
        self.agent.chmod(0o755)

    def flags(self, flavour: str) -> list[str]:
        if flavour == "mpich":
            return ["-launcher", "ssh", "-launcher-exec", str(self.agent)]
        eth0 = ("--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0")
        return ["--mca", "plm_rsh_agent", str(self.agent), "--mca", "plm_rsh_no_tree_spawn", "1", *eth0]

    def start(
        self, flavour: str, folder: Path, where: str, size: int, *more: str, **values: str
    ) -> subprocess.Popen[str]:
        env = environment(folder, **(mpi_environment(flavour) | values))
        names = ["ANSWERS", "PYTHONPATH", *mpi_environment(flavour), *values]
        passed = [] if flavour == "mpich" else [word for name in names for word in ("-x", name)]
        listed = ["-hosts" if flavour == "mpich" else "-H", where]
        words = [*flavours()[flavour], *self.flags(flavour), *passed, *listed, "-np", str(size)]
        process: subprocess.Popen[str] = self.hosts[0].popen(
            [*words, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        return process


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Namespaces(3) as made:
        yield Hosts(made)


def test_three_hosts_of_unequal_size(with_mpi4py: str, folder: Path, hosts: Hosts) -> None:
    job = hosts.start(with_mpi4py, folder, "node0:2,node1:1,node2:2", 5, sys.executable, str(PROGRAM), "meet")
    code, said = finish(job)
    assert code == 0, said
    assert answers(folder, "ranks") == {
        rank: [list(place)] for rank, place in enumerate([(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 0, 2), (4, 1, 1)])
    }
    assert answers(folder, "sizes") == {
        rank: [list(sizes)] for rank, sizes in enumerate([(5, 2, 3), (5, 2, 2), (5, 1, 3), (5, 2, 3), (5, 2, 2)])
    }
    assert {tuple(values[0]) for values in answers(folder, "total").values()} == {(10.0, 10.0)}
    assert {values[0] for values in answers(folder, "homogeneous").values()} == {False}


def test_ranks_that_are_dealt_out_in_turn(folder: Path, hosts: Hosts) -> None:
    if why := why_no_mpi("openmpi") or why_no_mpi4py("openmpi"):
        pytest.skip(why)
    words = ["--map-by", "node", sys.executable, str(PROGRAM), "meet"]
    code, said = finish(hosts.start("openmpi", folder, "node0:2,node1:2", 4, *words))
    assert code == 0, said
    assert answers(folder, "ranks") == {0: [[0, 0, 0]], 1: [[1, 0, 1]], 2: [[2, 1, 0]], 3: [[3, 1, 1]]}
    assert {tuple(values[0]) for values in answers(folder, "total").values()} == {(6.0, 6.0)}


def test_a_rank_on_another_host_dies(with_mpi4py: str, folder: Path, hosts: Hosts) -> None:
    words = [sys.executable, str(PROGRAM), "train"]
    job = hosts.start(with_mpi4py, folder, "node0:1,node1:1,node2:1", 3, *words, DIES="2")
    code, said = finish(job)
    assert code != 0, said
    assert 2 in answers(folder, "trains")


def test_a_host_that_is_cut_off_holds_nobody(with_mpi4py: str, folder: Path, hosts: Hosts) -> None:
    words = [sys.executable, str(PROGRAM), "train"]
    more = {"ELASTIC_DRIVER_HOST_TIMEOUT_S": "2"}
    job = hosts.start(with_mpi4py, folder, "node0:1,node1:1,node2:1", 3, *words, **more)
    wait_until(job, lambda: len(answers(folder, "trains")) == 3)
    hosts.hosts[1].cut()
    # What the launcher makes of it is its own affair.
    wait_until(job, lambda: answers(folder, "error").keys() >= {0, 2})
    hosts.hosts[1].heal()
    job.kill()
    finish(job)


def wait_until(job: subprocess.Popen[str], found: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not found():
        assert job.poll() is None or found(), "the job has ended"
        assert time.monotonic() < end
        time.sleep(0.02)


def test_elasticrun_mpi_over_hosts(with_mpi4py: str, folder: Path, hosts: Hosts) -> None:
    flags = ("-np", "3", "-H", "node0:1,node1:2", "--rsh-agent", str(hosts.agent), "--network-interfaces", "eth0")
    what = [sys.executable, str(PROGRAM), "meet"]
    code, said = finish(elasticrun(with_mpi4py, folder, *flags, what=what, prefix=hosts.hosts[0].prefix))
    assert code == 0, said
    assert answers(folder, "sizes") == {0: [[3, 1, 2]], 1: [[3, 2, 2]], 2: [[3, 2, 1]]}


def test_elasticrun_mpi_hands_output_and_exit_code_on(flavour: str, folder: Path) -> None:
    script = "import os, sys; print('a word', flush=True); sys.exit(3 * (os.environ['GIVEN'] == '5'))"
    job = elasticrun(flavour, folder, "-np", "2", "-x", "GIVEN=5", what=[sys.executable, "-c", script])
    code, said = finish(job)
    assert code == 3, said
    assert said.count("a word") == 2


def test_elasticrun_mpi_runs_ranks(flavour: str, folder: Path) -> None:
    job = elasticrun(flavour, folder, "-np", "3", what=[sys.executable, str(PROGRAM), "meet"])
    code, said = finish(job)
    assert code == 0, said
    assert answers(folder, "sizes") == {rank: [[3, 3, 1]] for rank in range(3)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_elasticrun_mpi_and_its_ranks(flavour: str, folder: Path, number: signal.Signals) -> None:
    job = elasticrun(flavour, folder, "-np", "2", what=[sys.executable, str(PROGRAM), "train"])
    wait_until(job, lambda: len(answers(folder, "trains")) == 2)
    job.send_signal(number)
    code, said = finish(job)
    # MPICH's ends with the signal's number, or with 0 when its ranks are gone before it has looked at them.
    assert code != 0 or flavour == "mpich", said


def test_elasticrun_mpi_without_mpirun(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "elastic_driver", "--mpi", "-np", "2", "/bin/true"]
    done = subprocess.run(words, env=environment(tmp_path, PATH="/no/such"), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("elasticrun: error: cannot find mpirun on the PATH (--mpi): install")
