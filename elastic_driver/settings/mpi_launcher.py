"""Settings from the environment of a launcher pod, as set by mpi-operator and Kubeflow Trainer for MPI.

Owns the variables' names, by implementation of MPI, and how such a pod is recognized. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

# Where both operators mount their files about the hosts.
_FOLDER = PurePosixPath("/etc/mpi")
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
# Open MPI's variable replaces --slots-per-host everywhere.
_SLOTS = "I_MPI_PERHOST"

VARIABLES = (*_HOSTFILES, _SLOTS)
"""The variables read here."""


def is_launcher_pod(environ: Mapping[str, str]) -> bool:
    """Return whether this is the environment of an operator's launcher pod."""
    return given_hostfile(environ) is not None


def given_hostfile(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the hostfile that the operator has mounted, and the variable that names it; None elsewhere.

    A file in another folder is a site's or a user's own for mpirun, and not about this job.
    """
    for variable in _HOSTFILES:
        path = environ.get(variable, "")
        if PurePosixPath(path).parent == _FOLDER:
            return path, variable
    return None


def given_slots(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the slots of hosts that name none, as text, if set for Intel's MPI; and the variable. None elsewhere."""
    text = environ.get(_SLOTS, "")
    return (text, _SLOTS) if text and is_launcher_pod(environ) else None
