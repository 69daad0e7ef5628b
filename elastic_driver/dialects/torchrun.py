"""torchrun's environment variables, set for workers so that scripts written for torchrun run unchanged.

Pure: a start in, variables out. The variables mean what they do in ``torch.distributed.elastic`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastic_driver.dialects.dialect import WorkerStart
from elastic_driver.rendezvous.environment import ENV_LOCAL_RANK

PLACE_VARIABLES = frozenset(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_ERROR_FILE",
    )
)
"""Variables whose values differ between workers, or between generations of them."""

HANDLED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that end a job by default."""


@dataclass(frozen=True, slots=True)
class TorchrunJob:
    """Settings of torchrun that all workers of a job share.

    Attributes:
        run_id: the job's name (--rdzv-id).
        role: the workers' role (--role).
        max_restarts: the limit of unplanned resets; None for no limit.
        virtual_local_rank: whether each worker sees its own GPU only, as device 0.
        signals: names of the signals that end the job (--signals-to-handle).
        macros: whether ``${local_rank}`` in the command stands for the worker's local rank.
    """

    run_id: str
    role: str = "default"
    max_restarts: int | None = None
    virtual_local_rank: bool = False
    signals: tuple[str, ...] = HANDLED_SIGNALS
    macros: bool = False


# "No limit" for scripts written for torchrun: a number that no job reaches.
_NO_BOUND = 2**31 - 1


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def torchrun_environment(
    start: WorkerStart, job: TorchrunJob, *, inherited: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return the variables of one worker. Those inherited may include a list of devices.

    Rank 0 has to serve the store of its generation itself, at a port reserved for it: no store outlives its generation,
    so no rank finds keys of the last one there.
    """
    planned = start.planned
    # The hosts of a joiner's plan are the members'; its own host may be missing.
    hosts = start.hosts if start.worker.hostname in start.hosts else (*start.hosts, start.worker.hostname)
    env = {
        "RANK": planned.rank,
        "WORLD_SIZE": planned.size,
        "LOCAL_RANK": planned.local_rank,
        "LOCAL_WORLD_SIZE": planned.local_size,
        "GROUP_RANK": hosts.index(start.worker.hostname),
        "GROUP_WORLD_SIZE": len(hosts),
        "ROLE_NAME": job.role,
        "ROLE_RANK": planned.rank,
        "ROLE_WORLD_SIZE": planned.size,
        "TORCHELASTIC_RESTART_COUNT": start.resets,
        "TORCHELASTIC_MAX_RESTARTS": _NO_BOUND if job.max_restarts is None else job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(job.signals),
    }
    if job.macros:
        env[ENV_LOCAL_RANK] = planned.local_rank
    if start.meeting is not None:
        env |= {"MASTER_ADDR": start.meeting.address, "MASTER_PORT": start.meeting.port}
    if job.virtual_local_rank:
        env |= {"LOCAL_RANK": 0, VISIBLE_DEVICES: _device(inherited.get(VISIBLE_DEVICES, ""), planned.local_rank)}
    return {name: str(value) for name, value in env.items()}


def _device(listed: str, local_rank: int) -> str:
    """Return the device for a worker: its entry of the list, or else its local rank."""
    devices = [device.strip() for device in listed.split(",") if device.strip()]
    return devices[local_rank] if local_rank < len(devices) else str(local_rank)
