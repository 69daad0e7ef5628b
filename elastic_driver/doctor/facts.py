"""A worker's report on its machine in ``elasticrun doctor``: as sent to the driver, and as printed by ``--json``.

Owns the shapes. They contain no secrets: no variables, no keys, and no paths, only the roles of folders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from elastic_driver.rendezvous.messages import Body

UNLIMITED = -1
"""A limit's value if there is no limit."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder on a machine to which a job would write.

    Attributes:
        role: "tmp", or the flag that names the folder.
        free_bytes: space left there for this user; in the nearest existing parent if the folder does not exist.
        writable: whether this user may write there.
        error: why the folder is unusable, or its state unknown; "" if neither.
        missing: whether it does not exist and nothing creates it: then programs use another one.
    """

    role: str
    free_bytes: int = 0
    writable: bool = False
    error: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Meeting:
    """The results of the allreduces over all workers of one round.

    Attributes:
        size: the number of workers in the round.
        correct: whether all results were right.
        small_s: median duration of an allreduce of a single number, seconds.
        large_s: the same for LARGE_BYTES.
    """

    size: int
    correct: bool
    small_s: float
    large_s: float


LARGE_BYTES = 4 << 20
"""The size of the larger allreduce, bytes."""


@dataclass(frozen=True, slots=True)
class HostFacts(Body):
    """The facts of one machine.

    Attributes:
        package: version of elastic_driver.
        python, torch, numpy: versions; "" if not installed.
        torch_error, native_error: why PyTorch, or the native extension, is installed but unusable; "" if it is usable,
            or was not tried yet.
        kernel, machine, libc: as reported by ``uname`` and the C library.
        cuda: the version for which PyTorch was built; "" for none.
        gpus: their names; gpu_driver: the version of their driver.
        gpu_error: why ``nvidia-smi`` is installed but does not list them.
        clock_s: how far this machine's clock is ahead of the driver's, seconds; None if not measured.
        clock_error_s: the largest error of ``clock_s``, seconds.
        limits: soft limits by their names in ``ulimit`` (nofile, nproc, memlock, core); UNLIMITED for none.
        core_pattern: where the kernel writes core dumps.
        shm_bytes: size of /dev/shm; 0 if there is none.
        disks: the folders to which a job would write.
        cpus: the number of CPUs that this process may use.
        memory_bytes: of the machine.
        available_bytes: free memory, of the machine and in its cgroups.
        cgroup_bytes: the memory limit of the cgroup; UNLIMITED if none is below the machine's memory.
        lacks: features that the kernel, or the container, does not permit, and the consequences.
        lacks_error: why not all of these could be checked; "" if they were.
        meeting: the results of the allreduces; None before.
        error: why this worker failed; "" if it did not.
    """

    _what: ClassVar[str] = "what a host's worker says"

    package: str
    python: str
    torch: str = ""
    torch_error: str = ""
    numpy: str = ""
    native_error: str = ""
    kernel: str = ""
    machine: str = ""
    libc: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    gpu_driver: str = ""
    gpu_error: str = ""
    clock_s: float | None = None
    clock_error_s: float = 0.0
    limits: dict[str, int] = field(default_factory=dict)
    core_pattern: str = ""
    shm_bytes: int = 0
    disks: tuple[Disk, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    available_bytes: int = 0
    cgroup_bytes: int = UNLIMITED
    lacks: tuple[str, ...] = ()
    lacks_error: str = ""
    meeting: Meeting | None = None
    error: str = ""
