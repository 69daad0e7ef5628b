"""A TensorFlow server of a job with a chief, which waits for work: ``python -m elastic_driver.task_server``.

Owns the server of this process, from the choice of its port until it has reported to the driver that it answers.
Signals end it at once: it holds nothing worth a wait. Its use is up to the chief: whatever its job and task at the
start, the chief gives it its name in the cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_driver.errors import ElasticError, RendezvousClosedError, SettingsError, in_words
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.environment import ENV_PORTS, ENV_RENDEZVOUS, ENV_TASK
from elastic_driver.rendezvous.messages import ServingReport
from elastic_driver.system.tether import tie_this_process

# A server listens as soon as it is created. Only a busy machine takes longer.
_ANSWERS_S = 60.0
_LOOK_S = 0.05
# Unless the user says otherwise: little noise, and no wait for a lost server.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_DEFAULTS = {_LOG_LEVEL: "2", "GRPC_FAIL_FAST": "use_caller"}
# TensorFlow's output, whatever that level, until its logging is set up: twice, once for each of its libraries.
_NOISE = re.compile(rb"WARNING: All log messages before absl::InitializeLog\(\)|I\d{4} \d\d:\d\d:")


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Serve until a signal ends this process. Returns an exit code if it cannot serve."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    tie_this_process()
    try:
        url, task = environ.get(ENV_RENDEZVOUS, ""), environ.get(ENV_TASK, "")
        job, _, index = task.partition(" ")
        if not url or job not in ("ps", "worker") or not index.isdecimal():
            raise SettingsError("this program is started by elasticrun --parameter-servers, which sets what it needs")
        credential = Credential.of_worker(environ)
        assert credential.identity.worker is not None
        with contextlib.nullcontext() if _LOG_LEVEL in environ else _quietly():
            server, port = _serve(job, _ports(environ))
        _wait_until_it_answers(port)
        RendezvousClient(url, credential).serving(ServingReport(credential.identity.worker, port))
    except RendezvousClosedError:
        return 0  # it is to end
    except ElasticError as error:
        print(f"elastic_driver: {error}", file=sys.stderr)
        return 1
    server.join()
    return 1  # never: it serves as long as it lives


def _serve(job: str, ports: tuple[int, int] | None) -> tuple[Any, int]:
    """Start a server, and return it and its port.

    Raises:
        SettingsError: there is no TensorFlow, or no port is free.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SettingsError(
            f"cannot serve: {sys.executable} has no TensorFlow ({error}); pip install 'elastic-driver[tensorflow]'"
        ) from error
    why = "none is free"
    for port in _candidates(ports):
        cluster = tf.train.ClusterSpec({job: [f"localhost:{port}"]})
        try:
            server = tf.distribute.Server(cluster, job_name=job, task_index=0)
        except Exception as error:  # TensorFlow's errors may have any class
            why = str(error).partition("\n")[0]
            continue
        return server, int(server.target.rpartition(":")[2])
    named = "any port" if ports is None else f"a port from {ports[0]} to {ports[1]} (--port-range)"
    raise SettingsError(f"cannot serve on {named}: {why}")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep that noise, and nothing else, from stderr.

    A child process filters it: a thread would die with this process, and lose the line with the cause of its death.
    """
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:  # the limit of processes is reached
        os.close(reading)
        os.close(writing)
        yield
        return
    if child == 0:
        try:
            os.close(writing)
            for number in (signal.SIGTERM, signal.SIGINT):  # they reach the group, and there may be more to pass on
                signal.signal(number, signal.SIG_IGN)
            with open(reading, "rb") as lines:
                for line in lines:
                    if not _NOISE.match(line):
                        os.write(2, line)
        finally:
            os._exit(0)
    os.close(reading)
    stderr = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.waitpid(child, 0)


def _candidates(ports: tuple[int, int] | None) -> Iterator[int]:
    """Yield ports that are free now; 0 lets the system choose."""
    if ports is None:
        yield 0
        return
    for port in range(ports[0], ports[1] + 1):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            sock.close()
            yield port


def _ports(environ: Mapping[str, str]) -> tuple[int, int] | None:
    text = environ.get(ENV_PORTS, "")
    if not text:
        return None
    low, _, high = text.partition("-")
    try:
        return int(low), int(high)
    except ValueError:
        raise SettingsError(f"cannot read {ENV_PORTS}={text!r}: it must be two ports, LOW-HIGH") from None


def _wait_until_it_answers(port: int) -> None:
    """Wait until something accepts connections on the port. Raises SettingsError if nothing does in time."""
    end = time.monotonic() + _ANSWERS_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=_ANSWERS_S).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise SettingsError(f"cannot serve: port {port} does not answer: {in_words(error)}") from error
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
