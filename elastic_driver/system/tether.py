"""Makes the kernel end workers when their driver dies, whatever else is stopped or dead.

Only the driver holds the write end of one pipe. Each worker inherits read ends of it for which the driver asks the
kernel for a signal at any event of the pipe (O_ASYNC, F_SETSIG). Nothing is ever written, so the only event is that the
write end is closed: the driver is dead. The kernel then kills the worker, even one that is stopped or holds Python's
lock, and sends SIGTERM to the rest of its process group. The guard (:mod:`elastic_driver.launch.processes.guard`) finds
processes that have left the group; if the guard itself was stopped, later.

Unlike PR_SET_PDEATHSIG this needs no code between fork and exec, does not depend on the thread that forked, and
survives the exec of a setuid program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
from dataclasses import dataclass

# High enough not to collide with scripts that use descriptors by number ("exec 3>file"), which would close ours.
_FROM = 100


@dataclass(frozen=True, slots=True)
class Ends:
    """The descriptors that one worker inherits: read ends with a signal each. Their holder closes them."""

    of_leader: int
    of_group: int

    def tie(self, pid: int) -> None:
        """Make the kernel signal this process, which leads its group or will, and the group.

        If it cannot (a sandbox without F_SETSIG), only the guard is left to end them.
        """
        with contextlib.suppress(OSError):
            _signal_at_end(self.of_leader, pid, signal.SIGKILL)
            _signal_at_end(self.of_group, -pid, signal.SIGTERM)

    def descriptors(self) -> tuple[int, int]:
        """Return both descriptors."""
        return self.of_leader, self.of_group

    def close(self) -> None:
        """Close them; a worker that inherited them stays tied."""
        for descriptor in self.descriptors():
            os.close(descriptor)


class Tether:
    """The driver's end. Keeps all workers tied as long as this process lives and does not close it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def ends(self) -> Ends:
        """Return new ends for one worker. Raises OSError when no descriptor is free."""
        leader = self._open()
        try:
            return Ends(leader, self._open())
        except BaseException:
            os.close(leader)
            raise

    def close(self) -> None:
        """Close the driver's end, which signals all that are still tied: only once all workers are gone."""
        os.close(self._read)
        os.close(self._write)

    def _open(self) -> int:
        # Owner and signal belong to the open file, so each end is opened anew.
        opened = os.open(f"/proc/self/fd/{self._read}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FROM)
        except OSError as error:
            if error.errno != errno.EINVAL:  # else the limit of open files is below that number
                raise
            return os.dup(opened)
        finally:
            os.close(opened)


def tie(reading_end: int, owner: int) -> None:
    """Make the kernel kill a process when the last write end of a pipe is closed.

    For programs that close all inherited descriptors except their standard input, which is this pipe. Their input was
    written before: any further byte would kill them, too. If the kernel does not support it, nothing is tied.

    Args:
        reading_end: of the pipe; the process has inherited it.
        owner: PID of the process, or the negative id of a process group.
    """
    with contextlib.suppress(OSError):  # like Ends.tie
        _signal_at_end(reading_end, owner, signal.SIGKILL)


def tie_this_process() -> None:
    """Tie a process that trains but was not started by the driver itself: for example if the command is a shell script.

    Such a process has inherited the ends, and gets one of its own. Does nothing if there are none, or this process is
    tied already. If the driver is dead, this process is killed at once.
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
        if poll.poll(0):  # the pipe had ended before the signal was asked for
            os.kill(os.getpid(), signal.SIGKILL)


def _open_descriptors() -> list[str]:
    try:
        return os.listdir("/proc/self/fd")
    except OSError:  # a sandbox without /proc: only the guard is left
        return []


def _is_of_leader(descriptor: int) -> bool:
    """Return whether it is an end of a tether: no other pipe asks for this signal."""
    asks = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ASYNC
    return bool(asks) and fcntl.fcntl(descriptor, fcntl.F_GETSIG) == signal.SIGKILL


def _signal_at_end(descriptor: int, owner: int, number: signal.Signals) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, owner)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, number)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
