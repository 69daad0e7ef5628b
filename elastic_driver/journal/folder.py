"""The folder of a journal: whether it is this user's alone, which process drives its job, and whether it still exists.

Owns the folder, its lock, and the checks. :mod:`elastic_driver.journal.file` owns the journal file.

The lock is a ``flock``, held from before the journal is read until the process has ended: the kernel releases it when
the driver dies, however it does. It belongs to the inode, and not to the name: so its owner checks before each write
whether ``lock`` is still the file that it has locked (:attr:`JournalFolder.is_ours`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.kernel import pidfd_open
from elastic_driver.system.parent import Interruption
from elastic_driver.system.process_name import lives, name_of_this_process, pid_in
from elastic_driver.system.safe_files import leads_to, who_exchanges_in, why_not_private

LOCK, JOURNAL = "lock", "journal"
_PRIVATE = 0o600
# A longer content is not a lock of ours.
_MOST_TEXT = 4096
# A dead process holds it until the kernel, or a child before its exec, has released it.
_LOOK_S = 0.05
_STANDS_BY_S = 1.0
# Network file systems: their locks, if there are any, are a server's, and outlive this machine. Linux's magic.h and the
# file systems' own headers; FUSE never tells what is behind it.
_NETWORKS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01021997: "9P",
    0x65735546: "FUSE",
}


class JournalError(SettingsError):
    """A journal cannot be used: its folder or its files are invalid."""


class JournalHeldError(JournalError):
    """Another driver has it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The content of the lock, written by the process that locks the folder.

    Attributes:
        process: the process; "" if it cannot be read.
        job: the job that is in the folder, or begins there; "" if it cannot be read.
        exit_code: the job's exit code; None if it has not ended, as far as its driver could record that.
    """

    process: str = ""
    job: str = ""
    exit_code: int | None = None


class JournalFolder:
    """A folder that this process has locked. Used by one thread at a time.

    Attributes:
        path: its path, without symbolic links.
        last: the content of the lock that the previous process has left.
        waited_for: the job whose driver's end was waited for; "" if no process had the folder.
    """

    def __init__(
        self, path: Path, job_id: str, descriptor: int, last: Signature = Signature(), *, waited: bool = False
    ) -> None:
        self.path = path
        self.last = last
        self.waited_for = last.job if waited else ""
        self._job_id = job_id
        self._descriptor = descriptor

    @classmethod
    def take(
        cls,
        path: Path,
        job_id: str,
        *,
        stands_by: bool = False,
        on_wait: Callable[[str], None] = lambda text: None,
        look: Interruption = lambda *, drives: None,
    ) -> Self:
        """Create the folder if it does not exist, check it, and lock it.

        Blocks for as long as a dead process still holds the lock.

        Args:
            path: the folder.
            job_id: written to the lock, for messages, if it names no job; see :meth:`is_of`.
            stands_by: whether to wait for the end of a living process that has it, too.
            on_wait: called once, with a description, when it has to wait.
            look: called repeatedly while it waits, also for a living process; an error that it raises ends the wait.

        Raises:
            JournalHeldError: a living process has it.
            JournalError: it cannot be created, is not this user's alone, or its file system has no locks.
        """
        path = _checked(path)
        waiting = _Waiting(path, on_wait, look, stands_by=stands_by)
        descriptor, last = _lock(path, job_id, waiting)
        return cls(path, job_id, descriptor, last, waited=waiting.is_stood_by)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the folder for others."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def handed_on(self) -> Self:
        """Return the folder, still locked, for another driver of this process: this one never releases it."""
        other = type(self)(self.path, self._job_id, self._descriptor)
        self._descriptor = -1
        return other

    def is_of(self, job_id: str) -> None:
        """Record which job is in it, and that it has not ended, for messages."""
        self._job_id = job_id
        _sign(self._descriptor, job_id)

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code, which drivers that stand by read even if the journal could not be written."""
        _sign(self._descriptor, self._job_id, str(exit_code))

    @property
    def is_ours(self) -> bool:
        """Whether the lock is still where others look for it."""
        return leads_to(self.path / LOCK, self._descriptor)

    def take_again(self) -> None:
        """Create and lock it again, if somebody has removed or replaced it.

        Raises:
            JournalHeldError: another process has it now.
            JournalError: as :meth:`take` raises it.
        """
        descriptor, _ = _lock(_checked(self.path), self._job_id, None)
        self.release()
        self._descriptor = descriptor


