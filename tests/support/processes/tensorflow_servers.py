"""TensorFlow's servers as processes, for tests and benchmarks: started, killed, stopped, started again where they were.

Importing TensorFlow takes longer than what most tests then do with a server, so a process that has imported it forks
them: the starter, itself forked from whoever makes :class:`Servers`, before that one uses TensorFlow's runtime. It
kills its servers when its maker closes the connection or ends, and the kernel kills them when the starter ends; also
those that are stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

_PR_SET_PDEATHSIG = 1
_HOST = "127.0.0.1"


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(eq=False)
class Server:
    """A server; may be used from any thread.

    Attributes:
        job: what it is to be.
        address: "host:port".
        pid: of its process, the last one.
    """

    job: str
    address: str
    pid: int
    _servers: Servers = field(repr=False)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._servers._ask({"reap": self.pid})

    def stop(self) -> None:
        """SIGSTOP: it holds its connections and answers nobody."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def start_again(self) -> None:
        """Another process at the same address, in place of one that was killed; returns when it answers."""
        port = int(self.address.rpartition(":")[2])
        self.pid = self._servers._ask({"start": [[self.job, port]]})[0][0]


class Servers:
    """Makes servers until it is closed. To be made before this process uses TensorFlow's runtime."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._starter = os.fork()
        if not self._starter:
            ours.close()
            _run_starter(theirs)
        theirs.close()
        self._socket = ours
        self._file = ours.makefile("rw")
        self._lock = threading.Lock()

    def start(self, job: str = "worker") -> Server:
        """A server on a port of its own; returns when it answers."""
        return self.start_all(job)[0]

    def start_all(self, *jobs: str) -> list[Server]:
        """The same for several, which start side by side."""
        there = self._ask({"start": [[job, 0] for job in jobs]})
        return [Server(job, f"{_HOST}:{port}", pid, self) for job, (pid, port) in zip(jobs, there, strict=True)]

    def close(self) -> None:
        """Kills all of them. Returns when they are gone."""
        self._file.close()
        self._socket.close()
        os.waitpid(self._starter, 0)

    def _ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self._file.write(json.dumps(request) + "\n")
            self._file.flush()
            answer = json.loads(self._file.readline())
        if "error" in answer:
            raise RuntimeError(f"cannot start a server: {answer['error']}")
        return answer["done"]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_starter(connection: socket.socket) -> None:
    pids: set[int] = set()
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with connection, connection.makefile("rw") as file:
            for line in file:
                request = json.loads(line)
                try:
                    answer = {"done": _reap(request["reap"], pids) if "reap" in request else _start(request, pids)}
                except Exception as error:
                    answer = {"error": str(error)}
                file.write(json.dumps(answer) + "\n")
                file.flush()
    except OSError:
        pass  # whoever made this one has ended
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)


def _reap(pid: int, pids: set[int]) -> None:
    os.waitpid(pid, 0)
    pids.discard(pid)


def _start(request: dict[str, Any], pids: set[int]) -> list[tuple[int, int]]:
    started = []
    for job, port in request["start"]:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            _serve(job, port, writer)
        os.close(writer)
        pids.add(pid)
        started.append((pid, reader))
    served = []
    for pid, reader in started:
        with os.fdopen(reader) as file:
            said = file.read()
        if not said:
            raise RuntimeError("it has ended before it listened; see standard error")
        served.append((pid, int(said)))
    return served


def _serve(job: str, port: int, ready: int) -> None:
    try:
        die_with_parent()
        spec = tf.train.ClusterSpec({job: [f"{_HOST}:{port}"]})
        # The coordinator tells it what it is, and of whom its cluster consists.
        server = tf.distribute.Server(
            spec, job_name=job, task_index=0, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        )
        os.write(ready, server.target.rpartition(":")[2].encode())
        os.close(ready)
        server.join()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


@contextlib.contextmanager
def a_port_that_says_nothing() -> Iterator[str]:
    """The address of a port that takes connections, and then says nothing."""
    with socket.create_server((_HOST, 0), backlog=64) as listening:
        yield f"{_HOST}:{listening.getsockname()[1]}"


@contextlib.contextmanager
def a_closed_port() -> Iterator[str]:
    """The address of a port where nobody listens, nor will."""
    with socket.socket() as held:
        held.bind((_HOST, 0))
        yield f"{_HOST}:{held.getsockname()[1]}"


def a_strategy(parameter_servers: list[Server], workers: list[Server], **options: Any) -> Any:
    """A ParameterServerStrategy over these servers. There may be one in a process."""
    cluster = {"ps": [one.address for one in parameter_servers], "worker": [one.address for one in workers]}
    with a_closed_port() as chief:
        spec = tf.train.ClusterSpec({**cluster, "chief": [chief]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    return tf.distribute.ParameterServerStrategy(resolver, **options)
