"""When workers' output counts as written to their files."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.output_files import OutputFiles
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.settings.logs import OUT, Logs, Streams
from elastic_driver.system.keeping import Keeping
from elastic_driver.words import Bar

pytestmark = [pytest.mark.unit]

A, B = WorkerId("a", 0, 0), WorkerId("a", 1, 0)


class Screen:
    """Shows nothing. Keeps the bars that it is given."""

    def __init__(self) -> None:
        self.bars: list[bytes] = []

    def write(self, stream: str, data: bytes) -> None:
        """See Screen."""

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """See Screen."""
        self.bars.append(b"" if bar is None else bar.data)


def test_output_is_kept_when_it_is_in_its_file(tmp_path: Path) -> None:
    async def play() -> None:
        keeping, is_kept, answers = Keeping(), asyncio.Event(), threading.Event()
        with OutputFiles(Screen(), folder=tmp_path, width=1, keeping=keeping) as outputs:
            outputs.begin(A, 42, 0, "0")
            assert outputs._writer is not None
            outputs._writer.put(answers.wait)  # the disk hangs
            outputs.write(A, "stdout", b"one\n")
            outputs.write(A, "stderr", b"two\n")
            assert (keeping.came, keeping.kept) == (2, 0)
            keeping.when_kept(2, is_kept.set)
            answers.set()
            await is_kept.wait()
            assert (tmp_path / "rank.0/stdout").read_text().endswith("one\n")
            assert (tmp_path / "rank.0/stderr").read_text().endswith("two\n")

    asyncio.run(play())


def test_where_there_are_no_files_nothing_is_counted() -> None:
    keeping = Keeping()
    with OutputFiles(Screen(), folder=None, width=1, keeping=keeping) as outputs:
        outputs.begin(A, 42, 0, "0")
        outputs.write(A, "stdout", b"one\n")
        assert keeping.came == 0


def test_files_of_some_ranks_or_streams_do_not_have_all(tmp_path: Path) -> None:
    logs = Logs(folder=tmp_path, tee=Streams(OUT))
    kept = RankLogs(logs, folder=tmp_path, name="job", role="default", with_hosts=False)
    with OutputFiles(Screen(), folder=None, width=1, logs=kept) as outputs:
        assert not outputs.has_all


def test_files_have_all_until_one_of_them_cannot_be_written(tmp_path: Path) -> None:
    async def play() -> None:
        warned = asyncio.Event()
        with OutputFiles(Screen(), folder=tmp_path, width=1, warn=lambda text: warned.set()) as outputs:
            outputs.begin(A, 42, 0, "0")
            assert outputs.has_all
            (tmp_path / "rank.1").write_text("no folder")
            outputs.begin(B, 43, 1, "1")
            await warned.wait()
            assert not outputs.has_all

    asyncio.run(play())


def test_of_a_bar_files_have_a_line_now_and_then_and_the_screen_has_each_state(tmp_path: Path) -> None:
    async def play() -> None:
        screen, keeping = Screen(), Keeping()
        logs = RankLogs(
            Logs(folder=tmp_path / "logs", tee=Streams(OUT), prefix="${rank}> "),
            folder=tmp_path / "logs",
            name="job",
            role="default",
            with_hosts=False,
        )
        with OutputFiles(screen, folder=tmp_path, width=1, logs=logs, keeping=keeping) as outputs:
            outputs.begin(A, 42, 0, "0")
            screen.bars.clear()
            for percent in range(3):
                data = b"[0]<stdout>:%d%%\n" % percent
                outputs.bar(A, Bar("stdout", "0", data, is_line=percent == 1))
            outputs.bar(A, Bar("stdout", "0", b""))
            outputs.end(A)
        assert screen.bars == [b"0> 0%\n", b"0> 1%\n", b"0> 2%\n", b"", b""]
        assert keeping.came == 0
        assert (tmp_path / "rank.0/stdout").read_text().splitlines()[1:] == ["[0]<stdout>:1%"]
        (log,) = (tmp_path / "logs").rglob("stdout.log")
        assert log.read_text().splitlines()[1:] == ["1%"]

    asyncio.run(play())


def test_a_bar_that_is_not_shown_is_no_bar_for_the_screen(tmp_path: Path) -> None:
    screen = Screen()
    logs = RankLogs(
        Logs(folder=tmp_path, redirects=Streams(OUT)), folder=tmp_path, name="job", role="default", with_hosts=False
    )
    with OutputFiles(screen, folder=None, width=1, logs=logs) as outputs:
        outputs.bar(A, Bar("stdout", "0", b"[0]<stdout>:1%\n"))
    with OutputFiles(screen, folder=None, width=1, is_shown=lambda worker, stream: True) as outputs:
        outputs.bar(A, Bar("stdout", "0", b"[0]<stdout>:2%\n"))
    assert screen.bars == [b""]
