"""Pods on a test's network namespaces: containers with processes, names, files and a user of their own.

A pod is one of :mod:`namespaces`' hosts with a name of its own. Its container is a process tree in a namespace of
processes, so that all of it dies with its first process; ``/etc``, ``/tmp`` and ``/srv`` are the pod's, and the rest of
the file system is this machine's. Names of pods resolve where there is a name server, and only while they run.

Needs what :mod:`namespaces` needs, and util-linux.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

from tests.support.clusters.config_volume import ConfigVolume
from tests.support.network.machines import command_of, wait_for
from tests.support.network.namespaces import NamespaceHost, Namespaces, run
from tests.support.paths import ROOT, SUPPORT

_SERVER = SUPPORT / "network/name_server.py"
HOME = "/srv/mpiuser"
SHARED = "/mnt"
"""Where a container sees :attr:`Pods.shared`: what would be a volume that all pods mount."""
# Where a container sees this machine's own /etc, of which its own has all that a pod has none of.
_HOST_ETC = "/media"
_OWN = frozenset(("hosts", "hostname", "resolv.conf", "passwd", "mpi", "ssh", "netns"))
_DOMAIN = "svc.cluster.local"
PORT = 2222
# The lines that mpi-operator's base image has over Debian's, without comments.
_SSH_CONFIG = f"""Host *
    StrictHostKeyChecking no
    Port {PORT}
    SendEnv LANG LC_*
    HashKnownHosts yes
    GSSAPIAuthentication yes
    UserKnownHostsFile /dev/null
