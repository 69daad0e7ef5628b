"""Whether an end was the OOM killer's: where the count is found, and whose end it explains."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.launch.processes.oom import OomKills
from elastic_driver.launch.words import OUT_OF_MEMORY, ExitStatus

pytestmark = pytest.mark.unit

KILLED = ExitStatus(-9)
FOLDERS = {
    "v2": ("0::/kubepods/pod1\n", "sys/fs/cgroup/kubepods/pod1/memory.events"),
    "v2 in a container": ("0::/\n", "sys/fs/cgroup/memory.events"),
    "v2 of another namespace": ("0::/../pod1\n", "sys/fs/cgroup/memory.events"),
    "v1": ("5:cpu:/\n4:blkio,memory:/slurm/job1\n0::/\n", "sys/fs/cgroup/memory/slurm/job1/memory.oom_control"),
    "v1 in a container": ("4:memory:/docker/1f\n", "sys/fs/cgroup/memory/memory.oom_control"),
}


def machine(root: Path, cgroup: str, file: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("under_oom 0\noom_kill 3\n")
    return root / file


@pytest.mark.parametrize("where", FOLDERS)
def test_the_count_is_found(tmp_path: Path, where: str) -> None:
    file = machine(tmp_path, *FOLDERS[where])
    kills = OomKills(tmp_path)
    assert kills.note(KILLED) == ""
    file.write_text("low 0\noom 9\noom_kill 4\noom_group_kill 0\n")
    assert kills.note(KILLED) == OUT_OF_MEMORY


def test_each_kill_explains_one_end(tmp_path: Path) -> None:
    file = machine(tmp_path, *FOLDERS["v2"])
    kills = OomKills(tmp_path)
    file.write_text("oom_kill 5\n")
    assert [kills.note(ExitStatus(code)) for code in (1, 0, -15, 137, -9, -9)] == [
        "",
        "",
        "",
        OUT_OF_MEMORY,
        OUT_OF_MEMORY,
        "",
    ]
    file.write_text("oom_kill 6\n")
    kills.forget()
    assert kills.note(KILLED) == ""


def test_a_machine_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    assert OomKills(tmp_path).note(KILLED) == ""
    file = machine(tmp_path, *FOLDERS["v2"])
    kills = OomKills(tmp_path)
    file.write_text("oom_kill many\n")
    assert kills.note(KILLED) == ""
    file.unlink()
    assert kills.note(KILLED) == ""


def test_how_it_is_told() -> None:
    assert str(ExitStatus(-9, note=OUT_OF_MEMORY)) == "killed by SIGKILL (out of memory: the kernel's OOM killer)"
