"""Runs a command to which the kernel refuses some system calls, as an old kernel or a container's seccomp profile does.

python -m tests.support.processes.refused_calls pidfd_open,memfd_create -- COMMAND ...
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

# Numbers of system calls, as the kernel's headers have them.
NUMBERS = {
    "x86_64": {
        "memfd_create": 319,
        "pidfd_getfd": 438,
        "pidfd_open": 434,
        "pidfd_send_signal": 424,
        "process_vm_readv": 310,
    },
    "aarch64": {
        "memfd_create": 279,
        "pidfd_getfd": 438,
        "pidfd_open": 434,
        "pidfd_send_signal": 424,
        "process_vm_readv": 270,
    },
}.get(platform.machine(), {})
# linux/filter.h, linux/seccomp.h, linux/prctl.h.
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse(calls: Sequence[str]) -> None:
    """Have these calls fail with ENOSYS in this process and in all that it starts. It cannot be undone."""
    filters = [struct.pack("=HBBI", _LOAD_WORD, 0, 0, 0)]  # the call's number
    for call in calls:
        filters.append(struct.pack("=HBBI", _JUMP_IF_EQUAL, 0, 1, NUMBERS[call]))
        filters.append(struct.pack("=HBBI", _RETURN, 0, 0, _FAIL | errno.ENOSYS))
    filters.append(struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(filters))
    program = _Program(len(filters), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "cannot install a seccomp filter")


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execvp(sys.argv[3], sys.argv[3:])
