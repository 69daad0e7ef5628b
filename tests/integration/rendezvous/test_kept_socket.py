"""A server's socket that somebody removes: made anew where it was, or elsewhere, or its loss told once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from elastic_driver.rendezvous.server import kept_socket
from elastic_driver.rendezvous.server.kept_socket import KeptSocket
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system import local_socket

pytestmark = pytest.mark.integration

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders lie, in place of /tmp."""
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    monkeypatch.setattr(local_socket, "_KNOWN_PLACES", (first, second))
    monkeypatch.delenv("TMPDIR", raising=False)
    return first


class Kept:
    """A server at such a socket."""

    def __init__(self, **options: Any) -> None:
        self.said: list[str] = []
        self.server = RendezvousServer(())
        self.socket = KeptSocket(self.server.listeners, "a.sock", say=self.said.append, **options)

    @property
    def folder(self) -> Path:
        return self.socket.path.parent

    async def answers(self) -> bool:
        """Whether the server listens where the socket is said to be."""
        with contextlib.closing(local_socket.connect_at_once(self.socket.path)) as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, b"rubbish")
            return bool(await loop.sock_recv(connection, 100))


@contextlib.asynccontextmanager
async def kept(**options: Any) -> AsyncIterator[Kept]:
    one = Kept(**options)
    await one.server.start_local(one.socket.listen(), workers=1)
    try:
        yield one
    finally:
        await one.server.close()
        one.socket.close()
        assert not one.folder.exists()


def run(main: Coroutine[Any, Any, None], new_loop: NewLoop) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@LOOPS
@pytest.mark.parametrize("remove", [Path.unlink, lambda path: shutil.rmtree(path.parent)], ids=["socket", "folder"])
def test_one_that_was_removed_is_made_anew_at_the_same_path(new_loop: NewLoop, remove: Callable[[Path], None]) -> None:
    async def main() -> None:
        async with kept() as one:
            where, before = one.socket.path, descriptors()
            for _ in range(3):
                remove(where)
                await one.socket.look()
                assert one.socket.path == where
                assert await one.answers()
                await one.socket.look()
                assert await one.answers()
            assert one.folder.stat().st_mode & 0o777 == 0o700
            assert one.said == [f"{where} was removed (does a cleanup job run there?); it was re-created"]
            while len(one.server.connections):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert descriptors() == before, "nothing is left of those that nobody finds"

    run(main(), new_loop)


@LOOPS
def test_who_is_connected_stays_so(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with kept() as one:
            reader, writer = await asyncio.open_unix_connection(sock=local_socket.connect_at_once(one.socket.path))
            while not len(one.server.connections):
                await asyncio.sleep(0)
            shutil.rmtree(one.folder)
            await one.socket.look()
            assert await one.answers()
            writer.write(b"rubbish")
            assert await reader.read()
            writer.close()

    run(main(), new_loop)


def test_where_its_path_cannot_be_had_it_is_elsewhere(place: Path) -> None:
    async def main() -> None:
        async with kept() as one:
            lost = one.socket.path
            shutil.rmtree(lost.parent)
            lost.parent.touch()
            await one.socket.look()
            assert one.socket.path != lost
            assert one.socket.path.parent.parent == place
            assert await one.answers()
            assert one.said == [
                f"{lost} was removed (does a cleanup job run there?), and it cannot be re-created: {lost.parent} is "
                f"not a folder; it is now {one.socket.path}"
            ]
            for _ in range(2):
                one.socket.path.unlink()
                await one.socket.look()
                assert await one.answers()

    run(main(), asyncio.new_event_loop)


def test_where_no_folder_can_be_had_that_is_told_once_and_tried_again(place: Path) -> None:
    async def main() -> None:
        async with kept() as one:
            where = one.socket.path
            places = [place, place.with_name("second")]
            for each in places:
                shutil.rmtree(each)
            for _ in range(2):
                await one.socket.look()
            assert one.socket.path == where
            (told,) = one.said
            assert "it cannot be re-created: No such file or directory; cannot make a folder for sockets: " in told
            for each in places:
                each.mkdir()
            await one.socket.look()
            assert one.socket.path == where
            assert await one.answers()

    run(main(), asyncio.new_event_loop)


def test_one_that_may_not_move_is_lost_as_long_as_its_path_cannot_be_had() -> None:
    async def main() -> None:
        async with kept(if_lost="nobody finds it") as one:
            where = one.socket.path
            shutil.rmtree(where.parent)
            where.parent.touch()
            for _ in range(2):
                await one.socket.look()
            assert one.socket.path == where
            assert one.said == [
                f"{where} was removed (does a cleanup job run there?), and it cannot be re-created: {where.parent} is "
                "not a folder; nobody finds it"
            ]
            where.parent.unlink()
            await one.socket.look()
            assert one.said[1:] == [f"{where} was removed (does a cleanup job run there?); it was re-created"]
            assert await one.answers()

    run(main(), asyncio.new_event_loop)


def test_another_in_its_place_is_not_it() -> None:
    """A copy of the folder that was put back, for instance."""

    async def main() -> None:
        async with kept() as one:
            shutil.copytree(one.folder, one.folder.with_name("copy"), ignore=lambda *_: ["a.sock"])
            shutil.rmtree(one.folder)
            one.folder.with_name("copy").rename(one.folder)
            one.socket.path.touch()
            await one.socket.look()
            assert await one.answers()

    run(main(), asyncio.new_event_loop)


def test_it_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_socket, "LOOK_S", 0.001)

    async def main() -> None:
        async with kept() as one:
            looked = asyncio.Event()
            keeping = asyncio.create_task(one.socket.keep(looked.set))
            for _ in range(2):
                one.socket.path.unlink()
                for _ in range(2):  # a look may be under way
                    looked.clear()
                    await looked.wait()
                assert await one.answers()
            keeping.cancel()

    run(main(), asyncio.new_event_loop)


@LOOPS
def test_a_socket_lies_in_the_folder_that_is_named(tmp_path: Path, new_loop: NewLoop) -> None:
    """Of any length; the next server there takes the place of one that has died."""
    folder = tmp_path / ("long" * 40)

    async def main() -> None:
        for _ in range(2):
            one = Kept(folder=folder)
            await one.server.start_local(one.socket.listen(), workers=1)
            assert one.socket.path == folder / "a.sock"
            assert await one.answers()
            assert [each.name for each in folder.iterdir()] == ["a.sock"]
            await one.server.close()  # and the socket is left, as by a death
        (folder / "other").touch()
        one.socket.close()
        assert [each.name for each in folder.iterdir()] == ["other"]
        assert one.said == []

    run(main(), new_loop)


@LOOPS
def test_a_folder_that_cannot_hold_it_is_told_of(tmp_path: Path, place: Path, new_loop: NewLoop) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)

    async def main() -> None:
        async with kept(folder=folder) as one:
            assert await one.answers()
            assert one.folder.parent == place
            (said,) = one.said
            assert said.startswith(f"cannot listen in {folder}: {folder} is open to other users")
            assert said.endswith("; using another folder for a.sock")

    run(main(), new_loop)
