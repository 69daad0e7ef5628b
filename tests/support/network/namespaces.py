"""Several machines on this one, for tests: network namespaces on one bridge, with a real OpenSSH server in each.

Each host has a namespace of its own (network, host name, id of its boot), addresses of IPv4 and IPv6, its names in
``/etc/hosts``, and no way out: no other name resolves, at once. Processes and files are this machine's, so tests see
all processes. The bridge lies in a namespace as well, so addresses are the same in each test run and collide with
nobody's.

Needs root, iproute2 and a kernel that allows it, and OpenSSH for the servers (``scripts/install-test-hosts``); else the
test that asks for hosts is skipped. Everything is gone afterwards; what a killed test run has left, the next removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest

SSHD = "/usr/sbin/sshd"
_NAMED = Path("/run/netns")
_ETC = Path("/etc/netns")
_numbers = itertools.count()
# Names of ours: the process that made them, and a number.
_OURS = re.compile(r"edt(?P<pid>\d+)x\d+-\w+")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# The shell's own $0 is the host's name: a namespace of host names lasts as long as its processes.
# And its boot's id: who looks takes it for another machine. A mount lasts as long as its namespace, that of ip netns.
_WITH_NAME = f'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" {BOOT_ID} && shift && exec "$@"'


class Namespaces:
    """Hosts ``node0``, ``node1``, ... A context manager; afterwards none of their processes lives.

    Args:
        count: of hosts; up to 250.
        sshd: whether an ssh server runs on each, on port 22.

    Attributes:
        hosts: them.
        folder: of keys and configuration; removed at the end.
        bin: a folder with an ``ssh`` that uses only the configuration here; first in PATH of what runs on the hosts.
        ssh_config: that configuration; tests may add to it at the beginning, by :meth:`configure_ssh`.
        known_hosts: the keys of all hosts' servers under all their names.
        key: a private key that every server takes.
        other_key: one that none takes.
    """

    def __init__(self, count: int, *, sshd: bool = False) -> None:
        assert 0 < count <= 250
        self._count = count
        self._sshd = sshd
        self._mark = f"edt{os.getpid()}x{next(_numbers)}"
        self._exit = contextlib.ExitStack()
        self.hosts: list[NamespaceHost] = []

    def __enter__(self) -> Self:
        reason = cannot_make_namespaces() or (cannot_serve_ssh() if self._sshd else "")
        if reason:
            pytest.skip(reason)
        _remove_stale()
        with self._exit:
            self._make()
            self._exit = self._exit.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()

    def __getitem__(self, index: int) -> NamespaceHost:
        return self.hosts[index]

    def __iter__(self) -> Iterator[NamespaceHost]:
        return iter(self.hosts)

    def configure_ssh(self, text: str) -> None:
        """Puts lines at the beginning of the hosts' ssh configuration, where they win."""
        self.ssh_config.write_text(text + "\n" + self.ssh_config.read_text())

    def write_known_hosts(self) -> None:
        """Writes the present keys of all servers."""
        lines = []
        for host in self.hosts:
            for name in host.names():
                lines += [f"{name} {host.public_host_key}", f"[{name}]:* {host.public_host_key}"]
        self.known_hosts.write_text("".join(f"{line}\n" for line in lines))

    def write_names(self) -> None:
        """Writes the present addresses of all hosts, for all of them; processes that run there see them as well."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.hosts:
            lines += [f"{host.ipv4} {host.name}"] + ([f"{host.ipv6} {host.name_v6}"] if host.ipv6 else [])
        for host in self.hosts:
            (host.etc / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def _make(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self._mark}-"))
        self._exit.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        self.ssh_config, self.known_hosts = self.folder / "ssh_config", self.folder / "known_hosts"
        self.key, self.other_key = self.folder / "key", self.folder / "other_key"
        switch = f"{self._mark}-sw"
        self._exit.callback(_remove, switch)
        ip("netns", "add", switch)
        batch(switch, "link set lo up", "link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up")
        for index in range(self._count):
            host = NamespaceHost(self, index, f"{self._mark}-{index}", switch)
            self._exit.callback(host.remove)
            self.hosts.append(host)
            host.make()
        for host in self.hosts:
            (host.etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self.write_names()
        if self._sshd:
            self._make_ssh()

    def _make_ssh(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd asks for it
        _keygen(self.key)
        _keygen(self.other_key)
        shutil.copy(self.key.with_suffix(".pub"), self.folder / "authorized_keys")
        self.ssh_config.write_text(
            f"Host *\n  User root\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        ssh = self.bin / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(self.ssh_config))} "$@"\n')
        ssh.chmod(0o755)
        for host in self.hosts:
            host.change_host_key()
        self.write_known_hosts()
        for host in self.hosts:
            host.start_sshd()


class NamespaceHost:
    """One host.

    Attributes:
        name: "node0"; resolves to ``ipv4`` on all hosts.
        name_v6: "node0-v6"; resolves to ``ipv6``.
        ipv4: address.
        ipv6: unique local address; "" where the kernel has none.
        namespace: its name for ``ip -n``.
        switch: the namespace of the bridge.
        port: the host's link there.
        etc: files there lie over those in /etc.
        prefix: words before a command that is to run on the host. The process keeps its number.
        public_host_key: of its ssh server, type and key.
        runtime: folder of its user's runtime files (``XDG_RUNTIME_DIR``), by ssh as well.
        sshd_log: what its ssh servers have said, lines.
    """

    def __init__(self, hosts: Namespaces, index: int, namespace: str, switch: str) -> None:
        self._hosts = hosts
        self.switch = switch
        self.port = f"p{index}"
        self._host_key = hosts.folder / f"host_key{index}"
        self._sshd: subprocess.Popen[str] | None = None
        self._popens: list[subprocess.Popen[Any]] = []
        self._readers: list[threading.Thread] = []
        self.name, self.name_v6 = f"node{index}", f"node{index}-v6"
        self.ipv4, self.ipv6 = f"10.77.0.{index + 1}", f"fd77::{index + 1:x}"
        self.namespace = namespace
        self.etc = _ETC / namespace
        boot = hosts.folder / f"boot{index}"
        boot.write_text(f"{uuid.uuid4()}\n")
        in_namespace = ["ip", "netns", "exec", namespace, "unshare", "--uts"]
        self.prefix = [*in_namespace, "sh", "-c", _WITH_NAME, self.name, str(boot)]
        self.runtime = hosts.folder / f"runtime{index}"
        self.public_host_key = ""
        self.sshd_log: list[str] = []

    def __repr__(self) -> str:
        return f"NamespaceHost({self.name})"

    def names(self) -> list[str]:
        """All names and addresses by which other hosts reach it."""
        return [self.name, self.ipv4] + ([self.name_v6, self.ipv6] if self.ipv6 else [])

    def environment(self) -> dict[str, str]:
        """This process's, with the host's runtime folder, and the ssh of these hosts comes first."""
        path = f"{self._hosts.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return os.environ | {"PATH": path, "XDG_RUNTIME_DIR": str(self.runtime)}

    def run(self, command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host; text, output captured, 150 s at most. Arguments as for subprocess.run."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 150, "env": self.environment()}
        return subprocess.run([*self.prefix, *command], **(settings | more))

    def popen(self, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Starts a command on the host. It is killed at the end, if it still runs."""
        popen = subprocess.Popen([*self.prefix, *command], **({"env": self.environment()} | more))
        self._popens.append(popen)
        return popen

    def pids(self) -> list[int]:
        """All processes in the host's network, its ssh server included; not those that have ended."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def cut(self) -> None:
        """Takes the host off the bridge: from now on packets vanish in both directions, and nobody is told."""
        ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def heal(self) -> None:
        """Puts it back."""
        ip("-n", self.switch, "link", "set", self.port, "master", "br0")

    def power_off(self) -> None:
        """Its machine goes at once: all is dead there, and nobody is sent anything, no end of a connection either."""
        self.cut()
        _kill_all(self.namespace)
        if self._sshd is not None:
            self._sshd.wait(timeout=150)
            self._sshd = None

    def power_on(self) -> None:
        """It is there again, with an ssh server and nothing else."""
        self.heal()
        self.start_sshd()

    def move(self, number: int) -> None:
        """Gives it other addresses under its old names, which resolve to them on all hosts from now on.

        Args:
            number: what the addresses end with; one that no host has.
        """
        old_v4, old_v6 = self.ipv4, self.ipv6
        self.ipv4, self.ipv6 = f"10.77.0.{number}", f"fd77::{number:x}" if old_v6 else ""
        batch(self.namespace, f"addr del {old_v4}/24 dev eth0", f"addr add {self.ipv4}/24 brd + dev eth0")
        if old_v6:
            batch(self.namespace, f"addr del {old_v6}/64 dev eth0", f"addr add {self.ipv6}/64 dev eth0 nodad")
        self._hosts.write_names()

    def lose_way_to(self, other: NamespaceHost) -> None:
        """From now on what it sends to the other vanishes; the other way is open, and so are all others."""
        for address in filter(None, (other.ipv4, other.ipv6)):
            # To a card that is none of the bridge's.
            nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
            ip("-n", self.namespace, "neigh", "replace", address, *nobody)

    def find_way_to(self, other: NamespaceHost) -> None:
        """Ends that."""
        for address in filter(None, (other.ipv4, other.ipv6)):
            ip("-n", self.namespace, "neigh", "del", address, "dev", "eth0")

    def cut_from(self, other: NamespaceHost) -> None:
        """From now on packets between the two vanish; both have all other hosts."""
        self.lose_way_to(other)
        other.lose_way_to(self)

    def heal_with(self, other: NamespaceHost) -> None:
        """Ends that."""
        self.find_way_to(other)
        other.find_way_to(self)

    def enter(self) -> None:
        """Brings the calling thread, and what it starts from here on, into the host's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(_NAMED / self.namespace) as file:
            if libc.setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network of {self.name}")

    def start_sshd(self, *, port: int = 22, addresses: Sequence[str] = ("0.0.0.0", "::")) -> None:
        """Starts its ssh server. Blocks until it listens."""
        assert self._sshd is None, "it runs already"
        if not self.ipv6:
            addresses = [address for address in addresses if ":" not in address]
        config = self._host_key.with_suffix(".config")
        config.write_text(
            f"Port {port}\nAddressFamily any\n"
            + "".join(f"ListenAddress {address}\n" for address in addresses)
            + f"HostKey {self._host_key}\nPidFile none\nUsePAM no\nUseDNS no\nStrictModes no\nPermitRootLogin yes\n"
            + f"AuthorizedKeysFile {self._hosts.folder / 'authorized_keys'}\nPasswordAuthentication no\n"
            + "KbdInteractiveAuthentication no\nMaxStartups 1000\nMaxSessions 1000\nPrintMotd no\n"
            + f"SetEnv XDG_RUNTIME_DIR={self.runtime}\n"
        )
        sshd = self.popen([SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE, text=True)
        listening = 0
        for line in sshd.stderr:
            self.sshd_log.append(line.rstrip())
            listening += line.startswith("Server listening on ")
            if listening == len(addresses):
                break
        else:
            raise RuntimeError(f"sshd does not start on {self.name}: {self.sshd_log[-5:]}")
        # Ends with the last of the server's processes.
        reader = threading.Thread(target=self._keep_log, args=(sshd.stderr,), name=f"sshd-{self.name}", daemon=True)
        reader.start()
        self._readers.append(reader)
        self._sshd = sshd

    def stop_sshd(self) -> None:
        """Ends its ssh server: connections are refused. Those that exist live on."""
        assert self._sshd is not None
        self._sshd.terminate()
        self._sshd.wait(timeout=150)
        self._sshd = None

    def end_sessions(self) -> None:
        """Ends its ssh sessions. One whose client is gone without a word lasts until the kernel gives up, 15 min."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_text().startswith("sshd: root@"):
                    os.kill(pid, signal.SIGKILL)

    def change_host_key(self) -> None:
        """Gives its ssh server a new key, which nobody knows; from its next start on."""
        for file in (self._host_key, self._host_key.with_suffix(".pub")):
            file.unlink(missing_ok=True)
        _keygen(self._host_key)
        self.public_host_key = " ".join(self._host_key.with_suffix(".pub").read_text().split()[:2])

    def make(self) -> None:
        """Makes the namespace and its link."""
        self.runtime.mkdir(mode=0o700)
        self.etc.mkdir(parents=True)
        ip("netns", "add", self.namespace)
        batch(
            self.switch,
            f"link add {self.port} type veth peer name eth0 netns {self.namespace}",
            f"link set {self.port} master br0 up",
        )
        batch(self.namespace, "link set lo up", f"addr add {self.ipv4}/24 brd + dev eth0", "link set eth0 up")
        # At once, not after a search for others with this address.
        try:
            ip("-n", self.namespace, "addr", "add", f"{self.ipv6}/64", "dev", "eth0", "nodad")
        except RuntimeError:
            self.ipv6 = ""

    def remove(self) -> None:
        """Kills what runs there, and removes it."""
        _remove(self.namespace)
        for popen in self._popens:
            popen.wait(timeout=150)
        for reader in self._readers:
            reader.join(timeout=150)
        for popen in self._popens:
            for stream in (popen.stdin, popen.stdout, popen.stderr):
                if stream is not None:
                    stream.close()

    def _keep_log(self, stream: IO[str]) -> None:
        self.sshd_log.extend(line.rstrip() for line in stream)


def cannot_make_namespaces() -> str:
    """Why there can be no hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if missing := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        return f"needs {missing[0]} (scripts/install-test-hosts)"
    probe = f"edt{os.getpid()}x{next(_numbers)}-sw"
    try:
        ip("netns", "add", probe)
        batch(probe, "link add br0 type bridge", "link add p0 type veth peer name p1")
        _ETC.mkdir(exist_ok=True)
        run(["ip", "netns", "exec", probe, "unshare", "--uts", "sh", "-c", _WITH_NAME, "probe", BOOT_ID, "true"])
    except (OSError, RuntimeError) as error:
        return f"no network namespaces here: {error}"
    finally:
        _remove(probe)
    return ""


def cannot_serve_ssh() -> str:
    """Why no ssh server can be started here; "" if one can."""
    for program in (SSHD, "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"needs {program} (scripts/install-test-hosts)"
    return ""


def _remove_stale() -> None:
    """Removes what test runs have left that were killed."""
    folders = tempfile.gettempdir()
    names = {*os.listdir(_NAMED), *os.listdir(_ETC), *os.listdir(folders)}
    for name in sorted(names):
        ours = _OURS.fullmatch(name)
        if ours and not Path("/proc", ours["pid"]).exists():
            _remove(name)
            shutil.rmtree(Path(folders, name), ignore_errors=True)


def _remove(namespace: str) -> None:
    _kill_all(namespace)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)


def _kill_all(namespace: str) -> None:
    # What is killed may be in the middle of starting others.
    while (_NAMED / namespace).exists():
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(OSError):  # it is gone already
                pidfd = os.pidfd_open(pid)
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    _wait_for_end(pidfd)
                finally:
                    os.close(pidfd)


def _wait_for_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(10_000)


def _keygen(file: Path) -> None:
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", file.name, "-f", str(file)])


def ip(*words: str) -> None:
    """Runs ``ip``. Raises RuntimeError, with what it says."""
    run(["ip", *words])


def batch(namespace: str, *lines: str) -> None:
    """Runs these lines of ``ip`` in a namespace. Raises RuntimeError."""
    run(["ip", "-n", namespace, "-batch", "-"], given="".join(f"{line}\n" for line in lines))


def run(command: Sequence[str], *, given: str = "") -> None:
    """Runs a command. Raises RuntimeError, with what it says."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
