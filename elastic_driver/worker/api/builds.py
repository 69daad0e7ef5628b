"""Horovod's functions that report a build's features, and its timeline, as they apply here."""

from __future__ import annotations

import os

from elastic_driver.errors import NotInitializedError
from elastic_driver.worker.launched import across
from elastic_driver.worker.rounds.current import current, is_initialized
from elastic_driver.worker.rounds.runtime import runtime


def gloo_built() -> bool:
    """Return True: Gloo, ours or PyTorch's, carries the collectives."""
    return True


def gloo_enabled() -> bool:
    """Return True: nothing but Gloo is used."""
    return True


def mpi_built() -> bool:
    """Return whether mpi4py is installed. Ranks use it to find each other; collectives never use MPI."""
    return across.is_installed()


def mpi_enabled() -> bool:
    """Return whether init() was called in a job started by an MPI launcher, or with a communicator."""
    return is_initialized() and runtime().is_through_mpi


def mpi_threads_supported() -> bool:
    """Return whether any thread may call MPI, if this process has started it (through mpi4py).

    Raises:
        ValueError: the job was not started through MPI, as in Horovod.
    """
    if not mpi_enabled():
        raise ValueError("cannot determine whether MPI supports threads: this job was not started through MPI")
    return across.threads_supported()


def nccl_built() -> int:
    """Return 0: tensors on other devices go through the CPU."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: tensors on other devices go through the CPU."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: object) -> None:
    """Do nothing: no extension is required."""


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's signature
    """Start writing a Chrome trace of the collectives. Call it on all ranks; rank 0 writes the file.

    Raises:
        NotInitializedError: init() was not called.
        OSError: the file cannot be written.
    """
    _check_initialized()
    context = current()
    if context.slot.rank == 0:
        context.engine.start_timeline(os.fspath(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Complete the trace. Raises NotInitializedError if init() was not called."""
    _check_initialized()
    current().engine.stop_timeline()


def _check_initialized() -> None:
    if not is_initialized():
        raise NotInitializedError("elastic_driver has not been initialized; use hvd.init().")
