"""When workers' output counts as written to their files."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.output_files import OutputFiles
from elastic_driver.system.keeping import Keeping

pytestmark = [pytest.mark.unit]

A = WorkerId("a", 0, 0)


class Screen:
    """Shows nothing."""

    def write(self, stream: str, data: bytes) -> None:
        """See Screen."""


def test_output_is_kept_when_it_is_in_its_file(tmp_path: Path) -> None:
    async def play() -> None:
        keeping, is_kept, answers = Keeping(), asyncio.Event(), threading.Event()
        with OutputFiles(Screen(), folder=tmp_path, width=1, keeping=keeping) as outputs:
            outputs.begin(A, 42, 0, "0")
            assert outputs._writer is not None
            outputs._writer.put(answers.wait)  # the disc hangs
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