def open_private(path: Path, flags: int) -> int:
    """Open a file of a journal.

    Raises:
        OSError: it cannot be opened.
        JournalError: it is another user's, open to others, not a regular file, or has another name.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, _PRIVATE)
    except OSError as error:
        if path.is_symlink():
            raise JournalError(f"cannot use {path} (--journal): it is a symbolic link") from error
        raise
    status = os.fstat(descriptor)
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = "it is not a regular file"
    elif status.st_uid != os.geteuid():
        why = f"it belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        why = f"other users can open it (chmod 600 {path})"
    elif status.st_nlink > 1:
        why = "it is a hard link: the file has other names"
    if why:
        os.close(descriptor)
        raise JournalError(f"cannot use {path} (--journal): {why}")
    return descriptor


def check_folder(path: Path) -> None:
    """Check that a folder is this user's, and that nobody else can enter, rename or replace it.

    Args:
        path: without symbolic links above it.

    Raises:
        FileNotFoundError: it does not exist.
        JournalError: it fails the check.
    """
    why = why_not_private(path.lstat())
    if why:
        raise _unfit(path, f"it {why}")
    if who := who_exchanges_in(path.parent, strict=True):
        raise _unfit(path, who)


def file_system(path: Path) -> int:
    """Return the kernel's number for the kind of a folder's file system, from statfs(2). Raises OSError."""
    # It is the first field of the structure, has the size of a long on all machines but one, and fits into this
    # everywhere.
    data = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return ctypes.c_uint32.from_buffer(data, 4 if _is_big() else 0).value


def _checked(path: Path) -> Path:
    """Return the folder, created if it did not exist, without symbolic links above it."""
    try:
        try:
            path = path.parent.resolve(strict=True) / path.name
        except FileNotFoundError as error:
            raise _unfit(path, f"its parent folder {path.parent} does not exist") from error
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        check_folder(path)
        network = _NETWORKS.get(file_system(path))
    except OSError as error:
        raise _unfit(path, in_words(error)) from error
    if network is not None:
        raise _unfit(path, f"it is on a network file system ({network}), whose locks are not local to this machine")
    return path


class _Waiting:
    """The wait for a lock that another process has, for :meth:`JournalFolder.take`.

    Attributes:
        is_stood_by: whether it has waited for the end of a living process.
    """

    def __init__(self, path: Path, on_wait: Callable[[str], None], look: Interruption, *, stands_by: bool) -> None:
        self._path, self._on_wait, self._look, self._stands_by = path, on_wait, look, stands_by
        self._told = ""
        self.is_stood_by = False

    def wait(self, process: str, job: str) -> None:
        """Wait a while, or until the process has ended. Raises JournalHeldError if there is nothing to wait for."""
        drives = not process or lives(process)
        if drives:
            if not self._stands_by:
                raise _held(self._path, process, job)
            self.is_stood_by = True
            whom = f"job {job}" if job else "another job"
            self._tell(
                f"standing by: {whom} is driven by {f'process {pid_in(process)}' if process else 'another process'}"
            )
        else:
            self._tell(
                f"the journal {self._path} is still locked for process {pid_in(process)}, which is dead: waiting "
                "until the kernel releases the lock"
            )
        self._look(drives=drives)
        if not _wait_for_end(pid_in(process)):
            time.sleep(_LOOK_S)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._on_wait(text)


def _wait_for_end(pid: int | None) -> bool:
    """Block until a process has ended, for a second at most; return whether it could be waited for."""
    if pid is None:
        return False
    try:
        process = pidfd_open(pid)
    except (OSError, OverflowError):  # it has ended, or is not visible from here
        return False
    try:
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        return not waiting.poll(_STANDS_BY_S * 1000)
    finally:
        os.close(process)


def _lock(path: Path, job_id: str, waiting: _Waiting | None) -> tuple[int, Signature]:
    """Return the descriptor that holds the lock, and the lock's last content. ``waiting``: None to not wait."""
    while True:
        try:
            descriptor = open_private(path / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _unfit(path, f"{LOCK}: {in_words(error)}") from error
        try:
            # On the current file: somebody may remove it, and its driver creates another before it releases this one.
            while not _has_locked(descriptor):
                holder = _signed(descriptor)
                if waiting is None:
                    raise _held(path, holder.process, holder.job)
                waiting.wait(holder.process, holder.job)
            if leads_to(path / LOCK, descriptor):
                last = _signed(descriptor)
                # Its content about the job stays until it is known which job this is: this process may die before that.
                code = "" if last.exit_code is None else str(last.exit_code)
                _sign(descriptor, last.job or job_id, code if last.job else "")
                return descriptor, last
        except OSError as error:
            os.close(descriptor)
            raise _unfit(path, f"{LOCK}: {in_words(error)}; a journal needs a file system with locks") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        path = _checked(path)


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int, job_id: str, exit_code: str = "") -> None:
    data = "\n".join((platform.node(), name_of_this_process(), job_id, exit_code, "")).encode()
    try:
        # In this order: a concurrent reader finds a process, in the first three lines.
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    except OSError:
        # Without room on the disk the owner is not recorded, but the lock is held all the same.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)


def _signed(descriptor: int) -> Signature:
    """Return what the last owner of the lock has written, as far as it is there already."""
    lines = os.pread(descriptor, _MOST_TEXT, 0).decode(errors="replace").split("\n")
    _, process, job, exit_code = (*lines[:4], "", "", "", "")[:4]
    return Signature(process, job, int(exit_code) if exit_code.isdecimal() else None)


def _held(path: Path, process: str, job: str) -> JournalHeldError:
    whom = f"job {job}" if job else "another job"
    by = f" is driven by process {pid_in(process)}" if process else " uses it"
    return JournalHeldError(f"cannot use the folder {path} (--journal): {whom}{by}")


def _unfit(path: Path, why: str) -> JournalError:
    return JournalError(f"cannot use the folder {path} (--journal): {why}")


def _is_big() -> bool:
    return sys.byteorder == "big" and ctypes.sizeof(ctypes.c_long) == 8
