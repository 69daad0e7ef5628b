"""The processors to which a worker is bound: those near its GPU, like torchrun's ``--numa-binding``.

Owns reading what Linux and NVIDIA's driver report of the machine. Modes: ``node`` (the processors of the GPU's NUMA
node), ``socket`` (of its socket's nodes), ``exclusive`` (a share of the node's cores that no other GPU's worker has),
``core-complex`` (those of the node that share one cache).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.errors import LaunchError, in_words

ENV_BINDING = "ELASTIC_DRIVER_NUMA_BINDING"
"""The mode, in the environment of a worker that is to be bound."""
MODES = ("node", "socket", "exclusive", "core-complex")

_CPUS = Path("sys/devices/system/cpu")
_NODES = Path("sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU.

    Attributes:
        bus: its address on the PCI bus, by which CUDA counts.
        uuid: its UUID, as NVIDIA's driver reports it.
        node: its NUMA node.
    """

    bus: str
    uuid: str
    node: int


def bind(pid: int, environ: Mapping[str, str], *, root: Path = Path("/")) -> None:
    """Bind a process that has just started, if its environment asks for that.

    Args:
        pid: of the process; its later threads and children inherit the binding.
        environ: its environment.
        root: of the file system.

    Raises:
        LaunchError: it cannot be bound; it continues to run.
    """
    mode = environ.get(ENV_BINDING)
    if not mode:
        return
    try:
        os.sched_setaffinity(pid, processors_of(mode, environ, os.sched_getaffinity(pid), root=root))
    except ProcessLookupError:
        return  # it has ended already
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot bind workers to processors (--numa-binding {mode}): {in_words(error)}") from error


def processors_of(
    mode: str, environ: Mapping[str, str], allowed: Collection[int], *, root: Path = Path("/")
) -> set[int]:
    """Return the processors of a worker.

    Args:
        mode: one of MODES.
        environ: the worker's: its local rank, and which devices it sees.
        allowed: processors that it may use.
        root: of the file system.

    Raises:
        ValueError: they cannot be determined; the message is a reason for the user.
        OSError: likewise.
    """
    gpus = _gpus(root)
    gpu = _gpu_of(environ, gpus)
    near = _list(root / _NODES / f"node{gpu.node}" / "cpulist") & set(allowed)
    if mode == "socket":
        package = _reader(root, "topology/physical_package_id")
        sockets = set(map(package, near))
        found = {cpu for cpu in allowed if package(cpu) in sockets}
    elif mode == "exclusive":
        found = _share(_grouped(near, _reader(root, "topology/thread_siblings_list")), gpu, gpus)
    elif mode == "core-complex":
        complexes = _grouped(near, lambda cpu: _last_cache(root, cpu))
        # If some are cut by what is allowed, whole ones come first.
        complexes.sort(key=lambda cpus: (-len(cpus), min(cpus)))
        found = complexes[_place(gpu, gpus) % len(complexes)] if complexes else set()
    else:
        found = near
    if not found:
        raise ValueError(f"no processor near GPU {gpu.bus} is available to this job")
    return found


def _gpus(root: Path) -> list[_Gpu]:
    """Return the NVIDIA devices present here, in the order in which CUDA counts devices of one kind."""
    found = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        text = path.read_text()
        bus, uuid, minor = (_field(text, name) for name in ("Bus Location", "GPU UUID", "Device Minor"))
        if not (root / "dev" / f"nvidia{minor}").exists():
            continue  # another container's
        bus = bus.lower() or path.parent.name
        # -1 if there is only one node.
        node = max(0, int((root / "sys/bus/pci/devices" / bus / "numa_node").read_text()))
        found.append(_Gpu(bus, uuid, node))
    return sorted(found, key=lambda gpu: gpu.bus)


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""


def _gpu_of(environ: Mapping[str, str], gpus: list[_Gpu]) -> _Gpu:
    if not gpus:
        raise ValueError("this host has no NVIDIA GPU")
    chosen, local_rank = environ.get("CUDA_VISIBLE_DEVICES"), int(environ.get("LOCAL_RANK", "0"))
    visible = [str(number) for number in range(len(gpus))] if chosen is None else chosen.split(",")
    name = visible[local_rank].strip() if local_rank < len(visible) else ""
    for number, gpu in enumerate(gpus):
        if name == str(number) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    raise ValueError(
        f"there is no GPU for local rank {local_rank}: this host has {len(gpus)}, CUDA_VISIBLE_DEVICES={chosen or ''}"
    )


def _place(gpu: _Gpu, gpus: list[_Gpu]) -> int:
    """Return its index among the GPUs of its node."""
    return [other.bus for other in gpus if other.node == gpu.node].index(gpu.bus)


def _share(cores: list[set[int]], gpu: _Gpu, gpus: list[_Gpu]) -> set[int]:
    count = sum(other.node == gpu.node for other in gpus)
    if len(cores) < count:
        raise ValueError(f"the {len(cores)} cores near GPU {gpu.bus} are fewer than the {count} GPUs there")
    # If the division leaves a rest, the first ones get one more.
    place, (each, rest) = _place(gpu, gpus), divmod(len(cores), count)
    start = place * each + min(place, rest)
    return set().union(*cores[start : start + each + (place < rest)])


def _grouped(cpus: Collection[int], key: Callable[[int], str]) -> list[set[int]]:
    """Group those with the same key, ordered by their lowest."""
    groups: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), set()).add(cpu)
    return list(groups.values())


def _reader(root: Path, name: str) -> Callable[[int], str]:
    return lambda cpu: (root / _CPUS / f"cpu{cpu}" / name).read_text().strip()


def _last_cache(root: Path, cpu: int) -> str:
    """Return the processors that share the processor's largest cache: the one of the highest level."""
    caches = [
        (int((folder / "level").read_text()), (folder / "shared_cpu_list").read_text().strip())
        for folder in (root / _CPUS / f"cpu{cpu}" / "cache").glob("index*")
        if (folder / "type").read_text().strip() != "Instruction"
    ]
    if not caches:
        raise ValueError(f"the caches of processor {cpu} are unknown")
    return max(caches)[1]


def _list(path: Path) -> set[int]:
    """Parse a list like ``0-3,8``."""
    found: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
