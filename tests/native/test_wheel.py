"""The wheels of scripts/build-wheel, on a machine without Gloo: this one, with its library covered up.

And what an installation says that has no extension.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .test_clash import BOTH, GLOBALLY, OURS

ROOT = Path(__file__).resolve().parents[2]
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
# A thread is in C++ (`wait`), without Python's lock, when the interpreter ends. Then it comes back (`end`).
ENDING = """
import os, sys, threading
from elastic_driver.worker.engine.native_loader import load

native = load()
{prepare}
native.park_threads_at_exit()
thread = threading.Thread(target=lambda: {wait}, daemon=True)
thread.start()
call = f"/proc/self/task/{{thread.native_id}}/syscall"

def is_in(*numbers, call=call, open=open):  # globals are gone by then
    with open(call) as file:
        return file.read().split()[0] in numbers

class AtTheEnd:  # deleted when the interpreter is ending, and its threads may not run Python any more
    def __del__(self, end=lambda its={its}: {end}, is_in=is_in, gone=OSError, write=os.write):
        end()
        try:
            while not is_in("34"):  # pause()
                pass
            write(1, b"it is parked\\n")
        except gone:
            write(1, b"it is gone\\n")

while not is_in("7", "271", "45", "202"):  # poll(), ppoll(), recvfrom(), futex()
    pass
sys.modules["at the end"] = AtTheEnd()
"""
OF_GROUPS = {
    "prepare": """members = [native.ContextGroup([("global", [0, 1], rank)], host="127.0.0.1") for rank in range(2)]
blobs = [member.prepare() for member in members]
connecting = [threading.Thread(target=member.connect, args=(blobs, 3600.0)) for member in members]
[thread.start() for thread in connecting]
[thread.join() for thread in connecting]""",
    "wait": 'members[0].barrier("global", 3600.0)',
    "its": "members[0]",
    "end": 'its.abort("the end")',
}
OF_TORCH = {
    "prepare": """import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
waiting = dist.TCPStore("127.0.0.1", store.port, is_master=False)""",
    "wait": 'waiting.get("key")',
    "its": "store",
    "end": 'its.set("key", b"value")',
}
# Of the C library and the compiler's: what each machine has, in the same version or a later one.
SYSTEM = re.compile(r"(libc|libm|libpthread|libdl|librt|libgcc_s|ld-linux-[\w-]+)\.so\.\d+")


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All that the script makes on this machine."""
    folder = tmp_path_factory.mktemp("dist")
    # Optimizing takes most of the time, and what is looked at here is the same without.
    env = {**os.environ, "ELASTIC_DRIVER_CXXFLAGS": "-O0", "PYTHONS": sys.executable}
    done = run(["bash", str(SCRIPT), str(folder)], env=env)
    assert done.returncode == 0, done.stdout
    paths = sorted(folder.iterdir())
    assert sorted(line for line in done.stdout.splitlines() if line.startswith(str(folder))) == [*map(str, paths)]
    return paths


@pytest.fixture(scope="module")
def wheel(built: list[Path]) -> Path:
    """The one for this Python."""
    (path,) = (path for path in built if path.name.startswith("elastic_driver-") and path.suffix == ".whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    done = run([*pip, "--target", str(folder), str(wheel)])
    assert done.returncode == 0, done.stdout
    return folder


def without_the_systems_gloo(command: list[str]) -> list[str]:
    """The command in a mount namespace where the system's Gloo is an empty file."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("covering up the system's libraries takes root and unshare")
    if run(["unshare", "-m", "mount", "--bind", "/dev/null", "/etc/hostname"]).returncode != 0:
        pytest.skip("this machine allows no mount namespaces")
    cached = run(["/sbin/ldconfig", "-p"]).stdout
    system = {os.path.realpath(path) for path in re.findall(r"^\slibgloo\S* .* => (\S+)$", cached, re.MULTILINE)}
    assert system, cached
    covers = [f"mount --bind /dev/null {shlex.quote(path)}" for path in sorted(system)]
    return ["unshare", "-m", "sh", "-c", " && ".join([*covers, f"exec {shlex.join(command)}"])]


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "PYTHONNOUSERSITE": "1"}


def test_it_is_for_old_machines_and_carries_the_licenses(wheel: Path, built: list[Path]) -> None:
    tag = "cp311-cp311" if sys.version_info[:2] == (3, 11) else "cp312-abi3"
    assert re.search(rf"-{tag}-manylinux_2_28_\w+\.whl$", wheel.name), wheel.name
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    assert re.search(r'following platform tag:\s+"manylinux_2_(1\d|2[0-8])_', shown.stdout), shown.stdout
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    licenses = {name.rpartition("/")[2] for name in names if re.search(r"\.dist-info/licenses/.", name)}
    assert licenses == {
        "LICENSE",
        *(f"LICENSE.{of}" for of in ("gloo", "libc++", "libc++abi", "nanobind", "robin-map")),
    }
    assert "elastic_driver/docs/operations.md" in names
    assert not [name for name in names if name.startswith(("tests/", "native/", "build/", "elastic_driver.libs/"))]
    others = {path.name.partition("-")[0]: path.suffix for path in built if path != wheel and path.suffix == ".gz"}
    assert set(others) == {"elastic_driver", "elastic_driver_horovod"}
    assert sum(path.name.startswith("elastic_driver_horovod-") and path.suffix == ".whl" for path in built) == 1


def test_the_source_distribution_has_what_a_build_needs(built: list[Path]) -> None:
    (path,) = (path for path in built if path.name.startswith("elastic_driver-") and path.suffix == ".gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = [path for path in (ROOT / "native").rglob("*") if path.suffix in (".cpp", ".h", ".map")]
    assert {str(path.relative_to(ROOT)) for path in needed if path.parent.name != "tests"} <= names
    assert {"LICENSE", "README.md", "docs/operations.md", "examples/train_torch.py", "setup.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", "native_missing.txt"))]


def test_a_native_job_of_two_runs_without_the_systems_gloo(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(JOB)
    command = [sys.executable, "-m", "elastic_driver", "-np", "2", sys.executable, str(program)]
    done = run(without_the_systems_gloo(command), env=environment(installed), cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("total 3 size 2 backend native") == 2, done.stdout
    assert done.stdout.count(f"package {installed}/elastic_driver/__init__.py gloo []") == 2, done.stdout


def test_the_covered_library_is_really_out_of_reach(installed: Path, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing: the extension of this checkout must fail to load there."""
    (extension,) = (ROOT / "elastic_driver").glob("_native.*.so")
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(extension)!r})"]
    done = run(without_the_systems_gloo(command), cwd=tmp_path)
    assert done.returncode != 0
    assert "libgloo.so" in done.stdout, done.stdout