"""
_SSHD_CONFIG = f"""Port {PORT}
StrictModes no
KbdInteractiveAuthentication no
UsePAM yes
X11Forwarding yes
PrintMotd no
AcceptEnv LANG LC_*
"""
# That of its user, for a server that is not root.
_USERS_SSHD_CONFIG = f"PidFile {HOME}/sshd.pid\nHostKey {HOME}/.ssh/id_rsa\nStrictModes no\nPort {PORT}\n"
SSHD = ("/usr/sbin/sshd", "-De", "-f", f"{HOME}/.sshd_config")
_ENTER = f"""set -e
mount --bind "$1" {SHARED}
UNCOVERED
mount --bind /etc {_HOST_ETC}
mount --bind {SHARED}/pods/$2/etc /etc
mount --bind {SHARED}/pods/$2/srv /srv
mount --bind {SHARED}/pods/$2/tmp /tmp
[ "$4" = writable ] || mount -o remount,ro,bind /srv
echo "$3" > /proc/sys/kernel/hostname
cd {HOME}
shift 4
exec "$@"
"""


class Pods:
    """Makes pods of a job. A context manager; afterwards none is left.

    Args:
        machines: on which they run, each pod on one of its own.
        job: its name, and that of its headless service.
        namespace: of Kubernetes.
        uid: of the containers' processes.
        has_user: whether the image has a user of this number, ``mpiuser``.

    Attributes:
        shared: a folder that all pods see as ``/mnt``, and whose ``work`` they can write to.
        config: the volume of the job's ConfigMap, which launchers have at ``/etc/mpi``.
    """

    def __init__(
        self,
        machines: Namespaces,
        *,
        job: str = "pi",
        namespace: str = "default",
        uid: int = 1000,
        has_user: bool = True,
    ) -> None:
        if any(Path(path).resolve().is_relative_to("/tmp") for path in (ROOT, sys.prefix)):
            pytest.skip("the repository and its Python may not be in /tmp, where pods have their own")
        for program in ("setpriv", "nsenter", "unshare", "mount"):
            if shutil.which(program) is None:
                pytest.skip(f"needs {program} (scripts/install-test-hosts)")
        self.job, self.namespace, self.uid, self.has_user = job, namespace, uid, has_user
        self.shared = machines.folder
        self.shared.chmod(0o755)
        self.work = self.shared / "work"
        self.work.mkdir()
        os.chown(self.work, uid, uid)
        self.config = ConfigVolume(self.shared / "config")
        self._names = self.shared / "names"
        self._names.touch()
        self._lock = threading.Lock()  # of the names and the free machines: a kubelet has a thread for each pod
        self._free = list(machines)
        self._numbers = itertools.count()
        self._pods: list[Pod] = []
        self._servers: dict[str, subprocess.Popen[str]] = {}  # by machine
        self.enter = _ENTER.replace("UNCOVERED", self._make_uncovering() if uid else "")
        self._make_keys()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pod in self._pods:
            pod.kill()
        for server in self._servers.values():
            server.kill()
            server.wait()

    def name_of(self, pod: str) -> str:
        """The name that mpi-operator writes for a pod."""
        return f"{pod}.{self.job}.{self.namespace}.svc"

    def find(self, name: str) -> Pod | None:
        """The pod of this name that runs."""
        return next((pod for pod in self._pods if pod.name == name and pod.runs), None)

    def pod(self, name: str, *, resolves: bool = False, read_only_home: bool = False) -> Pod:
        """A new pod on a machine of its own, without a container yet.

        Args:
            name: its own.
            resolves: whether names of pods resolve there.
            read_only_home: whether its home cannot be written to.
        """
        with self._lock:
            host = self._free.pop(0)
            pod = Pod(self, host, name, f"{name}-{next(self._numbers)}", read_only_home=read_only_home)
            self._pods.append(pod)
        if resolves and host.name not in self._servers:
            command = [sys.executable, str(_SERVER), f"@{self._names}"]
            server = host.popen(command, stdout=subprocess.PIPE, text=True)
            assert server.stdout.readline(), "the name server does not start"
            self._servers[host.name] = server
        return pod

    def release(self, pod: Pod) -> None:
        """A pod that has no container any more gives its machine back: a later one may have it."""
        assert not pod.processes(), "it runs"
        with self._lock:
            self._free.append(pod.host)

    def know(self, pod: Pod) -> None:
        """Its name resolves from now on."""
        with self._lock:
            lines = self._read_names()
            self._write_names(lines | {f"{pod.name}.{self.job}.{self.namespace}.{_DOMAIN}": pod.address})

    def forget(self, pod: Pod) -> None:
        """Its name does not resolve any more, if it was this pod's."""
        with self._lock:
            names = self._read_names()
            self._write_names({name: address for name, address in names.items() if address != pod.address})

    def address_of(self, pod: str) -> str | None:
        """What a pod's name resolves to now."""
        with self._lock:
            return self._read_names().get(f"{pod}.{self.job}.{self.namespace}.{_DOMAIN}")

    def _read_names(self) -> dict[str, str]:
        return dict(line.split("=") for line in self._names.read_text().split())

    def _write_names(self, addresses: Mapping[str, str]) -> None:
        new = self._names.with_suffix(".new")
        new.write_text("".join(f"{name}={address}\n" for name, address in addresses.items()))
        new.rename(self._names)

    def _make_keys(self) -> None:
        """As the operator makes them: called id_rsa, and are none."""
        key = self.shared / "id_rsa"
        run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", str(key)])
        public = key.with_suffix(".pub").read_text()
        self.secret = {"id_rsa": key.read_text(), "id_rsa.pub": public, "authorized_keys": public}
        self.host_key = self.shared / "host_key"
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.host_key)])

    def _make_uncovering(self) -> str:
        """Lines of the shell that let containers see Python and this repository, as if they were in an image.

        They may lie in a folder that only root can enter, its home for instance. That has nothing else in a container.
        """
        lines: dict[str, None] = {}
        for path in (Path(sys.base_prefix), Path(sys.prefix), ROOT):
            closed = [folder for folder in (path.resolve(), *path.resolve().parents) if not folder.stat().st_mode & 1]
            if not closed:
                continue
            if len(closed) > 1 or closed[0] == path.resolve():
                pytest.skip(f"no other user can enter {closed[0]}")
            child = path.resolve().relative_to(closed[0]).parts[0]
            cover = f"uncovered/{closed[0].as_posix().strip('/').replace('/', '_')}"
            (self.shared / cover / child).mkdir(parents=True, exist_ok=True)
            lines[f'mount --bind "{closed[0] / child}" "{SHARED}/{cover}/{child}"'] = None
            lines[f'mount --rbind "{SHARED}/{cover}" "{closed[0]}"'] = None
        return "\n".join(sorted(lines, key=lambda line: "--rbind" in line))


