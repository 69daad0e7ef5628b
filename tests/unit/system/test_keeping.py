"""What is kept is told to who waits for it, from any thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from elastic_driver.system.keeping import Keeping

pytestmark = pytest.mark.unit


def test_who_waits_for_more_waits_longer() -> None:
    async def play() -> None:
        keeping, called = Keeping(), []
        assert [keeping.comes() for _ in range(4)] == [1, 2, 3, 4]
        for many in (3, 1, 2, 3):
            keeping.when_kept(many, lambda many=many: called.append(many))
        keeping.keep(0)
        assert called == []
        keeping.keep(2)
        assert (called, keeping.kept) == ([1, 2], 2)
        keeping.keep(1)
        assert keeping.kept == 2, "what is kept stays so"
        keeping.when_kept(4, lambda: called.append(4))
        keeping.keep(4)
        assert called == [1, 2, 3, 3, 4]

    asyncio.run(play())


def test_a_thread_says_what_it_has_kept() -> None:
    async def play() -> None:
        keeping, is_kept = Keeping(), asyncio.Event()
        for _ in range(1000):
            keeping.comes()
        keeping.when_kept(1000, is_kept.set)

        def keep() -> None:
            for many in range(1, 1001):
                keeping.keep_soon(many)

        thread = threading.Thread(target=keep)
        thread.start()
        await is_kept.wait()
        thread.join()
        assert keeping.kept == 1000

    asyncio.run(play())


def test_after_the_loop_nobody_waits() -> None:
    keeping = Keeping()
    keeping.keep_soon(1)

    async def play() -> None:
        keeping.comes()

    asyncio.run(play())
    keeping.keep_soon(1)
