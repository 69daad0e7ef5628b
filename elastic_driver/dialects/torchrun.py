"""What torchrun tells a worker through its environment, so that a script for torchrun finds it here.

Pure: a start in, variables out. Their meanings are those of ``torch.distributed.elastic`` (torch 2.13).
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
"""What one worker, or one generation of them, is told otherwise than another."""

HANDLED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What ends a job, where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class TorchrunJob:
    """What all workers of a job are told alike.

    Attributes:
        run_id: the job's name (--rdzv-id).
        role: the workers' role (--role).
        max_restarts: unplanned resets that the job may have; None for no bound.
        virtual_local_rank: whether each sees its own GPU only, as the only one.
        signals: names of those that end the job (--signals-to-handle).
        macros: whether ``${local_rank}`` in the command stands for the worker's place on its host.
    """

    run_id: str
    role: str = "default"
    max_restarts: int | None = None
    virtual_local_rank: bool = False
    signals: tuple[str, ...] = HANDLED_SIGNALS
    macros: bool = False


# What torchrun's own scripts take for no bound: a number that nobody reaches.
_NO_BOUND = 2**31 - 1


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def torchrun_environment(
    start: WorkerStart, job: TorchrunJob, *, inherited: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The variables of one worker. Among those inherited may be a list of devices.

    Rank 0 is to serve the store of its generation itself, at a port that is held for it: no store outlives its
    generation, so no rank finds keys of the last one there.
    """
    planned = start.planned
    # A joiner is planned beside members that are on hosts of their own.
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
    """What the devices' variable is to name for a worker: its entry of the list, if there is one."""
    devices = [device.strip() for device in listed.split(",") if device.strip()]
    return devices[local_rank] if local_rank < len(devices) else str(local_rank)
