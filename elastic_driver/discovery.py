"""Where hosts come from: a script that is run again and again, or a list that stays.

Owns the running of the script (its time, its output, its process tree) and the check that hosts are this machine. Says
what there is; what that means is the membership core's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Protocol

import psutil

from elastic_driver.errors import DiscoveryError, SettingsError
from elastic_driver.hosts import Host, parse_hosts
from elastic_driver.rendezvous.messages import ENV_JOB

# A list of 4,096 hosts with long names is under 300 KB.
_MAX_OUTPUT_BYTES = 1 << 20
_STDERR_LINES = 5


class HostDiscovery(Protocol):
    """Tells the hosts there are."""

    async def find_hosts(self) -> tuple[Host, ...]:
        """All hosts now, in the user's order. Raises DiscoveryError when there is no answer."""


class FixedHosts:
    """The hosts of ``-H`` or ``--hostfile``: always the same."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)

    async def find_hosts(self) -> tuple[Host, ...]:
        """The list."""
        return self._hosts


class ScriptDiscovery:
    """Runs the user's script.

    Args:
        script: a shell command; its standard output is the list.
        default_slots: slots of a host that the script lists without any; None makes that an error.
        timeout_s: how long one run may take; then its whole process tree is killed.
        job_id: marks its processes, so that they end with a driver that is killed.
    """

    def __init__(self, script: str, default_slots: int | None, timeout_s: float, *, job_id: str = "") -> None:
        self._script = script
        self._job_id = job_id
        self._default_slots = default_slots
        self._timeout_s = timeout_s

    async def find_hosts(self) -> tuple[Host, ...]:
        """Runs the script once.

        Returns:
            Its hosts, in the order of its lines; none for an empty answer, which is no failure.

        Raises:
            DiscoveryError: it failed, hung, printed something else than hosts, or named a host that is not local.
        """
        try:
            process = await asyncio.create_subprocess_shell(
                self._script,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, ENV_JOB: self._job_id},
                limit=_MAX_OUTPUT_BYTES,
            )
        except OSError as error:
            raise DiscoveryError(f"cannot run the host discovery script {self._script!r}: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                stdout, stderr = await _read_all(process)
                await process.wait()
        except TimeoutError:
            _kill_tree(process.pid)
            raise DiscoveryError(
                f"the host discovery script {self._script!r} did not end within {self._timeout_s:g} s "
                "(--discovery-timeout) and was killed"
            ) from None
        except BaseException:
            _kill_tree(process.pid)
            raise
        if process.returncode:
            said = " | ".join(stderr.decode(errors="replace").strip().splitlines()[-_STDERR_LINES:])
            raise DiscoveryError(
                f"the host discovery script {self._script!r} failed with exit code {process.returncode}: "
                f"{said or 'it printed nothing on its standard error'}"
            )
        try:
            hosts = parse_hosts(stdout.decode().splitlines(), default_slots=self._default_slots)
        except UnicodeDecodeError:
            raise DiscoveryError(
                f"the host discovery script {self._script!r} printed bytes that are not UTF-8: {stdout[:40]!r}"
            ) from None
        except SettingsError as error:
            raise DiscoveryError(
                f"the host discovery script {self._script!r} printed no list of hosts: {error}"
            ) from error
        await asyncio.to_thread(check_local, hosts)
        return hosts


async def _read_all(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    async def read(stream: asyncio.StreamReader | None) -> bytes:
        data = bytearray()
        while stream is not None and (piece := await stream.read(65536)):
            data += piece
            if len(data) > _MAX_OUTPUT_BYTES:
                raise DiscoveryError(f"the host discovery script printed more than {_MAX_OUTPUT_BYTES} bytes")
        return bytes(data)

    stdout, stderr = await asyncio.gather(read(process.stdout), read(process.stderr))
    return stdout, stderr


def _kill_tree(pid: int) -> None:
    """Kills the script, its descendants, and what is left of its session's process group when it has ended already."""
    try:
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
    except psutil.Error:
        tree = []
    for process in tree:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def check_local(hosts: Sequence[Host]) -> None:
    """Raises DiscoveryError when a host is not this machine: workers elsewhere are not yet supported.

    May resolve names, so it may block.
    """
    for host in hosts:
        if not is_local_host(host.name):
            raise DiscoveryError(
                f"host {host.name!r} is not this machine: workers on remote hosts are not yet supported "
                "(use localhost, 127.0.0.1, or a name or address of this machine)"
            )


_known_local: set[str] = {"localhost", "127.0.0.1", "::1"}


def is_local_host(name: str) -> bool:
    """Whether a name or address means this machine.

    Loopback names, this machine's host name and addresses, and names that resolve (forwards; never backwards, which can
    hang for seconds) to one of its addresses. A positive answer is remembered.
    """
    if name in _known_local:
        return True
    addresses = {
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    hostname = socket.gethostname()
    local = name in addresses or name.lower() in (hostname.lower(), hostname.split(".")[0].lower())
    if not local:
        try:
            resolved = {
                str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            }
        except (OSError, UnicodeError):
            resolved = set()
        local = bool(resolved) and resolved <= addresses | {"127.0.0.1", "::1"}
    if local:
        _known_local.add(name)
    return local
