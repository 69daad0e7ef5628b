"""``hvd.report``: what may be reported, what is passed on of it, and that nobody waits for a GPU or an agent."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic_driver.figures import MOST_NAMES
from elastic_driver.launch.agent.figures import FiguresFile
from elastic_driver.rendezvous.environment import ENV_REPORT, ENV_REPORT_FD
from elastic_driver.worker.api import figures
from elastic_driver.worker.api.figures import report

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unit


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of which the test passes on what is new."""
    made = figures._Reporter()
    made.has_begun = True
    monkeypatch.setattr(figures, "_reporter", made)
    return made


@pytest.fixture
def file(reporter: Any) -> Iterator[FiguresFile]:
    made = FiguresFile()
    reporter._file = os.dup(made.descriptor)
    yield made
    os.close(reporter._file)
    made.close()


def told(reporter: Any, file: FiguresFile) -> dict[str, float | None]:
    reporter.pass_on()
    file.read()
    assert file.trouble == ""
    return file.news()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((0.5, 0.5), (3, 3.0), (Decimal("0.25"), 0.25), (Fraction(1, 4), 0.25), (10**400, None)),
        *((np.float32(0.5), 0.5), (np.int64(7), 7.0), (np.array(0.5), 0.5), (np.array([0.5]), 0.5)),
        *((torch.tensor(0.5), 0.5), (torch.tensor([7]), 7.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5)),
        *((float("nan"), None), (float("-inf"), None), (torch.tensor(float("nan")), None), (np.float64("inf"), None)),
        (torch.tensor(0.5, requires_grad=True) * 2, 1.0),
    ],
    ids=repr,
)
def test_numbers_of_all_kinds_are_figures(reporter: Any, file: FiguresFile, value: Any, number: float | None) -> None:
    report(figure=value)
    assert told(reporter, file) == {"figure": number}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *(("0.3", TypeError), (None, TypeError), (True, TypeError), (1j, TypeError), ([1.0], TypeError)),
        *((np.array([1.0, 2.0]), ValueError), (np.array([]), ValueError), (np.array("x"), TypeError)),
        *((torch.tensor([1.0, 2.0]), ValueError), (torch.tensor(1j), TypeError)),
        (torch.empty((), device="meta"), TypeError),
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused_at_the_call(reporter: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^cannot report 'figure'"):
        report(figure=value)
    assert reporter.values == {}


def test_names_that_cannot_be_are_refused_at_the_call(reporter: Any) -> None:
    for name in ("", "x" * 65, "a\n"):
        with pytest.raises(ValueError, match="cannot report a figure: a name has"):
            report(**{name: 1.0})


def test_a_name_too_many_comes_late_and_ends_no_training(reporter: Any, caplog: pytest.LogCaptureFixture) -> None:
    report(**{f"n{index}": 1.0 for index in range(MOST_NAMES)})
    report(more=1.0, n0=2.0)
    report(other=1.0, n1=torch.tensor(3.0))
    assert len(reporter.values) == MOST_NAMES
    assert (reporter.values["n0"], reporter.values["n1"]) == (2.0, 3.0)
    [record] = caplog.records
    assert record.getMessage() == f"cannot report 'more': there are already {MOST_NAMES} names, the maximum"


def test_the_newest_of_each_name_is_passed_on_once(reporter: Any, file: FiguresFile) -> None:
    for step in range(1000):
        report(loss=1.0 / (step + 1), step=step)
    assert told(reporter, file) == {"loss": 0.001, "step": 999.0}
    assert os.fstat(file.descriptor).st_size < 100
    assert told(reporter, file) == {}
    report(loss=0.5)
    assert told(reporter, file) == {"loss": 0.5}


def test_no_graph_is_kept(reporter: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    inner = weight * 2
    graph = weakref.ref(inner)
    loss = inner.sum()
    report(loss=loss)
    del inner, loss
    gc.collect()
    assert graph() is None
    assert reporter.values == {"loss": 6.0}


def test_outside_a_job_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_REPORT, ENV_REPORT_FD):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(figures, "_reporter", figures._Reporter())
    before = threading.active_count()
    report(loss=1.0)
    report(loss=2.0)
    assert threading.active_count() == before


def test_an_agent_that_is_gone_is_nothing_to_the_training(reporter: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    reporter._file = writer
    report(loss=1.0)
    reporter.pass_on()
    report(loss=2.0)
    reporter.pass_on()
    assert reporter._file == -1
    os.close(writer)


def test_it_is_found_by_descriptor_or_else_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FiguresFile()
    with open(os.devnull, "wb") as other:
        for path, number in (
            ("", made.descriptor),
            (made.environment[ENV_REPORT], other.fileno()),  # closed, and something else opened
            (made.environment[ENV_REPORT], "x"),
        ):
            monkeypatch.setenv(ENV_REPORT, path)
            monkeypatch.setenv(ENV_REPORT_FD, str(number))
            opened = figures._opened()
            os.write(opened, b'{"loss": 1}\n')
            os.close(opened)
            made.read()
            assert made.news() == {"loss": 1.0}
        monkeypatch.setenv(ENV_REPORT, "/proc/1/fd/77777")
        assert figures._opened() == -1
    made.close()


def test_whatever_else_the_path_leads_to_is_not_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that lives longer than the agent, whose number is another's now."""
    monkeypatch.setenv(ENV_REPORT_FD, "")
    with open(tmp_path / "checkpoint", "wb") as other:
        for path in (other.name, f"/proc/{os.getpid()}/fd/{other.fileno()}"):
            monkeypatch.setenv(ENV_REPORT, path)
            assert figures._opened() == -1


def test_a_child_process_reports_its_own(reporter: Any, file: FiguresFile) -> None:
    report(loss=1.0)
    reporter.after_fork()
    assert (reporter.values, reporter.has_begun, reporter._file) == ({}, False, -1)
    reporter._file = os.dup(file.descriptor)


_FORKS = """
import ctypes, os, sys
from types import SimpleNamespace
from elastic_driver.worker.api import figures

class Memory:
    def __init__(self):
        self.number = ctypes.c_double()
    def data_ptr(self):
        return ctypes.addressof(self.number)
    def copy_(self, value, non_blocking):
        pass
    def __del__(self):
        os.write(1, b"freed")

cuda = SimpleNamespace(is_current_stream_capturing=lambda: False)
torch = SimpleNamespace(float64=None, empty=lambda *shape, **how: Memory(), cuda=cuda)
value = SimpleNamespace(device=SimpleNamespace(type="cuda"))
value.to = value.reshape = lambda how: value
figures._reporter.values["loss"] = figures._reporter._copy("loss", torch, value)
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
os._exit(0)
"""


def test_memory_that_a_gpu_writes_is_not_freed_in_a_child_process() -> None:
    """That is a call to CUDA, which would end the workers of a DataLoader."""
    assert subprocess.run([sys.executable, "-c", _FORKS], check=True, capture_output=True).stdout == b""


_ENDS = """
import threading
from elastic_driver.worker.api.figures import report

class Never:
    shape, dtype, device = (), "float32", object()
    def __float__(self):
        asked.set()
        threading.Event().wait()

asked = threading.Event()
report(loss=Never())
asked.wait()
"""


def test_a_value_that_is_never_there_does_not_hold_up_the_end() -> None:
    file = FiguresFile()
    subprocess.run([sys.executable, "-c", _ENDS], check=True, env={**os.environ, **file.environment})
    file.close()


def test_what_is_reported_last_is_told_at_the_end() -> None:
    file = FiguresFile()
    script = "from elastic_driver.worker.api.figures import report; report(loss=0.5); report(loss=0.25)"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, **file.environment})
    file.read()
    assert file.news() == {"loss": 0.25}
    file.close()


