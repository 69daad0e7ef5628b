"""``horovod.runner.common.util.env``: the variables to pass to workers, and a process's rank from its environment."""

from __future__ import annotations

import os
import re

from elastic_driver.compat.runner.secret import HOROVOD_SECRET_KEY

__all__ = [
    "IGNORE_REGEXES",
    "KUBEFLOW_MPI_EXEC",
    "LOG_LEVEL_STR",
    "get_env_rank_and_size",
    "is_exportable",
    "is_kubeflow_mpi",
]

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", HOROVOD_SECRET_KEY}
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"


def is_exportable(v: str) -> bool:
    """Return whether a variable of this name is passed to workers."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the launcher's variables; (0, 1) without a launcher.

    Raises:
        RuntimeError: only one of the two variables is set.
    """
    for launcher in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        names = f"{launcher}_RANK", f"{launcher}_SIZE"
        rank, size = map(os.environ.get, names)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"cannot determine this process's rank and size: only one of {names[0]} and {names[1]} is set"
            )
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Return whether Kubeflow's MPI operator starts the processes."""
    return os.environ.get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC  # noqa: SIM112 - Open MPI's name
