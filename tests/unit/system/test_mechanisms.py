"""The mechanisms of Linux: what a probe says where one is missing, and that the docs have the same table."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from elastic_driver.cli import check_build
from elastic_driver.doctor import examine
from elastic_driver.system import mechanisms
from elastic_driver.system.mechanisms import MECHANISMS, Mechanism, missing

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def named() -> dict[str, str]:
    """What is missing here, by its name."""
    return {each.mechanism.name: each.why for each in missing()}


def test_the_docs_have_the_same_rows() -> None:
    text = (ROOT / "docs/platforms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`( \*)? \| (any|[\d.]+) \|", text, re.M)
    since = {"kernel.yama.ptrace_scope below 2": "3.4"}  # that of Yama itself
    assert rows == [
        (each.name, " *" if each.is_warned_of else "", each.since or since.get(each.name, "any")) for each in MECHANISMS
    ]


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        ("memory_file", {"memfd_create"}),
        ("pidfd_open", {"pidfd_open", "pidfd_open of a thread", "pidfd_getfd"}),
        ("pidfd_send_signal", {"pidfd_open"}),
        ("pidfd_getfd", {"pidfd_getfd"}),
        ("memory_files", {"memory cgroup"}),
    ],
)
def test_a_call_that_is_refused(call: str, lost: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = named()
    monkeypatch.setattr(mechanisms, call, refused)
    after = named()
    assert after.keys() == before.keys() | lost
    assert {after[name] for name in lost} == {"Function not implemented"}


@pytest.mark.parametrize(
    ("scope", "why"), [("0\n", ""), ("1\n", ""), ("2\n", "it is 2"), ("3\n", "it is 3"), (None, "")]
)
def test_yama(scope: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(scope)
    monkeypatch.setattr(mechanisms, "_PTRACE_SCOPE", file)
    assert named().get("kernel.yama.ptrace_scope below 2", "") == why


@pytest.mark.parametrize(
    ("release", "is_there"),
    [("5.7.19-generic", False), ("4.18.0-553.el8", False), ("5.8.0", True), ("6.18.44", True), ("?", False)],
)
def test_refusals_by_the_kernels_version(release: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms.platform, "release", lambda: release)
    assert ("IP_RECVERR of TCP" not in named()) == is_there


def test_a_short_tcp_info_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "_TCP_INFO_BYTES", 1 << 20)
    assert re.fullmatch(r"it has \d+ bytes; 1048576 are needed", named()["TCP_INFO"])


def test_doctor_reports_what_matters_and_check_build_all(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        Mechanism("there", "", "nothing", lambda: None, is_warned_of=True),
        Mechanism("small", "9.9", "little", refused),
        Mechanism("large", "9.9", "much", refused, is_warned_of=True),
    )
    monkeypatch.setattr(mechanisms, "MECHANISMS", table)
    monkeypatch.setattr(check_build, "MECHANISMS", table)
    assert examine._lacks() == ["large: Function not implemented: much"]
    assert check_build._mechanisms() == [
        "    [X] there",
        "    [ ] small: Function not implemented: little",
        "    [ ] large: Function not implemented: much",
    ]
