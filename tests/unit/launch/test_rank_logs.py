"""Which lines go to files, which to the terminal, and what stands before them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.settings.logs import Logs, Streams
from elastic_driver.system.file_writer import FileWriter

pytestmark = [pytest.mark.unit]

FIRST, SECOND = WorkerId("a", 0, 0), WorkerId("b", 1, 0)


class Rig:
    """Sinks over one folder, whose files are looked at when all is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []

    def run(self, logs: Logs, *lines: tuple[WorkerId, str, bytes], with_hosts: bool = False) -> list[bytes]:
        """What the terminal shows of each."""
        writer = FileWriter("test")
        sink = RankLogs(logs, folder=self.folder, name="job", role="trainer", with_hosts=with_hosts)
        if sink.keeps_files:
            for worker in dict.fromkeys(worker for worker, _, _ in lines):
                sink.begin(worker, 42, writer, self.warnings.append)
        shown = [sink.take(worker, stream, data) for worker, stream, data in lines]  # type: ignore[arg-type]
        sink.close()
        writer.close()
        return shown

    def files(self) -> dict[str, list[str]]:
        """The lines of each file, without the time."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.folder)): [
                line.partition(", started")[0] for line in path.read_text().splitlines()
            ]
            for path in found
        }


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    assert not rig.warnings


OUT_0, ERR_0 = (FIRST, "stdout", b"[3]<stdout>:hello\n"), (FIRST, "stderr", b"[3]<stderr>:oh\n[3]<stderr>:no\n")
OUT_1 = (SECOND, "stdout", b"Sun Nov 22 15:00:00 2026[4]<stdout>:[x]<stdout>:hello\n")


def test_redirected_output_is_in_files_only(rig: Rig) -> None:
    assert rig.run(Logs(redirects=Streams(3)), OUT_0, ERR_0, OUT_1) == [b"", b"", b""]
    assert rig.files() == {
        "job/0/stdout.log": ["===== worker a[0]#0, pid 42", "hello"],
        "job/0/stderr.log": ["===== worker a[0]#0, pid 42", "oh", "no"],
        "job/1/stdout.log": ["===== worker b[1]#0, pid 42", "[x]<stdout>:hello"],
        "job/1/stderr.log": ["===== worker b[1]#0, pid 42"],
    }


def test_tee_is_stronger_than_redirects(rig: Rig) -> None:
    logs = Logs(redirects=Streams(3), tee=Streams(by_rank={0: 2}))
    assert rig.run(logs, OUT_0, ERR_0, OUT_1) == [b"", ERR_0[2], b""]
    assert rig.files()["job/0/stderr.log"][1:] == ["oh", "no"]


def test_by_local_rank(rig: Rig) -> None:
    assert rig.run(Logs(redirects=Streams(by_rank={1: 1})), OUT_0, OUT_1) == [OUT_0[2], b""]
    assert list(rig.files()) == ["job/1/stdout.log"]


def test_generations_and_jobs_of_one_name_are_appended(rig: Rig) -> None:
    for attempt in range(2):
        rig.run(Logs(tee=Streams(1)), (WorkerId("a", 0, attempt), "stdout", b"[0]<stdout>:x\n"))
    assert rig.files()["job/0/stdout.log"] == [
        "===== worker a[0]#0, pid 42",
        "x",
        "===== worker a[0]#1, pid 42",
        "x",
    ]


def test_hosts_have_folders_where_there_may_be_several(rig: Rig) -> None:
    rig.run(Logs(tee=Streams(1)), OUT_0, OUT_1, with_hosts=True)
    assert list(rig.files()) == ["job/a/0/stdout.log", "job/b/1/stdout.log"]


def test_only_some_ranks_are_shown(rig: Rig) -> None:
    assert rig.run(Logs(shown=frozenset((1,)), tee=Streams(by_rank={0: 1})), OUT_0, OUT_1) == [b"", OUT_1[2]]
    assert rig.files() == {"job/0/stdout.log": ["===== worker a[0]#0, pid 42", "hello"]}


def test_the_prefix(rig: Rig) -> None:
    logs = Logs(prefix="[${role_name}${local_rank}/${rank} ${else} $] \\1 ")
    assert rig.run(logs, ERR_0, OUT_1) == [
        b"[trainer0/3 ${else} $] \\1 oh\n[trainer0/3 ${else} $] \\1 no\n",
        b"[trainer1/4 ${else} $] \\1 [x]<stdout>:hello\n",
    ]
    assert rig.run(Logs(prefix=""), ERR_0) == [b"oh\nno\n"]
    assert rig.files() == {}


def test_lines_with_one_of_some_texts(rig: Rig) -> None:
    logs = Logs(stderr_filters=("n", "x"), redirects=Streams(2), prefix="${rank}:")
    assert rig.run(logs, OUT_0, ERR_0) == [b"3:hello\n", b""]
    assert rig.files()["job/filtered_stderr.log"] == ["3:no"]
    assert "job/filtered_stdout.log" not in rig.files()


def test_what_is_no_text(rig: Rig) -> None:
    rig.run(Logs(tee=Streams(1), stdout_filters=("x",)), (FIRST, "stdout", b"[0]<stdout>:\xff x\n"))
    assert (rig.folder / "job/0/stdout.log").read_bytes().endswith(b"\n\xff x\n")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "file")
    (tmp_path / "file").touch()
    assert rig.run(Logs(tee=Streams(1)), OUT_0) == [OUT_0[2]]
    assert len(rig.warnings) == 1
    assert "cannot write the workers' output to" in rig.warnings[0]
