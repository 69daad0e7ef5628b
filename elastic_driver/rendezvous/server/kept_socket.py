"""A server's Unix socket, re-created when it is removed.

Owns the socket, its folder, and the regular check of both. Cleaning up /tmp (a systemd-tmpfiles timer, an
administrator, a script) removes the name under which a server is found, not the server: open connections notice
nothing, and later ones fail. A process learns of that only by checking.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.server.listeners import Listeners
from elastic_driver.system.local_socket import SocketFolder

# Between two checks; each costs a stat of a few microseconds. Commands report a missing socket and can be repeated;
# workers retry for longer than this.
LOOK_S = 1.0
_PROBE = ".probe"


class KeptSocket:
    """A Unix socket that is re-created when removed. Used on one event loop.

    Args:
        listeners: the server's sockets.
        name: the socket's name.
        say: called with what has happened to the socket, in words; the same words only once.
        folder: folder of the socket; None, or one that cannot hold it, for a new one.
        if_lost: the consequence of losing the socket for good, in words; "" where clients can be told another path, to
            which it then moves.

    Attributes:
        path: where the socket is.

    Raises:
        SettingsError: no folder can be made for it.
    """

    def __init__(
        self,
        listeners: Listeners,
        name: str,
        *,
        say: Callable[[str], None],
        folder: Path | None = None,
        if_lost: str = "",
    ) -> None:
        self._listeners = listeners
        self._name = name
        self._say = say
        self._if_lost = if_lost
        self._said: set[str] = set()
        self._folder = SocketFolder.new() if folder is None else self._folder_at(folder)
        self._is: tuple[int, int] | None = None  # device and inode
        self.path = self._folder.path / name

    def _folder_at(self, path: Path) -> SocketFolder:
        try:
            folder = SocketFolder.again(path)
            try:
                folder.listen(_PROBE).close()  # not every file system supports sockets
            finally:
                folder.forget(_PROBE)
            return folder
        except OSError as error:
            self._say_once(f"cannot listen in {path}: {in_words(error)}; using another folder for {self._name}")
            return SocketFolder.new()

    def listen(self) -> socket.socket:
        """Open the socket for the first time, for :meth:`RendezvousServer.start_local`.

        Raises:
            OSError: the folder was removed just now.
        """
        listening = self._folder.listen(self._name)
        self._is = _identity(self.path)
        return listening

    async def keep(self, after_look: Callable[[], None] = lambda: None) -> None:
        """Check the socket regularly. Runs until canceled.

        Args:
            after_look: called after each check; :attr:`path` may have changed by then.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()
            after_look()

    async def look(self) -> None:
        """Re-create the socket if it is gone; if that fails, the next check tries again."""
        if self._is is not None and _identity(self.path) == self._is:
            return
        removed, missing, lost_at = f"{self.path} was removed (does a cleanup job run there?)", "", self.path
        try:
            listening = self._listen_again()
        except (OSError, SettingsError) as error:
            missing = f"it cannot be re-created: {in_words(error)}"
            if self._if_lost:
                self._say_once(f"{removed}, and {missing}; {self._if_lost}")
                return
            try:
                listening = self._listen_elsewhere()
            except (OSError, SettingsError) as worse:
                self._say_once(f"{removed}, and {missing}; {worse}")
                return
        self._is = _identity(self.path)
        await self._listeners.open_local(listening)
        if self.path == lost_at:
            self._say_once(f"{removed}; it was re-created")
        else:
            self._say_once(f"{removed}, and {missing}; it is now {self.path}")

    def close(self) -> None:
        """Remove the socket and its folder. Idempotent."""
        self._folder.close()

    def _listen_again(self) -> socket.socket:
        if self._folder.is_there():
            return self._folder.listen(self._name)
        return self._listen_in(SocketFolder.again(self._folder.path))

    def _listen_elsewhere(self) -> socket.socket:
        return self._listen_in(SocketFolder.new())

    def _listen_in(self, folder: SocketFolder) -> socket.socket:
        with contextlib.ExitStack() as on_error:
            on_error.callback(folder.close)
            listening = folder.listen(self._name)
            on_error.pop_all()
        self._folder.close()
        self._folder, self.path = folder, folder.path / self._name
        return listening

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a path; None if nothing is found there."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino
