"""What one worker of ``elasticrun doctor`` says of its machine: as it travels to the driver, and as ``--json`` has it.

Owns the shapes. Nothing in them is secret: no variable, no key, and no path but a folder's role.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from elastic_driver.rendezvous.messages import Body

UNLIMITED = -1
"""A limit that is none."""


@dataclass(frozen=True, slots=True)
class Disc:
    """Where a job would write on a machine.

    Attributes:
        role: "tmp", or the flag that names the folder.
        free_bytes: that this user may still write there; of the nearest folder above, where it is not there yet.
        writable: whether this user may write there.
        error: why nothing can be written there, or why nobody knows; "" where it is known.
        missing: whether it is not there and nobody makes it: then programs take another.
    """

    role: str
    free_bytes: int = 0
    writable: bool = False
    error: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Meeting:
    """The allreduces over all workers of one round.

    Attributes:
        size: the round's workers.
        correct: whether each result was the right one.
        small_s: seconds that one of a single number took, the median.
        large_s: likewise of one of LARGE_BYTES.
    """

    size: int
    correct: bool
    small_s: float
    large_s: float


LARGE_BYTES = 4 << 20
"""Of the larger allreduce."""


@dataclass(frozen=True, slots=True)
class HostFacts(Body):
    """One machine.

    Attributes:
        package: version of elastic_driver.
        python, torch, numpy: versions; "" where it is not installed.
        torch_error, native_error: why PyTorch, or the native extension, cannot be used though it is there; "" where it
            can be, or was not tried yet.
        kernel, machine, libc: as ``uname`` and the C library call themselves.
        cuda: the version for which PyTorch was built; "" for none.
        gpus: their names; gpu_driver: the version of their driver.
        gpu_error: why ``nvidia-smi``, which is there, does not say that.
        clock_s: how far this machine's clock is ahead of the driver's, seconds; None where that was not measured.
        clock_error_s: by how much that may be wrong at most, seconds.
        limits: by its name in ``ulimit`` (nofile, nproc, memlock, core) the soft limit; UNLIMITED for none.
        core_pattern: where the kernel has core dumps written.
        shm_bytes: size of /dev/shm; 0 where there is none.
        discs: where a job would write.
        cpus: that this process may use.
        memory_bytes: of the machine.
        available_bytes: that are free, of the machine and in its cgroups.
        cgroup_bytes: the limit of the cgroup; UNLIMITED where it has none below the machine's memory.
        lacks: what the kernel, or the container, does not allow, and what comes of that.
        meeting: what came of the allreduces; None before.
        error: why this worker could not go on; "" for no reason.
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
    discs: tuple[Disc, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    available_bytes: int = 0
    cgroup_bytes: int = UNLIMITED
    lacks: tuple[str, ...] = ()
    meeting: Meeting | None = None
    error: str = ""
