"""Opens files safely where others may have planted something: in a folder that the user names, or in /tmp.

A file planted by another user is neither followed nor waited for. These are the kernel's own rules for such folders
(fs.protected_symlinks, _hardlinks, _regular, _fifos), which are not enabled on every machine, and which do not apply to
folders without the sticky bit. All errors are OSErrors whose ``strerror`` says what is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import secrets
import select
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Anything longer is not a mark of ours.
_MARK_BYTES = 4096
_PIECE = 65536


def open_inside(
    name: str | Path, flags: int, *, dir_fd: int | None = None, pipes: bool = False, mode: int = 0o666
) -> int:
    """Open a file with a name of ours, in a folder that the user named. Never waits for a pipe's other end.

    Args:
        name: the file.
        flags: as for os.open; O_TRUNC truncates it only once it has been verified.
        dir_fd: the folder to which the name is relative.
        pipes: whether it may be a named pipe with a reader; it is non-blocking then.
        mode: of a new file.

    Raises:
        OSError: it cannot be opened, or it is a symbolic link, a hard link, a device, a folder, or another user's.
    """
    descriptor = _open(name, flags | os.O_NOFOLLOW, dir_fd, mode)
    with _closed_on_error(descriptor):
        status = os.fstat(descriptor)
        if not (stat.S_ISREG(status.st_mode) or (pipes and stat.S_ISFIFO(status.st_mode))):
            raise OSError(errno.EINVAL, f"it is {_kind(status)}", str(name))
        _check(status, name, os.stat(Path(name).parent, dir_fd=dir_fd), flags)
        _make_plain(descriptor, status, flags)
    return descriptor


def open_named(path: Path, flags: int) -> int:
    """Open a file that the user named, for writing: also a device, a pipe with a reader, or a link of the user's own.

    Raises:
        OSError: it cannot be opened, or it is another user's link, or a file that another user may have planted.
    """
    folder = path.parent.stat()
    try:
        descriptor = _open(path, flags | os.O_NOFOLLOW, None)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        # A link of this user's, or root's (/dev/stderr), that no other user can replace before it is opened.
        if not _is_trusted(path.lstat().st_uid) or _may_exchange(folder):
            raise OSError(errno.ELOOP, "it is a symbolic link that another user may have created", str(path)) from None
        descriptor = _open(path, flags, None)
    with _closed_on_error(descriptor):
        status = os.fstat(descriptor)
        _check(status, path, folder, flags)
        _make_plain(descriptor, status, flags)
    return descriptor


def new_file(folder: Path, name: str, mode: int = 0o666) -> tuple[int, Path]:
    """Make a file with an unpredictable name, ``.NAME.RANDOM.tmp``. Raises OSError."""
    path = folder / f".{name}.{secrets.token_hex(8)}.tmp"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), path


def leads_to(path: Path, descriptor: int) -> bool:
    """Return whether the path is still that of the open file or folder; a link to it does not count."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    return False


def put_text(
    folder: Path, name: str, text: str, place: Callable[[Path, Path], object] = os.replace, *, mode: int = 0o666
) -> None:
    """Write a small file under another name, and move it to its place: by default over an existing file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    descriptor, path = new_file(folder, name, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        place(path, folder / name)
    finally:
        path.unlink(missing_ok=True)


def put_named(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file that the user named: completely or not at all, except into a link's target, a device or a pipe.

    Blocks for as long as a pipe's reader does.

    Raises:
        OSError: it cannot be written; see also :func:`open_named`.
    """
    if not path.is_symlink() and (path.is_file() or not path.exists()):
        put_text(path.parent, path.name, text, mode=mode)
        return
    descriptor = open_named(path, os.O_WRONLY | os.O_TRUNC)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def read_mark(path: Path) -> str:
    """Read a small file of ours; "" if it does not exist. Raises OSError, also if it is not a regular file."""
    try:
        descriptor = open_inside(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MARK_BYTES).decode(errors="replace").strip()


def read_named(path: Path, limit: int, *, patience_s: float = 30.0) -> bytes:
    """Read a whole file or pipe that the user named. Blocks for at most patience_s seconds.

    Raises:
        OSError: it cannot be read, is larger than the limit (/dev/zero), or does not end in time.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        data, until = bytearray(), time.monotonic() + patience_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            # A pipe that no process has opened for writing yet is not at its end.
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise OSError(errno.ETIMEDOUT, f"it did not end within {patience_s:g} s", str(path))
            piece = os.read(descriptor, _PIECE)
            if not piece:
                return bytes(data)
            data += piece
            if len(data) > limit:
                raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder that the user named, and all above it, if missing.

    Raises:
        OSError: it cannot be made, or is another user's symbolic link.
    """
    path.mkdir(parents=True, exist_ok=True)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and not _is_trusted(status.st_uid):
        raise OSError(errno.ELOOP, f"it is a symbolic link of user {_user(status.st_uid)}", str(path))


