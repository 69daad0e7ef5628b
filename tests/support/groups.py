"""Which tests run when: at a commit, at a landing, at a release. Each group contains the one before.

- ``commit``: no PyTorch in workers, no wait in real time: pure functions, text histories, the extension, and those
  integration tests that are quick. ``scripts/check`` runs them.
- ``landing``: everything that guards a landing: also jobs of real workers, and faults. ``make test`` runs them.
- ``release``: also what waits in real time, takes minutes, or needs what is installed by a script of its own.
  ``scripts/check --release`` runs them.

A test is in the group of its file: files of a later group are not even imported. ``@pytest.mark.release`` puts single
ones off: what the same faults would be found without, as a rule. Without ``--group`` all are collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

GROUPS = ("commit", "landing", "release")

_TESTS = Path(__file__).resolve().parents[1]

# What only a release runs: the name that the summary has for it, and where it is.
_RELEASE = {
    "hangs in real time": ("integration/hangs",),
    "soaks": ("soak/test_soak.py", "faults/test_device_lane_soak.py"),
    "the wheel": ("native/test_wheel.py",),
    "examples": ("integration/test_examples.py",),
    "machines with sshd": ("integration/machines",),
    "the fake of Kubernetes": ("integration/kubernetes/test_fake.py",),
    "agents of torchrun": ("integration/torchelastic/test_torchrun.py",),
    "MPI": ("integration/mpi/test_mpirun.py", "integration/mpi/test_srun.py"),
    "frameworks": ("frameworks",),
    "torch's own tests": ("torch_source",),
    "Horovod": ("horovod",),
    "Horovod's own tests": ("horovod_source",),
    "TensorFlow": ("tensorflow",),
    "the browser": ("browser",),
    "the documentation site": ("docs",),
    "monitoring": ("monitoring",),
    "etcd": ("etcd",),
}
# What a landing runs and a commit does not.
_LANDING = (
    "faults",
    "integration/cli/test_join_leave.py",
    "integration/cli/test_journal.py",
    "integration/cli/test_parent.py",
    "integration/compat",
    "integration/doctor",
    "integration/driver",
    "integration/function",
    "integration/horovod",
    "integration/kubernetes/test_jobs_on_pods.py",
    "integration/mpi",
    "integration/test_first_script.py",
    "integration/test_network_faults.py",
    "integration/torch",
    "integration/torchelastic",
    "integration/worker",
)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def group_of(path: Path) -> str:
    """The group of a file or a folder; a folder that holds files of several is in the first."""
    try:
        inside = path.resolve().relative_to(_TESTS).as_posix()
    except ValueError:
        return GROUPS[0]
    if any(_is_below(inside, folders) for folders in _RELEASE.values()):
        return "release"
    return "landing" if _is_below(inside, _LANDING) else "commit"


def is_left_out(path: Path, group: str | None) -> bool:
    """Whether the tests of a file are of a later group than the one that runs; None runs all."""
    return group is not None and GROUPS.index(group_of(path)) > GROUPS.index(group)


def what_is_left_out(group: str) -> str:
    """In a few words, what a group does not run; empty for the last one."""
    if group == "release":
        return ""
    words = f"left to scripts/check --release: {', '.join(_RELEASE)}, further variants"
    return words if group == "landing" else f"left to make test: jobs of real workers, faults; {words}"


def why_skipped(reasons: Iterable[str]) -> str:
    """One line for all that was skipped, the most frequent reason first."""
    counted = Counter(reasons).most_common()
    return "; ".join(f"{count} x {reason}" for reason, count in counted)