def test_the_extension_has_no_symbol_that_another_library_could_take(installed: Path) -> None:
    """Gloo and the C++ library are inside: PyTorch's of the same names can neither be taken for them, nor take them."""
    (extension,) = (installed / "elastic_driver").glob("_native.*.so")
    with extension.open("rb") as file:
        elf = ELFFile(file)
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        paths = [
            tag for kind in ("DT_RPATH", "DT_RUNPATH") for tag in elf.get_section_by_name(".dynamic").iter_tags(kind)
        ]
    defined = {each.name for each in symbols if each["st_shndx"] != "SHN_UNDEF"}
    assert {name for name in defined if not name.startswith("elastic_")} == {"PyInit__native"}
    assert not [each.name for each in symbols if "gloo" in each.name or each.name.startswith("_ZNSt")]
    assert all(SYSTEM.fullmatch(name) for name in needed), needed
    # What unwinds stacks is the process's own: threads are unwound in the extension when the interpreter ends.
    assert any(name.startswith("libgcc_s.") for name in needed), needed
    assert not paths


@pytest.mark.parametrize(
    "imports", [f"import torch\n{OURS}", f"{GLOBALLY}\n{OURS}"], ids=["torch first", "global symbols"]
)
def test_it_works_beside_pytorchs_gloo(installed: Path, tmp_path: Path, imports: str) -> None:
    pytest.importorskip("torch")
    done = run([sys.executable, "-c", BOTH.format(imports=imports)], env=environment(installed), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "both work\n" in done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers elsewhere")
@pytest.mark.parametrize("whose", [OF_GROUPS, OF_TORCH], ids=["of the extension", "of PyTorch"])
def test_a_thread_that_comes_back_when_the_interpreter_ends_is_no_crash(
    installed: Path, tmp_path: Path, whose: dict[str, str]
) -> None:
    if whose is OF_TORCH:
        pytest.importorskip("torch")
    program = tmp_path / "ending.py"
    program.write_text(ENDING.format(**whose))
    done = run([sys.executable, str(program)], env=environment(installed), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "it is parked\n"


def test_without_a_compiler_it_installs_and_says_what_is_lost(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "docs",
        "native",
        "elastic_driver",
    ):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
    installed = tmp_path / "installed"
    env = {**os.environ, "CXX": "/no/such"}
    done = run([*pip, "-v", "--target", str(installed), str(source)], env=env)
    assert done.returncode == 0, done.stdout
    assert "WARNING: the native extension is not built: there is no C++ compiler (/no/such)." in done.stdout
    assert "What is lost without it: " in done.stdout
    done = run([sys.executable, "-m", "elastic_driver", "--check-build"], env=environment(installed), cwd=tmp_path)
    assert (
        "[ ] native Gloo extension: the native extension was not built: there is no C++ compiler (/no/such), when the "
        "package was installed\n"
    ) in done.stdout
    done = run([sys.executable, "-m", "elastic_driver", "--help"], env=environment(installed), cwd=tmp_path)
    assert f"The docs/... pages are in {installed}/elastic_driver." in done.stdout
    assert (installed / "elastic_driver" / "docs" / "operations.md").is_file()
    # In a checkout the note is where the extension would be.
    done = run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], env=env, cwd=source)
    assert done.returncode == 0, done.stdout
    note = source / "elastic_driver" / "native_missing.txt"
    assert note.read_text() == "there is no C++ compiler (/no/such)\n"