def open_folder_inside(folder: Path, name: str) -> int:
    """Make and open a folder with a name of ours, in one that the user named.

    Raises:
        OSError: it cannot be opened, is a symbolic link, or was put there by another user.
    """
    path = folder / name
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from error
        raise
    with _closed_on_error(descriptor):
        _check_planted(os.fstat(descriptor), path, folder.stat())
    return descriptor


def make_private_folder(path: Path) -> None:
    """Make a folder for this user alone, and all above it, if missing.

    Raises:
        OSError: it cannot be made, is a symbolic link, another user's, or open to others, or others can replace it.
    """
    absent = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(absent):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    why = why_not_private(path.lstat())
    if why:
        raise OSError(errno.EACCES, f"it {why}", str(path))
    why = who_exchanges_in(path.parent.resolve(), strict=False)
    if why:
        raise OSError(errno.EACCES, why, str(path))


def who_else_writes(folder: Path, *, only_adding: bool) -> str:
    """Return which others than this user and root can write to a folder, in words; "" for none, and for its group.

    Args:
        folder: the folder.
        only_adding: whether it matters even if others can only add files, without replacing any (/tmp).
    """
    try:
        status = folder.stat()
    except OSError:
        return ""
    if not _is_trusted(status.st_uid):
        return f"it belongs to user {_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH and (only_adding or not status.st_mode & stat.S_ISVTX):
        return "it is writable by all users"
    return ""


def why_not_private(status: os.stat_result) -> str:
    """Return why a folder is not this user's alone, in words to follow its name; "" if it is.

    Args:
        status: of the folder; of a symbolic link, its own.
    """
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != user:
        return f"belongs to user {_user(status.st_uid)}, and this process to user {_user(user)}"
    if status.st_mode & 0o077:
        return "is open to other users (chmod 700)"
    if not _is_mapped(user):
        # All users that are not mapped in this namespace share one number, and this process has it, too.
        return f"has an unknown owner: this user namespace does not map user {user} (/proc/self/uid_map)"
    return ""


def who_exchanges_in(folder: Path, *, strict: bool) -> str:
    """Return which others can replace the files in a folder, or the folder itself, in words; "" for none.

    Args:
        folder: without symbolic links in its path.
        strict: whether the owner of a folder and its group count, too, instead of all users only: in a user namespace /
            itself may belong to nobody, and many people's own folders are writable by a group of theirs.

    Raises:
        OSError: the folder does not exist.
    """
    for ancestor in (folder, *folder.parents):
        status = ancestor.stat()
        if strict and not _is_trusted(status.st_uid):
            return f"{ancestor} belongs to user {_user(status.st_uid)}"
        if not status.st_mode & stat.S_ISVTX:
            if status.st_mode & stat.S_IWOTH:
                return f"all users can rename what is in {ancestor} (chmod +t)"
            if strict and status.st_mode & stat.S_IWGRP:
                return f"a group can rename what is in {ancestor} (chmod +t)"
    return ""


def _open(name: str | Path, flags: int, dir_fd: int | None, mode: int = 0o666) -> int:
    flags = flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(name, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        reasons = {errno.ENXIO: "no process reads that pipe", errno.ELOOP: "it is a symbolic link"}
        if error.errno in reasons:
            raise OSError(error.errno, reasons[error.errno], str(name)) from error
        raise


def _make_plain(descriptor: int, status: os.stat_result, flags: int) -> None:
    """Truncate the file if asked to, and make a regular file's reads and writes blocking."""
    if not stat.S_ISREG(status.st_mode):
        return
    os.set_blocking(descriptor, True)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)


def _check(status: os.stat_result, name: str | Path, folder: os.stat_result, flags: int) -> None:
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
        raise OSError(errno.EMLINK, "it is a hard link: the file has other names", str(name))
    _check_planted(status, name, folder)


def _check_planted(status: os.stat_result, name: str | Path, folder: os.stat_result) -> None:
    """Apply the rule of fs.protected_regular and _fifos: in a folder like /tmp only files of this user or its owner."""
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    if shared and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise OSError(errno.EACCES, f"it was created by user {_user(status.st_uid)}", str(name))


def _is_mapped(user: int) -> bool:
    """Return whether a user's number means that user."""
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
    except FileNotFoundError:
        return True  # a kernel without such namespaces
    return any(first <= user < first + count for first, _, count in ranges)


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid())


def _may_exchange(folder: os.stat_result) -> bool:
    """Return whether another user can replace a file of ours there."""
    return not _is_trusted(folder.st_uid) or folder.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise
