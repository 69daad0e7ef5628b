"""Calls of the kernel that Python has only where it was built against headers that know them.

conda-forge's Pythons, and others that are to run on old systems, were not: they lack os.memfd_create, os.pidfd_open and
signal.pidfd_send_signal on the newest kernel. There the same calls are made by their numbers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from functools import cache

# As linux/memfd.h has it.
_MFD_CLOEXEC = 1
# Numbers of system calls, as the kernel's headers have them. From 424 on they are the same everywhere.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _PIDFD_GETFD = 424, 434, 438


def memory_file(name: str) -> int:
    """A new file in memory that no folder has, as a descriptor that no program inherits.

    Args:
        name: what /proc shows it by; several may have the same.

    Raises:
        OSError: there is no room for one, or no descriptor.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    return _call(_MEMFD_CREATE.get(platform.machine(), -1), name.encode(), _MFD_CLOEXEC)


def pidfd_open(pid: int, flags: int = 0) -> int:
    """See os.pidfd_open. Raises OSError, also where the kernel knows no such call."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid, flags)
    return _call(_PIDFD_OPEN, pid, flags)


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """See signal.pidfd_send_signal. Raises OSError, also where the kernel knows no such call."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, descriptor, int(number), None, 0)


def pidfd_getfd(process: int, descriptor: int) -> int:
    """A copy of another process's descriptor, which this one may trace (Linux 5.6). Python has no such call.

    Args:
        process: a pidfd of it.
        descriptor: its number there.

    Raises:
        OSError: there is none, or it is not to be had.
    """
    return _call(_PIDFD_GETFD, process, descriptor, 0)


@cache
def has_pidfds() -> bool:
    """Whether the kernel has them (Linux 5.3), and lets this process have one."""
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Makes a system call. Raises OSError."""
    if number < 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    values = [ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments]
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
