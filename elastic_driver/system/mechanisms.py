"""The mechanisms of Linux that some kernels and containers lack: a table, with a probe for each mechanism.

Owns the list of mechanisms, the kernel versions that introduced them, and the effects of their absence. ``elasticrun
--check-build`` prints the table for this machine, ``elasticrun doctor`` reports the effects on each host, and
docs/platforms.md explains them. Probes have no lasting effects.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.errors import in_words, shortage
from elastic_driver.system.cgroups import memory_files
from elastic_driver.system.kernel import F_OFD_GETLK, check_pidfds, lock_file, memory_file, pidfd_getfd, pidfd_open

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")
# linux/prctl.h
_PR_GET_TID_ADDRESS = 40
# The part of struct tcp_info that native/net/reach.cpp needs to notice silence: up to tcpi_notsent_bytes.
_TCP_INFO_BYTES = 148
_NETLINK_SOCK_DIAG = 4
# From linux/capability.h.
_CAP_SYS_PTRACE = 19


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism of Linux that this project uses if it is available.

    Attributes:
        name: the name of the system call, socket option or file.
        since: the first Linux version with it; "" if all supported versions have it.
        lost: the effect of its absence.
        probe: raises OSError, with the reason, if it cannot be used here.
        is_warned_of: whether ``elasticrun doctor`` warns if it is missing. The other mechanisms are missing only in old
            kernels and in containers with the default profile, and with little effect.
    """

    name: str
    since: str
    lost: str
    probe: Callable[[], object]
    is_warned_of: bool = False

    def why_not(self) -> str:
        """Return why it cannot be used here; "" if it can.

        Raises:
            OSError: no descriptor, process or memory is free, so the probe has no result.
        """
        try:
            self.probe()
        except OSError as error:
            if shortage(error):
                raise
            return in_words(error)
        return ""


def _thread_pidfd() -> None:
    os.close(pidfd_open(threading.get_native_id(), os.O_EXCL))  # PIDFD_THREAD is O_EXCL by definition


@contextlib.contextmanager
def _child() -> Iterator[int]:
    """Run a child of this user, as a worker is its agent's child, and yield its PID; it ends with the pipe it reads.

    The probes of access to another process need one: Yama lets a process do anything to itself.
    """
    if not sys.executable:
        raise OSError(errno.EAGAIN, "cannot tell which Python runs this program")
    waits = [sys.executable, "-I", "-S", "-c", "import os; os.read(0, 1)"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        yield child.pid


def _copied_descriptor() -> None:
    with _child() as child, contextlib.ExitStack() as opened:
        process = pidfd_open(child)
        opened.callback(os.close, process)
        os.close(pidfd_getfd(process, 0))


def _memory_file() -> None:
    os.close(memory_file("probe"))


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_memory() -> None:
    """Read this process's own memory: seccomp may reject even that."""
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        raise OSError("the C library has no such function")
    read.restype = ctypes.c_ssize_t
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    there = _Piece(ctypes.cast(source, ctypes.c_void_p), 1)
    here = _Piece(ctypes.cast(target, ctypes.c_void_p), 1)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if read(os.getpid(), ctypes.byref(here), one, ctypes.byref(there), one, none) != 1:
        raise _last_error()


def _yama() -> None:
    scope = ""
    with contextlib.suppress(OSError):
        scope = _PTRACE_SCOPE.read_text(errors="replace").strip()
    if scope == "3" or (scope == "2" and not _may_trace_all()):
        raise OSError(f"it is {scope}")


def _may_trace_all() -> bool:
    """Return whether this process has CAP_SYS_PTRACE, which Yama accepts at 2 (root usually has it)."""
    with contextlib.suppress(OSError):
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", _STATUS.read_text(errors="replace"), re.M)
        return found is not None and bool(int(found[1], 16) >> _CAP_SYS_PTRACE & 1)
    return False


def _signal_at_end() -> None:
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)  # never sent, without O_ASYNC
        if fcntl.fcntl(reader, fcntl.F_GETSIG) != signal.SIGKILL:
            raise OSError("the kernel ignores it")
    finally:
        os.close(reader)
        os.close(writer)


def _proc() -> None:
    for name in ("stat", "fd", "ns/pid", "ns/net"):
        os.lstat(f"/proc/self/{name}")
    os.stat("/proc/sys/kernel/random/boot_id")


