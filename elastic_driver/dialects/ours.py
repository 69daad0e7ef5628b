"""The environment of a worker's process: the driver's own, less what would mislead, plus the worker's place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_driver.dialects.horovod_shim import ENV_SHIM, NEVER, with_shim
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import ENV_KEY, ENV_RANKS_KEY, JobKey
from elastic_driver.rendezvous.environment import ENV_ADDRESS, ENV_JOB, ENV_OWNER, ENV_RENDEZVOUS, ENV_ROUND, ENV_WORKER

# Not passed on: shell functions and the shell's own bookkeeping (Horovod filters the same), and what an outer job of
# ours or of torchrun said of itself - a worker of this job must not take it for its own.
_NOT_INHERITED = re.compile(
    r"^(BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|ELASTIC_DRIVER_(RENDEZVOUS|KEY|RANKS_KEY|WORKER|JOB|ROUND|ADDRESS|OWNER|DURABLE_[A-Z]+)"
    r"|HOROVOD_(HOSTNAME|RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|GLOO_RENDEZVOUS_(ADDR|PORT)|GLOO_IFACE)"
    r"|(TORCHELASTIC_|OMPI_COMM_|PMI_).*)$"
)

# What torch's NCCL groups read when they are made, whatever the driver's environment says. By default their watchdog
# ends the process when a collective fails or takes too long, or when the watchdog itself is blocked. Here a failed
# collective ends a round. Set before the process starts: in a running one no thread may change the environment.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # aborts communicators, leaves the process alone
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # asks the store each second
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}


@dataclass(frozen=True, slots=True)
class JobAddress:
    """What every worker of the job is told.

    Attributes:
        url: the driver's HTTP server.
        key: of the job; workers get what is derived from it.
        job_id: marks the job's processes.
        address: where workers listen for each other.
        owner: the driver's process, as :mod:`elastic_driver.worker.rounds.owner` names it.
    """

    url: str
    key: JobKey
    job_id: str
    address: str
    owner: str = ""


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the driver's environment workers get."""
    return {name: value for name, value in environ.items() if not _NOT_INHERITED.match(name)}


def worker_env(
    inherited: Mapping[str, str],
    *,
    job: JobAddress,
    exported: Mapping[str, str],
    worker: WorkerId,
    planned: SlotInfo,
    round_id: int,
    cores: int,
    horovod_shim: str = NEVER,
) -> dict[str, str]:
    """The whole environment for one worker.

    Args:
        inherited: of the driver's environment, what is inheritable().
        job: where the driver is.
        exported: variables of the tuning flags.
        worker: whose environment it is.
        planned: its place if the round were formed now. Scripts that read HOROVOD_RANK and the like before ``init()``
            see this; the truth is ``hvd.rank()``.
        round_id: the round that runs now; 0 for none.
        cores: processors the driver may use; shared out to OpenMP threads when the user set none, because workers
            with as many threads each as the machine has cores slow each other down many times over.
        horovod_shim: see Settings.
    """
    env = dict(inherited)
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // planned.size)))
    env |= exported
    python_path = with_shim(env.pop("PYTHONPATH", None), horovod_shim)
    if python_path is not None:
        env["PYTHONPATH"] = python_path
    env[ENV_SHIM] = horovod_shim
    env |= NCCL
    env |= {
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": worker.hostname,
        "HOROVOD_RANK": str(planned.rank),
        "HOROVOD_SIZE": str(planned.size),
        "HOROVOD_LOCAL_RANK": str(planned.local_rank),
        "HOROVOD_LOCAL_SIZE": str(planned.local_size),
        "HOROVOD_CROSS_RANK": str(planned.cross_rank),
        "HOROVOD_CROSS_SIZE": str(planned.cross_size),
        ENV_RENDEZVOUS: job.url,
        ENV_KEY: job.key.of_worker(worker).hex(),
        ENV_RANKS_KEY: job.key.of_ranks().hex(),
        ENV_WORKER: worker.key,
        ENV_JOB: job.job_id,
        ENV_ROUND: str(round_id),
        ENV_ADDRESS: job.address,
        ENV_OWNER: job.owner,
    }
    return env
