"""Jobs of nodes for tests: one command a node, on this machine or on a test's own machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from tests.support.network.namespaces import NamespaceHost
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import forked

WORKER = [sys.executable, str(PROGRAMS / "node_worker.py")]
PATIENCE_S = 150.0

_T = TypeVar("_T")


class Node:
    """One command.

    Attributes:
        name: of it; its workers are told so.
        process: it.
    """

    def __init__(self, name: str, process: subprocess.Popen[Any] | forked.ForkedProcess, folder: Path) -> None:
        self.name, self.process, self._folder = name, process, folder

    @property
    def out(self) -> str:
        """What it has written to standard output."""
        return (self._folder / f"{self.name}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has written to standard error."""
        return (self._folder / f"{self.name}.err").read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Sends the command, and nothing that it has started, a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code. Blocks until it has ended."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end\n{self.err[-4000:]}") from None


class NodesJob:
    """The nodes of one job. A context manager; afterwards nothing of it runs.

    Args:
        folder: of its files.
        nodes: what all are told alike.
    """

    def __init__(self, folder: Path, **nodes: Any) -> None:
        self.folder = folder
        self._nodes = {"run_id": "a job", **nodes}
        self.log, self._end = folder / "log.jsonl", folder / "end"
        self.log.touch()
        self.started: list[Node] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.started:
            if node.process.poll() is None:
                node.process.kill()
            node.process.wait(PATIENCE_S)
        self.wait_for("nothing is left", lambda: not self.living())

    def start(
        self,
        name: str,
        *,
        host: NamespaceHost | None = None,
        given: dict[str, Any] | None = None,
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        **nodes: Any,
    ) -> Node:
        """Starts a node, on a machine or on this one."""
        words = [sys.executable, str(PROGRAMS / "node_program.py"), json.dumps(given or {})]
        words += [json.dumps(self._nodes | nodes), *(command or WORKER)]
        return self.start_words(name, host, words, env=env, cwd=cwd)

    def start_words(
        self,
        name: str,
        host: NamespaceHost | None,
        words: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Node:
        """Starts a node by a command line of Python's."""
        environ = os.environ if host is None else host.environment()
        more = {"NODE": name, "LOG": str(self.log), "END": str(self._end), "PYTHONPATH": str(ROOT), **(env or {})}
        env, cwd = {**environ, **more}, cwd or self.folder
        process: subprocess.Popen[Any] | forked.ForkedProcess
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            if host is not None:
                process = host.popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd)
            elif forked.starts_afresh():
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd)
            else:
                process = forked.start_driver(words[1:], env, out, err, cwd, workers=True)
        node = Node(name, process, self.folder)
        self.started.append(node)
        return node

    def end(self, code: int) -> None:
        """All workers end with this code."""
        new = self._end.with_suffix(".new")
        new.write_text(str(code))
        new.replace(self._end)

    def begin_again(self) -> None:
        """Workers that start from now on go on until the next end."""
        self._end.unlink()

    def lines(self) -> list[dict[str, Any]]:
        """What workers have said, in order of time."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def living(self) -> list[dict[str, Any]]:
        """What the workers have said that run."""
        return [line for line in self.lines() if self._is_living(line["pid"])]

    def _is_living(self, pid: int) -> bool:
        try:
            # Not by its command line: that of a forked one is another's.
            return bool(psutil.Process(pid).environ().get("LOG") == str(self.log))
        except psutil.Error:
            return False

    def wait_for_world(self, *names: str) -> dict[int, dict[str, Any]]:
        """Blocks until the workers that run are one world, on these nodes and no others. What they said, by rank."""

        def found() -> dict[int, dict[str, Any]]:
            lines = self.living()
            by_rank = {int(line["RANK"]): line for line in lines}
            is_whole = len(lines) == len(by_rank) and all(line["WORLD_SIZE"] == str(len(lines)) for line in lines)
            return by_rank if is_whole and {line["NODE"] for line in lines} == set(names) else {}

        return self.wait_for(f"a world on {names}", found)

    def wait_for(self, what: str, found: Callable[[], _T]) -> _T:
        """What was found at last."""
        end = time.monotonic() + PATIENCE_S
        while not (answer := found()):
            said = "".join(f"--- {node.name} ({node.process.poll()})\n{node.err[-3000:]}" for node in self.started)
            assert time.monotonic() < end, f"{what}: not seen\n{self.log.read_text()[-3000:]}\n{said}"
            time.sleep(0.02)
        return answer
