"""The exchange over mpi4py for a launched job: which rank is on which machine, and how rank 0 is reached.

Owns the use of mpi4py, which is imported only here, and only when needed: importing it starts MPI. mpi4py pickles what
is sent, so a job's ranks trust each other's processes, as in any MPI program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeGuard

from elastic_driver.errors import SettingsError
from elastic_driver.worker.launched.launcher import Launch

_INSTALL = "pip install 'elastic_driver[mpi]'"


class Communicator(Protocol):
    """The part of mpi4py's communicator that is used."""

    def Get_rank(self) -> int:
        """Return this process's rank."""

    def Get_size(self) -> int:
        """Return the number of processes."""

    def Is_inter(self) -> bool:
        """Return whether it connects two groups."""

    def Dup(self) -> Communicator:
        """Duplicate it. All processes call it."""

    def Free(self) -> None:
        """Free it. All processes call it."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all processes' objects, by rank. All processes call it."""

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object. All processes call it."""


def is_communicator(comm: object) -> TypeGuard[Communicator]:
    """Return whether it is a communicator of mpi4py."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(comm, module.Comm)


def is_null(comm: Communicator) -> bool:
    """Return whether this process is not in it."""
    return bool(comm == sys.modules["mpi4py.MPI"].COMM_NULL)


def is_installed() -> bool:
    """Return whether mpi4py can be imported. Does not start MPI."""
    return importlib.util.find_spec("mpi4py") is not None


def threads_supported() -> bool:
    """Return whether MPI runs in this process, and lets any thread call it."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return False
    return bool(module.Query_thread() == module.THREAD_MULTIPLE)


def world(launch: Launch) -> Communicator:
    """Return the communicator of all processes that were started together.

    Raises:
        SettingsError: mpi4py is not installed, or does not belong to the MPI that started them.
    """
    size = f"{launch.size} ranks" if launch.size else "ranks"
    try:
        from mpi4py import MPI
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mpi4py"
        if not missing:
            raise SettingsError(
                f"cannot load mpi4py, which ranks on several hosts need to find each other: {error}"
            ) from error
        how = "without a job id" if launch.is_on_one_host else "on several hosts"
        raise SettingsError(
            f"cannot join the job of {size} that {launch.launcher} started {how}: its ranks need mpi4py to find "
            f"rank 0, and it is not installed; {_INSTALL}"
        ) from None
    except (OSError, RuntimeError) as error:  # a wheel that finds no MPI library
        raise SettingsError(
            f"cannot load the MPI library, which ranks on several hosts need to find rank 0: {error}"
        ) from error
    found: Communicator = MPI.COMM_WORLD
    if (launch.size and found.Get_size() != launch.size) or found.Get_rank() != launch.rank:
        vendor = MPI.get_vendor()[0]
        raise SettingsError(
            f"cannot join the job of {launch.launcher}: this process is rank {launch.rank} of {launch.size} "
            f"there, but rank {found.Get_rank()} of {found.Get_size()} according to mpi4py, which uses {vendor}; "
            "make mpi4py use the launcher's MPI (MPI4PY_MPIABI, MPI4PY_LIBMPI), or install it for that MPI"
        )
    return found


@contextlib.contextmanager
def of_ranks(comm: Communicator, ranks: Sequence[int] | None) -> Iterator[Communicator]:
    """Make a communicator of the job's own. All of these ranks enter and leave it.

    Args:
        comm: the communicator to derive it from.
        ranks: ranks of that, in their order; None for all.
    """
    if ranks is None:
        own = comm.Dup()
    else:
        whole: Any = comm
        group = whole.Get_group().Incl(list(ranks))
        own = whole.Create_group(group)
        group.Free()
    try:
        yield own
    finally:
        own.Free()
