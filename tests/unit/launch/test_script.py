"""What an agent says of the script that a worker's command runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from elastic_driver.launch.agent.script import script_of

pytestmark = pytest.mark.unit

TEXT = b"print('hello')\n"
DIGEST = hashlib.sha256(TEXT).hexdigest()


@pytest.mark.parametrize("command", [["python3", "-u", "train.py", "--epochs", "3"], ["python3", "-m", "train"]])
def test_a_script_and_a_module_are_read(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(TEXT)
    assert script_of(command, tmp_path) == (str(tmp_path / "train.py"), DIGEST)


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "train.sh"],
        ["python3", "absent.py"],
        ["python3", "-c", "1"],
        ["python3", "-m", "os"],
        ["python3", "\0"],
    ],
)
def test_of_any_other_command_nothing_is_said(command: list[str], tmp_path: Path) -> None:
    assert script_of(command, tmp_path) == ("", "")


def test_of_a_file_that_cannot_be_read_nothing_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")  # it is no file, and nobody waits for a writer
    assert script_of(["python3", "train.py"], tmp_path) == ("", "")