def test_an_array_that_is_not_ready_is_told_later(
    reporter: Any, file: FiguresFile, caplog: pytest.LogCaptureFixture
) -> None:
    class Array:
        shape, dtype, device = (), "float32", object()

        def is_ready(self) -> bool:
            return is_ready

        def __float__(self) -> float:
            assert is_ready
            return 0.5

    is_ready = False
    report(loss=Array())
    assert told(reporter, file) == {}
    is_ready = True
    assert told(reporter, file) == {"loss": 0.5}
    assert caplog.records == []


class Device:
    """Tensors on a GPU that is none: it writes when the test says so. In place of torch.

    Attributes:
        copies: that it has been asked for, and not made.
    """

    float64 = torch.float64

    def __init__(self) -> None:
        self.copies: list[tuple[Any, float]] = []
        self.is_capturing = self.fails = False
        self.cuda = SimpleNamespace(is_current_stream_capturing=lambda: self.is_capturing)

    def empty(self, shape: tuple[int, ...], *, dtype: Any, device: str, pin_memory: bool) -> Any:
        assert (device, pin_memory) == ("cpu", True)
        memory = torch.empty(shape, dtype=dtype)

        def copy(value: Any, *, non_blocking: bool) -> None:
            assert non_blocking
            if self.fails:
                raise RuntimeError("CUDA error")
            self.copies.append((memory, value.number))

        return SimpleNamespace(data_ptr=memory.data_ptr, copy_=copy)

    def run(self) -> None:
        for memory, number in self.copies:
            memory.fill_(number)
        self.copies.clear()

    def tensor(self, number: float) -> Any:
        value: Any = SimpleNamespace(
            number=number,
            dtype=torch.float32,
            device=torch.device("cuda", 0),
            is_meta=False,
            is_cpu=False,
            numel=lambda: 1,
            is_complex=lambda: False,
        )
        value.detach = lambda: value
        value.to = lambda dtype: value
        value.reshape = lambda shape: value
        return value


