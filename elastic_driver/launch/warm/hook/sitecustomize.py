"""The warmed process: a Python that is held in the middle of its start, and forks workers from there.

The launcher starts the worker's own command with this folder first on the PYTHONPATH, so that :mod:`site` imports this
file before Python reads the script. It imports the heavy modules and waits. For each request it clones itself; the
clone is given the state of a fresh process, and returns to :mod:`site`: Python itself then continues with the script.
So ``sys.argv``, ``__main__``, ``sys.path[0]``, ``-m``, flags and exit are not imitated; they are Python's own.

The clone is a child of the launcher, not of this process (CLONE_PARENT): exit codes, signals and the parent's PID are
those of a process that the launcher started itself. It runs under any Python that the command names, so this file uses
the standard library only and nothing of the package.
"""

from __future__ import annotations

import os
import sys

# Modules that a fresh process has imported by now. A script's folder could hide any other module.
_before = set(sys.modules)

try:
    import fcntl
    import io
    import marshal
    import struct
    from collections.abc import Mapping, Sequence
    from socket import recv_fds, socket
    from typing import Any
except BaseException:
    # site would print it, and Python would continue with the script.
    os._exit(1)

_FLAGS = 0x8000 | 0x200000 | 0x1000000 | 17  # CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID, SIGCHLD
_PR_GET_TID_ADDRESS = 40
_TIOCSCTTY = 0x540E
# By machine: the system calls clone, set_robust_list, get_robust_list, and whether ctid comes before tls.
_CALLS = {"x86_64": (56, 273, 274, True), "aarch64": (220, 99, 100, False)}


class _Refused(Exception):
    """No worker may be forked from this process; the text says why."""


class _Cloner:
    """Clones this process as fork() would, except for the parent."""

    def __init__(self) -> None:
        import ctypes

        if os.uname().machine not in _CALLS or sys.implementation.name != "cpython":
            raise _Refused("forking workers is not supported on " + os.uname().machine)
        self._clone, self._set_robust, get_robust, self._ctid_first = _CALLS[os.uname().machine]
        self._c = ctypes.PyDLL(None, use_errno=True)
        self._c.syscall.restype = ctypes.c_long
        self._long = ctypes.c_long
        self._python = ctypes.pythonapi
        # The C library keeps its thread's id here; fork() makes the kernel write the child's to it, and so does this.
        tid = ctypes.c_void_p()
        if self._c.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0) or not tid.value:
            raise _Refused("the kernel does not report where the C library keeps its thread's id")
        if ctypes.c_int.from_address(tid.value).value != os.getpid():
            raise _Refused("the C library keeps its thread's id in an unknown place")
        self._tid = tid.value
        head, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._call(get_robust, 0, ctypes.byref(head), ctypes.byref(size))
        self._robust = (head.value or 0, size.value)

    def _call(self, number: int, *arguments: Any) -> int:
        result: int = self._c.syscall(
            self._long(number), *(self._long(a) if isinstance(a, int) else a for a in arguments)
        )
        return result

    def clone(self) -> int:
        """Return the child's PID; 0 in the child; negative if there is none."""
        ids = (self._tid, 0) if self._ctid_first else (0, self._tid)
        self._python.PyOS_BeforeFork()
        pid = self._call(self._clone, _FLAGS, 0, 0, *ids)
        if pid == 0:
            if self._robust[0]:
                self._call(self._set_robust, *self._robust)
            self._python.PyOS_AfterFork_Child()
        else:
            self._python.PyOS_AfterFork_Parent()
        return pid


def _receive(control: socket, count: int) -> tuple[Any, list[int]]:
    """Receive one message and its descriptors. Ends the process if the launcher has ended."""
    head, descriptors, _, _ = recv_fds(control, 8, count)
    while 0 < len(head) < 8:
        head += control.recv(8 - len(head)) or os._exit(0)
    if not head:
        os._exit(0)
    size, data = struct.unpack("=Q", head)[0], b""
    while len(data) < size:
        data += control.recv(size - len(data)) or os._exit(0)
    return marshal.loads(data), descriptors


