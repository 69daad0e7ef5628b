"""``elasticrun token``."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.cli.main import main
from elastic_driver.rendezvous.operator_token import read_operator_key
from elastic_driver.rendezvous.token_file import JOIN, read_token, weakness

pytestmark = pytest.mark.unit


def test_it_is_good_for_all_that_take_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    assert main(["token", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path, JOIN) == read_token(path) == read_operator_key(path).hex()
    assert capsys.readouterr().out == "", "a secret is not shown unasked"
    assert main(["token"]) == 0
    printed = capsys.readouterr().out.strip()
    assert len(printed) == 64
    assert printed != read_token(path)
    assert weakness(printed) == ""


def test_no_file_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text("mine")
    assert main(["token", str(path)]) == 2
    assert "the file exists already" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["token", str(tmp_path / "absent" / "token")]) == 2
    assert "cannot write a token to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("0123456789abcde", "it has 15 characters; at least 16 are required"),
        ("a" * 64, "it has only 1 different characters"),
        ("1212343412123434", "it has only 4 different characters"),
        ("passwordpassword", "it repeats 8 characters"),
        ("secret-secret-secret", "it repeats 7 characters"),
        ("0123456789abcdef", ""),
        ("a token of some length", ""),
        ("0f1e2d3c4b5a69780", ""),  # its end is as its beginning, by chance
        ("0123456789abcdef" * 2, ""),
    ],
)
def test_what_anybody_can_guess_is_no_token(tmp_path: Path, token: str, why: str) -> None:
    assert weakness(token).startswith(why)
    assert bool(weakness(token)) == bool(why)
    assert token not in weakness(token)


@pytest.mark.parametrize("text", ["0" * 64, "deadbeef" * 8])
def test_an_operator_s_key_is_as_random(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="create one with elasticrun token"):
        read_operator_key(tmp_path / "token")