def test_a_gpu_is_not_waited_for_and_copied_from_once_a_second(reporter: Any, file: FiguresFile) -> None:
    device = Device()
    for number in (0.5, 0.25, 0.125):
        reporter._take_tensor("loss", device, device.tensor(number))
    assert [number for _, number in device.copies] == [0.5]
    assert told(reporter, file) == {}
    reporter._take_tensor("loss", device, device.tensor(4.0))  # it is far behind
    assert told(reporter, file) == {}
    device.run()
    assert told(reporter, file) == {"loss": 0.5}
    reporter._take_tensor("loss", device, device.tensor(float("nan")))
    device.run()
    assert told(reporter, file) == {"loss": None}


def test_within_a_cuda_graph_nothing_is_copied(reporter: Any, file: FiguresFile) -> None:
    device = Device()
    device.is_capturing = True
    reporter._take_tensor("loss", device, device.tensor(0.5))
    assert (device.copies, told(reporter, file)) == ([], {})
    device.is_capturing = False
    reporter._take_tensor("loss", device, device.tensor(0.5))
    device.run()
    assert told(reporter, file) == {"loss": 0.5}


class Sharded:
    """A DTensor of one element, on a CPU or a GPU; in place of PyTorch's, which needs a group of processes."""

    def __init__(self, local: Any, *placements: tuple[str, int]) -> None:
        self.placements = [
            SimpleNamespace(is_replicate=lambda kind=kind: kind == "replicate") for kind, _ in placements
        ]
        self.device_mesh = SimpleNamespace(shape=tuple(ranks for _, ranks in placements))
        self.is_cpu, self.is_meta, self.dtype, self.device = local.is_cpu, False, local.dtype, local.device
        self.to_local = lambda: local
        self.detach = lambda: self
        self.numel = lambda: 1
        self.is_complex = lambda: False


def test_a_dtensor_is_a_figure_once_it_is_whole(
    reporter: Any, file: FiguresFile, caplog: pytest.LogCaptureFixture
) -> None:
    """As the norm of gradients is with FSDP2; no rank waits for another here."""
    device = Device()
    for number, local in ((0.5, torch.tensor(0.5)), (0.25, device.tensor(0.25))):
        reporter._take_tensor("norm", device, Sharded(local, ("replicate", 4), ("partial", 1)))
        device.run()
        assert told(reporter, file) == {"norm": number}
    for name in ("norm", "other"):
        reporter._take_tensor(name, device, Sharded(device.tensor(4.0), ("partial", 2)))
    assert told(reporter, file) == {}
    [record] = caplog.records
    assert record.getMessage() == (
        "cannot report 'norm': ValueError: each rank has only its part of this DTensor: report its full_tensor()"
    )


def test_a_gpu_that_fails_ends_no_step_and_may_come_again(
    reporter: Any, file: FiguresFile, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.fails = True
    for number in (0.5, 0.25):
        reporter._take_tensor("loss", device, device.tensor(number))
        assert told(reporter, file) == {}
    assert [record.getMessage() for record in caplog.records] == ["cannot report 'loss': RuntimeError: CUDA error"]
    device.fails = False
    reporter._take_tensor("loss", device, device.tensor(0.125))
    device.run()
    assert told(reporter, file) == {"loss": 0.125}


def test_what_another_library_cannot_convert_is_dropped_and_told_once(
    reporter: Any, file: FiguresFile, caplog: pytest.LogCaptureFixture
) -> None:
    class Traced:
        shape, dtype, device = (), "float32", object()

        def __float__(self) -> float:
            raise RuntimeError("it is traced")

    for number in (0.5, 0.25):
        report(bad=Traced(), good=number)
        assert told(reporter, file) == {"good": number}
    assert [record.getMessage() for record in caplog.records] == ["cannot report 'bad': RuntimeError: it is traced"]
