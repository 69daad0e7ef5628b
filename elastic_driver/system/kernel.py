"""System calls that Python only provides if it was built against headers that define them.

conda-forge's Pythons, and others built for old systems, were not: they lack os.memfd_create, os.pidfd_open and
signal.pidfd_send_signal on the newest kernel. There the same calls are made by their numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import struct
import threading
from functools import cache

# From linux/memfd.h.
_MFD_CLOEXEC = 1
# From linux/fcntl.h.
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = (
    getattr(fcntl, name, number) for name, number in (("F_OFD_GETLK", 36), ("F_OFD_SETLK", 37), ("F_OFD_SETLKW", 38))
)
# A struct flock: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
# Numbers of system calls, from the kernel's headers. From 424 on they are the same on all architectures.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _PIDFD_GETFD = 424, 434, 438


def memory_file(name: str) -> int:
    """Make a file in memory, without a path, and return a descriptor that no program inherits.

    Args:
        name: shown in /proc; several files may have the same.

    Raises:
        OSError: there is no room for one, or no descriptor.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    return _call(_MEMFD_CREATE.get(platform.machine(), -1), name.encode(), _MFD_CLOEXEC)


def pidfd_open(pid: int, flags: int = 0) -> int:
    """Call os.pidfd_open. Raises OSError, also if the kernel has no such call."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid, flags)
    return _call(_PIDFD_OPEN, pid, flags)


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Call signal.pidfd_send_signal. Raises OSError, also if the kernel has no such call."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, descriptor, int(number), None, 0)


def end_of_child(pid: int) -> int:
    """Return a descriptor that becomes readable once a child has ended; the child stays a zombie.

    That is a pidfd. Where there are none, a thread waits for the child and writes to a pipe; of a child that is no more
    the pipe is readable at once.

    Raises:
        OSError: there is no such child, or no descriptor or thread is free.
    """
    if has_pidfds():
        return pidfd_open(pid)
    reader, writer = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # somebody has reaped it, so it has ended
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(writer, b"\0")  # closing is not enough: a forked process may hold a copy
        os.close(writer)

    # A daemon, because only the child's end wakes it: it must not keep a driver alive that ends in a crash.
    thread = threading.Thread(target=wait, name=f"elastic-driver-wait-{pid}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        os.close(reader)
        os.close(writer)
        raise OSError(errno.EAGAIN, f"cannot wait for process {pid}: {error}") from error
    return reader


def pidfd_getfd(process: int, descriptor: int) -> int:
    """Return a copy of a descriptor of another process that this one may trace (Linux 5.6). Python has no such call.

    Args:
        process: a pidfd of it.
        descriptor: its number there.

    Raises:
        OSError: there is none, or it is unavailable.
    """
    return _call(_PIDFD_GETFD, process, descriptor, 0)


def check_pidfds() -> None:
    """Raise OSError if the kernel has no pidfds (Linux 5.3), or denies this process opening or signaling by one."""
    process = pidfd_open(os.getpid())
    try:
        pidfd_send_signal(process, 0)  # checks only whether it may be sent one
    finally:
        os.close(process)


def lock_file(descriptor: int, command: int, kind: int) -> int:
    """Lock a whole file while it is open (F_OFD_SETLK, F_OFD_SETLKW), or query the lock in the way (F_OFD_GETLK).

    Args:
        descriptor: of the file.
        command: one of these three.
        kind: F_RDLCK or F_WRLCK.

    Returns:
        The kind of the conflicting lock for F_OFD_GETLK, F_UNLCK if there is none; otherwise ``kind``.

    Raises:
        OSError: another open file has a conflicting lock, or the file system has no locks.
    """
    lock = fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    return int(_FLOCK.unpack(lock)[0])


@cache
def has_pidfds() -> bool:
    """Return whether :func:`check_pidfds` finds nothing wrong. A lack of free descriptors does not count."""
    try:
        check_pidfds()
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call. Raises OSError."""
    if number < 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    values = [
        ctypes.c_long(argument) if isinstance(argument, int) else ctypes.c_char_p(argument) for argument in arguments
    ]
    result = int(_libc().syscall(ctypes.c_long(number), *values))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library
