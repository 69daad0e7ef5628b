"""Scripts for torchrun, unchanged, under elasticrun: they are restarted, forked warm, and lose no saved step."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.ports import _first_free, bound_port
from tests.support import extent
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import Job
from tests.support.processes.launching import job as launched
from tests.support.processes.launching import run

pytestmark = pytest.mark.integration


class Script(Job):
    """elasticrun on the plain DDP script, with a shim-free environment."""

    def __init__(self, folder: Path, hosts: str, *flags: str, **env: str) -> None:
        self.stop, self.fail, self.error = folder / "stop", folder / "fail", folder / "error.json"
        files = {"CHECKPOINT": folder / "model.pt", "STOP": self.stop, "FAIL": self.fail}
        super().__init__(
            folder,
            hosts,
            *("-np", "1", "--min-np", "1", "--on-change", "restart", "--grace-time", "60", *flags),
            command=[sys.executable, str(PROGRAMS / "ddp_program.py"), "as ${local_rank}"],
            env={name: str(file) for name, file in files.items()}
            | {"TORCHELASTIC_ERROR_FILE": str(self.error), "OMP_NUM_THREADS": "1"}
            | env,
        )

    def generations(self) -> list[list[dict[str, Any]]]:
        """The step lines of rank 0, by process, in the order of time."""
        lines = [line for line in self.steps() if line["rank"] == 0]
        return [list(group) for _, group in itertools.groupby(lines, key=lambda line: line["pid"])]


def test_hosts_come_and_go_and_a_worker_fails(tmp_path: Path) -> None:
    both, one = "localhost:1\n127.0.0.1:1\n", "localhost:1\n"
    with Script(tmp_path, both, ASK="1") as job:
        job.wait_for_steps(2)
        job.set_hosts(one)
        job.wait_for_steps(1)
        at = job.steps()[-1]["time"]
        job.set_hosts(both)
        job.wait_for_steps(2, after=at)
        generations = job.generations()
        assert [group[0]["size"] for group in generations] == [2, 1, 2]
        numbers = [line["step"] for group in generations for line in group]
        assert numbers == list(range(1, len(numbers) + 1)), "no step is lost, and none is done twice"
        assert [group[0]["warm"] for group in generations] == [True, True, True], "the first ones, too"
        assert {line["TORCHELASTIC_RESTART_COUNT"] for line in job.steps()} == {"0"}, "nothing has failed yet"
        assert len({group[0]["MASTER_PORT"] for group in generations}) == 3, "a store of its own for each"
        assert not [event for event in job.events("worker_exited") if event["returncode"]]
        places = {(line["rank"], line["GROUP_RANK"], line["LOCAL_RANK"], *line["args"]) for line in job.steps()}
        assert places == {(0, "0", "0", "as 0"), (1, "1", "0", "as 0")}

        job.fail.touch()
        at = job.steps()[-1]["time"]
        job.wait_for("the exception", lambda: not job.fail.exists())
        job.wait_for("the next generation", lambda: len(job.generations()) == 4)
        job.wait_for_steps(1, after=at)
        last = job.generations()[-1]
        assert (last[0]["warm"], last[0]["TORCHELASTIC_RESTART_COUNT"]) == (True, "1")
        assert "ValueError: on purpose" in job.wait_for("its cause", lambda: "on purpose" in job.said() and job.said())
        job.stop.touch()
        assert job.wait() == 0
        assert not job.error.exists(), "the job has not failed"


# The second of two fails at its first start. When both are started again, they make process groups and let them die
# with a wrapper. Unmended, torch hangs within some dozens.
FAILS_ONCE = """\
import os
import sys

import torch
import torch.distributed as dist


def use():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    parts = [torch.zeros(1)]
    for _ in range(3):
        dist.all_gather(parts, torch.zeros(1))
    dist.destroy_process_group()


generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
print("generation", generation, "rank", rank, "warm", "torch._dynamo" in sys.modules, flush=True)
dist.init_process_group("gloo")
if generation == 0 and rank == "1":
    sys.exit(7)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
for number in range(TIMES):
    use()
