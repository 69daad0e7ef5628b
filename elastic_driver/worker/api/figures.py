"""``hvd.report(loss=0.31)``: figures of the training itself, for the page, the report and the metrics.

A call only puts the values into a dictionary: a step pays for nothing else. About once a second a thread takes the
newest value of each name, converts it to a number, and appends a line to the file that the agent reads
(:mod:`elastic_driver.launch.agent.figures`): nothing waits for an agent or a driver, whatever their state.

Nothing waits for a tensor on a GPU. Its value is copied to memory that the thread reads without a call to CUDA, since
such a call could break a graph that the training captures; it arrives once the GPU gets there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from elastic_driver.figures import MOST_NAMES, fault_of, line_of
from elastic_driver.rendezvous.environment import ENV_REPORT, ENV_REPORT_FD, FIGURES_FILE
from elastic_driver.system.threads import name_this_thread

_log = logging.getLogger(__name__)
_EACH_S = 1.0
# How long the end of a process waits for its thread: another library's value may never arrive.
_END_S = 1.0
_MOST_WARNINGS = 8
# A float64 NaN that no calculation produces: the value has not arrived yet.
_AWAITED = 0x7FF5A5A5A5A5A5A5
# Returns the number once it has arrived; None before that.
_Later: TypeAlias = Callable[[], float | None]


def report(**figures: Any) -> None:
    """Report figures of the training: ``hvd.report(loss=loss, accuracy=0.93)``.

    They become curves on the job's page and in ``elasticrun report``, and ``elastic_driver_reported`` in its metrics.
    The newest value of each name is used, about once a second; among several ranks, that of the lowest that reports it.
    A value is a number, a numpy scalar or a tensor with one element, which may be on a GPU and require grad: nothing
    waits for it. Of a name's tensors on a GPU the first in about each second is used. NaN and infinite values are shown
    as missing. Names beyond 64 are dropped with a warning, and so is a DTensor that is not reduced yet. Call it as
    often as you like, from any thread, also before ``init()``; outside a job it does nothing.

    Raises:
        TypeError: a value is not a number.
        ValueError: a name is invalid, or a tensor has several elements.
    """
    reporter = _reporter
    values = reporter.values
    for name, value in figures.items():
        if name not in values and not reporter.admits(name):
            continue
        if type(value) is float:
            values[name] = value
        else:
            reporter.take(name, value)
    if not reporter.has_begun:
        reporter.begin()


class _Reporter:
    """The figures that this process has reported, and the thread that writes them to the agent's file.

    Attributes:
        values: the newest by name: a float, or a function that returns it.
        has_begun: whether the thread runs, or there is no file.
    """

    def __init__(self) -> None:
        self.values: dict[str, float | _Later | None] = {}
        self.has_begun = False
        self._beginning = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_ending, self._has_ended = threading.Event(), threading.Event()
        self._passed: dict[str, float | _Later | None] = {}
        self._copied: set[str] = set()  # names whose last copy the thread has not taken yet
        self._cells: dict[str, _Cell] = {}
        self._file = -1
        self._warned: set[str] = set()

    def admits(self, name: str) -> bool:
        """Return whether there is room for a new name; without room only a warning follows. Raises ValueError if it is
        invalid.
        """
        if fault := fault_of(name):
            raise ValueError(f"cannot report a figure: {fault}")
        if len(self.values) < MOST_NAMES:
            return True
        self._warn(name, f"there are already {MOST_NAMES} names, the maximum")
        return False

    def take(self, name: str, value: Any) -> None:
        """Store a value that is not a plain float. Raises TypeError or ValueError if it is not a figure."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            self._take_tensor(name, torch, value)
        else:
            self.values[name] = _number(name, value)

    def _take_tensor(self, name: str, torch: Any, value: Any) -> None:
        if value.numel() != 1:
            raise ValueError(f"cannot report {name!r}: a tensor with {value.numel()} elements is not a single number")
        if value.is_complex() or value.is_meta:
            raise TypeError(f"cannot report {name!r}: a tensor of {value.dtype} on {value.device} is not a number")
        if not value.is_cpu and name in self._copied:  # one copy a second: each costs a few microseconds
            return
        try:
            whole = _whole(value.detach())
            if whole.is_cpu:
                self.values[name] = _float(whole.item())
                return
            later = self._copy(name, torch, whole)
        except Exception as error:  # PyTorch's or CUDA's: a figure is no reason to end
            self._warn(name, f"{type(error).__name__}: {error}")
            return
        if later is not None:
            self._copied.add(name)
            self.values[name] = later

    def _copy(self, name: str, torch: Any, value: Any) -> _Later | None:
        """Start a copy on the device. None if that is impossible now."""
        if value.device.type != "cuda":
            copy = value.clone()
            return lambda: float(copy.item())
        if torch.cuda.is_current_stream_capturing():
            return None  # a captured graph has values only when it is replayed
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _Cell(torch)
        return cell.fill(value.to(torch.float64).reshape(()))

    # --- passing on ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the thread, if there is a file to write to."""
        with self._beginning:
            if self.has_begun:
                return
            self.has_begun = True
            self._file = _opened()
            if self._file < 0:
                return
            # Woken by its clock. A daemon, as a process ends when its training does; an exit handler has the last
            # values written.
            self._thread = threading.Thread(target=self._run, name="elastic-figures", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is available: nothing is reported
                self._thread.start()
            atexit.register(self.end)

    def end(self) -> None:
        """Make the thread write the last values before the process ends."""
        if self._thread is not None and self._thread.is_alive():
            self._is_ending.set()
            self._has_ended.wait(_END_S)

    def _run(self) -> None:
        name_this_thread()
        while not self._is_ending.wait(_EACH_S):
            self.pass_on()
        self.pass_on()
        self._has_ended.set()

    def pass_on(self) -> None:
        """Write values that are new and have arrived."""
        self._copied.clear()
        news: dict[str, float | None] = {}
        for name, value in self.values.copy().items():
            if value is None or self._passed.get(name) is value:
                continue
            number = self._of_later(name, value) if callable(value) else value
            if number is not None:
                self._passed[name] = value
                news[name] = number
        if news and self._file >= 0:
            try:
                os.write(self._file, line_of(news))
            except OSError:  # it is no longer read
                self._file = -1

    def _of_later(self, name: str, value: _Later) -> float | None:
        try:
            return value()
        except Exception as error:  # of another library's: a figure is no reason to end
            self._warn(name, f"{type(error).__name__}: {error}")
            return None

    def _warn(self, name: str, why: str) -> None:
        """Log once why a figure is dropped."""
        if why not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(why)
            _log.warning("cannot report %r: %s", name, why)

    def after_fork(self) -> None:
        """In a forked child: forget the parent's figures and thread."""
        file = self._file
        # CUDA's memory: freeing it is a call to CUDA, which would end a child. Not even at the child's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([self.values, self._passed, self._cells]))
        self.__init__()  # type: ignore[misc]
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)