def _proc_syscall() -> None:
    with _child() as child, open(f"/proc/{child}/syscall", "rb") as file:
        file.read()


def _memory_cgroup() -> None:
    if not any(file.exists() for file in memory_files("memory.oom_control", "memory.events")):
        raise OSError("no cgroup of this process counts memory, or /sys/fs/cgroup is not mounted")


def _thread_address() -> None:
    address = ctypes.c_void_p()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0):
        raise _last_error()


def _tcp_info() -> None:
    with socket.socket() as sock:
        size = len(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    if size < _TCP_INFO_BYTES:
        raise OSError(f"it has {size} bytes; {_TCP_INFO_BYTES} are required")


def _refusals() -> None:
    """Check the kernel's version: a real probe would need a refused connection."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if found is None or (int(found[1]), int(found[2])) < (5, 8):
        raise OSError(f"this is Linux {platform.release()}")


def _peer_credentials() -> None:
    one, other = socket.socketpair()
    with one, other:
        user = struct.unpack("=iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if user != os.geteuid():
        raise OSError(f"the kernel reports user {user}, but this process runs as user {os.geteuid()}")


def _looked_at_lock() -> None:
    with open("/proc/self/exe", "rb") as file:
        lock_file(file.fileno(), F_OFD_GETLK, fcntl.F_RDLCK)


def _sock_diag() -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG).close()


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


MECHANISMS = (
    Mechanism(
        "/proc",
        "",
        "jobs cannot start: local sockets and processes are found through it",
        _proc,
        is_warned_of=True,
    ),
    Mechanism(
        "SO_PEERCRED",
        "",
        "jobs cannot start: processes on a machine authenticate each other with it",
        _peer_credentials,
        is_warned_of=True,
    ),
    Mechanism(
        "memfd_create",
        "3.17",
        "ranks of this host use the network instead of shared memory, and a driver with other hosts, --event-hook and "
        "hvd.report() do not work",
        _memory_file,
        is_warned_of=True,
    ),
    Mechanism(
        "pidfd_open",
        "5.3",
        "the end of a process is noticed up to half a second later, and elasticrun stacks does not work",
        check_pidfds,
        is_warned_of=True,
    ),
    Mechanism(
        "pidfd_open of a thread",
        "6.9",
        "the death of a worker with much memory is noticed only when the kernel has freed it, seconds later",
        _thread_pidfd,
    ),
    Mechanism(
        "pidfd_getfd",
        "5.6",
        "the agent cannot close connections of hung workers, nor see that a waiting worker still receives data",
        _copied_descriptor,
    ),
    Mechanism(
        "process_vm_readv",
        "3.2",
        "large allreduces within this host are slower",
        _read_memory,
        is_warned_of=True,
    ),
    Mechanism(
        "kernel.yama.ptrace_scope below 2",
        "",
        "large allreduces within this host are slower, and gdb needs root",
        _yama,
        is_warned_of=True,
    ),
    Mechanism(
        "F_SETSIG",
        "",
        "workers outlive a driver that dies together with its guard",
        _signal_at_end,
        is_warned_of=True,
    ),
    Mechanism(
        "PR_GET_TID_ADDRESS",
        "3.5",
        "workers are not forked from a warm process: each imports its modules itself",
        _thread_address,
    ),
    Mechanism(
        "memory cgroup",
        "4.13",
        "a worker killed by the OOM killer is reported as killed by SIGKILL, and the memory limit is unknown",
        _memory_cgroup,
    ),
    Mechanism(
        "/proc/PID/syscall",
        "",
        "reports of a hang do not include what the worker's main thread waits for",
        _proc_syscall,
    ),
    Mechanism(
        "TCP_INFO",
        "4.6",
        "a rank whose host has vanished is noticed only by the kernel's own timeouts",
        _tcp_info,
    ),
    Mechanism(
        "IP_RECVERR of TCP",
        "5.8",
        "an agent cannot distinguish a driver that has died from a firewall",
        _refusals,
    ),
    Mechanism(
        "F_OFD_SETLK",
        "3.15",
        "a job that was killed is listed as running for ten minutes",
        _looked_at_lock,
    ),
    Mechanism(
        "sock_diag",
        "3.3",
        "Horovod's workers are identified by /proc/net/tcp, which takes longer",
        _sock_diag,
    ),
)
