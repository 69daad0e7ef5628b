"""Inspects the machine on which this process runs, for ``elasticrun doctor``. Changes nothing, and needs no privileges.

Owns the queries to the kernel and to other programs. :mod:`elastic_driver.doctor.findings` judges the answers. Queries
that may hang (a network file system, a GPU's driver) run in a thread that is given up after a few seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import queue
import resource
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil

from elastic_driver.doctor.facts import UNLIMITED, Disk, HostFacts
from elastic_driver.errors import in_words
from elastic_driver.reporting.printable import without_home
from elastic_driver.system.cgroups import memory_left, memory_limit
from elastic_driver.system.mechanisms import MECHANISMS
from elastic_driver.version import __version__
from elastic_driver.worker.engine.native_loader import load

# Time limit of queries that a dead disk or a broken driver never answers.
_PATIENCE_S = 5.0
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}
_SHM = "/dev/shm"
# In the order of Python's tempfile, which tries each by writing, and falls back to another folder without a message.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
# The kernel's own file systems: no folder for files can be created there, whatever the permissions show.
_WITHOUT_FILES = ("proc", "sysfs", "devpts", "mqueue", "securityfs", "bpf", "pstore", "efivarfs")

_T = TypeVar("_T")
_Gpus = tuple[tuple[str, ...], str, str]


def facts_here(folders: Mapping[str, str]) -> HostFacts:
    """Return the facts of this machine that need no large import. Takes a few seconds at most.

    Args:
        folders: the folders to which the job would write, by flag; without that for temporary files.
    """
    memory = psutil.virtual_memory()
    limit, left = memory_limit(), memory_left()
    lacks, lacks_error = _lacks()
    gpus, driver, gpu_error = _in_time(_gpus, _silent_gpus())
    return HostFacts(
        package=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        native_error=_why_no_extension(),
        kernel=platform.release(),
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip(),
        gpus=gpus,
        gpu_driver=driver,
        gpu_error=gpu_error,
        limits={name: _soft(number) for name, number in _LIMITS.items()},
        core_pattern=_first_line(Path("/proc/sys/kernel/core_pattern")),
        shm_bytes=_in_time(lambda: _size(_SHM), 0),
        disks=tuple(_disk(role, path) for role, path in {"tmp": _temporary(), **folders}.items()),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        available_bytes=memory.available if left is None else min(memory.available, left),
        cgroup_bytes=limit if limit is not None and limit < memory.total else UNLIMITED,
        lacks=lacks,
        lacks_error=lacks_error,
    )


def with_torch(facts: HostFacts) -> HostFacts:
    """Return the facts with those added that need an import of PyTorch, which may take seconds."""
    if not facts.torch:
        return facts
    try:
        with warnings.catch_warnings(action="ignore"):
            torch = importlib.import_module("torch")
            cuda = torch.version.cuda or ""
    except Exception as error:  # a library is missing, or of another version
        return replace(facts, torch_error=without_home(f"{type(error).__name__}: {error}")[:300])
    return replace(facts, torch=str(torch.__version__), cuda=str(cuda))


def _in_time(question: Callable[[], _T], otherwise: _T) -> _T:
    """Return the answer to a query that may hang; in that case its thread is abandoned."""
    answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
    # A daemon: a thread that is blocked in the kernel cannot be stopped.
    threading.Thread(target=lambda: answers.put(question()), name="doctor", daemon=True).start()
    try:
        return answers.get(timeout=_PATIENCE_S)
    except queue.Empty:
        return otherwise


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _why_no_extension() -> str:
    try:
        load()
    except ImportError as error:
        return without_home(str(error))
    return ""


def _silent_gpus() -> _Gpus:
    return (), "", f"nvidia-smi did not answer within {_PATIENCE_S:g} s"


def _gpus() -> _Gpus:
    """Return the names of the GPUs, their driver's version, and why these are unknown."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S)
    except FileNotFoundError:
        return (), "", ""
    except subprocess.TimeoutExpired:
        return _silent_gpus()
    except OSError as error:
        return (), "", f"cannot run nvidia-smi: {in_words(error)}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        return (), "", f"nvidia-smi: {(lines or done.stderr.split(chr(10)))[0][:200]}"
    rows = [line.rpartition(",") for line in lines]
    return tuple(name.strip() for name, _, _ in rows), rows[0][2].strip() if rows else "", ""


def _soft(number: int) -> int:
    soft, _ = resource.getrlimit(number)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _first_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").partition("\n")[0]
    return ""


def _size(folder: str) -> int:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_frsize * stat.f_blocks


def _disk(role: str, path: str) -> Disk:
    silent = Disk(role, error=f"its disk does not answer within {_PATIENCE_S:g} s")
    return _in_time(lambda: _asked_disk(role, Path(path)), silent)


def _temporary() -> str:
    """Return the folder that the user has set for temporary files, usable or not."""
    return next(filter(None, map(os.environ.get, _TEMPORARY)), "/tmp")


def _asked_disk(role: str, named: Path) -> Disk:
    """Return the facts of a folder; if it does not exist, those of its nearest existing parent."""
    folder = named
    # Not Path.exists, which raises if a parent folder may not be searched.
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    is_missing = folder != named
    if is_missing and role == "tmp":
        return Disk(role, missing=True)
    try:
        stat = os.statvfs(folder)
        if not folder.is_dir():
            return Disk(role, error="there is a file in its place")
        if _file_system(folder) in _WITHOUT_FILES:
            return Disk(role, error="nothing can be made there")
    except OSError as error:
        return Disk(role, error=in_words(error))
    return Disk(role, stat.f_frsize * stat.f_bavail, os.access(folder, os.W_OK | os.X_OK))


def _file_system(folder: Path) -> str:
    """Return the kernel's name for the file system; "" if unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return ""


def _lacks() -> tuple[tuple[str, ...], str]:
    """Return what is lost without each mechanism of the kernel that is missing here, and why that is unknown."""
    lacks: list[str] = []
    for mechanism in MECHANISMS:
        if mechanism.is_warned_of:
            try:
                why = mechanism.why_not()
            except OSError as error:
                return tuple(lacks), in_words(error)
            if why:
                lacks.append(f"{mechanism.name}: {why}: {mechanism.lost}")
    return tuple(lacks), ""
