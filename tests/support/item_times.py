"""``--times FILE``: what each test cost, as a table; the dearest first. A plugin of pytest's (``-p item_times``).

The processor time of a test is that of pytest's process, of all processes that ended below it, and of those that live:
a job that several tests share is charged to those during which it works, and what a fixture starts to the first test
that asks for it. So is what programs are forked from (tests/support/processes/forked.py), and what it has imported.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import forked

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HEAD = "processor_s\tof_children_s\twall_s\ttest\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds since some moment: of the clock, of this process's processor time, and of all below it."""

    wall_s: float
    own_s: float
    children_s: float

    @classmethod
    def now(cls) -> Usage:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        children_s = ended.ru_utime + ended.ru_stime + sum(server.imported_s for server in forked.servers())
        processes, children = _processes()
        below = [*children[os.getpid()], *(server.pid for server in forked.servers())]
        for pid in below:  # more and more
            children_s += processes.get(pid, 0.0)
            below += children[pid]
        return cls(time.monotonic(), time.process_time(), children_s)


def _processes() -> tuple[dict[int, float], dict[int, list[int]]]:
    """Of each process of this machine, the processor time, with that of its own ended children; and its children."""
    spent: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue
        fields = stat.rpartition(b")")[2].split()
        spent[int(name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
        children[int(fields[1])].append(int(name))
    return spent, children


class ItemTimes:
    """Appends a line for each test, in whichever process runs it; sorts them in the process that began."""

    def __init__(self, path: Path, *, is_first: bool) -> None:
        self._path, self._is_first = path, is_first
        if is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = Usage.now()
        try:
            return (yield)
        finally:
            after = Usage.now()
            # Who ended without having been waited for is in no sum any more.
            children_s = max(0.0, after.children_s - before.children_s)
            processor_s = children_s + after.own_s - before.own_s
            wall_s = after.wall_s - before.wall_s
            line = f"{processor_s:.3f}\t{children_s:.3f}\t{wall_s:.3f}\t{item.nodeid}\n"
            with self._path.open("ab", buffering=0) as file:  # in one call, as other processes append too
                file.write(line.encode())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._is_first:
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            lines.sort(key=lambda line: float(line.split("\t")[0]), reverse=True)
            self._path.write_text(_HEAD + "".join(lines), encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = [line.split("\t") for line in self._path.read_text(encoding="utf-8").splitlines()[1:]]
        total_s = sum(float(row[0]) for row in rows)
        terminalreporter.write_line(f"{total_s:.0f} s of processor time in {len(rows)} tests: {self._path}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, metavar="FILE", help="write what each test cost there, the dearest first")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--times")
    if path is not None:
        is_first = "PYTEST_XDIST_WORKER" not in os.environ
        config.pluginmanager.register(ItemTimes(Path(path).absolute(), is_first=is_first), "item-times")
