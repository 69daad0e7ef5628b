"""Unix sockets with a path, in folders that only this user can enter: how the processes of one machine connect.

Owns where such folders are, how they are made, found, locked and removed, and how both ends verify whose process the
other one is (decision 43). Does not know the protocols on the sockets.

The process that uses a folder holds a lock (flock) on it. So programs that clear /tmp of old files leave it alone, and
an unlocked folder was left by a killed process: the process that makes the next folder there removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.process_name import boot_id
from elastic_driver.system.safe_files import leads_to, who_exchanges_in, why_not_private

# Limit of connections not yet accepted. The system has a limit of its own (net.core.somaxconn).
_BACKLOG = 4096
# A process that looks for left folders locks each one for some microseconds.
_LOOKED_AT_S = 1.0
_AGAIN_S = 0.02
_SCHEME = "unix:"
_CREDENTIALS = struct.Struct("=iII")
# Where processes meet that know only a common name: not in $TMPDIR, which may differ between them.
_KNOWN_PLACES = (Path("/tmp"), Path("/dev/shm"))


class OtherUserError(PermissionError):
    """A folder, or the process that listens there, is another user's, or may be."""


class SocketFolder:
    """A folder of sockets on which this process holds a lock.

    Args:
        path: where it is.
        descriptor: of the folder; holds the lock.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._names: set[str] = set()  # of this process's sockets

    @classmethod
    def new(cls, places: Sequence[Path] | None = None) -> Self:
        """Make a folder with an unpredictable name.

        Args:
            places: folders in which it may be, in order of preference; None for /tmp, $TMPDIR and /dev/shm.

        Raises:
            SettingsError: it cannot be made in any of them.
        """
        if places is None:
            temporary = os.environ.get("TMPDIR")
            places = (_KNOWN_PLACES[0], *([Path(temporary)] if temporary else []), *_KNOWN_PLACES[1:])

        def make(place: Path) -> Path:
            path = place / (_prefix() + os.urandom(8).hex())
            path.mkdir(mode=0o700)
            return path

        return cls._first(places, make, fcntl.LOCK_SH, "; set TMPDIR to a usable folder")

    @classmethod
    def named(cls, name: str, places: Sequence[Path] = _KNOWN_PLACES) -> Self:
        """Make or take over the folder that others find under this name (:func:`named_paths`), for this process alone.

        Raises:
            BlockingIOError: another process has it.
            SettingsError: it cannot be made in any of these places.
        """

        return cls._first(places, lambda place: _made(place / (_prefix() + name)), fcntl.LOCK_EX)

    @classmethod
    def again(cls, path: Path) -> Self:
        """Make a removed folder again where others look for it.

        Raises:
            OtherUserError: another user has this name by now, or could have it in our place.
            OSError: it cannot be made there.
        """
        _check_place(path.parent)
        return cls._make(partial(_made, path), fcntl.LOCK_SH)

    @classmethod
    def at(cls, path: Path, lock: int = fcntl.LOCK_SH) -> Self:
        """Open and lock an existing folder.

        Raises:
            BlockingIOError: another process's lock forbids it.
            OtherUserError: it is not a folder, is another user's, or open to others.
            OSError: there is none.
        """
        found = _open(path)
        try:
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
        finally:
            os.close(found)
        try:
            try:
                fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            except OSError as error:
                # Some file systems have no locks. There nobody removes folders left by others.
                if lock == fcntl.LOCK_EX or isinstance(error, BlockingIOError):
                    raise
            folder = cls(path, descriptor)
            if not folder.is_there():  # until now it may have been removed
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BaseException:
            os.close(descriptor)
            raise
        return folder

    @classmethod
    def _first(cls, places: Sequence[Path], make: Callable[[Path], Path], lock: int, advice: str = "") -> Self:
        reasons = []
        for place in map(Path.absolute, places):  # processes that are told the path may be in another working directory
            try:
                _check_place(place)
                folder = cls._make(partial(make, place), lock)
            except BlockingIOError:
                raise
            except OSError as error:
                reasons.append(f"{place}: {in_words(error)}")
                continue
            try:
                folder.listen("probe").close()  # not every file system has sockets
                folder.forget("probe")
            except OSError as error:
                reasons.append(f"{place}: {in_words(error)}")
                folder.close()
                continue
            with contextlib.suppress(OSError):  # some sites forbid listing /tmp
                _remove_left(folder.path)
            return folder
        if not os.path.exists("/proc/self/fd"):
            reasons, advice = ["/proc is not mounted"], ""
        raise SettingsError(f"cannot make a folder for sockets: {'; '.join(reasons)}{advice}")

    @classmethod
    def _make(cls, make: Callable[[], Path], lock: int) -> Self:
        until = time.monotonic() + _LOOKED_AT_S
        while True:
            path = make()
            try:
                return cls.at(path, lock)
            except (FileNotFoundError, BlockingIOError):
                # A process that removes left folders was quicker, or is looking at it.
                if time.monotonic() > until:
                    raise
            except OSError:
                # Folders here do not keep their permissions, or have no locks; the next one would not be better.
                with contextlib.suppress(OSError):
                    path.rmdir()
                raise
            time.sleep(_AGAIN_S)

    def listen(self, name: str) -> socket.socket:
        """Listen under this name, in place of any earlier socket. As soon as it is found there, it accepts connections.

        Raises:
            OSError: this file system has no sockets, or the folder was removed.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        new = f".{name}"
        try:
            self.forget(new)
            listening.bind(f"/proc/self/fd/{self._descriptor}/{new}")
            self._names.add(new)
            listening.listen(_BACKLOG)
            os.rename(new, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            self._names.add(name)
            self._names.discard(new)
        except BaseException:
            listening.close()
            raise
        return listening

    def forget(self, name: str) -> None:
        """Remove a socket, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)
        self._names.discard(name)

    def is_there(self) -> bool:
        """Return whether its path still leads to it."""
        return leads_to(self.path, self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor that holds the lock; -1 when it is closed."""
        return self._descriptor

    def close(self) -> None:
        """Remove this process's sockets, and the folder if nothing else is in it. Idempotent."""
        if self._descriptor < 0:
            return
        for name in tuple(self._names):
            with contextlib.suppress(OSError):
                self.forget(name)
        with contextlib.suppress(OSError):
            if self.is_there():  # another folder may have the name by now, with a lock of its own
                self.path.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # even if a forked process has the descriptor
        os.close(self._descriptor)
        self._descriptor = -1


def named_paths(name: str, places: Sequence[Path] = _KNOWN_PLACES) -> list[Path]:
    """Return where :meth:`SocketFolder.named` makes the folder of this name: the first of these that is suitable."""
    return [place / (_prefix() + name) for place in places]


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the process of this user that listens there. Blocks for at most timeout_s seconds.

    Returns:
        The socket, with that as its own time limit.

    Raises:
        OtherUserError: the folder or the process is another user's, or may be.
        OSError: no process listens there, or it did not accept in that time.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return _connect(path, timeout_s)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"{path} is too busy to accept a connection") from None
        time.sleep(_AGAIN_S)


