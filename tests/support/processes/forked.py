"""Worker processes forked from one that has imported what they need, for tests that start hundreds of them.

Importing takes longer than what most tests then do, most of all PyTorch. A program that runs here cannot tell, but for
the modules that it finds loaded: environment, arguments, streams, ``__main__``, exit code and signals are its own. What
Python or a library reads from the environment at its start is part of which process is forked from.

A driver is forked likewise, from one that has imported the driver's side and nothing of a worker's: see
:func:`start_driver`.

Whatever is imported, is so once in a run of the tests: from that process each of pytest's processes has one of its own
forked, which forks programs for it and ends with it.

Not the product's warm starts (elastic_driver/launch/warm/forks.py), which are under test elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

# The folder where pytest's processes of one run find what has imported.
_SHARED = "ELASTIC_TESTS_FORK_FROM"
# Of the environment: what is read once, at the start of Python or at the import of a library.
_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "TORCH_", "ATEN_")
# Of those: for hash() of bytes to be the same in all processes, and what workers have from their driver.
_SEED = {"PYTHONHASHSEED": "0"}
_FOR_WORKERS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_LONGEST = 1 << 20
_ROOM = "ELASTIC_TESTS_ROOM"
PATIENCE_S = 150.0
# What programs import, also when they first use it. Of ours, nothing that runs anything: a worker's own program calls
# init().
_ALWAYS = (
    *("numpy", "numpy.random", "pytest", "cloudpickle"),
    *("elastic_driver.worker.api.numpy", "elastic_driver.elastic"),
)
_WITH_TORCH = ("torch", "torch._dynamo", "elastic_driver.torch", "elastic_driver.torch.elastic")
# Of init(). The extension comes behind PyTorch, as in a worker.
_OF_ROUNDS = (
    *("elastic_driver.rendezvous.client", "elastic_driver.worker.launched.client"),
    *("elastic_driver.worker.rounds.owner", "elastic_driver.worker.engine.native", "elastic_driver._native"),
)
_OF_DRIVERS = (
    *("elastic_driver.cli.main", "elastic_driver.driver.nodes", "elastic_driver.function.driver"),
    *("tests.support.processes.forked_agent", "tests.support.processes.forked_again", "encodings.idna"),
)
_LAST = ("tests.support.processes.forked_forms",)


class ForkedProcess:
    """A forked program; the part of :class:`subprocess.Popen` that the tests use.

    Attributes:
        stdin, stdout: what :func:`start` gives it: its input, and its output and errors together.
    """

    stdin: TextIO
    stdout: TextIO

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired([str(self.pid)], timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def ended(self, code: int) -> None:
        """Its parent has reaped it."""
        self.returncode = code
        self._ended.set()


class ForkServer:
    """The process that this one's programs are forked from. Any thread may call.

    Attributes:
        pid: its own.
        imported_s: seconds of a processor that were spent on importing, if that was for this one; else 0.
    """

    def __init__(self, at_start: dict[str, str], modules: tuple[str, ...]) -> None:
        self._control, hello = _connect(at_start, modules)
        self.pid: int = hello["pid"]
        self.imported_s: float = hello["imported_s"]
        self._lock = threading.Lock()  # one fork at a time
        self._forked: queue.SimpleQueue[ForkedProcess | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def start(self, command: Sequence[str], env: dict[str, str], streams: Sequence[int], cwd: Path) -> ForkedProcess:
        """Runs a Python file with these arguments, and its three standard streams. Blocks until it is forked."""
        request = json.dumps({"command": list(command), "env": env, "cwd": str(cwd)}).encode()
        with self._lock:
            socket.send_fds(self._control, [request], list(streams))
            process = self._forked.get(timeout=PATIENCE_S)
        assert process is not None, "the process to fork from has ended"
        return process

    def _read(self) -> None:
        processes: dict[int, ForkedProcess] = {}
        for answer in self._answers():
            told = json.loads(answer)
            if "code" in told:
                processes.pop(told["pid"]).ended(told["code"])
            else:
                processes[told["pid"]] = process = ForkedProcess(told["pid"])
                self._forked.put(process)
        for process in processes.values():
            process.ended(-signal.SIGKILL)  # nobody knows: its parent is gone
        self._forked.put(None)

    def _answers(self) -> Iterator[bytes]:
        with contextlib.suppress(ConnectionResetError):  # it has ended, and what it was asked last is not read
            while answer := self._control.recv(_LONGEST):
                yield answer

    def close(self) -> None:
        """Ends the server; what it forked goes on."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._control.close()


