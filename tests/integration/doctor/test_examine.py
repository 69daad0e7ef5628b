"""What is found out about a machine: this one, and what other programs say there."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.doctor import examine
from elastic_driver.doctor.examine import facts_here, with_torch
from elastic_driver.doctor.facts import UNLIMITED, Disk, HostFacts

pytestmark = pytest.mark.integration


def test_this_machine(tmp_path: Path) -> None:
    """Of a folder that is not there yet the disk is looked at, and nothing is made."""
    facts = facts_here({"--durable-dir": str(tmp_path / "a" / "b")})
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert 0 < facts.available_bytes <= facts.memory_bytes
    assert facts.limits["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert [(disk.role, disk.writable, disk.error) for disk in facts.disks] == [
        ("tmp", True, ""),
        ("--durable-dir", True, ""),
    ]
    assert facts.disks[1].free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert HostFacts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize("left", [0, 1 << 20, None, 1 << 60])
def test_free_is_what_the_container_has_left(left: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(examine, "memory_left", lambda: left)
    facts = facts_here({})
    assert facts.cgroup_bytes == 1 << 30
    if left is None or left == 1 << 60:
        assert 0 < facts.available_bytes <= facts.memory_bytes
    else:
        assert facts.available_bytes == left


def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert set(facts_here({}).limits.values()) == {UNLIMITED}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            'echo "NVIDIA H200, 570.1"; echo "NVIDIA H200, 570.1"',
            (("NVIDIA H200", "NVIDIA H200"), "570.1", ""),
        ),
        ("exit 0", ((), "", "")),
        ('echo "No devices were found"; exit 6', ((), "", "nvidia-smi: No devices were found")),
        ("echo broken >&2; exit 9", ((), "", "nvidia-smi: broken")),
        ("exec sleep 1000", ((), "", "nvidia-smi did not answer within 0.2 s")),
    ],
)
def test_what_nvidia_smi_says(
    script: str, found: tuple[tuple[str, ...], str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if "sleep" in script:
        monkeypatch.setattr(examine, "_PATIENCE_S", 0.2)
    assert examine._gpus() == found


def test_there_may_be_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine._gpus() == ((), "", "")


def test_of_temporary_files_the_folder_that_is_named_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes another without a word. Nothing is written to find that out: on a dead disk that never ends."""
    monkeypatch.setenv("TMPDIR", "/proc/nope")
    assert facts_here({}).disks == (Disk("tmp", missing=True),)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    [disk] = facts_here({}).disks
    assert (disk.writable, disk.missing, disk.error) == (True, False, "")


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert examine._disk("--durable-dir", "/proc/nope").error == "nothing can be made there"
    assert examine._disk("--durable-dir", str(tmp_path / "file" / "x")).error == "there is a file in its place"


def test_a_folder_that_may_not_be_looked_into_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may: the kernel's answer is a fake's."""

    def refused(path: object, **how: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "a")) and str(path) != str(tmp_path / "a"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **how)  # type: ignore[call-overload, no-any-return]

    (tmp_path / "a").mkdir()
    stat = os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        patch.setattr(os, "access", lambda path, mode: False)
        found = examine._asked_disk("--durable-dir", tmp_path / "a" / "b" / "c")
    assert (found.writable, found.error) == (False, "")


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(examine, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(examine, "_asked_disk", lambda role, folder: os.read(reader, 1))
    assert examine._disk("--durable-dir", str(tmp_path)) == Disk(
        "--durable-dir", error="its disk does not answer within 0.2 s"
    )
    os.close(writer)


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    facts = HostFacts(package="1", python="3", torch="2.9.0")
    assert with_torch(facts).torch_error == "OSError: libcudart.so.12: cannot open shared object file"
    none = HostFacts(package="1", python="3")
    assert with_torch(none) == none
