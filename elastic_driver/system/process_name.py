"""Identifies this machine, and a process on it beyond the reuse of its PID: boot, namespace, PID, start time.

Owns the format of such a name, and reads /proc. With a name one can check whether that very process lives, and end it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Self

from elastic_driver.errors import shortage
from elastic_driver.system.kernel import pidfd_open, pidfd_send_signal

# The states in /proc/PID/stat (proc(5)) of a process that has ended.
_ENDED = ("Z", "X", "x")
# More than 52 numbers and a name need.
_STAT_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ProcessName:
    """A process of some machine. ``str()`` makes its name, :meth:`parse` reads it.

    Attributes:
        place: the boot and the namespace to which its PID belongs (:func:`place_of_processes`).
        pid: its PID there.
        started: its start time, in the kernel's ticks.
    """

    place: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Name a process of this place.

        Raises:
            OSError, ValueError, IndexError: there is none, or the system does not say.
        """
        return cls(place_of_processes(), pid, look_up(pid)[1])

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse a name; None if it is invalid."""
        try:
            place, pid, started = name.rsplit(" ", 2)
            return cls(place, int(pid), int(started))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.place} {self.pid} {self.started}"

    @property
    def is_of_this_place(self) -> bool:
        """Whether it can be looked up from here."""
        try:
            return self.place == place_of_processes()
        except OSError:
            return False

    def state(self) -> str | None:
        """Return the state of a process of this place, a letter of proc(5); None when it has ended.

        "?" if it cannot be looked up now because no descriptor or memory is free: that says nothing of the process.
        """
        try:
            state, started = look_up(self.pid)
        except OSError as error:
            return "?" if shortage(error) else None
        except (ValueError, IndexError):
            return None
        return state if started == self.started and state not in _ENDED else None


def name_of_this_process() -> str:
    """Return a name that no other process has, on any machine at any time: for the processes that it owns.

    Returns:
        "" if the system does not say.
    """
    return name_of(os.getpid())


def name_of(pid: int) -> str:
    """Return the name of another process of this place; "" if there is none."""
    try:
        return str(ProcessName.of(pid))
    except (OSError, ValueError, IndexError):
        return ""


def send(name: str, number: signal.Signals) -> bool:
    """Send a signal to the process of that name, and to no other. Returns whether it lives, and the signal was sent."""
    process = ProcessName.parse(name)
    if process is None or not process.is_of_this_place:
        return False
    try:
        descriptor = pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # the kernel has none, or none is free: the number could become another's between these two lines
        return process.state() is not None and _kill(process.pid, number)
    try:
        if process.state() is None:  # after the opening: its PID cannot be reused by now
            return False
        pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    except OSError:  # opening is allowed, but not this; the open descriptor keeps the number from being reused
        return _kill(process.pid, number)
    finally:
        os.close(descriptor)


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def lives(name: str) -> bool:
    """Return whether the process of that name lives: a zombie does not.

    One of another PID namespace or machine, which cannot be looked up from here, counts as living.
    """
    process = ProcessName.parse(name)
    return process is not None and (not process.is_of_this_place or process.state() is not None)


def lives_here(name: str) -> bool:
    """Return whether a process lives and can be looked up from here; another one may have died."""
    process = ProcessName.parse(name)
    return process is not None and process.is_of_this_place and process.state() is not None


def is_of_this_boot(name: str) -> bool:
    """Return whether the process of that name ran since this machine's boot, in any container.

    False if the system does not say.
    """
    boot = boot_id()
    return bool(boot) and name.startswith(f"{boot} ")


def pid_in(name: str) -> int | None:
    """Return the PID in a process's name; None if the name is invalid."""
    process = ProcessName.parse(name)
    return None if process is None else process.pid


def place_of_processes() -> str:
    """Return the boot of this machine, and in it the namespace to which PIDs belong."""
    return f"{_boot()} {os.readlink('/proc/self/ns/pid')}"


def boot_id() -> str:
    """Return the unique id of this boot of the machine; "" if the system does not say."""
    try:
        return _boot()
    except OSError:
        return ""


def network_id() -> str:
    """Return an id that distinguishes this process's network from other containers' on the machine; "" likewise."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def place_of_sockets() -> str:
    """Return a unique id of this process's network, across machines: it tells whose loopback addresses these are."""
    return f"{boot_id()} {network_id()}"


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def look_up(pid: int) -> tuple[str, int]:
    """Return the state and the start time of a process.

    Raises:
        OSError: there is none.
    """
    _, fields = stat_of(pid)
    return fields[0].decode(), int(fields[19])


def stat_of(process: int | str) -> tuple[bytes, list[bytes]]:
    """Return what /proc/PID/stat says: the program's name, and the fields behind it.

    The state is the first of them, field 3 of proc(5). Read in one call and without a buffer: agents do so for every
    process of a machine.

    Args:
        process: its number; of a thread "PID/task/TID".

    Raises:
        OSError: there is none, or no descriptor is free.
    """
    descriptor = os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, _STAT_BYTES)
    finally:
        os.close(descriptor)
    head, _, tail = text.rpartition(b")")  # a name may hold anything, also ")"
    return head.partition(b"(")[2], tail.split()


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or under a debugger. False for one that is gone."""
    try:
        return look_up(pid)[0] in "Tt"
    except (OSError, ValueError, IndexError):
        return False


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is that one, or a descendant of it with all ancestors in between alive."""
    try:
        while pid not in (0, 1, ancestor):
            pid = int(stat_of(pid)[1][1])
    except (OSError, ValueError, IndexError):
        return False
    return pid == ancestor
