"""A cluster of Slurm on this machine, of one node, for tests: munge, a controller and a node's daemon of their own.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge (``scripts/install-mpi``), of which no service is
used: all files and sockets are in a folder, and the ports are free ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_START_S = 60.0


def why_no_slurm() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root, for slurmd"
    missing = [program for program in _PROGRAMS if _path(program) is None]
    return f"needs {missing[0]} (scripts/install-mpi)" if missing else ""


def _path(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


class Slurm:
    """A context manager; afterwards none of its processes lives.

    Attributes:
        environ: variables with which its commands find it.
    """

    def __init__(self) -> None:
        self._exit = contextlib.ExitStack()
        self.environ: dict[str, str] = {}

    def __enter__(self) -> Self:
        with self._exit:
            # Short, since sockets have short names; others may look in, since munge sees to that.
            folder = Path(tempfile.mkdtemp(prefix="slurm"))
            self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.chmod(0o755)
            for name in ("state", "spool", "run"):
                (folder / name).mkdir(mode=0o755)
            key = folder / "munge.key"
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(1024))
            run = folder / "run"
            munge = run / "munge.socket"
            self._start(
                folder,
                ["munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}"],
                [f"--pid-file={run}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"],
            )
            self._wait_for(folder, munge.exists)
            config = folder / "slurm.conf"
            config.write_text(_CONFIG.format(folder=folder, munge=munge, ports=_free_ports(), cpus=os.cpu_count()))
            self.environ = {"SLURM_CONF": str(config)}
            self._start(folder, ["slurmctld", "-D", "-f", str(config)])
            self._start(folder, ["slurmd", "-D", "-N", "localhost", "-f", str(config)])
            self._wait_for(folder, lambda: "idle" in self._asked("sinfo", "-h"))
            self._exit = self._exit.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()

    def _start(self, folder: Path, *words: Sequence[str]) -> None:
        program, *rest = (word for part in words for word in part)
        log = self._exit.enter_context((folder / f"{program}.out").open("wb"))
        process = subprocess.Popen(
            [_path(program) or program, *rest], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        self._exit.callback(_end, process)

    def _asked(self, *words: str) -> str:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=150, env=os.environ | self.environ, check=False
        )
        return done.stdout

    def _wait_for(self, folder: Path, found: object) -> None:
        end = time.monotonic() + _START_S
        assert callable(found)
        while not found():
            if time.monotonic() > end:
                logs = {file.name: file.read_text(errors="replace")[-1500:] for file in folder.glob("*.[ol]*")}
                raise AssertionError(f"Slurm does not come up: {logs}")
            time.sleep(0.1)


def _free_ports() -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return [one.getsockname()[1], two.getsockname()[1]]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(150)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