print("rank", rank, "used", number + 1, flush=True)
"""


def plain(folder: Path, text: str, *flags: str) -> Job:
    """elasticrun on this script, as it is called in torchrun's place: no hosts, no --min-np."""
    path = folder / "train.py"
    path.write_text(text)
    command = [*flags, "--max-restarts=1", str(path)]
    return Job(folder, None, command=command, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


def test_workers_that_are_restarted_in_a_job_of_fixed_size_are_forked(tmp_path: Path) -> None:
    """Process groups that die with their wrapper hang none of them."""
    times = extent.examples(300)
    with plain(tmp_path, FAILS_ONCE.replace("TIMES", str(times)), "--nproc-per-node=2") as job:
        assert job.wait() == 0, job.said()
        said = job.stdout.read_text()
        for generation in (0, 1):
            for rank in (0, 1):
                assert f"generation {generation} rank {rank} warm True" in said, said
        for rank in (0, 1):
            assert f"rank {rank} used {times}" in said, said


def test_a_job_that_fails_leaves_an_error_file_of_its_own(tmp_path: Path) -> None:
    with Script(tmp_path, "localhost:2\n", "-np", "2", "--min-np", "2", OMP_NUM_THREADS="") as job:
        job.fail.touch()
        assert job.wait() == 1
        assert "job failed: ValueError: on purpose (ddp_program.py:" in job.said()
        message = json.loads(job.error.read_text())["message"]
        assert (message["message"], message["errorCode"]) == ("ValueError: on purpose", 1)
        assert "ddp_program.py" in message["extraInfo"]["py_callstack"]


# Who raises is on its way out for longer than the other takes to fail of it.
SLOW_TO_END = """\
import atexit, os, signal, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    named = Path(__file__).with_name("named")
    if os.environ["RANK"] == "1":
        atexit.register(signal.pause)
        named.with_suffix(".new").write_text(os.environ["TORCHELASTIC_ERROR_FILE"])
        named.with_suffix(".new").rename(named)
        raise ValueError("on purpose")
    while not (named.exists() and os.path.exists(named.read_text())):
        time.sleep(0.01)
    # Far longer than a message to the driver takes: no more exactly does it know when an error was raised.
    while time.time() - os.stat(named.read_text()).st_mtime < 5:
        time.sleep(0.01)
    raise RuntimeError("the other is gone")

main()
"""


def test_the_cause_is_what_was_raised_first_and_not_whose_process_ended_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLOW_TO_END)
    flags = ("-np", "2", "--min-np", "2", "--on-change", "restart")
    with Job(tmp_path, "localhost:2\n", *flags, command=[sys.executable, str(script)]) as job:
        assert job.wait() == 1
        last = job.said().splitlines()[-1]
        assert "job failed: ValueError: on purpose (train.py:" in last
        assert ", rank 1 on localhost" in last


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("family", [socket.AF_INET6, socket.AF_INET])
def test_the_store_of_torch_listens_at_a_held_port(libuv: bool, family: socket.AddressFamily) -> None:
    with bound_port([]) if family == socket.AF_INET6 else _first_free(family, (0,)) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"), socket.socket() as thief:
            thief.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=libuv)
        client = dist.TCPStore("127.0.0.1", port, is_master=False, use_libuv=libuv)
        client.set("key", "value")
        assert store.get("key") == b"value"


BLOCKED = """
import os, signal, sys, torch, torch.distributed as dist

def leave(number, frame):
    sys.exit(7)

signal.signal(signal.SIGTERM, leave)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
x = torch.ones(1)
dist.all_reduce(x)
try:
    print("ready", sys.argv[2], flush=True)
    if sys.argv[2] == "1":
        signal.pause()
    dist.all_reduce(x)
except RuntimeError:
    signal.pause()  # SIGTERM is about to be handled
finally:
    print("tidied up", flush=True)
"""


@pytest.mark.release  # two imports of torch; unit/launch/horovod/test_connections.py severs connections of processes
def test_who_waits_for_a_lost_peer_still_tidies_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with launched() as job:
            workers = [
                await job.start(
                    [sys.executable, "-c", BLOCKED, str(tmp_path / "store"), str(rank)],
                    worker=WorkerId("localhost", rank, 0),
                )
                for rank in range(2)
            ]
            for rank in range(2):
                await job.sink.has(f"ready {rank}")
            os.kill(workers[1].pid, signal.SIGSTOP)
            # Without its connections being shut it would hang for all of the grace.
            workers[0].stop(10_000.0, sever=True)
            status = await workers[0].wait()
            # torch itself now and then ends a process that has a collective under way by abort(), after all else.
            assert status.returncode in (7, -signal.SIGABRT)
            await job.sink.has("tidied up")  # what it has written may be read after its end
            workers[1].kill()
            await workers[1].wait()

    run("uvloop", main)
