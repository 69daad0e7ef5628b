"""What is said on an agent's local socket: orders and answers, and nothing of what is neither."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic_driver.codec import encode
from elastic_driver.errors import SettingsError
from elastic_driver.launch.agent.control import (
    AgentHere,
    Answer,
    ControlSocket,
    Done,
    Leave,
    Order,
    Who,
    agents_here,
    leave,
)

pytestmark = pytest.mark.integration

HERE = AgentHere("job", "a", connected=True, pid=7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "elasticrun"


async def say(path: Path, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(line)
    answer = await reader.read()
    writer.close()
    return answer


def test_orders_are_carried_out_and_nothing_else(folder: Path) -> None:
    async def main() -> None:
        taken: list[Order] = []

        async def orders(order: Order) -> Answer:
            taken.append(order)
            return HERE if isinstance(order, Who) else Done(done=True)

        control = ControlSocket("ab", orders)
        await control.open()
        (path,) = folder.glob("*.sock")
        right = encode(Order, Leave("a reason", 1.5))
        for line in (b"", b"x", b"[]", b"{}", b"\xff", b"[" * 8000, right[:-1] + b',"more":1}', b" " * 9000, right):
            for_us = line == right
            assert (await say(path, line + b"\n") == encode(Answer, Done(done=True)) + b"\n") == for_us
        assert await asyncio.to_thread(agents_here) == {path: HERE}
        assert await asyncio.to_thread(leave, "a", "jo", 30.0, "another", 2.0) == "host a has left its job"
        assert taken == [Leave("a reason", 1.5), Who(), Who(), Leave("another", 2.0)]
        await control.close()

    asyncio.run(main())


def test_an_agent_that_answers_in_other_words_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b'{"said": "kept"}\n')
            writer.close()

        folder.mkdir(mode=0o700)
        async with await asyncio.start_unix_server(answer, folder / "agent-old.sock"):
            with pytest.raises(SettingsError, match="cannot find an agent of yours on this machine"):
                await asyncio.to_thread(leave, None, None, 30.0)

    asyncio.run(main())
    assert f"the agent at {folder}/agent-old.sock, which may run another version" in caplog.text
