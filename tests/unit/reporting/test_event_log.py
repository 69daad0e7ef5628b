"""The event log."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.happenings import JobStarted
from elastic_driver.system import file_writer

pytestmark = [pytest.mark.unit]


def test_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("first", text="a\nb\u2028ü\udcff", number=3, path=tmp_path)
        log.write("second")
    line, _ = path.read_bytes().splitlines()
    assert path.read_bytes().endswith(b"\n")
    first = json.loads(line)
    assert first.pop("time") > 1e9
    assert 0 <= first.pop("at_s") < 60
    assert first == {"event": "first", "text": "a\nb\u2028ü\udcff", "number": 3, "path": str(tmp_path)}
    with EventLog(path) as log:
        log.write("third")
    events = [json.loads(line)["event"] for line in path.read_text().split("\n")[:-1]]
    assert events == ["first", "second", "third"], "a later job's events are appended"


@pytest.mark.parametrize("torn", [b'{"event": "first"}\n{"event": "sec', b"{"])
def test_a_later_job_begins_a_line_of_its_own_behind_one_that_was_torn(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(torn)
    with EventLog(path) as log:
        log.write("job_started")
    assert path.read_bytes().startswith(torn + b"\n{")
    assert json.loads(path.read_bytes().splitlines()[-1])["event"] == "job_started"
    with EventLog(path) as log:
        log.write("again")
    assert path.read_bytes().count(b"\n") == torn.count(b"\n") + 3


@pytest.mark.parametrize("lacks", [True, False])
def test_a_job_that_is_taken_over_is_told_of_once_as_started(tmp_path: Path, lacks: bool) -> None:
    """Its first driver may have died before it had written that."""
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.hear(JobStarted("unix:/one", "0122"))
        log.write("report", text='"job_id": "0123"}\n')
        if not lacks:
            log.hear(JobStarted("unix:/one", "0123"))
        log.write("filler", text="x" * (2 << 20))
    if lacks:
        with path.open("ab") as file:
            file.write(b'{"event": "job_started", "job_id": "0123"')  # torn
    with EventLog(path) as log:
        log.hear(JobStarted("unix:/two", "0123", again=True))
        log.hear(JobStarted("unix:/three", "0123", again=True))
    lines = [line for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    started = [event for event in map(json.loads, lines) if event["event"] == "job_started"]
    assert [each["rendezvous"] for each in started if each["job_id"] == "0123"] == [
        "unix:/two" if lacks else "unix:/one"
    ]
    assert len(started) == 2


def test_where_a_log_cannot_be_read_a_job_that_is_taken_over_is_not_told_of_as_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with EventLog(tmp_path / "pipe") as log:
        log.hear(JobStarted("unix:/two", "0123", again=True))
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_no_log() -> None:
    with EventLog(None) as log:
        log.write("anything")


def test_closed_twice_and_written_to_then(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e")
    log.close()
    log.close()
    log.write("late")
    assert (tmp_path / "e").read_bytes() == b""


@pytest.mark.parametrize("name", [".", "absent/e"])
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"cannot write the event log .* \(--event-log\): "):
        EventLog(tmp_path / name)


def test_a_full_disk_is_said_once_and_borne() -> None:
    said: list[str] = []
    with EventLog(Path("/dev/full"), on_warning=said.append) as log:
        log.write("one")
        log.write("two")
    assert said == ["cannot write the event log /dev/full: No space left on device; continuing without it"]


def test_a_disk_that_fills_within_a_line(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom elastic_driver.reporting.event_log import EventLog\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "with EventLog(Path(sys.argv[1]), on_warning=print) as log:\n"
        "    for number in range(20):\n        log.write('event', number=number)\n"
    )
    path = tmp_path / "e"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"cannot write the event log {path}: no space left for a whole line; continuing without it\n"
    assert path.stat().st_size == 200


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "e")
    with pytest.raises(SettingsError, match=r"cannot write the event log .*: no process reads that pipe"):
        EventLog(tmp_path / "e")


def test_a_pipe_whose_reader_does_not_keep_up_is_given_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "e")
    reader = os.open(tmp_path / "e", os.O_RDONLY | os.O_NONBLOCK)
    said: list[str] = []
    try:
        with EventLog(tmp_path / "e", on_warning=said.append) as log:
            log.write("first")
            assert select.select([reader], [], [], 30)[0], "an event is there at once"
            assert json.loads(os.read(reader, 1 << 16))["event"] == "first"
            for _ in range(200):  # 200 kB: more than a pipe holds
                log.write("filling", text="x" * 1000)
            log.close()
        assert said == [
            f"cannot write the event log {tmp_path / 'e'}: no space left for a whole line; continuing without it"
        ]
        # What is there ends with a whole line.
        data = b""
        while piece := os.read(reader, 1 << 20):
            data += piece
        assert [json.loads(line)["event"] for line in data.splitlines()] == ["filling"] * data.count(b"\n")
    finally:
        os.close(reader)


def test_a_reader_that_goes_ends_the_log_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "e")
    reader = os.open(tmp_path / "e", os.O_RDONLY | os.O_NONBLOCK)
    said: list[str] = []
    with EventLog(tmp_path / "e", on_warning=said.append) as log:
        os.close(reader)
        log.write("one")
        log.write("two")
    assert said == [
        f"cannot write the event log {tmp_path / 'e'}: its reader has closed it (broken pipe); continuing without it"
    ]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    hangs, answers, write = threading.Event(), threading.Event(), os.write

    def hang(descriptor: int, data: bytes) -> int:
        hangs.set()
        assert answers.wait(150)
        return write(descriptor, data)

    monkeypatch.setattr(file_writer, "ROOM_BYTES", 10_000)
    monkeypatch.setattr(os, "write", hang)
    others = set(threading.enumerate())
    log = EventLog(tmp_path / "e", on_warning=said.append)
    (thread,) = set(threading.enumerate()) - others
    log.write("event", number=0)
    assert hangs.wait(150)
    for number in range(1, 200):
        log.write("event", number=number, text="x" * 100)
    assert said == [f"the event log {tmp_path / 'e'} is missing events: the disk cannot keep up"]
    log.close(0.01)
    (last,) = said[1:]
    match = re.fullmatch(rf"(\d+) bytes are missing from the event log {tmp_path / 'e'}: the disk cannot keep up", last)
    assert match
    assert 20_000 < int(match[1]) < 60_000
    # What had room is written when the disk answers after all.
    answers.set()
    thread.join(150)
    assert not thread.is_alive()
    numbers = [json.loads(line)["number"] for line in (tmp_path / "e").read_text().splitlines()]
    assert numbers == list(range(len(numbers)))
    assert 10 < len(numbers) < 100
