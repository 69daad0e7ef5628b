"""What becomes of workers' output that the driver does not take: kept in memory and in files, sent in order."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_driver.launch.agent import backlog as backlog_module
from elastic_driver.launch.agent.backlog import Backlog
from elastic_driver.rendezvous.agent_messages import Output

pytestmark = pytest.mark.unit

PATIENCE_S = 150.0
A, B = "a[0]#0", "a[1]#0"
TOLD = re.compile(
    rb"(\[\d\]<std(?:out|err)>:)elastic_driver: ([\d,]+) lines? (?:is|are) missing here: the driver did not accept "
    rb"them in time, and the buffer was full\n"
)


class Driver:
    """Takes what it is sent, while it does.

    Attributes:
        taken: the messages.
        room: so many more it takes.
    """

    def __init__(self, room: int = 0, **sizes: int) -> None:
        self.taken: list[Output] = []
        self.room = room
        self.backlog = Backlog(self._take, lambda: self.room > 0, **sizes)

    def _take(self, message: Output) -> None:
        self.room -= 1
        self.taken.append(message)

    def take(self, room: int) -> None:
        self.room += room
        self.backlog.go_on()

    async def take_all(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.backlog.is_empty:
                self.take(1)
                await asyncio.sleep(0)

    async def until(self, found: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not found():
                await asyncio.sleep(0.001)

    def lines(self) -> bytes:
        return b"".join(message.blob for message in self.taken)


def act(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def line(number: int, size: int = 100) -> bytes:
    return f"[0]<stdout>:{number:0{size}d}\n".encode()


def numbers(data: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb">:(\d+)\n", data)]


def test_a_driver_that_takes_all_gets_all_at_once() -> None:
    async def main() -> None:
        driver = Driver(room=10)
        said = []
        driver.backlog.write(A, "stderr", b"[0]<stderr>:one\n")
        driver.backlog.behind(lambda: said.append(len(driver.taken)))
        assert driver.taken == [Output(A, "stderr", b"[0]<stderr>:one\n")]
        assert said == [1]
        assert driver.backlog.on_disk == 0

    act(main)


def test_what_is_kept_comes_in_order_and_what_is_behind_it_behind_it() -> None:
    """From memory and from files, of which none is left afterwards; what is written meanwhile comes last."""

    async def main() -> None:
        driver = Driver(memory_bytes=1000, file_bytes=5000)
        said: list[tuple[int, int]] = []
        before = set(os.listdir("/proc/self/fd"))
        for number in range(200):
            driver.backlog.write(A, "stdout", line(number))
            if number % 50 == 49:
                driver.backlog.behind(lambda number=number: said.append((number, len(driver.taken))))  # type: ignore[misc]
            if number % 7 == 0:
                await driver.until(lambda: not driver.backlog._works)
        assert driver.taken == []
        assert said == []
        assert driver.backlog.on_disk > 15_000
        assert len(driver.backlog._files) > 2
        assert len(set(os.listdir("/proc/self/fd")) - before) == len(driver.backlog._files)
        driver.take(1)
        await driver.until(lambda: len(driver.taken) == 1)
        driver.backlog.write(A, "stdout", line(200))
        await driver.take_all()
        assert numbers(driver.lines()) == list(range(201))
        assert [at for at, _ in said] == [49, 99, 149, 199]
        assert all(count == number + 1 for number, count in said), "behind its last, before the next"
        assert len(set(os.listdir("/proc/self/fd")) - before) == 0

    act(main)


def test_files_have_no_names(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        driver = Driver(memory_bytes=10)
        driver.backlog.write(A, "stdout", line(0))
        await driver.until(lambda: driver.backlog.on_disk > 0)
        assert list(tmp_path.iterdir()) == []
        await driver.take_all()

    act(main)


def test_what_finds_no_room_is_counted_where_it_is_missing() -> None:
    async def main() -> None:
        driver = Driver(memory_bytes=1000, disk_bytes=5000, file_bytes=2000)
        for number in range(200):
            driver.backlog.write(A, "stdout", line(number) + line(number))
            driver.backlog.write(B, "stderr", f"[1]<stderr>:{number}\n".encode())
            await driver.until(lambda: not driver.backlog._works)
        first = driver.backlog.on_disk
        assert 3000 < first <= 6500
        # As soon as there is room again, lines are kept again, behind the place of those that are not.
        while driver.backlog.on_disk > 2000:
            driver.take(1)
            await asyncio.sleep(0)
        driver.backlog.write(A, "stdout", line(1000) * 2)
        await driver.take_all()
        said = driver.lines()
        (at_a, at_b) = sorted(TOLD.finditer(said), key=lambda found: found[1])
        assert (at_a[1], at_b[1]) == (b"[0]<stdout>:", b"[1]<stderr>:")
        there = [message.blob for message in driver.taken if message.worker == A and b"missing" not in message.blob]
        assert int(at_a[2]) == 2 * (201 - len(there))
        assert numbers(there[-1]) == [1000, 1000]
        assert said.index(line(1000)) > max(at_a.end(), at_b.end()) - 1
        kept = numbers(b"".join(there[:-1]))
        assert kept == sorted(kept)

    act(main)


class BadDisk:
    """Fails writes, or reads, while it is to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.fails = True
        self._works = getattr(os, call)
        monkeypatch.setattr(backlog_module.os, call, self._call)

    def _call(self, *arguments: Any) -> Any:
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._works(*arguments)


