"""The thread that serves a launched job in rank 0's process: the rendezvous server, and the socket where ranks find it.

Owns the thread, its event loop and the sockets. rounds.py answers the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from elastic_driver.hosts import SlotInfo, WorkerId, with_number
from elastic_driver.rendezvous.credentials import Identity, JobKey
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.local_socket import SocketFolder, url_of
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.worker.launched import meeting
from elastic_driver.worker.launched.places import LOOPBACK
from elastic_driver.worker.launched.rounds import LaunchedRounds

_log = logging.getLogger("elastic_driver.worker")

_T = TypeVar("_T")
# How long rank 0 waits for the others' goodbyes when it ends: they arrive within milliseconds of their last barrier.
_GOODBYES_S = 2.0
_CLOSE_S = 3.0
_SOCKET = "ranks.sock"


class JobHost:
    """Rank 0's server. The training thread makes and closes it.

    Args:
        workers: the ranks' names, by rank.
        slots: their places.
        start_timeout_s: how long ranks may wait for others that have not called ``init()``.
    """

    def __init__(self, workers: Sequence[WorkerId], slots: Sequence[SlotInfo], *, start_timeout_s: float) -> None:
        self._workers, self._slots, self._start_timeout_s = workers, slots, start_timeout_s
        self._key = JobKey.new()
        self._loop = asyncio.new_event_loop()
        self._folder: SocketFolder | None = None
        self._meeting: asyncio.Server | None = None
        # A daemon, because the interpreter joins other threads before it runs the atexit functions that end this one.
        # Requests wake it; close() ends it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="elastic-job", daemon=True)
        self._thread.start()
        self._rounds, self._server = self._call(self._make())

    async def _make(self) -> tuple[LaunchedRounds, RendezvousServer]:
        rounds = LaunchedRounds(self._workers, self._slots, start_timeout_s=self._start_timeout_s)
        keys = KeyRoutes()
        rounds.serve(keys)
        # The kernel closes a rank's connections when its process ends, however that ends.
        server = RendezvousServer(
            (*rounds.routes, *keys.routes),
            key_of=lambda identity: self._key.of(identity) if self._is_rank(identity) else None,
            admits=self._is_rank,
            on_error=_report,
            on_worker_gone=rounds.gone,
        )
        return rounds, server

    def _is_rank(self, identity: Identity) -> bool:
        return identity.worker in self._workers

    def serve_where_ranks_meet(self, name: str) -> meeting.Welcome:
        """Serve the ranks of this machine, and send the welcome to those that ask under this name.

        Raises:
            SettingsError: another process has this name, or no folder can hold a socket.
        """
        self._folder = meeting.claim(name)
        welcome = self._serve_in(self._folder)
        listening = self._folder.listen(meeting.SOCKET)
        self._meeting = self._call(
            self._loop.create_unix_server(lambda: meeting.WelcomeSender(welcome), sock=listening)
        )
        return welcome

    def serve_here(self) -> meeting.Welcome:
        """Serve the ranks of this machine only.

        Raises:
            SettingsError: no folder can hold a socket.
        """
        self._folder = SocketFolder.new()
        return self._serve_in(self._folder)

    def _serve_in(self, folder: SocketFolder) -> meeting.Welcome:
        self._call(self._server.start_local(folder.listen(_SOCKET), workers=len(self._slots)))
        url = url_of(folder.path / _SOCKET)
        return meeting.Welcome(url, self._key.secret.hex(), len(self._slots), name_of_this_process(), LOOPBACK)

    def serve(self, address: str, ports: tuple[int, int] | None) -> meeting.Welcome:
        """Serve ranks of all machines.

        Args:
            address: address of this machine.
            ports: the lowest and the highest port allowed; None for any.

        Raises:
            SettingsError: the address or a port is not available.
        """
        wanted = 0 if ports is None else range(ports[0], ports[1] + 1)
        port = self._call(self._server.start(address, wanted, workers=len(self._slots)))
        fingerprint = self._call(self._server.certificate.make())
        url = str(DriverUrl(f"https://{with_number(address, port)}", fingerprint))
        return meeting.Welcome(url, self._key.secret.hex(), len(self._slots), "", address)

    def close(self, *, wait_for_others: bool) -> None:
        """Stop serving. Blocks for a few seconds at most.

        Args:
            wait_for_others: whether the other ranks are about to end, too, and may still send requests.
        """
        if not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self._call(self._end(_GOODBYES_S if wait_for_others else 0.0), timeout_s=_GOODBYES_S + _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        if self._folder is not None:
            self._folder.close()

    async def _end(self, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rounds.all_gone.wait(), patience_s)
        if self._meeting is not None:
            self._meeting.close()
        self._rounds.close()
        await self._server.close()

    def abandon(self) -> None:
        """In a forked child: release the parent's sockets and lock, so that others notice when the parent dies.

        Their numbers stay in use: the objects that close them may be deleted here at any later time.
        """
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in self._descriptors():
            with contextlib.suppress(OSError):
                os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
        _kept.append(self)  # the loop must not be cleaned up here

    def _descriptors(self) -> list[int]:
        asked = [] if self._meeting is None else [socket.fileno() for socket in self._meeting.sockets]
        folder = [] if self._folder is None else [self._folder.fileno()]
        return [number for number in (*asked, *folder, *self._server.descriptors()) if number >= 0]

    def _call(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


_kept: list[JobHost] = []


def _report(error: BaseException) -> None:
    _log.error("elastic_driver: error in rank 0's server: %s", error, exc_info=error)
