"""Calls of the kernel, with a Python that has them and with one that was built against headers without them."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from elastic_driver.system import kernel


@pytest.fixture(params=["python's", "by number"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by number":
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(os, "MFD_CLOEXEC")
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "3600"]) as popen:
        yield popen
        popen.kill()


def test_a_file_in_memory() -> None:
    descriptor = kernel.memory_file("a name")
    try:
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:a name")
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.write(descriptor, b"kept")
        assert os.pread(descriptor, 9, 0) == b"kept"
    finally:
        os.close(descriptor)


def test_a_process_is_signalled_and_its_end_is_seen(child: subprocess.Popen[bytes]) -> None:
    process = kernel.pidfd_open(child.pid)
    try:
        kernel.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [])
    finally:
        os.close(process)
    assert child.wait() == -signal.SIGTERM


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_the_end_of_a_child_is_seen_and_it_stays_a_zombie(
    has_pidfds: bool, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "has_pidfds", lambda: has_pidfds)
    end = kernel.end_of_child(child.pid)
    try:
        assert select.select([end], [], [], 0)[0] == []
        child.kill()
        select.select([end], [], [])
        seen = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert seen is not None
        assert seen.si_status == signal.SIGKILL
    finally:
        os.close(end)


def test_a_copy_of_the_pipe_in_a_forked_process_does_not_hide_the_end(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []

    def pipe() -> tuple[int, int]:
        ends = made()
        copies.append(os.dup(ends[1]))
        return ends

    made = os.pipe
    monkeypatch.setattr(kernel, "has_pidfds", lambda: False)
    monkeypatch.setattr(os, "pipe", pipe)
    end = kernel.end_of_child(child.pid)
    child.kill()
    select.select([end], [], [])
    for descriptor in (end, *copies):
        os.close(descriptor)


def test_a_thread_too_many_is_an_error_of_the_system_and_leaves_nothing_open(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kernel, "has_pidfds", lambda: False)
    monkeypatch.setattr(threading.Thread, "start", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="can't start new thread") as caught:
        kernel.end_of_child(child.pid)
    assert caught.value.errno == errno.EAGAIN
    assert os.listdir("/proc/self/fd") == before


def test_errors_are_the_kernels(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    with pytest.raises(ProcessLookupError):
        kernel.pidfd_open(child.pid)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        kernel.pidfd_send_signal(-1, signal.SIGTERM)


def test_an_unknown_machine_has_no_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(kernel.platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        kernel.memory_file("none")


def test_a_descriptor_of_another_process_is_copied() -> None:
    reader, writer = os.pipe()
    process = kernel.pidfd_open(os.getpid())
    try:
        copy = kernel.pidfd_getfd(process, writer)
        os.write(copy, b"through")
        os.close(copy)
        assert os.read(reader, 9) == b"through"
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            kernel.pidfd_getfd(process, 1 << 20)
    finally:
        for descriptor in (reader, writer, process):
            os.close(descriptor)