def connect_at_once(path: Path) -> socket.socket:
    """Connect without blocking, for event loops. A later try may succeed.

    Raises:
        BlockingIOError: the process has more connections than it can accept at once.
        OtherUserError, OSError: as :func:`connect`.
    """
    return _connect(path, 0.0)


def _connect(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = _open(path.parent)
        try:
            connection.settimeout(timeout_s)
            # No name is looked up again, and the path may be longer than the 107 bytes of an address.
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        _, user, _ = peer_of(connection)
        if user != os.geteuid():
            raise OtherUserError(errno.EPERM, f"the process that listens at {path} belongs to user {user}")
    except BaseException:
        connection.close()
        raise
    return connection


def url_of(path: Path) -> str:
    """Return ``unix:/PATH``, the URL of a socket. Its path is absolute."""
    return f"{_SCHEME}{path}"


def path_of(url: str) -> Path | None:
    """Return the socket of a URL from :func:`url_of`; None for another URL."""
    return Path(url.removeprefix(_SCHEME)) if url.startswith(f"{_SCHEME}/") else None


def is_ours(connection: socket.socket) -> bool:
    """Return whether the process at the other end is this user's or root's."""
    return peer_of(connection)[1] in (0, os.geteuid())


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the PID, user and group of the process that made the other end of a unix socket, from the kernel."""
    process, user, group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user, group


def _open(path: Path) -> int:
    """Open a folder that is verified to be this user's alone."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            f"{path} does not exist: the process that created it has ended, or it is not mounted in this container",
        ) from error
    why = why_not_private(os.fstat(descriptor))
    if why:
        os.close(descriptor)
        raise OtherUserError(errno.EPERM, f"{path} {why}")
    return descriptor


def _made(path: Path) -> Path:
    """Make a folder, unless it exists."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return path


def _check_place(place: Path) -> None:
    """Raise OtherUserError if any user can replace our folder there."""
    real = Path(os.path.realpath(place, strict=True))  # resolve() does not raise OSError for a loop of links
    if who := who_exchanges_in(real, strict=False):
        raise OtherUserError(errno.EPERM, who)


def _prefix() -> str:
    """Return the prefix of all these folders' names. Machines may share folders without seeing each other's locks."""
    boot = hashlib.blake2b(boot_id().encode(), digest_size=4).hexdigest()
    return f"elasticrun-{os.geteuid()}-{boot}-"


def _remove_left(own: Path) -> None:
    """Remove the folders beside this one that killed processes of this user on this machine have left."""
    prefix, user = _prefix(), os.geteuid()
    for name in os.listdir(own.parent):
        if name.startswith(prefix) and name != own.name:
            path = own.parent / name
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == user:  # other users may have made very many of such a name: they cost little
                    left = SocketFolder.at(path, fcntl.LOCK_EX)
                    left._names.update(os.listdir(left.fileno()))
                    left.close()
