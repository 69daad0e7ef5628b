"""The start of one process: its pipes, its session, and what the errors of exec mean to the user.

Blocks, so the keeper calls it in a thread. Either a process runs afterwards, or nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import termios
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import psutil

from elastic_driver.errors import LaunchError, in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.words import CommandNotFoundError, Stream
from elastic_driver.rendezvous.environment import ENV_REPORT_FD
from elastic_driver.system.tether import Tether

# Errors of exec that mean: this command will not run, however often it is tried.
_BAD_COMMAND = {
    errno.ENOENT: "there is no such command",
    errno.EACCES: "it is not executable",
    errno.ENOEXEC: "it is neither a program nor a script that begins with #!",
    errno.ENOTDIR: "a part of its path is not a directory",
    errno.EISDIR: "it is a directory",
    errno.ELOOP: "its path has too many symbolic links",
    errno.ENAMETOOLONG: "its path is too long",
    errno.E2BIG: "its arguments and environment are too long",
}

# Held during each start, so that descriptors for one worker are not inherited by another started at the same moment.
_spawning = threading.Lock()


class Child(Protocol):
    """A child process that can be reaped; :class:`subprocess.Popen` is one."""

    pid: int

    def wait(self) -> object:
        """Wait until it is dead, and reap it. Blocks until then."""


@dataclass(frozen=True, slots=True)
class Given:
    """A process's standard input, instead of none.

    Attributes:
        descriptor: the process's end; its maker closes it after the start.
        terminal: our end if it is a terminal, which is then also the process's standard output; else None.
        stderr_too: whether that terminal is its standard error as well.
    """

    descriptor: int
    terminal: int | None = None
    stderr_too: bool = False

    def holds(self, stream: Stream) -> bool:
        """Return whether a stream of the process is the terminal."""
        return self.terminal is not None and (stream == "stdout" or self.stderr_too)


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that was just started.

    Attributes:
        popen: reaps it.
        leader: the same process, for comparison: it leads a session of its own.
        pipes: read ends of its output. Output to a terminal arrives as "stdout".
    """

    popen: Child
    leader: psutil.Process
    pipes: dict[Stream, int]

    def undo(self) -> None:
        """Kill the process and close the pipes."""
        _kill_new(self.popen)
        for descriptor in self.pipes.values():
            os.close(descriptor)


def let_children_be_reaped() -> None:
    """Restore the default for SIGCHLD if it is inherited as ignored: exit codes would be lost."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def output_ends(
    given: Given | None, our_ends: contextlib.ExitStack, childs_ends: contextlib.ExitStack
) -> tuple[dict[Stream, int], dict[Stream, int]]:
    """Open the outputs of a process. Returns the read ends, and the process's.

    Args:
        given: its standard input.
        our_ends, childs_ends: close them.
    """
    pipes: dict[Stream, int] = {}
    ends: dict[Stream, int] = {}
    streams: tuple[Stream, ...] = ("stdout", "stderr")
    for stream in streams:
        if given is None or given.terminal is None or not given.holds(stream):
            pipes[stream], ends[stream] = os.pipe()
        else:
            ends[stream] = os.dup(given.descriptor)
            if stream == "stdout":
                pipes[stream] = os.dup(given.terminal)
        if stream in pipes:
            our_ends.callback(os.close, pipes[stream])
        childs_ends.callback(os.close, ends[stream])
    return pipes, ends


def spawn(
    worker: WorkerId, command: Sequence[str], env: Mapping[str, str], tether: Tether, given: Given | None = None
) -> Spawned:
    """Start a process in a session of its own. Blocks until its program is loaded.

    Args:
        worker: for messages.
        command, env: what to run, and its whole environment.
        tether: ends it when this process dies.
        given: its standard input, or None.

    Raises:
        CommandNotFoundError: the command cannot be run.
        LaunchError: the process could not be started.
    """
    name = command[0] if command else ""
    try:
        return _spawn(command, env, tether, given)
    except OSError as error:
        reason = _BAD_COMMAND.get(error.errno or 0)
        if reason is None:
            raise LaunchError(f"cannot start worker {worker}: {name!r}: {in_words(error)}") from error
        if error.errno == errno.ENOENT and shutil.which(name, path=env.get("PATH")):
            reason = "the program that its first line (#!) names does not exist"
        raise CommandNotFoundError(f"cannot run {name!r}: {reason}") from error
    except psutil.Error as error:  # /proc does not show it
        raise LaunchError(f"cannot watch worker {worker}: {error}") from error
    except (ValueError, IndexError) as error:  # a NUL byte in an argument, no argument at all
        raise CommandNotFoundError(f"cannot run {name!r}: {error}") from error


def _spawn(command: Sequence[str], env: Mapping[str, str], tether: Tether, given: Given | None) -> Spawned:
    with contextlib.ExitStack() as our_ends, contextlib.ExitStack() as childs_ends:
        pipes, ends = output_ends(given, our_ends, childs_ends)
        tied = tether.ends()
        childs_ends.callback(tied.close)
        with _spawning:
            _inherit_only({*tied.descriptors(), *_reports_to(env)})
            popen = subprocess.Popen(
                command,
                # Not closed by the child itself: until its program is loaded and shows the job's marks, it has to hold
                # the guard's pipe open, so that the guard of a driver that dies now waits for it.
                close_fds=False,
                stdin=subprocess.DEVNULL if given is None else given.descriptor,
                stdout=ends["stdout"],
                stderr=ends["stderr"],
                env=env,
                start_new_session=True,
                # One system call, in the leader of a new session: the terminal becomes its own, with Ctrl-C and sizes.
                preexec_fn=None if given is None or given.terminal is None else _TAKE_TERMINAL,
            )
        try:
            tied.tie(popen.pid)
            childs_ends.close()
            leader = psutil.Process(popen.pid)
        except BaseException:
            _kill_new(popen)
            raise
        our_ends.pop_all()
        return Spawned(popen, leader, pipes)


def _reports_to(env: Mapping[str, str]) -> Collection[int]:
    """Return the descriptor to which a process with this environment reports figures, if any."""
    number = env.get(ENV_REPORT_FD, "")
    return (int(number),) if number.isascii() and number.isdecimal() else ()


_TAKE_TERMINAL = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)


def _inherit_only(descriptors: Collection[int]) -> None:
    """Make exec close all descriptors but the three standard ones and these: the driver may have inherited others."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), int(name) in descriptors)


def _kill_new(popen: Child) -> None:
    # It has only just been started: no children worth a search. Not reaped yet, so the group's id is still its own.
    with contextlib.suppress(OSError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