class Pod:
    """One pod; made by :meth:`Pods.pod`.

    Attributes:
        name: its own, which is its host name as well.
        address: its own.
        host: the machine that it runs on.
        first_process: of its container, as this machine counts.
    """

    def __init__(self, pods: Pods, host: NamespaceHost, name: str, folder: str, *, read_only_home: bool) -> None:
        self._pods = pods
        self.host = host
        self.name, self.address = name, host.ipv4
        self._read_only_home = read_only_home
        self._folder_name = folder
        self._folder = pods.shared / "pods" / folder
        self._popen: subprocess.Popen[Any] | None = None
        self.first_process = 0
        self.env: dict[str, str] = {}
        self._make_folders()

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        named: bool = True,
        stdout: Any = None,
        stderr: Any = None,
    ) -> Any:
        """Starts its container. Returns the process that lasts as long as it does, with its exit code.

        Args:
            command: its first process.
            env: its environment, beside PATH and what the kubelet sets.
            named: whether its name resolves from now on.
            stdout, stderr: of that.
        """
        assert not self.runs, "it runs already"
        home = HOME if self._pods.has_user else "/"
        service = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        self.env = {"PATH": os.environ["PATH"], "HOSTNAME": self.name, "HOME": home, **service, **env}
        home_is = "read-only" if self._read_only_home else "writable"
        enter = ["sh", "-c", self._pods.enter, "sh", str(self._pods.shared), self._folder_name, self.name, home_is]
        namespaces = ["unshare", "--uts", "--pid", "--fork", "--mount-proc"]
        words = ["ip", "netns", "exec", self.host.namespace, *namespaces, *enter, *self._as(command)]
        with (self._folder / "log").open("ab") as log:
            self._popen = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stdout or log, stderr=stderr or log)
        parent = psutil.Process(self._popen.pid)
        self.first_process = int(wait_for(f"the container of {self.name}", parent.children)[0].pid)
        if named:
            self._pods.know(self)
        return self._popen

    def start_sshd(self, env: Mapping[str, str], *, late: bool = False) -> None:
        """Starts a worker's container. Blocks until its server listens.

        Args:
            env: see :meth:`start`.
            late: the server starts only at :meth:`go`, which then blocks.
        """
        command = SSHD if self._pods.uid else SSHD[:2]
        if late:
            os.mkfifo(self._folder / "go")
            command = ("sh", "-c", f'read word <{SHARED}/pods/{self._folder_name}/go; exec "$@"', "sh", *command)
        self.start(command, {"K_MPI_JOB_ROLE": "worker", **env})
        if not late:
            self._wait_for_sshd()

    def go(self) -> None:
        """Lets its server start. Blocks until it listens."""
        (self._folder / "go").chmod(0o644)
        (self._folder / "go").write_text("go\n")
        self._wait_for_sshd()

    def _wait_for_sshd(self) -> None:
        wait_for(f"sshd on {self.name}", lambda: "Server listening" in self.log(), more=self.log)

    @property
    def runs(self) -> bool:
        """Whether its container does."""
        return self._popen is not None and self._popen.poll() is None

    def mount(self, at: str, files: Mapping[str, str], *, mode: int, group: int) -> ConfigVolume:
        """Has it see these files there, within /etc or its home, from its next container on. Returns the volume."""
        assert at.startswith(("/etc/", f"{HOME}/")), at
        name = f"volumes/{at.strip('/').replace('/', '_')}"
        volume = ConfigVolume(self._folder / name, files, mode=mode, group=group)
        place = self._folder / at.lstrip("/")
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(f"{SHARED}/pods/{self._folder_name}/{name}")
        return volume

    def log(self) -> str:
        """What its container has said."""
        return (self._folder / "log").read_text(errors="replace")

    def run(self, command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command in its container, as kubectl exec and the kubelet do. Text, output captured, 60 s at most."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 150, "stdin": subprocess.DEVNULL}
        return subprocess.run(self.inside(command), **(settings | more))

    def inside(self, command: Sequence[str]) -> list[str]:
        """The words that run a command in its container."""
        enter = ["nsenter", "--target", str(self.first_process), "--mount", "--uts", "--net", "--pid"]
        return [*enter, "--", "env", "-C", HOME, *self._as(command)]

    def zombies(self) -> list[int]:
        """Processes in its container that have ended, and that nobody has waited for."""
        found = psutil.Process(self.first_process).children(recursive=True)
        return [process.pid for process in found if process.status() == psutil.STATUS_ZOMBIE]

    def environments(self, command: str) -> list[list[str]]:
        """The variables of its processes whose command line has this word."""
        found = [pid for pid in self.processes() if command in command_of(pid)]
        return [Path(f"/proc/{pid}/environ").read_text().strip("\0").split("\0") for pid in found]

    def delete(self, pre_stop: Sequence[str] | None = None, *, grace_s: float = 30.0) -> str:
        """Deletes it as the kubelet does: preStop, SIGTERM for the first process alone, SIGKILL after the grace.

        Returns:
            What preStop has said.
        """
        self._pods.forget(self)  # a pod that terminates is not among its service's any more
        said = ""
        end = time.monotonic() + grace_s
        if pre_stop is not None:
            done = self.run(pre_stop, timeout=grace_s)
            said = done.stdout + done.stderr
        assert self._popen is not None
        os.kill(self.first_process, signal.SIGTERM)
        try:
            self._popen.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        return said

    def kill(self) -> None:
        """Kills its container at once."""
        if self._popen is not None:
            self._pods.forget(self)
            # With its first process all others die. What waits for that is not reaped yet, so neither is that.
            if self._popen.poll() is None:
                os.kill(self.first_process, signal.SIGKILL)
            self._popen.wait(timeout=150)
            wait_for(f"the end of {self.name}", lambda: not self.processes(), more=lambda: str(self.processes()))

    def processes(self) -> list[int]:
        """What runs in it."""
        found = []
        for pid in self.host.pids():
            with contextlib.suppress(psutil.Error, OSError):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and not _is_name_server(pid):
                    found.append(pid)
        return found

    def _as(self, command: Sequence[str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in self.env.items()]
        uid = str(self._pods.uid)
        return ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "env", "-i", *variables, *command]

    def _make_folders(self) -> None:
        pods = self._pods
        for name in ("etc/ssh", "srv/mpiuser", "tmp"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "tmp").chmod(0o1777)
        (self._folder / "log").touch()
        home, etc = self._folder / "srv/mpiuser", self._folder / "etc"
        os.chown(home, pods.uid, pods.uid)
        mode = 0o644 if pods.uid else 0o600
        ConfigVolume(home / ".ssh", pods.secret, mode=mode)
        (home / ".sshd_config").write_text(_USERS_SSHD_CONFIG)
        for entry in os.listdir("/etc"):
            if entry not in _OWN:
                (etc / entry).symlink_to(f"{_HOST_ETC}/{entry}")
        full = f"{self.name}.{pods.job}.{pods.namespace}.{_DOMAIN}"
        (etc / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{self.address}\t{full}\t{self.name}\n")
        (etc / "hostname").write_text(f"{self.name}\n")
        (etc / "resolv.conf").write_text(
            f"search {pods.namespace}.{_DOMAIN} {_DOMAIN} cluster.local\nnameserver 127.0.0.1\n"
            "options ndots:5 timeout:1 attempts:1\n"
        )
        (etc / "mpi").symlink_to(f"{SHARED}/config")
        (etc / "passwd").write_text(self._passwd())
        (etc / "ssh/ssh_config").write_text(_SSH_CONFIG)
        (etc / "ssh/sshd_config").write_text(_SSHD_CONFIG)
        key = etc / "ssh/ssh_host_ed25519_key"
        shutil.copy(pods.host_key, key)
        key.chmod(0o600)

    def _passwd(self) -> str:
        kept = [
            line
            for line in Path("/etc/passwd").read_text().splitlines()
            if line.split(":")[2] not in ("0", str(self._pods.uid))
        ]
        root = HOME if not self._pods.uid else "/root"
        kept.append(f"root:x:0:0:root:{root}:/bin/sh")
        if self._pods.uid and self._pods.has_user:
            kept.append(f"mpiuser:x:{self._pods.uid}:{self._pods.uid}::{HOME}:/bin/sh")
        return "".join(f"{line}\n" for line in kept)


def _is_name_server(pid: int) -> bool:
    return str(_SERVER) in psutil.Process(pid).cmdline()
