"""The distribution elastic-driver-horovod, built and installed in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from elastic_driver.version import __version__
from tests.support.processes import launched_jobs

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "packaging/horovod"
TRAIN = """
import horovod
from horovod.common.basics import HorovodBasics
hvd = HorovodBasics()
hvd.init()
print("rank", hvd.rank(), "of", hvd.size(), "version", horovod.__version__, flush=True)
hvd.shutdown()
"""


def run(*command: object, **env: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in command],
        env=kept | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_its_version_is_that_of_the_package() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["dependencies"] == [f"elastic-driver=={__version__}"]


class TestInstalled:
    """One environment: it has this repository's package and what that needs, and the distribution."""

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("distribution")
        source = folder / "source"
        subprocess.run(["cp", "-r", SOURCE, source], check=True)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        code, said = run(
            *(*pip, "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, source)
        )
        assert code == 0, said
        (wheel,) = folder.glob("*.whl")
        assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("horovod/")]
        made = folder / "venv"
        venv.create(made, symlinks=True)
        code, said = run(
            *(*pip, "--python", made / "bin/python", "install", "-q", "--no-deps", "--no-index", wheel),
        )
        assert code == 0, said
        below = sysconfig.get_path("purelib")
        cls.site(made).joinpath("below.pth").write_text(f"{ROOT}\nimport site; site.addsitedir({below!r})\n")
        (folder / "train.py").write_text(TRAIN)
        return made

    @staticmethod
    def site(environment: Path) -> Path:
        (folder,) = environment.glob("lib/python*/site-packages")
        return folder

    @pytest.fixture
    def python(self, environment: Path) -> Path:
        return environment / "bin/python"

    @pytest.fixture
    def train(self, environment: Path) -> Path:
        return environment.parent / "train.py"

    def test_a_script_alone(self, python: Path, train: Path) -> None:
        assert run(python, train) == (0, "rank 0 of 1 version 0.28.1\n")
        assert run(python, "-I", train) == (0, "rank 0 of 1 version 0.28.1\n")

    def test_under_its_command(self, environment: Path, python: Path, train: Path) -> None:
        code, said = run(environment / "bin/elastic-horovodrun", "-np", "2", python, train)
        assert code == 0, said
        assert {"[0]<stdout>:rank 0 of 2 version 0.28.1", "[1]<stdout>:rank 1 of 2 version 0.28.1"} <= set(
            said.splitlines()
        )

    @pytest.mark.release  # integration/mpi/test_launched_ranks.py has such a script where nothing is installed
    def test_under_mpirun(self, python: Path, train: Path) -> None:
        job = launched_jobs.new_job()
        ranks = [
            subprocess.Popen(
                [python, train],
                env=launched_jobs.environment(train.parent) | launched_jobs.place_in(job, rank, 2),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        assert [rank.communicate()[0] for rank in ranks] == [f"rank {rank} of 2 version 0.28.1\n" for rank in (0, 1)]

    @pytest.mark.release  # test_horovod_compat.py has it where nothing is installed
    def test_who_wants_none_has_none(self, environment: Path, python: Path, train: Path) -> None:
        code, said = run(environment / "bin/elastic-horovodrun", "-np", "1", "--horovod-shim", "never", python, train)
        assert code != 0
        assert "ModuleNotFoundError: No module named 'horovod'" in said

    @pytest.mark.parametrize("where", ["site-packages", "PYTHONPATH"])
    def test_an_installed_horovod_wins(self, environment: Path, python: Path, tmp_path: Path, where: str) -> None:
        place = self.site(environment) if where == "site-packages" else tmp_path
        package = place / "horovod"
        package.mkdir()
        try:
            (package / "__init__.py").write_text("__version__ = 'real'\n")
            said = run(python, "-c", "import horovod; print(horovod.__version__)", PYTHONPATH=str(tmp_path))
        finally:
            package.joinpath("__init__.py").unlink()
            subprocess.run(["rm", "-rf", package], check=True)
        assert said == (0, "real\n")

    def test_without_the_package_it_is_silent(self, environment: Path, python: Path) -> None:
        path_file = self.site(environment) / "below.pth"
        hidden = path_file.rename(path_file.with_suffix(".hidden"))
        try:
            code, said = run(python, "-c", "import horovod")
        finally:
            hidden.rename(path_file)
        assert code == 1
        assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'horovod'"
        assert "Error processing line" not in said

    def test_horovodrun_only_where_it_is_asked_for_and_there_is_none(self, environment: Path, tmp_path: Path) -> None:
        command, link = environment / "bin/elastic-horovodrun", environment / "bin/horovodrun"
        assert not link.exists()
        other = tmp_path / "horovodrun"
        other.write_text("#!/bin/sh\n")
        other.chmod(0o755)
        code, said = run(command, "--install-horovodrun", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert (code, said) == (2, f"elastic-horovodrun: error: cannot install horovodrun: there is {other}\n")
        link.write_text("another")
        assert run(command, "--install-horovodrun")[0] == 2
        assert link.read_text() == "another"
        link.unlink()
        try:
            assert run(command, "--install-horovodrun", PATH=os.defpath)[0] == 0
            assert run(link, "--version") == (0, f"elasticrun {__version__}\n")
            assert run(command, "--install-horovodrun") == (0, f"{link} is there already\n")
        finally:
            link.unlink()
