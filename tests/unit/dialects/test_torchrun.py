"""What workers are told as torchrun tells it, and what stays the same from one generation to the next."""

from __future__ import annotations

import pytest

from elastic_driver.dialects.dialect import JobAddress, Meeting, WorkerStart
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.dialects.torchrun import TorchrunJob, torchrun_environment
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.error_files import ENV_ERROR_FILE
from elastic_driver.launch.warm.forks import _OWN
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.words import OnChange

pytestmark = pytest.mark.unit

JOB = JobAddress("http://127.0.0.1:1", JobKey.new(), "job")
MEETING = Meeting("10.0.0.1", 2345)


def start(
    rank: int = 3, size: int = 4, *, attempt: int = 0, resets: int = 0, local_size: int = 2, restarted: bool = True
) -> WorkerStart:
    worker = WorkerId("b", 1, attempt)
    slot = SlotInfo(rank, size, 1, local_size, 1, 2)
    return WorkerStart(worker, slot, ("a", "b"), 5 + attempt, 16, resets, MEETING, restarted=restarted)


def environment(first: WorkerStart, **environ: str) -> dict[str, str]:
    return OurDialect(environ, exported={}, on_change=OnChange.RESTART).environment(first, job=JOB)


def test_all_that_torchrun_tells() -> None:
    assert torchrun_environment(start(resets=2), TorchrunJob("run", "trainer", 7)) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "2345",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "7",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


def test_nothing_of_horovods_where_it_is_not_asked_for() -> None:
    dialect = OurDialect({}, exported={}, on_change=OnChange.RESTART, tells_as_horovod=False)
    told = dialect.environment(start(), job=JOB)
    assert not [name for name in told if name.startswith("HOROVOD_")]
    assert told["ELASTIC_DRIVER_PLACE"] == "3,4,1,2,1,2"
    assert environment(start())["HOROVOD_RANK"] == "3"


def test_what_differs_between_workers_and_generations_keeps_no_worker_from_being_forked() -> None:
    dialect = OurDialect({}, exported={}, on_change=OnChange.RESTART)
    told = [
        dialect.environment(start(rank, size, attempt=attempt, resets=attempt, local_size=local_size), job=JOB)
        for attempt, (rank, size, local_size) in enumerate([(3, 4, 2), (0, 2, 1), (1, 3, 2)])
    ]
    same = [{name: value for name, value in env.items() if name not in _OWN} for env in told]
    assert same[0] == same[1] == same[2]
    assert same[0]["OMP_NUM_THREADS"] == "1", "also where one is left of them"
    assert ENV_ERROR_FILE in _OWN


def test_threads_and_nccl_are_torchruns_where_workers_are_restarted() -> None:
    alone = environment(start(0, 1, local_size=1))
    assert "OMP_NUM_THREADS" not in alone
    assert environment(start(), OMP_NUM_THREADS="6")["OMP_NUM_THREADS"] == "6"
    assert alone["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in alone
    given = environment(start(), TORCH_NCCL_ASYNC_ERROR_HANDLING="3", CUDA_VISIBLE_DEVICES="4,5")
    assert (given["TORCH_NCCL_ASYNC_ERROR_HANDLING"], given["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")
    in_place = environment(start(restarted=False), TORCH_NCCL_ASYNC_ERROR_HANDLING="3")
    assert (in_place["TORCH_NCCL_ASYNC_ERROR_HANDLING"], in_place["OMP_NUM_THREADS"]) == ("2", "4")
    assert in_place["MASTER_PORT"] == "2345"
