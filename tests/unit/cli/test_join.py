"""elasticrun join: what becomes of its command line. Joining itself is tested with real agents."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from elastic_driver.cli.join import read
from elastic_driver.cli.main import main
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.agent_messages import Bootstrap
from elastic_driver.rendezvous.credentials import join_key

pytestmark = [pytest.mark.unit]

TOKEN = "0123456789abcdef"
KEY = join_key(TOKEN).hex()
DIGITS = "ab" * 32
WORDS = ("--driver", "https://10.0.0.1:1234", "--slots", "4")


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return str(path)


def test_what_the_agent_is_given(token: str) -> None:
    bootstrap = read([*WORDS, "--join-token-file", token], {})
    assert bootstrap == Bootstrap(("https://10.0.0.1:1234",), "joiner", KEY, "", slots=4)
    assert KEY not in repr(bootstrap)
    words = ["--driver", f"https://a:1#sha256:{DIGITS}", "--driver", f"https://[fd00::1]:1#sha256:{DIGITS.upper()}"]
    words += ["--slots", "1", "--host", "[fd00::2]", "--agent-timeout", "3", "--label", "rack=r1", "--label", "spot"]
    assert read([*words, "--join-token-file", token], {}) == Bootstrap(
        ("https://a:1", "https://[fd00::1]:1"),
        "joiner",
        KEY,
        "fd00::2",
        slots=1,
        labels=("rack=r1", "spot"),
        agent_timeout_s=3.0,
        fingerprint=DIGITS,
    )


def test_how_long_a_machine_lives_on(token: str) -> None:
    words = [*WORDS, "--join-token-file", token]
    assert read(words, {}).grace_s == 0.0
    assert read(words, {"ELASTIC_DRIVER_GRACE": " 45 "}).grace_s == 45.0
    assert read([*words, "--grace", "30", "--spot-notices", "gcp"], {"ELASTIC_DRIVER_GRACE": "45"}).grace_s == 30.0
    assert read([*words, "--spot-notices", "gcp"], {}).spot_notices == "gcp"
    for text in ("soon", "nan", "-1", "0", "1e12"):
        with pytest.raises(SettingsError, match="ELASTIC_DRIVER_GRACE"):
            read(words, {"ELASTIC_DRIVER_GRACE": text})


def test_the_secret_comes_from_a_file_standard_input_or_a_variable(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"ELASTIC_DRIVER_JOIN_TOKEN": f" {TOKEN}-of-the-variable ", "OTHER": "x"}
    of_file = read([*WORDS, "--join-token-file", token], environ.copy())
    assert (of_file.key, of_file.source) == (KEY, f"the file {token} (--join-token-file)")
    of_variable = read(WORDS, environ)
    assert of_variable.key == join_key(f"{TOKEN}-of-the-variable").hex()
    assert of_variable.source == "the variable ELASTIC_DRIVER_JOIN_TOKEN"
    assert environ == {"OTHER": "x"}, "workers do not inherit it"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{TOKEN}-of-stdin\n".encode())))
    of_stdin = read([*WORDS, "--join-token-file", "-"], {})
    assert (of_stdin.key, of_stdin.source) == (join_key(f"{TOKEN}-of-stdin").hex(), "standard input")


def test_a_file_that_others_may_read_is_said(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    read([*WORDS, "--join-token-file", token], {})
    assert capsys.readouterr().err == ""
    Path(token).chmod(0o604)
    read([*WORDS, "--join-token-file", token], {})
    assert capsys.readouterr().err == (f"elasticrun: warning: the join token's file {token}: all users can read it\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "the following arguments are required: --driver, --slots"),
        ("--driver https://a:1", "the following arguments are required: --slots"),
        ("--driver a --slots 1", "argument --driver: cannot read 'a' as the driver's address"),
        ("--driver https://a:1#sha256:x --slots 1", "the part after # must be sha256:"),
        (
            f"--driver https://a:1#sha256:{DIGITS} --driver https://a:1 --slots 1",
            "the --driver addresses belong to different drivers",
        ),
        ("--driver https://a:1 --slots x", "argument --slots: 'x' is not an integer"),
        ("--driver https://a:1 --slots 0", "--slots 0 is not within 1 to 4096"),
        ("--driver https://a:1 --slots 5000", "--slots 5000 is not within 1 to 4096"),
        ("--driver https://a:1 --slots 2 --host a/b", "cannot read 'a/b' as a host"),
        ("--driver https://a:1 --slots 2 --host a:3", "--host 'a:3' conflicts with --slots 2"),
        (
            "--driver https://a:1 --slots 2 --label spot --label spot",
            "argument --label: the label 'spot' is there twice",
        ),
        (
            "--driver https://a:1 --slots 2 --label rack",
            "argument --label: cannot use the label 'rack': it needs a value",
        ),
        ("--driver https://a:1 --slots 2 --agent-timeout 1", "--agent-timeout 1 is below 2 s"),
        ("--driver https://a:1 --slots 2 --agent-timeout nan", "--agent-timeout nan is not a number of seconds"),
        ("--driver https://a:1 --slots 2 --leave-code 256", "--leave-code 256 is not within 0 to 255"),
        ("--driver https://a:1 --slots 2 --grace 0", "--grace 0 is not a number of seconds above 0"),
        ("--driver https://a:1 --slots 2 --spot-notices ibm", "argument --spot-notices: invalid choice: 'ibm'"),
        ("--driver https://a:1 --slots 2", "the job's secret is missing: give --join-token-file FILE"),
        ("--driver https://a:1 --slots 2 --join-token-file /no/such", "cannot read the join token file /no/such"),
        ("--driver https://a:1 --slots 2 --join-token-file /dev/null", "it has 0 characters; at least 16 are required"),
    ],
)
def test_bad_usage(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint in err


def test_a_secret_that_is_none_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        read(WORDS, {"ELASTIC_DRIVER_JOIN_TOKEN": "hunter2"})
    assert "the variable ELASTIC_DRIVER_JOIN_TOKEN as a join token: it has 7 characters" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--timeout x", "argument --timeout: 'x' is not a number"),
        ("--timeout 0", "--timeout 0 is not a number of seconds above 0"),
        ("--within 0", "--within 0 is not a number of seconds above 0"),
        ("--within soon", "argument --within: 'soon' is not a number"),
        ("somebody", "unrecognized arguments: somebody"),
    ],
)
def test_bad_usage_of_leave(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leave", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint in err


@pytest.mark.parametrize("name", ["join", "leave"])
def test_each_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: elasticrun {name} ")
