"""A server's Unix socket that is made anew when somebody has removed it.

Owns the socket, the folder that it lies in, and the look at them. Whoever empties /tmp (a timer of systemd-tmpfiles, an
administrator, a script) takes away the name under which a server is found, not the server: those who are connected
notice nothing, and whoever connects later finds nobody. Nothing tells a process of that but a look.
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

# Between two looks, of which each costs a stat: some microseconds. Commands say what they miss, and can be repeated;
# workers try again for longer than this.
LOOK_S = 1.0
_PROBE = ".probe"


class KeptSocket:
    """See above. Used on one event loop.

    Args:
        listeners: of the server.
        name: of the socket.
        say: told in words what has become of it; the same words only once.
        folder: where it is to lie; None, and where that cannot hold it, for a new one.
        if_lost: what it means when the socket is gone for good, in words; "" where whoever looks for it is told of
            another path, to which it moves then.

    Attributes:
        path: where it is.

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
                folder.listen(_PROBE).close()  # not every file system has sockets
            finally:
                folder.forget(_PROBE)
            return folder
        except OSError as error:
            self._say_once(f"cannot listen in {path}: {in_words(error)}; {self._name} is in another folder")
            return SocketFolder.new()

    def listen(self) -> socket.socket:
        """Listens there for the first time, for :meth:`RendezvousServer.start_local`.

        Raises:
            OSError: the folder was removed this moment.
        """
        listening = self._folder.listen(self._name)
        self._is = _identity(self.path)
        return listening

    async def keep(self, after_look: Callable[[], None] = lambda: None) -> None:
        """Looks at it now and then. Runs until it is cancelled.

        Args:
            after_look: called after each look; :attr:`path` may be another by then.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()
            after_look()

    async def look(self) -> None:
        """Makes it anew if it is not there any more; where that cannot be done, the next look tries again."""
        if self._is is not None and _identity(self.path) == self._is:
            return
        removed, missing, lost_at = f"{self.path} was removed (does something clean up there?)", "", self.path
        try:
            listening = self._listen_again()
        except (OSError, SettingsError) as error:
            missing = f"it cannot be made anew: {in_words(error)}"
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
            self._say_once(f"{removed}; it was made anew")
        else:
            self._say_once(f"{removed}, and {missing}; it is {self.path} from now on")

    def close(self) -> None:
        """Removes it, and the folder. Idempotent."""
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
    """Device and inode of what is there; None for nothing that can be found."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino
