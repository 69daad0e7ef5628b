"""Horovod's questions about what a build can do, and its timeline, as they apply here."""

from __future__ import annotations

import os

from elastic_driver.errors import NotInitializedError
from elastic_driver.worker.launched import across
from elastic_driver.worker.rounds.current import current, is_initialized
from elastic_driver.worker.rounds.runtime import runtime


def gloo_built() -> bool:
    """True: Gloo carries the collectives, ours or PyTorch's."""
    return True


def gloo_enabled() -> bool:
    """True: there is nothing else."""
    return True


def mpi_built() -> bool:
    """Whether MPI can be used: mpi4py is installed. It tells ranks of each other; the collectives are never MPI's."""
    return across.is_installed()


def mpi_enabled() -> bool:
    """Whether init() was called in a job that a launcher of MPI has started, or with a communicator."""
    return is_initialized() and runtime().is_through_mpi


def mpi_threads_supported() -> bool:
    """Whether MPI, if this process has started it (through mpi4py), may be called by any thread.

    Raises:
        ValueError: the job was not started through MPI, as in Horovod.
    """
    if not mpi_enabled():
        raise ValueError("cannot say whether MPI supports threads: this job was not started through MPI")
    return across.threads_supported()


def nccl_built() -> int:
    """0: tensors on other devices go through the CPU."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False: tensors on other devices go through the CPU."""
    return False


def rocm_built() -> bool:
    """False."""
    return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: object) -> None:
    """Does nothing: there is no extension without which this does not work."""


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's signature
    """Begins to write a Chrome trace of the collectives. Call it on all ranks; rank 0 writes the file.

    Raises:
        NotInitializedError: init() was not called.
        OSError: the file cannot be written.
    """
    _check_initialized()
    context = current()
    if context.slot.rank == 0:
        context.engine.start_timeline(os.fspath(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Completes the trace. Raises NotInitializedError when init() was not called."""
    _check_initialized()
    current().engine.stop_timeline()


def _check_initialized() -> None:
    if not is_initialized():
        raise NotInitializedError("elastic_driver has not been initialized; use hvd.init().")
