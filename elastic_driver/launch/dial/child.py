"""A command that starts an agent, as a child process here; its end is the reason why no agent came up.

Owns the process until its end, and the last lines of its standard error. Knows nothing of the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from elastic_driver.errors import LaunchError, in_words
from elastic_driver.etcd.credentials import without_credentials
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.dial.spawned import Spawned, spawn
from elastic_driver.launch.words import CommandNotFoundError

# How much of the end of its standard error is kept.
KEPT_LINES = 20
KEPT_BYTES = 4096
_READ_BYTES = 65536
# As much as a pipe holds; a process left behind may write forever.
_LAST_READS = 16

Explain = Callable[[int, list[str]], DialFailure]
"""Explains a return code (negative: a signal's number) and the last lines."""


class Child:
    """A running command; see :class:`~elastic_driver.launch.dial.dialler.Dialled`.

    It leads a session of its own. The kernel kills it when this process dies, unless it has to outlive that: its
    standard input is a pipe that stays open, and is tied.

    All methods on the loop.

    Attributes:
        pid: of the command.
    """

    def __init__(self, started: Spawned, explain: Explain, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[DialFailure] = loop.create_future()
        self.pid = started.popen.pid
        self._loop = loop
        self._started = started
        self._explain = explain
        self._grace_s = grace_s
        self._tail = b""
        self._reads = True
        self._ended = asyncio.Event()
        loop.add_reader(started.stderr, self._read)
        loop.add_reader(started.ended, self._end)

    async def close(self) -> None:
        """Send SIGTERM, then SIGKILL after the grace. Blocks until the command is dead."""
        if not self._ended.is_set() and self._grace_s > 0:
            self._started.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await self._ended.wait()
        if not self._ended.is_set():
            self._started.signal(signal.SIGKILL)
        await self._ended.wait()

    def _read(self) -> bool:
        """Read what is there, so that writers do not block. Returns whether there may be more."""
        try:
            data = os.read(self._started.stderr, _READ_BYTES)
        except BlockingIOError:
            return False
        self._tail = (self._tail + data)[-KEPT_BYTES:]
        if not data:
            self._stop_reading()
        return bool(data)

    def _stop_reading(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._started.stderr)

    def _end(self) -> None:
        """Handle the command's death, without waiting for the end of its standard error, which others may keep open."""
        self._loop.remove_reader(self._started.ended)
        if self._reads:
            any(not self._read() for _ in range(_LAST_READS))
        self._stop_reading()
        self._started.signal(signal.SIGKILL)  # what it has left in its group
        returncode = self._started.popen.wait()
        self._started.close()
        self._ended.set()
        lines = self._tail.decode(errors="replace").splitlines()[-KEPT_LINES:]
        if not self.failed.done():
            self.failed.set_result(self._explain(returncode, lines))


async def start_child(
    command: Sequence[str],
    given: bytes,
    explain: Explain,
    *,
    env: Mapping[str, str] | None = None,
    grace_s: float = 1.0,
    with_group: bool = True,
    more: Sequence[int] = (),
    outlives: bool = False,
) -> Child:
    """Start a command. Its program is loaded afterwards.

    Args:
        command: what to run; its standard output is discarded.
        given: written to its standard input, which stays open afterwards.
        explain: explains its end.
        env: its whole environment; None for this process's, without variables meant for drivers only: a launcher like
            srun passes its own on to other hosts.
        grace_s: from SIGTERM to SIGKILL, when it is closed, seconds; 0 for SIGKILL at once.
        with_group: whether its children in its process group are ended with it.
        more: descriptors that it inherits under their numbers.
        outlives: whether it continues when this process dies.

    Raises:
        CommandNotFoundError: there is no such program, or it cannot be executed.
        LaunchError: it could not be started: too many processes or descriptors, no memory.
    """
    starting = asyncio.ensure_future(
        asyncio.to_thread(_start, command, given, env, more, with_group=with_group, outlives=outlives)
    )
    try:
        started = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_undo)
        raise
    return Child(started, explain, grace_s)


def _start(
    command: Sequence[str],
    given: bytes,
    env: Mapping[str, str] | None,
    more: Sequence[int],
    *,
    with_group: bool,
    outlives: bool,
) -> Spawned:
    try:
        own = without_credentials(os.environ) if env is None else env
        spawned = spawn(command, own, with_group=with_group, more=more)
        try:
            spawned.give(given, outlives=outlives)
        except BaseException:
            spawned.end()
            raise
        return spawned
    except OSError as error:
        name = command[0]
        if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
            raise CommandNotFoundError(f"cannot start an agent: {name!r}: {in_words(error)}") from error
        raise LaunchError(f"cannot start an agent: {name!r}: {in_words(error)}") from error


def _undo(starting: asyncio.Future[Spawned]) -> None:
    """End a command whose start is no longer awaited."""
    if starting.cancelled() or starting.exception() is not None:
        return
    starting.result().end()
