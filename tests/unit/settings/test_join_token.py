"""The join token in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.token_file import JOIN, read_token
from elastic_driver.settings.join_token import who_else_reads

pytestmark = [pytest.mark.unit]

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("text", [TOKEN, f"  {TOKEN}\n", f"\n\t{TOKEN}\r\n"])
def test_white_space_around_it_does_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_bytes(text.encode())
    assert read_token(tmp_path / "token", JOIN) == TOKEN


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "it has 0 characters; at least 16 are required"),
        (b" " * 30, "it has 0 characters"),
        (TOKEN[1:].encode(), "it has 15 characters"),
        (b"\xff" * 20, "it is not UTF-8 text"),
        (TOKEN.encode() + b"\n" + TOKEN.encode(), "more than one line"),
        (TOKEN.encode() + b"\0", "control characters"),
        (b"a" * 5000, "it is larger than 4096 bytes"),
    ],
)
def test_what_cannot_be_a_token(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "token").write_bytes(data)
    with pytest.raises(SettingsError) as caught:
        read_token(tmp_path / "token", JOIN)
    assert complaint in str(caught.value)
    assert TOKEN[1:] not in str(caught.value), "what it holds is not told"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the join token file .*No such file"):
        read_token(tmp_path / "absent", JOIN)


def test_who_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert who_else_reads(path) == "", "reading it tells"
    path.write_text(TOKEN)
    for mode, text in ((0o600, ""), (0o640, ""), (0o644, "all users can read it")):
        path.chmod(mode)
        assert who_else_reads(path) == text


def test_the_mode_of_a_mounted_secret_is_the_manifests(tmp_path: Path) -> None:
    data = tmp_path / "..2026"
    data.mkdir()
    (data / "token").write_text(TOKEN)
    (data / "token").chmod(0o644)
    (tmp_path / "..data").symlink_to(data.name)
    (tmp_path / "token").symlink_to("..data/token")
    assert who_else_reads(tmp_path / "token") == ""
