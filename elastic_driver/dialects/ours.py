"""The dialect of this library's own workers, which rendezvous and reset inside their running processes.

Owns their environment: the driver's own, without misleading variables, plus the worker's place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.dialects.horovod import ENV_ADDRESS, ENV_PROTOCOL, OFF, place_variables
from elastic_driver.dialects.horovod_shim import ENV_SHIM, NEVER, with_shim
from elastic_driver.dialects.torchrun import TorchrunJob, torchrun_environment
from elastic_driver.etcd.credentials import CREDENTIALS
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY
from elastic_driver.rendezvous.environment import (
    ENV_JOB,
    ENV_OWNER,
    ENV_PLACE,
    ENV_RENDEZVOUS,
    ENV_RESTARTED,
    ENV_ROUND,
    ENV_WORKER,
    NCCL,
)
from elastic_driver.words import OnChange

# Not passed on: shell functions and the shell's own bookkeeping (Horovod filters the same); variables of an outer job
# of ours or of torchrun, which a worker of this job must not mistake for its own; and credentials that only drivers may
# have.
_NOT_INHERITED = re.compile(
    r"^(BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|ELASTIC_DRIVER_(RENDEZVOUS|JOIN_TOKEN|KEY|RANKS_KEY|WORKER|JOB|CHIEF|TASK|MARK|ROUND|PLACE|LOCAL_RANK|RESTARTED|OWNER|MAY_CHANGE|BESIDE|HOROVOD_(PROTOCOL|ADDRESS|PORT)|NUMA_BINDING|DURABLE_[A-Z]+)"
    r"|HOROVOD_(HOSTNAME|RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|GLOO_RENDEZVOUS_(ADDR|PORT)|GLOO_IFACE)"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(NAME|RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    rf"|(TORCHELASTIC_|OMPI_COMM_|PMI_).*|{CREDENTIALS})$"
)


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the driver's environment that workers inherit."""
    return {name: value for name, value in environ.items() if not _NOT_INHERITED.match(name)}


class OurDialect:
    """The environment of this library's workers; a Dialect.

    Args:
        environ: the driver's environment.
        exported: variables that the driver and its flags set.
        horovod_shim, horovod_protocol: see Settings.
        on_change: the workers' kind at first.
        torchrun: values of torchrun's variables; None for its defaults.
        tells_as_horovod: whether to set Horovod's variables, too.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        exported: Mapping[str, str],
        horovod_shim: str = NEVER,
        horovod_protocol: str = OFF,
        on_change: OnChange = OnChange.IN_PLACE,
        torchrun: TorchrunJob | None = None,
        tells_as_horovod: bool = True,
    ) -> None:
        self._inherited = inheritable(environ)
        self._exported = dict(exported)
        self._horovod_shim = horovod_shim
        self._horovod_protocol = horovod_protocol
        self._on_change = on_change
        self._torchrun = torchrun
        self._tells_as_horovod = tells_as_horovod
        self._shared: set[str] = set()  # hosts that have had several workers at once

    @property
    def on_change(self) -> OnChange:
        """Their kind: they ask for the next round, or are restarted until they do."""
        return self._on_change

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        """Return the whole environment of one worker's process.

        Scripts that read HOROVOD_RANK and the like before ``init()`` see the plan; ``hvd.rank()`` is authoritative.
        Scripts that never call it find all of torchrun's variables.
        """
        worker, planned = start.worker, start.planned
        env = dict(self._inherited)
        in_place = not start.restarted
        # Workers that each have as many threads as the machine has cores slow each other down many times over.
        if in_place:
            env.setdefault("OMP_NUM_THREADS", str(max(1, start.cores // planned.size)))
        elif self._is_shared(worker.hostname, planned.local_size):
            env.setdefault("OMP_NUM_THREADS", "1")
        env |= self._exported
        python_path = with_shim(env.pop("PYTHONPATH", None), self._horovod_shim)
        if python_path is not None:
            env["PYTHONPATH"] = python_path
        env[ENV_SHIM] = self._horovod_shim
        if self._horovod_protocol != OFF:
            env |= {ENV_PROTOCOL: self._horovod_protocol, ENV_ADDRESS: start.address}
        if in_place:
            env |= NCCL
        else:
            env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        env |= torchrun_environment(start, self._torchrun or TorchrunJob(job.job_id), inherited=env)
        env |= {
            "PYTHONUNBUFFERED": "1",
            ENV_PLACE: ",".join(map(str, astuple(planned))),
            ENV_RENDEZVOUS: job.url,
            ENV_RANKS_KEY: job.key.of_ranks().hex(),
            ENV_WORKER: worker.key,
            ENV_JOB: job.job_id,
            ENV_ROUND: str(start.round_id),
            ENV_OWNER: job.owner,
        }
        if start.restarted:
            env[ENV_RESTARTED] = "1"
        if self._tells_as_horovod:
            env |= {
                "HOROVOD_ELASTIC": "1",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_HOSTNAME": worker.hostname,
                **place_variables(planned),
            }
        return env

    def _is_shared(self, hostname: str, local_size: int) -> bool:
        """Whether several workers share this host, or have: a stable environment allows warm forks."""
        if local_size > 1:
            self._shared.add(hostname)
        return hostname in self._shared
