"""How much memory a process can have, as its cgroups and its machine say."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.system.cgroups import memory_left, memory_limit

pytestmark = pytest.mark.unit

MACHINE = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 5 kB\n"}
VERSION_2 = {**MACHINE, "proc/self/cgroup": "0::/pod/container\n"}
VERSION_1 = {**MACHINE, "proc/self/cgroup": "5:cpu:/a\n7:memory:/job/step\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        (MACHINE, 1_024_000),
        (VERSION_2, 1_024_000),
        ({**VERSION_2, "sys/fs/cgroup/pod/container/memory.max": "max\n"}, 1_024_000),
        ({**VERSION_2, "sys/fs/cgroup/pod/container/memory.max": "70000\n"}, 70_000),
        (
            {
                **VERSION_2,
                "sys/fs/cgroup/pod/container/memory.max": "70000\n",
                "sys/fs/cgroup/pod/memory.max": "60000\n",
            },
            60_000,
        ),
        ({**VERSION_2, "sys/fs/cgroup/memory.max": "50000\n"}, 50_000),
        ({**VERSION_1, "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": "40000\n"}, 40_000),
        ({**VERSION_1, "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, 1_024_000),
    ],
)
def test_the_least_of_them_holds(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


POD, JOB = "sys/fs/cgroup/pod/", "sys/fs/cgroup/memory/job/"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({**VERSION_2, f"{POD}memory.max": "max\n", f"{POD}memory.current": "5\n"}, None),
        ({**VERSION_2, f"{POD}memory.max": "70000\n"}, None),
        ({**VERSION_2, f"{POD}memory.max": "70000\n", f"{POD}memory.current": "50000\n"}, 20_000),
        ({**VERSION_2, f"{POD}memory.max": "70000\n", f"{POD}memory.current": "80000\n"}, 0),
        (
            {
                **VERSION_2,
                f"{POD}memory.max": "70000\n",
                f"{POD}memory.current": "50000\n",
                f"{POD}memory.stat": "anon 10\ninactive_file 6000\n",
                f"{POD}container/memory.max": "60000\n",
                f"{POD}container/memory.current": "1\n",
            },
            26_000,
        ),
        (
            {
                **VERSION_1,
                f"{JOB}memory.limit_in_bytes": "40000\n",
                f"{JOB}memory.usage_in_bytes": "30000\n",
                f"{JOB}memory.stat": "inactive_file 1\ntotal_inactive_file 5000\n",
            },
            15_000,
        ),
    ],
)
def test_what_is_left_is_least_where_a_limit_is_nearest(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    """A cache of files that nobody has read lately is no less free for that."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == left
