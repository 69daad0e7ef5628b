"""What ends workers when their driver dies, whatever else is stopped or dead: the kernel itself.

The driver holds the writing end of one pipe, and nobody else does. Each worker inherits reading ends of it for which
the driver asks the kernel for a signal when something happens to the pipe (O_ASYNC, F_SETSIG). Nothing is ever
written, so what happens is that the writing end is gone: the driver is dead. The kernel then kills the worker, also one
that is stopped or holds Python's lock, and sends SIGTERM to the rest of its process group. The guard
(:mod:`elastic_driver.launch.processes.guard`) finds what has left the group; where the guard itself was stopped, later.

Unlike PR_SET_PDEATHSIG this needs no code between fork and exec, does not depend on the thread that forked, and lasts
through the exec of a setuid program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
from dataclasses import dataclass

# Out of the way of scripts that use descriptors by number ("exec 3>file"), which would close what stands there.
_FROM = 100


@dataclass(frozen=True, slots=True)
class Ends:
    """What one worker inherits: reading ends with a signal each. Whoever has them closes them."""

    of_leader: int
    of_group: int

    def tie(self, pid: int) -> None:
        """Has the kernel signal this process, which leads its group or will, and the group.

        Where it cannot (a sandbox that knows no F_SETSIG), the guard alone is left to end them.
        """
        with contextlib.suppress(OSError):
            _signal_at_end(self.of_leader, pid, signal.SIGKILL)
            _signal_at_end(self.of_group, -pid, signal.SIGTERM)

    def descriptors(self) -> tuple[int, int]:
        """Both."""
        return self.of_leader, self.of_group

    def close(self) -> None:
        """Lets go of them; a worker that inherited them stays tied."""
        for descriptor in self.descriptors():
            os.close(descriptor)


class Tether:
    """The driver's end. Lets go of nobody as long as this process lives and does not close it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def ends(self) -> Ends:
        """New ends for one worker. Raises OSError when no descriptor is free."""
        leader = self._open()
        try:
            return Ends(leader, self._open())
        except BaseException:
            os.close(leader)
            raise

    def close(self) -> None:
        """Signals whoever is still tied; so not before all workers are gone."""
        os.close(self._read)
        os.close(self._write)

    def _open(self) -> int:
        # Owner and signal belong to the open file, so each end is one of its own.
        opened = os.open(f"/proc/self/fd/{self._read}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FROM)
        except OSError as error:
            if error.errno != errno.EINVAL:  # else so many may not be open at all
                raise
            return os.dup(opened)
        finally:
            os.close(opened)


def tie(reading_end: int, owner: int) -> None:
    """Has the kernel kill a process when the last writing end of a pipe is closed.

    For programs that close what they inherit, all but their standard input, which is this pipe. What is to be read was
    written before: every further byte would kill as well. Where the kernel cannot, nobody is tied.

    Args:
        reading_end: of the pipe; the process has inherited it.
        owner: number of the process, or that of a process group, negative.
    """
    with contextlib.suppress(OSError):  # as Ends.tie
        _signal_at_end(reading_end, owner, signal.SIGKILL)


def tie_this_process() -> None:
    """Ties a process that trains, but was not itself started by the driver: the command is a shell script, say.

    Such a process has inherited the ends, and gets one of its own. Does nothing where there are none, and where this
    process is tied already. Where the driver is dead, it is killed at once.
    """
    owners = {}
    for name in _open_descriptors():
        with contextlib.suppress(OSError):  # closed by another thread meanwhile
            if _is_of_leader(int(name)):
                owners[int(name)] = fcntl.fcntl(int(name), fcntl.F_GETOWN)
    if not owners or os.getpid() in owners.values():
        return
    with contextlib.suppress(OSError):
        # Stays open for as long as the process lives.
        reading_end = os.open(f"/proc/self/fd/{next(iter(owners))}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        _signal_at_end(reading_end, os.getpid(), signal.SIGKILL)
        poll = select.poll()
        poll.register(reading_end, 0)
        if poll.poll(0):  # it ended before the signal was asked for
            os.kill(os.getpid(), signal.SIGKILL)


def _open_descriptors() -> list[str]:
    try:
        return os.listdir("/proc/self/fd")
    except OSError:  # a sandbox without /proc: the guard alone is left
        return []


def _is_of_leader(descriptor: int) -> bool:
    """Whether it is an end of a tether: nothing else is a pipe that asks for this signal."""
    asks = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ASYNC
    return bool(asks) and fcntl.fcntl(descriptor, fcntl.F_GETSIG) == signal.SIGKILL


def _signal_at_end(descriptor: int, owner: int, number: signal.Signals) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, owner)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, number)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
