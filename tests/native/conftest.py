"""Helpers of the native tests: worlds of threads, and of forked processes that exchange their addresses over pipes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from elastic_driver.worker.engine import native_loader

from .limits import NEVER_S

try:
    native: Any = native_loader.load()
except ImportError as error:  # the package works without it; CI requires it through the environment
    if os.environ.get("ELASTIC_DRIVER_REQUIRE_NATIVE") == "1":
        raise
    pytest.skip(str(error), allow_module_level=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/native" in str(item.path):
            item.add_marker(pytest.mark.native)


def groups_of(rank: int, size: int) -> list[tuple[str, list[int], int]]:
    return [("global", list(range(size)), rank)]


def in_threads(size: int, body: Callable[[Any, int], None]) -> dict[int, BaseException]:
    """Runs body(context group, rank) on a thread for each rank; whoever fails aborts, as the worker library does."""
    members = [native.ContextGroup(groups_of(rank, size), host="127.0.0.1") for rank in range(size)]
    blobs = [member.prepare() for member in members]
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            members[rank].connect(blobs, NEVER_S)
            body(members[rank], rank)
        except BaseException as error:
            errors[rank] = error
            members[rank].abort(f"rank {rank} failed: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for member in members:
        member.close()
    return errors


class Processes:
    """A forked process for each rank. ``body(context group, rank, pipe to the test)`` runs connected."""

    def __init__(self, size: int, body: Callable[[Any, int, Connection], None]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=self._main, args=(rank, size, theirs, body), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        blobs = [pipe.recv_bytes() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(blobs)

    @staticmethod
    def _main(rank: int, size: int, pipe: Connection, body: Callable[[Any, int, Connection], None]) -> None:
        member = native.ContextGroup(groups_of(rank, size), host="127.0.0.1")
        pipe.send_bytes(member.prepare())
        member.connect(pipe.recv(), NEVER_S)
        body(member, rank, pipe)
        member.close()
        pipe.send("closed")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