def _send(control: socket, value: Any) -> None:
    data = marshal.dumps(value, 2)
    control.sendall(struct.pack("=Q", len(data)) + data)


def _set_environ(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _show_environ(environment: Mapping[str, str], start: int, end: int) -> None:
    """Make /proc show this environment, by which the job's processes are recognized."""
    import ctypes

    data = b"".join(os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environment.items())
    if len(data) > end - start:
        raise ValueError("no room for the environment")
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _own_sitecustomize() -> Exception | None:
    """Run the sitecustomize that this file hides. Returns the exception to raise in its place, if any."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return ImportError("No module named 'sitecustomize'", name="sitecustomize")
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        return error
    return None


def _preload(names: Sequence[str], *, must: bool) -> None:
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if must:
                raise _Refused(f"cannot import {name}: " + str(error).partition("\n")[0]) from error


def _mend_torch() -> None:
    """Keep workers from hanging while a DistributedDataParallel is destroyed (decision 0034)."""
    wrapper = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    if wrapper is None or hasattr(wrapper, "__del__"):
        return

    def __del__(self: Any) -> None:
        # If the reducer is the last to hold its process group, torch joins the group's threads with the interpreter
        # locked, and they may be waiting for that lock. Python's own reference is dropped after this; there torch
        # unlocks it.
        self.__dict__.pop("logger", None)
        self.__dict__.pop("reducer", None)

    wrapper.__del__ = __del__


def _check_alone() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise _Refused("importing created a CUDA context, which does not survive a fork")
    for name in os.listdir("/proc/self/fd"):
        try:
            device = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue
        if device.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd")):
            raise _Refused("importing opened " + device + ", which does not survive a fork")
    # OpenBLAS ends its threads before a fork, and starts them again at the first use.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        raise _Refused(f"importing started threads ({count - 1} are running), which a fork does not copy")


def _read_all(descriptor: int) -> bytes:
    data = b""
    os.set_blocking(descriptor, False)
    while True:
        try:
            part = os.read(descriptor, 65536)
        except BlockingIOError:
            return data
        if not part:
            return data
        data += part


def _high(descriptor: int) -> int:
    """Return a copy with a high number, as elastic_driver.system.tether does."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    except OSError:  # too many files are open
        return os.dup(descriptor)


def _give_input(descriptor: int, *, is_terminal: bool) -> None:
    """Make it the standard input; Python's own was made for another."""
    os.dup2(descriptor, 0)
    os.close(descriptor)
    if is_terminal:
        fcntl.ioctl(0, _TIOCSCTTY, 0)
    old: Any = sys.stdin
    if old is None:
        return
    buffer: Any = open(0, "rb", closefd=False)  # noqa: SIM115 - the standard input is never closed
    buffer.raw.name = "<stdin>"
    new: Any = io.TextIOWrapper(buffer, encoding=old.encoding, errors=old.errors, newline="\n")
    new.mode = "r"
    sys.stdin = new
    vars(sys)["__stdin__"] = new


def _open_report(environment: dict[str, str]) -> None:
    """Open the descriptor to which the worker's training may report figures, if the launcher has a file for that."""
    if not environment.get("ELASTIC_DRIVER_REPORT"):
        return
    number = ""
    try:
        opened = os.open(environment["ELASTIC_DRIVER_REPORT"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        kept = _high(opened)
        os.close(opened)
        os.set_inheritable(kept, True)
        number = str(kept)
    except OSError:  # training continues without it
        pass
    environment["ELASTIC_DRIVER_REPORT_FD"] = number


def _freshen(request: Mapping[str, Any], early_output: Sequence[bytes], launch: int, outputs: Sequence[int]) -> None:
    """Give the clone the state of a process that was started just now. Blocks until the launcher knows of it.

    Args:
        request: its environment, folder and umask.
        early_output: what importing wrote to the two streams.
        launch: the connection to the launcher for this one start.
        outputs: its standard input, if it has one, its standard output and error, and what ends it when the launcher
            dies (elastic_driver.system.tether).
    """
    _open_report(request["env"])
    _set_environ(request["env"])
    _show_environ(request["env"], *_area)
    # The warmed process's command line is that of all workers; this placeholder in it stands for a worker's own local
    # rank.
    for words in (sys.argv, getattr(sys, "orig_argv", [])):  # Python 3.9 has no orig_argv
        own = request["env"].get("ELASTIC_DRIVER_LOCAL_RANK", "${local_rank}")
        words[:] = [word.replace("${local_rank}", own) for word in words]
    os.write(launch, struct.pack("=q", os.getpid()))
    # Until here it is in the warmed process's group, by which the launcher finds it if anything goes wrong.
    if not os.read(launch, 1):
        os._exit(1)
    os.setsid()
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    if request["stdin"]:
        stdin, *outputs = outputs
        _give_input(stdin, is_terminal=request["terminal"])
    for descriptor, number, data in zip(outputs, (1, 2), early_output):  # noqa: B905 - Python 3.9 knows no strict
        os.dup2(descriptor, number)
        os.close(descriptor)
        if data:
            os.write(number, data)
    for stream in (sys.stdout, sys.stderr):
        if request["terminal"] and isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.reconfigure(line_buffering=True)
    # As in a fresh worker: kept by exec, and high enough not to collide.
    for descriptor in outputs[2:]:
        os.set_inheritable(_high(descriptor), True)
        os.close(descriptor)
    # random reseeds itself after a fork.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    logging = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "_startTime"):
        import time

        started: Any = logging
        started._startTime = time.time() if isinstance(started._startTime, float) else time.time_ns()
    os.write(launch, b"!")
    os.close(launch)


def _hold() -> Exception | None:
    """Warm up and serve; returns in a clone only. Returns the exception to raise instead of this module's import."""
    control_fd, out_fd, err_fd = (int(word) for word in os.environ["ELASTIC_DRIVER_WARM"].split(":")[:3])
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    sys.path_importer_cache.pop(os.path.dirname(__file__), None)
    control = socket(fileno=control_fd)
    for descriptor in (control_fd, out_fd, err_fd):
        os.set_inheritable(descriptor, False)
    config, _ = _receive(control, 1)
    _set_environ(config["env"])
    try:
        cloner = _Cloner()
        error = _own_sitecustomize()
        _preload(config["preload"], must=config["must"])
        _mend_torch()
        sys.stdout.flush()
        sys.stderr.flush()
        early_output = [_read_all(out_fd), _read_all(err_fd)]
        import gc

        gc.collect()
        # Objects that live now live in all clones. A collection there, and the one at their exit, would touch each of
        # them, and so copy nearly all of this process's memory: most of the time that a worker takes to end.
        gc.freeze()
        _check_alone()
    except _Refused as refused:
        _send(control, {"refused": str(refused)})
        os._exit(1)
    loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - _before})
    _send(control, {"pid": os.getpid(), "loaded": loaded})
    os.close(out_fd)
    os.close(err_fd)
    while True:
        request, (launch, *outputs) = _receive(control, 6)
        if len(os.listdir("/proc/self/task")) == 1 and cloner.clone() == 0:
            try:
                control.close()
                _freshen(request, early_output, launch, outputs)
            except BaseException:
                os._exit(1)
            return error
        for descriptor in (launch, *outputs):
            os.close(descriptor)


with open("/proc/self/stat", "rb") as _file:
    _area = [int(word) for word in _file.read().rpartition(b")")[2].split()[47:49]]
try:
    _error = _hold()
except BaseException:
    os._exit(1)
if _error is not None:
    raise _error
