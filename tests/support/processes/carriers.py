"""The processes that carry a variable, by which tests see what is left of what they have started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import psutil


def carriers_of(name: str, is_meant: Callable[[str], bool]) -> list[psutil.Process]:
    """All living processes of this machine that have this variable, with a value that is meant.

    Most tests of whole jobs ask for this, some all the while; psutil takes ten times as long to look through all.
    """
    return list(_find(f"{name}=".encode(), is_meant))


def _find(start: bytes, is_meant: Callable[[str], bool]) -> Iterator[psutil.Process]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # It may end at any moment, and others' are not to be read.
        with contextlib.suppress(OSError, psutil.Error), open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            variables = file.readall()
            if start in variables and any(
                is_meant(os.fsdecode(each.removeprefix(start)))
                for each in variables.split(b"\0")
                if each.startswith(start)
            ):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def in_words(processes: Iterable[psutil.Process]) -> list[str]:
    """Those of them that still run, by number and command line."""
    words = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words.append(f"{process.pid} {process.cmdline()}")
    return words
