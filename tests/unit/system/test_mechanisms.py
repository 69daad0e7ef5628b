"""The mechanisms of Linux: what a probe says where one is missing, and that the docs have the same table."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.cli import check_build
from elastic_driver.doctor import examine, findings
from elastic_driver.doctor.facts import HostFacts
from elastic_driver.doctor.findings import Level
from elastic_driver.system import kernel, mechanisms
from elastic_driver.system.mechanisms import MECHANISMS, Mechanism

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def named() -> dict[str, str]:
    """What is missing here, by its name."""
    return {mechanism.name: why for mechanism in MECHANISMS if (why := mechanism.why_not())}


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
    for module in (kernel, mechanisms):
        monkeypatch.setattr(module, call, refused, raising=False)
    after = named()
    assert after.keys() == before.keys() | lost
    assert {after[name] for name in lost} == {"Function not implemented"}


@pytest.mark.parametrize(
    ("scope", "capabilities", "why"),
    [
        ("0\n", "0", ""),
        ("1\n", "0", ""),
        ("2\n", "0", "it is 2"),
        ("2\n", "00000000a80425fb", "it is 2"),  # root in a container of Docker
        ("2\n", "0000000000080000", ""),
        ("3\n", "000001ffffffffff", "it is 3"),
        (None, "0", ""),
    ],
)
def test_yama(scope: str | None, capabilities: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(scope)
    status = tmp_path / "status"
    status.write_text(f"CapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(mechanisms, "_PTRACE_SCOPE", file)
    monkeypatch.setattr(mechanisms, "_STATUS", status)
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
    assert re.fullmatch(r"it has \d+ bytes; 1048576 are required", named()["TCP_INFO"])


def test_doctor_reports_what_matters_and_check_build_all(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        Mechanism("there", "", "nothing", lambda: None, is_warned_of=True),
        Mechanism("small", "9.9", "little", refused),
        Mechanism("large", "9.9", "much", refused, is_warned_of=True),
    )
    monkeypatch.setattr(examine, "MECHANISMS", table)
    monkeypatch.setattr(check_build, "MECHANISMS", table)
    assert examine._lacks() == (("large: Function not implemented: much",), "")
    assert check_build._mechanisms() == [
        "    [X] there",
        "    [ ] small: Function not implemented: little",
        "    [ ] large: Function not implemented: much",
    ]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_mechanism_is_not_missing_because_no_descriptor_is_free(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(code, os.strerror(code))

    why = os.strerror(code)
    table = (
        Mechanism("gone", "9.9", "something", refused, is_warned_of=True),
        Mechanism("there", "", "nothing", full, is_warned_of=True),
    )
    monkeypatch.setattr(examine, "MECHANISMS", table)
    monkeypatch.setattr(check_build, "MECHANISMS", table)
    assert examine._lacks() == (("gone: Function not implemented: something",), why)
    assert check_build._mechanisms()[1] == f"    [ ] there: cannot check this: {why}"


def test_with_no_descriptor_free_no_mechanism_is_called_missing() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        _, why = examine._lacks()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert why == "Too many open files"


def test_doctor_says_why_the_mechanisms_are_unknown() -> None:
    facts = HostFacts("1", "3.11", lacks_error="Too many open files")
    found = [finding for finding in findings._of_host("a", facts) if "Too many open files" in finding.what]
    assert [finding.level for finding in found] == [Level.WARNS]
    assert "ulimit -n" in found[0].advice


@pytest.mark.parametrize("name", ["pidfd_getfd", "/proc/PID/syscall"])
def test_access_to_another_process_is_probed_at_a_child(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def gone() -> Iterator[int]:
        with child() as pid:
            pids.append(pid)
        yield pid  # has ended, and was reaped

    child, pids = mechanisms._child, list[int]()
    monkeypatch.setattr(mechanisms, "_child", gone)
    assert named()[name] in ("No such process", "No such file or directory")
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
