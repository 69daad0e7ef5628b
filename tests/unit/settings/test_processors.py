"""How many workers a machine is good for, by files that stand for its devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_driver.settings.processors import count_gpus, count_processes

pytestmark = [pytest.mark.unit]


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    for number, gpu_id in enumerate(("0", "31415", "2718", "")):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,3", 2),
        ("0,4,1", 1),
        ("0,-1,1", 1),
        ("1,1", 0),
        ("GPU-5ebe9f43,GPU-ac33420d", 2),
        ("MIG-1,MIG-2", 1),
        ("none", 0),
    ],
)
def test_the_variable_chooses_as_cuda_has_it(nvidia: Path, chosen: str | None, count: int) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert count_gpus(environ, root=nvidia) == count


def test_amd(amd: Path) -> None:
    assert count_gpus({}, root=amd) == 2
    assert count_gpus({"HIP_VISIBLE_DEVICES": "1"}, root=amd) == 1
    assert count_gpus({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0"}, root=amd) == 1


def test_no_device(tmp_path: Path) -> None:
    processors = len(os.sched_getaffinity(0))
    assert count_gpus({}, root=tmp_path) == 0
    assert count_processes("auto", {}, root=tmp_path) == processors
    assert count_processes("cpu", {}, root=tmp_path) == processors
    with pytest.raises(ValueError, match="no GPU is visible on this machine"):
        count_processes("gpu", {}, root=tmp_path)


def test_gpus_are_what_auto_takes(nvidia: Path) -> None:
    assert count_processes("gpu", {}, root=nvidia) == 4
    assert count_processes("auto", {}, root=nvidia) == 4
    assert count_processes("auto", {"CUDA_VISIBLE_DEVICES": "1"}, root=nvidia) == 1


def test_numbers_and_rubbish() -> None:
    assert count_processes(" 3 ", {}) == 3
    assert count_processes("-3", {}) == -3
    for text in ("", "two", "1.5", "gpus"):
        with pytest.raises(ValueError, match="is not a number, auto, cpu, gpu or xpu"):
            count_processes(text, {})
