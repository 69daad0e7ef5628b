"""The dialect of this library's own workers: they meet and reset inside their running processes.

Owns their environment (the driver's own, less what would mislead, plus the worker's place), and which routes of the
driver's server they use. What is said there is in :mod:`elastic_driver.rendezvous.messages`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.dialects.horovod_shim import ENV_SHIM, NEVER, with_shim
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import ENV_KEY, ENV_RANKS_KEY
from elastic_driver.rendezvous.environment import ENV_JOB, ENV_OWNER, ENV_RENDEZVOUS, ENV_ROUND, ENV_WORKER
from elastic_driver.rendezvous.routes import WORKER, Route, Routes
from elastic_driver.words import OnChange

# Not passed on: shell functions and the shell's own bookkeeping (Horovod filters the same), and what an outer job of
# ours or of torchrun said of itself - a worker of this job must not take it for its own.
_NOT_INHERITED = re.compile(
    r"^(BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|ELASTIC_DRIVER_(RENDEZVOUS|JOIN_TOKEN|KEY|RANKS_KEY|WORKER|JOB|MARK|ROUND|OWNER|DURABLE_[A-Z]+)"
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


# All of them answered by the server itself; the driver adds the route of torch Stores. What a worker posts has to name
# that worker.
OUR_ROUTES: Routes = {
    "next-round": Route({b"POST": WORKER}),
    "watch": Route({b"POST": WORKER}),
    "running": Route({b"POST": WORKER}),
    "leave": Route({b"POST": WORKER}),
    "exchange": Route({b"POST": WORKER}),
    "key": Route({b"GET": WORKER, b"PUT": WORKER}),
}


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the driver's environment workers get."""
    return {name: value for name, value in environ.items() if not _NOT_INHERITED.match(name)}


class OurDialect:
    """See Dialect.

    Args:
        environ: the driver's environment.
        exported: variables that the driver and its flags set.
        horovod_shim: see Settings.
        more_routes: what its workers may ask beside OUR_ROUTES.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        exported: Mapping[str, str],
        horovod_shim: str = NEVER,
        more_routes: Routes | None = None,
    ) -> None:
        self._inherited = inheritable(environ)
        self._exported = dict(exported)
        self._horovod_shim = horovod_shim
        self._routes = {**OUR_ROUTES, **(more_routes or {})}

    @property
    def on_change(self) -> OnChange:
        """They ask for the next round."""
        return OnChange.IN_PLACE

    @property
    def routes(self) -> Routes:
        """What it takes to meet in a round, and to leave it."""
        return self._routes

    def environment(
        self, worker: WorkerId, planned: SlotInfo, *, job: JobAddress, round_id: int, cores: int
    ) -> dict[str, str]:
        """See Dialect. Scripts that read HOROVOD_RANK and the like before ``init()`` see the plan; the truth is
        ``hvd.rank()``.
        """
        env = dict(self._inherited)
        # Workers with as many threads each as the machine has cores slow each other down many times over.
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // planned.size)))
        env |= self._exported
        python_path = with_shim(env.pop("PYTHONPATH", None), self._horovod_shim)
        if python_path is not None:
            env["PYTHONPATH"] = python_path
        env[ENV_SHIM] = self._horovod_shim
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
            ENV_OWNER: job.owner,
        }
        return env
