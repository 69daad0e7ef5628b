"""The file that a worker reports figures to: what is read of it, what is given back, and that nobody waits."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

import pytest

from elastic_driver.figures import MOST_NAMES
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent import figures as agent_figures
from elastic_driver.launch.agent.figures import MOST_READ, FiguresFile, HostFigures
from elastic_driver.rendezvous.agent_messages import AgentMessage, FiguresSeen, NoFigures
from elastic_driver.rendezvous.environment import ENV_REPORT, ENV_REPORT_FD

pytestmark = pytest.mark.unit

ONE = WorkerId("a", 0, 0)


@pytest.fixture
def file() -> Iterator[FiguresFile]:
    made = FiguresFile()
    yield made
    made.close()


def write(file: FiguresFile, data: bytes) -> None:
    os.write(int(file.environment[ENV_REPORT_FD]), data)


def test_the_newest_of_each_name_is_news_once(file: FiguresFile) -> None:
    write(file, b'{"loss": 2}\n{"loss": 1, "step": 7}\n\n  \r\n{"loss": 0.5}\n')
    file.read()
    assert file.news() == {"loss": 0.5, "step": 7.0}
    file.read()
    assert file.news() == {}
    write(file, b'{"loss": 0.25}\n')
    file.read()
    assert (file.news(), file.values, file.trouble) == ({"loss": 0.25}, {"loss": 0.25, "step": 7.0}, "")


def test_a_line_is_read_when_it_is_whole_or_nobody_ends_it(file: FiguresFile) -> None:
    write(file, b'{"loss": 1}\n{"loss"')
    file.read()
    assert file.news() == {"loss": 1.0}
    write(file, b": 2}")
    file.read()
    assert file.news() == {}
    file.read(to_its_end=True)
    assert (file.news(), file.trouble) == ({"loss": 2.0}, "")


def test_rubbish_is_dropped_and_only_the_first_is_told(file: FiguresFile) -> None:
    write(file, b'epoch 7\n{"loss": "x"}\n{"loss": 1}\n')
    file.read()
    assert file.news() == {"loss": 1.0}
    assert file.trouble.startswith("'epoch 7': ")


def test_there_are_only_so_many_names(file: FiguresFile) -> None:
    for index in range(MOST_NAMES + 5):
        write(file, json.dumps({f"n{index}": index}).encode() + b"\n")
    write(file, b'{"n0": 77}\n')
    file.read()
    assert len(file.news()) == MOST_NAMES
    assert file.values["n0"] == 77
    assert f"at most {MOST_NAMES} names are allowed" in file.trouble


def test_of_very_many_lines_the_newest_are_read_and_all_is_given_back(file: FiguresFile) -> None:
    for begin in range(0, 200_000, 10_000):
        write(file, b"".join(b'{"step": %d}\n' % step for step in range(begin, begin + 10_000)))
    assert os.fstat(file.descriptor).st_size > 20 * MOST_READ
    file.read()
    assert (file.news(), file.trouble) == ({"step": 199_999.0}, "")
    assert os.fstat(file.descriptor).st_blocks * 512 <= 64 << 10
    write(file, b'{"step": 7}\n')
    file.read()
    assert file.news() == {"step": 7.0}


def test_an_endless_line_is_no_figure_and_ends_nowhere_else(file: FiguresFile) -> None:
    write(file, b"x" * 100_000)
    file.read()
    write(file, b'\n{"loss": 1}\n')
    file.read()
    assert file.news() == {"loss": 1.0}
    assert "a line may have at most" in file.trouble


def test_the_path_does_what_the_descriptor_does_even_where_it_is_opened_anew(file: FiguresFile) -> None:
    path = file.environment[ENV_REPORT]
    for mode, value in (("a", 1.5), ("w", 2), ("a", 3), ("w", 4), ("w", 5), ("w", 6), ("w", 6.25)):
        before = os.fstat(file.descriptor).st_mtime_ns
        while os.fstat(file.descriptor).st_mtime_ns == before:  # the clock of files has ticks, unlike looks
            with open(path, mode) as opened:
                opened.write(json.dumps({"loss": value}) + "\n")
        file.read()
        assert file.news() == {"loss": value}
    write(file, b'{"loss": 7}\n')
    file.read()
    assert (file.news(), file.trouble) == ({"loss": 7.0}, "")


@pytest.mark.parametrize("mode", ["a", "w"])
def test_the_file_does_not_grow_for_ever(file: FiguresFile, mode: str) -> None:
    """Some sites limit how long files may be. One that was opened with "w" is written on where it was."""
    shortest = 1 << 30
    with open(file.environment[ENV_REPORT], mode) as opened:
        for number in range(100):
            os.write(opened.fileno(), b'{"step": %d, "pad": %s7}\n' % (number, 8_000 * b" "))
            file.read()
            assert (file.news()["step"], file.trouble) == (number, "")
            shortest = min(shortest, os.fstat(file.descriptor).st_size) if number > 50 else shortest
    assert shortest == 0
    assert os.fstat(file.descriptor).st_blocks * 512 <= 256 << 10


def test_a_file_that_is_closed_says_nothing(file: FiguresFile) -> None:
    file.close()
    file.read()
    file.close()
    assert file.news() == {}


class Host:
    """A host's figures, and what its driver was told."""

    def __init__(self) -> None:
        self.told: list[AgentMessage] = []
        self.is_heard = True
        self.figures = HostFigures(self.told.append, lambda: self.is_heard)

    def start(self, worker: WorkerId = ONE) -> int:
        return int(self.figures.new(worker)[ENV_REPORT_FD])


def test_the_driver_is_told_what_is_new_once_it_hears() -> None:
    async def run() -> None:
        host = Host()
        descriptor = host.start()
        os.write(descriptor, b'{"loss": 2}\n')
        host.is_heard = False
        host.figures.look()
        os.write(descriptor, b'{"loss": 1}\n')
        host.figures.look()
        assert host.told == []
        host.is_heard = True
        host.figures.look()
        host.figures.look()
        assert host.told == [FiguresSeen({ONE.key: {"loss": 1.0}})]
        assert list(host.figures.again()) == host.told  # another driver is told all
        host.figures.close()

    asyncio.run(run())


def test_what_a_worker_reports_last_is_told_before_its_end() -> None:
    async def run() -> None:
        host = Host()
        os.write(host.start(), b'{"loss": 1}')
        host.figures.ended(ONE)
        host.figures.ended(ONE)
        assert host.told == [FiguresSeen({ONE.key: {"loss": 1.0}})]
        assert list(host.figures.again()) == []
        host.figures.close()

    asyncio.run(run())


def test_rubbish_of_many_workers_is_told_once() -> None:
    async def run() -> None:
        host = Host()
        for index in range(3):
            os.write(host.start(WorkerId("a", index, 0)), b"hello\n")
        host.figures.look()
        [told] = host.told
        assert isinstance(told, NoFigures)
        assert told.worker == ONE.key
        assert told.why.startswith("'hello': ")
        host.figures.close()

    asyncio.run(run())


def test_without_a_file_a_worker_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        def none() -> FiguresFile:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(agent_figures, "FiguresFile", none)
        host = Host()
        assert host.figures.new(ONE) == {ENV_REPORT: "", ENV_REPORT_FD: ""}
        host.figures.ended(ONE)
        host.figures.close()
        await asyncio.sleep(0)

    asyncio.run(run())
