"""Error files of workers: whatever a script leaves there, and whatever it does not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from elastic_driver.launch.error_files import ErrorFiles, Raised, pass_on, raised_in, read_error_file

pytestmark = pytest.mark.unit

STACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    x()\nValueError: no\n'
FILE = {"message": {"message": "ValueError: no\nmore", "extraInfo": {"py_callstack": STACK, "timestamp": "1"}}}


def test_names_are_of_a_folder_that_is_removed() -> None:
    files = ErrorFiles()
    one, other = Path(files.new()), Path(files.new())
    assert one != other
    assert not one.exists()
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700
    one.write_text("text")
    assert read_error_file(str(one))[0] == "text"
    assert read_error_file(str(other)) == read_error_file("") == ("", None)
    files.remove()
    files.remove()
    assert not one.parent.exists()


def test_what_a_killed_agent_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elastic_driver-errors-file").write_text("no folder")
    (tmp_path / "elastic_driver-errors-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    code = (
        "import os, signal\n"
        "from elastic_driver.launch.error_files import ErrorFiles\n"
        "files = ErrorFiles()\n"
        "open(files.new(), 'w').write('an error')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    [left] = [path for path in tmp_path.glob("elastic_driver-errors-*") if path.is_dir() and not path.is_symlink()]
    one, other = ErrorFiles(), ErrorFiles()
    kept = Path(one.new())
    assert not left.exists()
    other.new()
    assert kept.parent.is_dir(), "its agent lives"
    one.remove()
    other.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elastic_driver-errors-file", "elastic_driver-errors-link", "elsewhere",
    ]  # fmt: skip


def test_what_is_no_file_or_too_long_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(b"x" * (1 << 20))
    (tmp_path / "link").symlink_to(tmp_path / "bytes")
    (tmp_path / "bytes").write_bytes(b"\xff{}")
    assert [read_error_file(str(tmp_path / name)) for name in ("fifo", "long", "link", "", "none")] == [("", None)] * 5
    assert read_error_file(str(tmp_path / "bytes"))[0] == "\ufffd{}"


def test_when_it_was_written_is_not_in_the_future(tmp_path: Path) -> None:
    path, now = tmp_path / "file", time.time()
    path.write_text("text")
    os.utime(path, (now - 100, now - 100))
    _, age_s = read_error_file(str(path))
    assert age_s is not None
    assert age_s >= 100
    os.utime(path, (now + 1000, now + 1000))
    assert read_error_file(str(path)) == ("text", 0.0)


def test_what_it_says() -> None:
    assert raised_in(json.dumps(FILE)) == Raised("ValueError: no", tuple(STACK.splitlines()))
    assert raised_in('{"message": "plain", "timestamp": 3}') == Raised("plain", ())
    assert raised_in('{"message": {"message": "x", "extraInfo": 3}}') == Raised("x", ())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"message": ""}', '{"message": {}}', "[" * 100000, "3"])
def test_what_says_nothing(text: str) -> None:
    assert raised_in(text) is None


def test_it_is_passed_on_to_the_launcher_around(tmp_path: Path) -> None:
    file = tmp_path / "a" / "error.json"
    pass_on(str(file), json.dumps(FILE), "worker a[0] exited with code 3", 3)
    assert json.loads(file.read_text()) == {"message": {**FILE["message"], "errorCode": 3}}
    pass_on(str(file), "", "worker a[0] killed by SIGKILL", -9)
    document = json.loads(file.read_text())
    assert (document["message"]["message"], document["message"]["errorCode"]) == ("worker a[0] killed by SIGKILL", -9)
    pass_on(str(file), '{"message": "plain"}', "", 1)
    assert json.loads(file.read_text()) == {"message": "plain"}
    pass_on("/proc/nothing/here", "", "", 1)
