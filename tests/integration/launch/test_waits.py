"""What is looked at of a worker whose files lie on a file system that does not answer."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.launch.agent import waits
from elastic_driver.launch.processes.sockets import connections, in_kernel

pytestmark = pytest.mark.integration

# Reads from standard input, and has the root of a folder open.
READS = "import os, sys; os.open(sys.argv[1], os.O_PATH); print(flush=True); sys.stdin.read()"
MNT_DETACH = 2


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[str]:
    """A folder whose server never answers: each look at it hangs."""
    folder = tmp_path / "dead"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
        if libc.mount(b"dead", bytes(folder), b"fuse", 0, options.encode()) != 0:
            pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield str(folder)
        finally:
            libc.umount2(bytes(folder), MNT_DETACH)
    finally:
        os.close(server)  # what still hangs ends with an error


def test_a_file_of_a_server_that_is_away_holds_nobody_up(dead: str) -> None:
    command = [sys.executable, "-c", READS, dead]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        names = os.listdir(f"/proc/{process.pid}/fd")
        assert dead in [os.readlink(f"/proc/{process.pid}/fd/{name}") for name in names]
        assert {in_kernel(process.pid, name)[0] for name in names} >= {"", "pipe"}
        assert not list(connections(process.pid))
        # All descriptors of the others are looked at.
        mine = in_kernel(os.getpid(), process.stdin.fileno())
        assert waits._who_has(mine[1], (process.pid,)) == process.pid
        assert waits._who_has(0xFFFFFFFF, (process.pid,)) is None
        process.stdin.close()
