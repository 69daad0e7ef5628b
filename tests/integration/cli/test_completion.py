"""elasticrun completion, in the shells themselves."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from elastic_driver.cli.completion import SUBCOMMANDS
from elastic_driver.cli.flags import build_parser
from elastic_driver.cli.main import _subcommand, main
from elastic_driver.rendezvous.job_files import Posting
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration]


def script(tmp_path: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script in a file, and beside it the command that it asks."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    assert main(["completion", shell]) == 0
    path = tmp_path / f"_elasticrun.{shell}"
    path.write_text(capsys.readouterr().out)
    command = tmp_path / "elasticrun"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m elastic_driver "$@"\n')
    command.chmod(0o755)
    return path


def run(shell: str, text: str, tmp_path: Path, *words: str) -> str:
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [shell, "-c", text, *words], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stderr == ""
    return done.stdout


IN_BASH = """source "$0"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_elasticrun
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash(tmp_path: Path, runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "bash", capsys)

    def complete(*words: str) -> list[str]:
        return run("bash", IN_BASH, tmp_path, str(path), "elasticrun", *words).split()

    (tmp_path / "hosts").touch()
    assert complete("st") == ["stacks", "status"]
    assert set(complete("stacks", "--")) >= {"--rank", "--all", "--json", "--driver", "--token-file"}
    assert complete("--hostf") == ["--hostfile"]
    assert complete("--log-level", "DE") == ["DEBUG"]
    assert complete("--hostfile", f"{tmp_path}/ho") == [f"{tmp_path}/hosts"]
    assert complete("completion", "b") == ["bash"]
    assert complete("status", "") == [], "no job runs, and nothing is said of it"
    posting = Posting.post("3f2a", Path("/no/such/driver.sock"), ["true"])
    assert posting is not None
    assert complete("status", "") == ["3f2a"]
    assert complete("drain", "--job", "3") == ["3f2a"]
    posting.remove()
    # The command's own words are files, which bash completes by itself.
    assert "-o default" in run("bash", 'source "$0"; complete -p elasticrun', tmp_path, str(path))


def test_fish(tmp_path: Path, runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "fish", capsys)

    def complete(line: str) -> list[str]:
        text = f"source {shlex.quote(str(path))}; complete -C {shlex.quote(f'elasticrun {line}')}"
        return [line.split("\t")[0] for line in run("fish", text, tmp_path).splitlines()]

    assert complete("stat") == ["status"]
    assert complete("stacks --ra") == ["--rank"]
    (tmp_path / "hosts").touch()
    assert complete(f"-np 2 python {tmp_path}/ho") == [f"{tmp_path}/hosts"]
    assert complete(f"report {tmp_path}/ho") == [f"{tmp_path}/hosts"]
    assert complete(f"status {tmp_path}/ho") == []


def test_zsh_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "zsh", capsys)
    assert run("zsh", 'zsh -n "$0"', tmp_path, str(path)) == ""
    assert path.read_text().startswith("#compdef elasticrun\n")
    assert "stacks:" in path.read_text()


class Zsh:
    """One on a terminal, since it completes nowhere else."""

    def __init__(self, path: Path, folder: Path) -> None:
        functions = folder / "functions"
        functions.mkdir()
        path.rename(functions / "_elasticrun")
        start = f"PS1='ready> '\nfpath=({shlex.quote(str(functions))} $fpath)\nautoload -Uz compinit\ncompinit -u -D\n"
        (folder / ".zshrc").write_text(start)
        pid, self.terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            seen = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ZDOTDIR": str(folder), "TERM": "dumb"}
            os.execvpe("zsh", ["zsh", "-d", "-i"], seen)
        self.pid = pid
        self.read_until("ready> ")

    def read_until(self, wanted: str) -> str:
        text, until = "", time.monotonic() + 150
        while wanted not in text:
            left = max(0.0, until - time.monotonic())
            assert select.select([self.terminal], [], [], left)[0], f"no {wanted!r} in {text!r}"
            text += os.read(self.terminal, 65536).decode()
        return text

    def completes(self, line: str, wanted: str) -> None:
        os.write(self.terminal, f"{line}\t".encode())
        self.read_until(wanted)
        os.write(self.terminal, b"\x15")  # ^U: the line away

    def end(self) -> None:
        os.close(self.terminal)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_zsh_on_a_terminal(tmp_path: Path, runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "zsh", capsys)
    (tmp_path / "the_only_hosts").touch()
    zsh = Zsh(path, tmp_path)
    try:
        zsh.completes("elasticrun compl", "completion")
        zsh.completes("elasticrun --log-level DE", "DEBUG")
        zsh.completes("elasticrun report the_o", "the_only_hosts")
        zsh.completes("elasticrun -np 2 python the_o", "the_only_hosts")
        # Those that run when the key is pressed, not when the script was read.
        posting = Posting.post("3f2a", Path("/no/such/driver.sock"), ["true"])
        assert posting is not None
        zsh.completes("elasticrun status 3", "3f2a")
        posting.remove()
    finally:
        zsh.end()


def test_every_subcommand_is_completed() -> None:
    listed = re.findall(r"^  ([a-z]+) ", build_parser().description or "", re.MULTILINE)
    assert sorted(listed) == sorted(SUBCOMMANDS)
    # One runs a driver, as a command does.
    assert [name for name in SUBCOMMANDS if _subcommand(name) is None] == ["resume"]


def test_a_default_installation_can_complete() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert any(each.startswith("shtab") for each in project["dependencies"])


def test_without_shtab_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == (
        "elasticrun: error: cannot generate a completion script without shtab: pip install shtab\n"
    )
