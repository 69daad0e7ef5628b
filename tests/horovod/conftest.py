"""Tests with Horovod's own workers: unmodified scripts, under elasticrun or, to compare, under horovodrun."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.processes.horovod_jobs import HorovodJob, Start


def _is_installed(framework: str) -> bool:
    try:
        built = importlib.metadata.distribution("horovod").locate_file(f"horovod/{framework}")
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(Path(str(built)).glob("mpi_lib*.so"))


class _Skipped(pytest.Module):
    def collect(self) -> Any:
        flag = " --tensorflow" if "tensorflow" in self.path.name else ""
        pytest.skip(f"no Horovod is built for this: scripts/install-horovod{flag} does it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    framework = "tensorflow" if "tensorflow" in module_path.name else "torch"
    return None if _is_installed(framework) else _Skipped.from_parent(parent, path=module_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "launcher" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--horovod-launcher")
        metafunc.parametrize("launcher", ["elasticrun", "horovodrun"] if chosen == "both" else [chosen])


@pytest.fixture(autouse=True)
def only_ours(request: pytest.FixtureRequest) -> None:
    """Skips under horovodrun what is asked of elasticrun alone."""
    if request.node.get_closest_marker("only_elasticrun") and request.getfixturevalue("launcher") != "elasticrun":
        pytest.skip("asked of elasticrun alone")


@pytest.fixture
def start(launcher: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a job, or several. They are ended with the test, and then none of their processes may be left."""
    from tests.support.processes.horovod_jobs import HorovodJob

    class Starter:
        def __init__(self) -> None:
            self.launcher = launcher
            self.jobs: list[HorovodJob] = []

        def __call__(self, *arguments: Any, **env: Any) -> HorovodJob:
            self.jobs.append(HorovodJob(launcher, tmp_path / str(len(self.jobs)), *arguments, **env))
            return self.jobs[-1]

    starter = Starter()
    yield starter
    for job in starter.jobs:
        job.__exit__()