def test_a_full_disk_costs_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        disk = BadDisk(monkeypatch, "pwrite")
        driver = Driver(memory_bytes=1000)
        said = []
        for number in range(100):
            driver.backlog.write(A, "stdout", line(number))
            await driver.until(lambda: not driver.backlog._works)
        driver.backlog.behind(lambda: said.append(len(driver.taken)))
        disk.fails = False
        for number in range(100, 200):
            driver.backlog.write(A, "stdout", line(number))
        await driver.take_all()
        (missing,) = TOLD.finditer(driver.lines())
        there = numbers(driver.lines())
        assert int(missing[2]) == 200 - len(there)
        assert there == list(range(200 - len(there), 200)), "all but those"
        assert len(there) > 100
        assert len(said) == 1

    act(main)


def test_a_file_that_cannot_be_read_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        driver = Driver(memory_bytes=1000)
        for number in range(100):
            driver.backlog.write(A, "stdout", line(number))
        await driver.until(lambda: not driver.backlog._works)
        disk = BadDisk(monkeypatch, "pread")
        driver.take(1)
        await driver.until(lambda: len(driver.taken) == 1)
        disk.fails = False
        await driver.take_all()
        (missing,) = TOLD.finditer(driver.lines())
        there = numbers(driver.lines())
        assert int(missing[2]) == 100 - len(there)
        assert there == list(range(100 - len(there), 100))

    act(main)


def test_a_disk_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "_WAITING_BYTES", 10_000)

    async def main() -> None:
        driver = Driver(memory_bytes=1000)
        driver.backlog._works = True  # and never comes back
        for number in range(200):
            driver.backlog.write(A, "stdout", line(number))
        assert driver.backlog._fresh_bytes <= 10_000
        driver.backlog._works = False
        await driver.take_all()
        (missing,) = TOLD.finditer(driver.lines())
        there = numbers(driver.lines())
        assert there == list(range(len(there)))
        assert int(missing[2]) == 200 - len(there)

    act(main)


def test_a_backlog_that_is_closed_keeps_nothing() -> None:
    async def main() -> None:
        driver = Driver(memory_bytes=1000)
        said = []
        for number in range(100):
            driver.backlog.write(A, "stdout", line(number))
        driver.backlog.behind(lambda: said.append("behind"))
        driver.backlog.close()
        driver.backlog.close()
        assert driver.backlog.is_empty
        assert said == ["behind"]
        driver.backlog.write(A, "stdout", line(100))
        assert numbers(driver.lines()) == [100]
        await driver.until(lambda: not driver.backlog._works)

    act(main)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_line_comes_once_and_in_order_or_is_counted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        writes, reads = BadDisk(monkeypatch, "pwrite"), BadDisk(monkeypatch, "pread")
        writes.fails = reads.fails = False
        driver = Driver(memory_bytes=500, disk_bytes=4000, file_bytes=1000)
        written = {A: 0, B: 0}
        finished: list[tuple[str, int]] = []
        for _ in range(300):
            worker = rng.choice((A, B))
            lines = rng.choice((1, 1, 3))
            data = b"".join(b"[%d]<stdout>:%d\n" % (worker == B, written[worker] + each) for each in range(lines))
            written[worker] += lines
            driver.backlog.write(worker, "stdout", data)
            if rng.random() < 0.1:

                def behind(worker: str = worker, count: int = written[worker]) -> None:
                    assert seen(driver)[worker] >= count, "more where they are missing"
                    finished.append((worker, count))

                driver.backlog.behind(behind)
            if rng.random() < 0.3:
                driver.take(rng.choice((1, 2, 20)))
            if rng.random() < 0.2:
                writes.fails, reads.fails = rng.random() < 0.3, rng.random() < 0.1
            if rng.random() < 0.5:
                await driver.until(lambda: not driver.backlog._works)
        reads.fails = False
        await driver.take_all()
        assert seen(driver) == written
        assert finished
        assert not driver.backlog._behind

    act(main)


def seen(driver: Driver) -> dict[str, int]:
    """How many lines of each worker the driver has, or knows to be missing. Checks their order."""
    counts = {A: 0, B: 0}
    for message in driver.taken:
        if missing := TOLD.fullmatch(message.blob):
            counts[message.worker] += int(missing[2].replace(b",", b""))
            continue
        for number in numbers(message.blob):
            assert number == counts[message.worker], "in order, once"
            counts[message.worker] += 1
    return counts
