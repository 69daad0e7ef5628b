"""Everything in the README that can be run or looked up: programs, commands, messages, exit codes, flags, links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.cli.flags import build_parser
from elastic_driver.words import ExitCode
from tests.support.processes import forked
from tests.support.processes.jobs import FORKING, capture_elasticrun

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"^# (\S+\.(?:py|sh))$", re.MULTILINE)
FILES = {match[1]: text for _, text in BLOCKS if (match := FILE_NAME.search(text))}
COMMANDS = [
    line for kind, text in BLOCKS if kind == "sh" and not FILE_NAME.search(text) for line in text.splitlines() if line
]

pytestmark = pytest.mark.integration


def test_every_block_is_a_file_a_command_or_output() -> None:
    assert README.count("```") == 2 * len(BLOCKS)
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", "text"}
    assert all(FILE_NAME.search(text) for kind, text in BLOCKS if kind == "python")
    assert sorted(FILES) == ["discover_hosts.sh", "train.py", "train_numpy.py"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)
    return tmp_path


def run(folder: Path, command: str) -> tuple[int, str]:
    with subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=150)
        except BaseException:
            process.terminate()
            raise
    return process.returncode, output


def run_forked(folder: Path, command: str) -> tuple[int, str]:
    """Likewise, an elasticrun whose workers are forked: each import of PyTorch takes seconds."""
    named = {"python": sys.executable, "train.py": str(folder / "train.py")}
    _, *words = [named.get(word, word) for word in shlex.split(command)]
    done = capture_elasticrun(*words, elasticrun=FORKING, cwd=folder)
    return done.returncode, done.stdout + done.stderr


# Some are put off, as PyTorch is imported for each: another one starts this script with more, and one this many.
_PUT_OFF = ("elasticrun -np 2 python train.py",)


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.release] * (each in _PUT_OFF)) for each in COMMANDS]
)
def test_command(folder: Path, command: str) -> None:
    if command.startswith("make "):
        # What they do is run by other tests, or runs them; here it counts that there is such a target.
        command = f"make --dry-run --directory {ROOT} {command.removeprefix('make ')}"
        assert run(folder, command)[0] == 0
        return
    asked = re.search(r"-np (\d+)", command)
    size = int(asked[1]) if asked else 1
    if command == "python train.py":
        # As above.
        code, output = forked.run([str(folder / "train.py")])
    else:
        code, output = (run_forked if size == 4 else run)(folder, command)
    assert code == 0, output
    ranks = re.findall(rf"rank (\d+) of {size}: (?:loss (\S+)|weights \[0\. 1\. 2\.\])", output)
    assert sorted(int(rank) for rank, _ in ranks) == list(range(size)), output
    assert all(float(loss) < 1.0 for _, loss in ranks if loss), output
    if size == 4:
        (sample,) = (
            text.splitlines()[0] for kind, text in BLOCKS if kind == "text" and text.startswith("elasticrun: ")
        )
        pattern = re.sub(r"\d+\\\.\d+ s", r"[\\d.]+ s", re.escape(sample).replace(r"\ ", " "))
        assert re.search(f"^{pattern}$", output, re.MULTILINE), (pattern, output)


def test_exit_codes_are_all_there() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", README, re.MULTILINE)
    codes = {int(code) for row in rows for code in row.split(",")}
    assert codes == {code.value for code in ExitCode} | {129, 130, 143}


def test_flags_exist() -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w-])(--?[a-zA-Z][a-z-]*)", "".join(re.findall(r"`[^`]+`", prose))))
    assert "--min-np" in named
    assert named <= known, named - known


def test_each_flag_is_told_of() -> None:
    """In the README or in a page of docs/ that is for users, by one of its names at least."""
    docs = ROOT / "docs"
    paths = {*docs.glob("*.md"), *docs.glob("howto/*.md"), *docs.glob("reference/*.md")} - {docs / "design.md"}
    pages = [README, *(path.read_text(encoding="utf-8") for path in paths)]
    told = {name for page in pages for name in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", page)}
    names: dict[str, set[str]] = {}
    for action in build_parser()._actions:
        names.setdefault(action.dest, set()).update(action.option_strings)
    untold = [sorted(each) for each in names.values() if each and not each & told]
    assert not untold, f"neither README.md nor docs/ tells of {untold}"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target
