"""The launcher that started this process with others (mpirun or srun), by its environment variables.

Owns the variables' names and meaning. Pure: the environment is passed in. Does not know how the ranks meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_driver.errors import SettingsError

# slurm.h: steps not made by srun (batch script, interactive shell, extern, pending) have this number or a higher one.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place among those that were started together.

    Attributes:
        launcher: name of the launcher, for messages.
        is_mpi: whether it is an MPI launcher.
        rank: this process's rank.
        size: how many processes there are; 0 if the variables do not say.
        local_size: how many of them are on this machine; 0 if the variables do not say.
        job: distinguishes these from all others that one user has started on one machine; "" if only the launcher's
            process does.
    """

    launcher: str
    is_mpi: bool
    rank: int
    size: int
    local_size: int = 0
    job: str = ""

    @property
    def is_on_one_host(self) -> bool:
        """Whether all of them are known to be on this machine."""
        return self.size > 0 and self.local_size == self.size


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Return this process's launcher and place; None if no launcher of several processes started it.

    The innermost launcher counts: mpirun inside a Slurm allocation is mpirun, and a process of torchrun has none of
    these.

    Raises:
        SettingsError: the variables are set, but not to consistent numbers.
    """
    if environ.get("TORCHELASTIC_RUN_ID"):
        return None
    launch = _open_mpi(environ) or _hydra(environ) or _slurm(environ) or _other(environ)
    if launch is not None and launch.size and not launch.rank < launch.size:
        raise SettingsError(
            f"cannot use the rank that {launch.launcher} gave this process: rank {launch.rank} of {launch.size}"
        )
    return launch


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    # The namespace is the job's number, made from mpirun's process id; the addresses contain its own ports.
    names = (
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_hnp_uri",
        "PMIX_SERVER_URI4",
        "PMIX_SERVER_URI2",
    )
    job = "\n".join(environ.get(name, "") for name in names)
    return Launch(
        "Open MPI's mpirun",
        is_mpi=True,
        rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
        size=_number(environ, "OMPI_COMM_WORLD_SIZE"),
        local_size=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
        job=job if job.strip() else "",
    )


def _hydra(environ: Mapping[str, str]) -> Launch | None:
    if not (environ.get("PMI_RANK") and environ.get("MPI_LOCALNRANKS")):
        return None
    # It names no job: all of its variables are the same in the next one.
    return Launch(
        "MPICH's mpirun",
        is_mpi=True,
        rank=_number(environ, "PMI_RANK"),
        size=_number(environ, "PMI_SIZE"),
        local_size=_number(environ, "MPI_LOCALNRANKS"),
    )


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    # A batch script has a rank as well, but no step; an interactive shell has a step with a special number.
    step = environ.get("SLURM_STEP_ID", "")
    if not environ.get("SLURM_PROCID") or not step.isdecimal() or int(step[:18]) >= _FIRST_SPECIAL_STEP:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    nodes_name = "SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    size = _number(environ, size_name)
    # Jobs of two clusters may have the same number; srun's own port is unique while it runs.
    job = ("SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_LAUNCHER_PORT")
    return Launch(
        "srun",
        is_mpi=False,
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_size=size if _number(environ, nodes_name, 0) == 1 else 0,
        job="\n".join(environ.get(name, "") for name in job),
    )


def _other(environ: Mapping[str, str]) -> Launch | None:
    """Recognize a launcher whose variables do not suffice to meet without MPI."""
    for name in ("PMI_RANK", "PMIX_RANK"):
        if environ.get(name):
            size = _number(environ, "PMI_SIZE", 0)
            return Launch(f"a launcher that sets {name}", is_mpi=True, rank=_number(environ, name), size=size)
    return None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise SettingsError(f"cannot use {name}={text[:40]!r}, which a launcher sets: it is not a number")
    return int(text)
