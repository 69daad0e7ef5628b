"""``elasticrun report``: files in, files out, and what is said where that cannot be."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from elastic_driver.cli.main import main

pytestmark = [pytest.mark.unit]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    lines = [
        {"event": "job_started", "job_id": "feedface", "rendezvous": "http://a:1", "time": 1.7e9, "at_s": 0.5},
        {
            "event": "phase",
            "phase": "starting",
            "doing": "forming",
            "on_change": "in-place",
            "time": 1.7e9,
            "at_s": 0.5,
        },
        {"event": "worker_started", "worker": "a[0]#0", "pid": 1, "time": 1.7e9, "at_s": 1.5},
        {
            "event": "round_formed",
            "round_id": 1,
            "size": 1,
            "old_size": 0,
            "cause": "start\x1b[31m",
            "commits": 0,
            "sync": True,
            "backend": "native",
            "formed_in_s": 2.0,
            "lost_s": 0.0,
            "members": [{"rank": 0, "worker": "a[0]#0", "pid": 1}],
            "time": 1.7e9,
            "at_s": 2.5,
        },
        {
            "event": "phase",
            "phase": "running",
            "doing": "training",
            "on_change": "in-place",
            "time": 1.7e9,
            "at_s": 3.5,
        },
        {"event": "job_ended", "exit_code": 0, "message": "done", "time": 1.7e9, "at_s": 20.5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_log_that_was_cut_is_said_to_be(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log.read_text().splitlines(keepends=True)
    cut = {"event": "log_cut", "size_bytes": 1000, "time": 1.7e9, "at_s": 10.5}
    booked = {"event": "goodput", "seconds": {"training": 16.0}, "wall_s": 20.0, "time": 1.7e9, "at_s": 20.5}
    log.write_text("".join([*lines[:-1], json.dumps(cut) + "\n", json.dumps(booked) + "\n", lines[-1]]))
    assert main(["report", str(log)]) == 0
    goodput, note = capsys.readouterr().out.splitlines()[-2:]
    assert goodput == "goodput 80.0 %: training 16.0 s, unexplained 0.0 s"
    assert note.startswith("from 0:10 on: the log reached its size limit")


def test_the_version_is_told_where_the_log_has_it(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(log)]) == 0
    assert capsys.readouterr().out.startswith("job feedface, ")
    log.write_text(log.read_text().replace('"job_id": "feedface"', '"job_id": "feedface", "version": "0.1.0"'))
    assert main(["report", str(log)]) == 0
    assert capsys.readouterr().out.startswith("job feedface, elasticrun 0.1.0, ")


def test_on_the_terminal(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(log)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "job feedface, 20 s; exit code 0: done",
        "round    at  workers  time lost  recomputed  from commit  cause",
        "    1  0:02        1          -           -            -  start [31m",
        "goodput 85.0 %: training 17.0 s, start 3.0 s, unexplained 0.0 s",
    ]
    assert err == ""


@pytest.mark.parametrize("name", ["job.svg", "job.html"])
def test_into_a_file(log: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / name
    output.write_text("an older one")
    assert main(["report", str(log), "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert "feedface" in text
    if name == "job.svg":
        ET.fromstring(text)
    assert sorted(os.listdir(tmp_path)) == sorted(["events.jsonl", name]), "nothing else is left"
    assert capsys.readouterr() == ("", "")


def test_lines_that_cannot_be_read_are_said(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.open("ab") as file:
        file.write(b"rubbish\n{")
    assert main(["report", str(log)]) == 0
    assert f"2 lines of {log} could not be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{log}", "-o", "{folder}/job.png"], "must end with .html or .svg"),
        (["{log}", "-o", "{folder}/absent/job.svg"], "cannot write .*: No such file"),
        (["{log}", "-o", "/dev/full/job.svg"], "cannot write .*: Not a directory"),
        (["{folder}/absent"], "cannot read the event log .*: No such file"),
        (["{folder}"], "cannot read the event log .*: Is a directory"),
        (["/dev/null"], "contains no job$"),
        (["{log}", "--job", "beef"], "contains no job beef"),
    ],
)
def test_what_cannot_be(log: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled = [word.format(log=log, folder=log.parent) for word in words]
    code: object
    try:
        code = main(["report", *filled])
    except SystemExit as error:
        code = error.code
    assert code == 2
    error_lines = capsys.readouterr().err.strip()
    assert re.search(why, error_lines)
    assert os.listdir(log.parent) == ["events.jsonl"]