def share() -> None:
    """Lets the processes that this one starts from now on fork from what this one and they have imported."""
    if _SHARED not in os.environ:
        os.environ[_SHARED] = folder = tempfile.mkdtemp(prefix="elasticrun-tests-forks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _connect(at_start: dict[str, str], modules: tuple[str, ...]) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to a new server, and what that says first. Blocks until all these modules are imported.

    They are in whichever process comes first; a second one only where the first has ended by then.
    """
    share()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_AT_START)}
    name = hashlib.sha256(repr((sorted(at_start.items()), modules)).encode()).hexdigest()[:16]
    place = Path(os.environ[_SHARED], name)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        control = _socket()
        with contextlib.suppress(FileNotFoundError, ConnectionError):
            control.connect(str(place))
            if hello := control.recv(_LONGEST):
                return control, json.loads(hello)
        control.close()
        control = _socket()
        with _socket() as listener:
            place.unlink(missing_ok=True)
            listener.bind(str(place))
            listener.listen()
            control.connect(str(place))  # before that, as it ends when nobody is connected
            command = [sys.executable, "-X", "faulthandler", str(Path(__file__)), str(listener.fileno()), *modules]
            passed = (listener.fileno(),)
            subprocess.run(command, env=environ | at_start, stdin=subprocess.DEVNULL, pass_fds=passed, check=True)
        hello = control.recv(_LONGEST)
        assert hello, f"cannot import {', '.join(modules)}"
        return control, json.loads(hello)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


_servers: list[ForkServer] = []


@functools.cache
def _server(at_start: tuple[tuple[str, str], ...], modules: tuple[str, ...]) -> ForkServer:
    _servers.append(ForkServer(dict(at_start), modules))
    return _servers[-1]


def servers() -> Sequence[ForkServer]:
    """Those that this process has, which are no children of its own."""
    return _servers


def start(
    command: Sequence[str], env: dict[str, str], *, torch: bool = True, output: Path | None = None
) -> ForkedProcess:
    """Starts ``command`` (a Python file and its arguments) with this environment, its output and errors in one pipe.

    Args:
        command: what to run.
        env: all of its environment.
        torch: whether it needs PyTorch, and is to find that loaded.
        output: a file for its output and errors, in place of the pipe.
    """
    at_start = {
        name: value
        for name, value in env.items()
        if value and name.startswith(_AT_START) and name != "PYTHONWARNINGS"  # an empty one is as none
    }
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    stdin, stdout = open(in_write, "w"), open(out_read)  # noqa: SIM115 - the caller closes them
    if output is not None:
        os.close(out_write)  # nothing is to be read from it
        out_write = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        if torch and at_start | _SEED == _of_workers():
            server = start_driver_server(workers=True, torch=True)  # another import of PyTorch would be seconds
        else:
            server = _server(tuple(sorted(at_start.items())), _of_programs(torch=torch))
        process = server.start(command, env, (in_read, out_write, out_write), Path.cwd())
    finally:
        os.close(in_read)
        os.close(out_write)
    process.stdin, process.stdout = stdin, stdout
    return process


def starts_afresh() -> bool:
    """Whether this run of the tests starts all drivers and agents as users do."""
    return os.environ.get("START_AFRESH") == "1"


def start_driver(
    command: Sequence[str],
    env: dict[str, str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    cwd: Path,
    *,
    stdin: int | None = None,
    workers: bool = False,
    torch: bool = False,
) -> ForkedProcess:
    """Starts an elasticrun, or what else is of the driver's side.

    Args:
        command: a Python file that calls its main(), and the arguments.
        env: all of its environment.
        stdout, stderr: where it writes.
        cwd: the folder where it runs.
        stdin: what it reads; None for nothing.
        workers: whether workers are to be forked from what it forks, and all that is to find loaded what they need.
        torch: whether that is PyTorch, too.
    """
    server = start_driver_server(workers=workers, torch=torch)
    with open(os.devnull, "rb") as nothing:
        given = nothing.fileno() if stdin is None else stdin
        written = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdout, stderr)]
        return server.start(command, env, [given, *written], cwd)


def start_driver_server(*, workers: bool = False, torch: bool = False) -> ForkServer:
    """Starts what drivers are forked from, if it does not run; returns it."""
    at_start = _of_drivers()
    modules: tuple[str, ...] = (*_OF_DRIVERS, *_LAST)
    if workers:
        at_start = _of_workers()
        # A worker's environment has to have room in that of what it is forked from (the hook's _show_environ).
        at_start[_ROOM] = "." * 16384
        modules = (*_OF_DRIVERS, "tests.support.processes.forked_warm", *_of_programs(torch=torch))
    return _server(tuple(sorted(at_start.items())), modules)


def _of_programs(*, torch: bool) -> tuple[str, ...]:
    return (*_ALWAYS, *(_WITH_TORCH if torch else ()), *_OF_ROUNDS, *_LAST)


def _of_drivers() -> dict[str, str]:
    """What is read at the start of Python, of what drivers are forked from."""
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")} | _SEED


def _of_workers() -> dict[str, str]:
    """Likewise, where workers are forked from these."""
    return _of_drivers() | _FOR_WORKERS


def environment() -> dict[str, str]:
    """Ours without what makes a process a worker, and with what lets all be forked from the same processes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_DRIVER_")}
    return env | _FOR_WORKERS


def run(command: Sequence[str], env: dict[str, str] | None = None, *, torch: bool = True) -> tuple[int, str]:
    """Runs it to its end, with no input. Gives its exit code, and its output and errors.

    Args:
        command: what to run.
        env: all of its environment; None for :func:`environment`.
        torch: as for :func:`start`.
    """
    process = start(command, environment() if env is None else env, torch=torch)
    process.stdin.close()
    with process.stdout:
        said = process.stdout.read()
    return process.wait(PATIENCE_S), said


# --- in the process that has imported --------------------------------------------------------------------------------


def fork_servers(listener: socket.socket) -> socket.socket:
    """Forks a server for each connection, and returns in those only, with it. Ends when all of them have ended."""
    imported_s = time.process_time()
    running: dict[int, int] = {}  # by descriptors that can be read when they have ended
    while True:
        ready, _, _ = select.select([listener, *running], [], [])
        for descriptor in set(ready) & running.keys():
            os.waitpid(running.pop(descriptor), 0)
            os.close(descriptor)
        if listener in ready:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                for descriptor in running:
                    os.close(descriptor)
                hello = {"pid": os.getpid(), "imported_s": imported_s}
                with contextlib.suppress(ConnectionError):  # it has ended meanwhile, as is seen when it is asked
                    connection.sendall(json.dumps(hello).encode())
                return connection
            connection.close()
            running[os.pidfd_open(pid)] = pid
            imported_s = 0.0  # once is enough
        elif not running:
            os._exit(0)  # nothing is to be flushed or torn down


# --- in the server ---------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> Any:
    """Forks whenever it is asked to; returns in the child only, with what it was asked for."""
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        select.select([control, wake], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                answer = {"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}
                control.sendall(json.dumps(answer).encode())
        if not select.select([control], [], [], 0)[0]:
            continue
        request, streams, _, _ = socket.recv_fds(control, _LONGEST, 3)
        if not request:
            os._exit(0)  # nothing is to be flushed or torn down
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (wake, waker):
                os.close(end)
            control.close()
            for target, source in enumerate(streams):
                os.dup2(source, target)
                os.close(source)
            return json.loads(request)
        for stream in streams:
            os.close(stream)
        control.sendall(json.dumps({"pid": pid}).encode())


def become(command: Sequence[str], env: dict[str, str], cwd: str) -> None:
    """Makes this process that program, as far as Python can see, and runs it."""
    os.chdir(cwd)
    take_environment(env)
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(command[0])
    run_main(command[0])


def take_environment(env: Mapping[str, str]) -> None:
    """Has this process begin with these variables."""
    import random

    os.environ.clear()
    os.environ.update(env)
    # As Python does at its start; each other server would be another import of torch.
    sys.warnoptions[:] = filter(None, env.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def run_main(file: str) -> None:
    """Runs a Python file as this process's program."""
    from tests.support.processes.program_exit import run_to_exit

    ends_at_once = "torch" in sys.modules or "elastic_driver.driver" in sys.modules
    names = vars(sys.modules["__main__"])
    source = Path(file).read_bytes()
    for name in [name for name in names if not (name.startswith("__") and name.endswith("__"))]:
        del names[name]
    names |= {"__file__": file, "__doc__": None, "__annotations__": {}}
    program = compile(source, file, "exec", dont_inherit=True)
    if ends_at_once:
        run_to_exit(lambda: exec(program, names))
    exec(program, names)


if __name__ == "__main__":
    # Of none of pytest's processes it is a child: each would take what it does for all others for its own.
    if os.fork():
        os._exit(0)
    with warnings.catch_warnings(action="ignore"):
        for name in sys.argv[2:]:
            importlib.import_module(name)
    # Otherwise each collection in what is forked, of which exit is one, goes over all that was imported here, and so
    # copies it: a second of a processor, in programs that have nothing to do.
    gc.freeze()
    become(**serve(fork_servers(socket.socket(fileno=int(sys.argv[1])))))