class _Cell:
    """Page-locked memory for one number, which a GPU writes."""

    def __init__(self, torch: Any) -> None:
        self._memory = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=True)
        address = self._memory.data_ptr()
        self._bits, self._number = ctypes.c_uint64.from_address(address), ctypes.c_double.from_address(address)
        self._bits.value = 0

    def fill(self, value: Any) -> _Later | None:
        """Start the GPU's write. None if it has not finished the previous one."""
        if self._bits.value == _AWAITED:
            return None
        self._bits.value = _AWAITED
        try:
            self._memory.copy_(value, non_blocking=True)
        except BaseException:
            self._bits.value = 0
            raise
        return lambda: None if self._bits.value == _AWAITED else self._number.value


def _whole(value: Any) -> Any:
    """Return a tensor that is not a DTensor. Raises ValueError if that would take a collective."""
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    if not all(
        placement.is_replicate() or ranks == 1
        for placement, ranks in zip(placements, value.device_mesh.shape, strict=True)
    ):
        raise ValueError("each rank has only its part of this DTensor: report its full_tensor()")
    return value.to_local()


def _number(name: str, value: Any) -> float | _Later:
    """Convert a value that is not PyTorch's tensor."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        try:
            size = math.prod(shape)
        except TypeError:  # an unknown dimension
            size = -1
        if size != 1:
            raise ValueError(f"cannot report {name!r}: an array of shape {shape} is not a single number")
        if hasattr(value, "device") and not isinstance(value.device, str | None):
            # JAX: it may be on a GPU, and is immutable.
            is_ready = getattr(value, "is_ready", None)
            return lambda: _float(value) if is_ready is None or is_ready() else None
        if type(value).__module__.startswith("tensorflow"):
            if not hasattr(value, "numpy"):
                raise TypeError(f"cannot report {name!r} from within a tf.function: it has no value there")
            return lambda: _float(value)
        value = value.item()
    if isinstance(value, bool | complex | str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"cannot report {name!r}: {type(value).__name__} is not a number")
    return _float(value)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of float
        return math.inf


def _opened() -> int:
    """Open the agent's file; return -1 if there is none."""
    # A subprocess may inherit the variables but not the descriptor, or outlive the agent: both may lead to something
    # else.
    number, path = os.environ.get(ENV_REPORT_FD, ""), os.environ.get(ENV_REPORT, "")
    with contextlib.suppress(OSError, ValueError):
        if _is_ours(f"/proc/self/fd/{int(number)}"):
            return os.dup(int(number))
    with contextlib.suppress(OSError):
        if _is_ours(path):
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    return -1


def _is_ours(path: str) -> bool:
    return os.readlink(path).startswith(f"/memfd:{FIGURES_FILE}")


_reporter = _Reporter()
os.register_at_fork(after_in_child=_reporter.after_fork)
