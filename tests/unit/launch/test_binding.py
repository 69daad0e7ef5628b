"""Which processors a worker gets, on machines that are made of files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.launch.processes.binding import ENV_BINDING, MODES, bind, processors_of
from elastic_driver.settings.torchrun_options import OPTIONS

pytestmark = [pytest.mark.unit]

ALL = range(16)


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets of two nodes of four processors, two threads a core, two caches a node; GPUs at nodes 0, 0, 0, 3."""
    for cpu in ALL:
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        put(tmp_path, f"{folder}/topology/physical_package_id", str(cpu // 8))
        first = cpu - cpu % 2
        put(tmp_path, f"{folder}/topology/thread_siblings_list", f"{first}-{first + 1}")
        for index, (level, kind, shared) in enumerate(
            ((1, "Instruction", f"{cpu}"), (3, "Unified", f"{first}-{first + 1}"), (1, "Data", f"{cpu}"))
        ):
            put(tmp_path, f"{folder}/cache/index{index}/level", str(level))
            put(tmp_path, f"{folder}/cache/index{index}/type", kind)
            put(tmp_path, f"{folder}/cache/index{index}/shared_cpu_list", shared)
    for node in range(4):
        put(tmp_path, f"sys/devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}")
    # The minors, by which files are called, are in another order than the buses, by which CUDA counts.
    for number, (bus, minor, node) in enumerate((("18", 2, 0), ("2a", 0, -1), ("5d", 1, 0), ("ba", 3, 3))):
        address = f"0000:{bus}:00.0"
        put(
            tmp_path,
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{number}{number}-x\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {minor}",
        )
        put(tmp_path, f"sys/bus/pci/devices/{address}/numa_node", str(node))
        put(tmp_path, f"dev/nvidia{minor}", "")
    return tmp_path


def chosen(mode: str, rank: int, root: Path, *, visible: str | None = None, allowed: object = ALL) -> list[int]:
    environ = {"LOCAL_RANK": str(rank), **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    return sorted(processors_of(mode, environ, set(allowed), root=root))  # type: ignore[call-overload]


def test_the_modes_are_those_that_the_option_takes() -> None:
    assert all(mode in OPTIONS["numa_binding"].help for mode in MODES)


def test_node(machine: Path) -> None:
    assert chosen("node", 0, machine) == [0, 1, 2, 3]
    assert chosen("node", 1, machine) == [0, 1, 2, 3]
    assert chosen("node", 3, machine) == [12, 13, 14, 15]
    assert chosen("node", 3, machine, allowed=(1, 13, 14)) == [13, 14]


def test_socket(machine: Path) -> None:
    assert chosen("socket", 0, machine) == list(range(8))
    assert chosen("socket", 3, machine, allowed=(0, 9, 12)) == [9, 12]


def test_exclusive_shares_whole_cores(machine: Path) -> None:
    put(machine, "sys/devices/system/node/node0/cpulist", "0-7")
    shares = [chosen("exclusive", rank, machine) for rank in range(3)]
    assert shares == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert chosen("exclusive", 3, machine) == [12, 13, 14, 15]


def test_exclusive_where_there_are_too_few_cores(machine: Path) -> None:
    with pytest.raises(ValueError, match=r"the 2 cores near GPU 0000:18:00.0 are fewer than the 3 GPUs there"):
        chosen("exclusive", 0, machine)


def test_core_complex(machine: Path) -> None:
    assert [chosen("core-complex", rank, machine) for rank in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert chosen("core-complex", 0, machine, allowed=(0, 2, 3)) == [2, 3], "a whole one first"


def test_devices_that_are_chosen(machine: Path) -> None:
    assert chosen("node", 0, machine, visible="3,0") == [12, 13, 14, 15]
    assert chosen("node", 1, machine, visible="3, 0") == [0, 1, 2, 3]
    assert chosen("node", 0, machine, visible="GPU-33") == [12, 13, 14, 15]
    for visible in ("", "7", "MIG-1"):
        with pytest.raises(ValueError, match="there is no GPU for local rank 0: this host has 4"):
            chosen("node", 0, machine, visible=visible)


def test_devices_of_other_containers_do_not_count(machine: Path) -> None:
    (machine / "dev/nvidia2").unlink()
    (machine / "dev/nvidia0").unlink()
    assert chosen("node", 1, machine) == [12, 13, 14, 15]


def test_no_processor_is_left(machine: Path) -> None:
    with pytest.raises(ValueError, match=r"no processor near GPU 0000:ba:00.0 is available to this job"):
        chosen("node", 3, machine, allowed=(0,))


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(
        LaunchError, match=r"cannot bind workers .*\(--numa-binding node\): this host has no NVIDIA GPU"
    ):
        bind(os.getpid(), {ENV_BINDING: "node"}, root=tmp_path)
    bind(os.getpid(), {}, root=tmp_path)
    assert os.sched_getaffinity(0) == before


def test_a_process_is_bound(machine: Path) -> None:
    put(machine, "sys/devices/system/node/node0/cpulist", str(min(os.sched_getaffinity(0))))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        bind(child.pid, {ENV_BINDING: "node", "LOCAL_RANK": "0"}, root=machine)
        assert os.sched_getaffinity(child.pid) == {min(os.sched_getaffinity(0))}
