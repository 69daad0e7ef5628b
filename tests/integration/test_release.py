"""scripts/release in a repository of its own, where building and trying wheels are stand-ins."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BUILD = """#!/bin/sh
test "$1" = --all && mkdir -p "$2"
pwd >"$2/../built-in"
echo "$ELASTIC_DRIVER_URL" >"$2/elastic_driver-0.2.0-cp311.whl"
echo source >"$2/elastic_driver-0.2.0.tar.gz"
"""
# Whose commits and tags these are, whatever this machine's git has been told.
WHO = {f"GIT_{role}_{what}": "x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
CHANGES = """# Changelog

## 0.2.0 - not yet released
New things.

### Training
- It is quicker.

## 0.1.0 - 2026-01-01
Old things.
"""

pytestmark = pytest.mark.integration


class Repository:
    """A checkout with what a release touches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("elastic_driver/version.py", '"""The version."""\n\n__version__ = "0.1.0"\n')
        self.write(
            "packaging/horovod/pyproject.toml", 'version = "0.1.0"  # same\ndependencies = ["elastic-driver==0.1.0"]\n'
        )
        self.write("CHANGELOG.md", CHANGES)
        self.write(".gitignore", "/dist/\n")
        self.write("scripts/build-wheel", BUILD)
        self.write("scripts/try-wheel", '#!/bin/sh\ntest -f "$1"\n')
        shutil.copyfile(ROOT / "scripts" / "release", folder / "scripts" / "release")
        self.git("init", "--quiet")
        self.commit()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def git(self, *words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=self.folder, env={**os.environ, **WHO}, check=True, capture_output=True, text=True
        ).stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "work")

    def release(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "scripts/release", *words],
            cwd=self.folder,
            env={**os.environ, **WHO},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    return Repository(tmp_path)


def test_a_release_is_built_summed_up_and_tagged(repository: Repository) -> None:
    done = repository.release("0.2.0", "--url", "https://example.org/x/blob/v0.2.0")
    assert done.returncode == 0, done.stdout
    assert '__version__ = "0.2.0"' in repository.read("elastic_driver/version.py")
    assert repository.read("packaging/horovod/pyproject.toml").count("0.2.0") == 2
    assert "not yet released" not in repository.read("CHANGELOG.md")
    assert repository.git("log", "--format=%s", "-1").strip() == "Release 0.2.0"
    assert repository.git("rev-parse", "v0.2.0^{commit}") == repository.git("rev-parse", "HEAD")
    assert repository.git("status", "--porcelain") == ""
    notes = "New things.\n\n### Training\n- It is quicker.\n"
    assert repository.read("dist/0.2.0/NOTES.md").strip() == notes.strip()
    assert notes in repository.git("tag", "--list", "--format=%(contents)", "v0.2.0")
    assert repository.read("dist/0.2.0/elastic_driver-0.2.0-cp311.whl") == "https://example.org/x/blob/v0.2.0\n"
    sums = dict(reversed(line.split()) for line in repository.read("dist/0.2.0/SHA256SUMS").splitlines())
    for name in ("elastic_driver-0.2.0-cp311.whl", "elastic_driver-0.2.0.tar.gz"):
        assert sums.pop(name) == hashlib.sha256((repository.folder / "dist" / "0.2.0" / name).read_bytes()).hexdigest()
    assert not sums


def test_nothing_is_tagged_when_a_wheel_fails_and_the_next_try_goes_on(repository: Repository) -> None:
    repository.write("scripts/try-wheel", "#!/bin/sh\necho no good\nexit 1\n")
    repository.commit()
    done = repository.release("0.2.0")
    assert done.returncode == 1, done.stdout
    assert "no good" in done.stdout
    assert repository.git("tag") == ""
    repository.write("scripts/try-wheel", "#!/bin/sh\n")
    repository.commit()
    assert repository.release("0.2.0").returncode == 0
    assert repository.git("tag").split() == ["v0.2.0"]


def test_an_index_gets_whole_addresses_of_pages_and_of_images(tmp_path: Path) -> None:
    """An image is the file itself: an address with /blob/ in it is that of a page."""
    (tmp_path / "README.md").write_text("![a job](docs/a.svg) [hangs](docs/hangs.md) [here](#here) [it](https://a.org)")
    shutil.copyfile(ROOT / "setup.py", tmp_path / "setup.py")
    readme = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "--long-description"],
        cwd=tmp_path,
        env={**os.environ, "ELASTIC_DRIVER_URL": "https://example.org/x/blob/v1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    assert readme.strip() == (
        "![a job](https://example.org/x/raw/v1/docs/a.svg) [hangs](https://example.org/x/blob/v1/docs/hangs.md) "
        "[here](#here) [it](https://a.org)"
    )


def test_what_was_built_is_tagged_although_work_goes_on_meanwhile(repository: Repository) -> None:
    """Building takes half an hour. Here somebody commits while wheels are tried, and edits the changelog, too."""
    repository.write(
        "scripts/try-wheel",
        f"#!/bin/sh\ncd {repository.folder}\nsed -i 's/New things/Newer things/' CHANGELOG.md\n"
        "git commit --quiet --all --message later\n",
    )
    repository.commit()
    done = repository.release("0.2.0")
    assert done.returncode == 0, done.stdout
    assert repository.git("log", "--format=%s", "-1").strip() == "later"
    assert repository.git("log", "--format=%s", "-1", "v0.2.0").strip() == "Release 0.2.0"
    assert "New things." in repository.read("dist/0.2.0/NOTES.md")
    assert "New things." in repository.git("tag", "--list", "--format=%(contents)", "v0.2.0")


def test_a_version_that_cannot_be_committed_is_not_left_behind(repository: Repository) -> None:
    hook = repository.folder / ".git" / "hooks" / "pre-commit"
    repository.write(str(hook), "#!/bin/sh\necho not today\nexit 1\n")
    hook.chmod(0o755)
    done = repository.release("0.2.0")
    assert done.returncode == 2, done.stdout
    assert "not today\n" in done.stdout
    assert "cannot commit the version and the date" in done.stdout
    assert repository.git("status", "--porcelain") == ""
    assert '__version__ = "0.1.0"' in repository.read("elastic_driver/version.py")
    hook.unlink()
    assert repository.release("0.2.0").returncode == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "which version? One like 0.1.0"),
        (("v0.2.0",), "which version? One like 0.1.0"),
        (("0.3.0",), "the first section of CHANGELOG.md is 0.2.0, not 0.3.0"),
        (("0.2.0", "--url", "example.org"), "the address begins with https://"),
        (("0.2.0", "--publish"), "unknown argument --publish"),
    ],
)
def test_what_is_refused_changes_nothing(repository: Repository, words: tuple[str, ...], reason: str) -> None:
    done = repository.release(*words)
    assert done.returncode == 2, done.stdout
    assert reason in done.stdout
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("tag") == ""


def test_work_that_is_not_committed_and_a_tag_that_is_there_are_refused(repository: Repository) -> None:
    repository.write("new", "")
    assert "changes that are not committed" in repository.release("0.2.0").stdout
    repository.commit()
    repository.git("tag", "v0.2.0")
    assert "there is a tag v0.2.0 already" in repository.release("0.2.0").stdout
