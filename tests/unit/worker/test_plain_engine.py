"""What the plain engine does about collectives that do not end, and its timeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elastic_driver as hvd
from elastic_driver.compat.common_util import env
from elastic_driver.errors import HorovodInternalError, SettingsError
from elastic_driver.hosts import SlotInfo
from elastic_driver.rendezvous.messages import RoundAssignment
from elastic_driver.words import Backend
from elastic_driver.worker.engine.choice import Limits, make_engine
from elastic_driver.worker.engine.collectives import Bytes, Exchange, Group, ReduceOp, SoloCollectives
from elastic_driver.worker.engine.gate import WriteGate
from elastic_driver.worker.engine.plain import PlainEngine
from elastic_driver.worker.engine.protocol import Kind, Operation, TensorSpec
from elastic_driver.worker.engine.seal import NO_SEAL
from elastic_driver.worker.engine.trace import Trace

pytestmark = pytest.mark.unit


class Stuck(SoloCollectives):
    """Collectives whose waits no abort ends, as happens with a half received message in torch's Gloo."""

    def __init__(self, group: Group) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        pass

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        self.entered.set()
        self.released.wait()


def test_an_aborted_collective_that_does_not_end_is_given_up() -> None:
    made: list[Stuck] = []

    def make(group: Group) -> Stuck:
        made.append(Stuck(group))
        return made[-1]

    def exchange(scope: str, **unused: Any) -> list[bytes]:
        raise AssertionError("nobody to meet")

    engine = PlainEngine(make, rank=0, size=2, round_id=1, build_s=5.0, collective_s=60.0)
    engine.connect(exchange, timeout_s=5.0)
    array = np.ones(3)
    spec = TensorSpec(array.ctypes.data, array.nbytes, "float64", array.shape, array.ctypes.data)
    handles = [engine.submit(Operation(Kind.ALLREDUCE, (spec,), name=f"n{i}")) for i in range(3)]
    assert made[0].entered.wait(150)
    engine.abort("a peer is gone")
    for handle in handles:
        with pytest.raises(HorovodInternalError, match="a peer is gone"):
            handle.result()
    engine.close()
    made[0].released.set()


class Late(SoloCollectives):
    """An allreduce that no abort ends, and that writes its result when it comes to its end after all."""

    def __init__(self, group: Group) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        pass

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        for start in range(0, output.nbytes, data.nbytes):
            output[start : start + data.nbytes] = data

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        self.entered.set()
        self.released.wait()
        data.view(dtype)[:] += 1


def test_what_comes_to_its_end_after_the_round_writes_nothing() -> None:
    made: list[Late] = []

    def make(group: Group) -> Late:
        made.append(Late(group))
        return made[-1]

    engine = PlainEngine(make, rank=0, size=2, round_id=1, build_s=5.0, collective_s=60.0)
    engine.connect(lambda scope, **unused: [], timeout_s=5.0)
    array = np.ones(3)
    spec = TensorSpec(array.ctypes.data, array.nbytes, "float64", array.shape, array.ctypes.data)
    handle = engine.submit(Operation(Kind.ALLREDUCE, (spec,), name="late", keep=array))
    assert made[0].entered.wait(150)
    engine.abort("a peer is gone")
    assert engine.quiesce(20.0)
    made[0].released.set()
    with pytest.raises(HorovodInternalError):
        handle.result()
    engine.close()
    assert array.tolist() == [1, 1, 1]


def test_a_shut_gate_lets_nobody_in_and_waits_for_who_is() -> None:
    gate = WriteGate()
    inside, leave = threading.Event(), threading.Event()

    def write() -> None:
        inside.set()
        leave.wait()

    writer = threading.Thread(target=gate.write, args=(write,))
    writer.start()
    assert inside.wait(150)
    gate.shut("the round is over")
    with pytest.raises(HorovodInternalError, match="cannot deliver a result: the round is over"):
        gate.write(pytest.fail)
    assert not gate.wait(0.01)
    leave.set()
    assert gate.wait(150.0)
    writer.join()


def test_leaving_alone_completes_what_other_threads_do() -> None:
    engine = PlainEngine(lambda group: SoloCollectives(), rank=0, size=1, build_s=5.0, collective_s=60.0)
    engine.connect(lambda scope, **unused: [], timeout_s=5.0)
    engine.leave().result()
    with pytest.raises(HorovodInternalError, match="this rank has left the round"):
        engine.submit(Operation(Kind.BARRIER, name="late"))


def test_closing_gives_it_up_too() -> None:
    made: list[Stuck] = []
    engine = PlainEngine(
        lambda groups: made.append(Stuck(groups)) or made[-1],  # type: ignore[func-returns-value]
        rank=0,
        size=2,
        round_id=1,
        build_s=5.0,
        collective_s=60.0,
    )
    engine.connect(lambda scope, **unused: [], timeout_s=5.0)
    handle = engine.submit(Operation(Kind.BARRIER, name="end"))
    assert made[0].entered.wait(150)
    engine.close()
    with pytest.raises(HorovodInternalError):
        handle.result()
    made[0].released.set()


def test_timeline_of_a_job_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As set for init() alone, as Horovod's own test does; the file is whole at any time."""
    path = tmp_path / "trace.json"
    monkeypatch.delenv("ELASTIC_DRIVER_RENDEZVOUS", raising=False)
    with env(HOROVOD_TIMELINE=str(path), HOROVOD_TIMELINE_MARK_CYCLES="1"):
        hvd.init()
    try:
        assert [event["ph"] for event in json.loads(path.read_text())] == ["M"]
        hvd.allreduce(np.ones(3), name="test_allreduce")
        hvd.reducescatter(np.ones(3), name="reducescatter.one")
        events = json.loads(path.read_text())
    finally:
        hvd.shutdown()
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        *("QUEUE", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_REDUCESCATTER", "REDUCESCATTER")
    }
    assert {event["name"] for event in events if event["ph"] == "i"} == {"CYCLE_START"}
    about, *rows = [event["args"] for event in events if event["ph"] == "M"]
    assert about["start_time_since_epoch_in_micros"] > 1e15
    assert [row["name"] for row in rows] == ["allreduce.test_allreduce", "reducescatter.one"]


def test_a_timeline_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ELASTIC_DRIVER_RENDEZVOUS", raising=False)
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "nowhere" / "trace.json"))
    hvd.init()
    try:
        assert "cannot write the timeline requested by HOROVOD_TIMELINE" in caplog.text
        with pytest.raises(OSError, match="No space left"):
            hvd.start_timeline("/dev/full")
        hvd.allreduce(np.ones(3))
    finally:
        hvd.shutdown()


def test_a_disk_that_fills_ends_the_timeline_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(str(tmp_path / "trace.json"), 0)
    assert trace._file is not None
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), trace._file.fileno())
    for _ in range(2):
        trace.operation("allreduce.a", "ALLREDUCE", 0.0, 0.0, 0.0)
    trace.close()
    assert caplog.text.count("cannot continue the timeline") == 1


@pytest.mark.parametrize("backend", Backend)
def test_nobody_joins_others_without_a_key_to_prove_them_with(backend: Backend) -> None:
    assignment = RoundAssignment(1, SlotInfo(0, 2, 0, 2, 0, 1), sync=True, commits=0, backend=backend)
    with pytest.raises(SettingsError, match="ELASTIC_DRIVER_RANKS_KEY is not set"):
        make_engine(assignment, "127.0.0.1", Limits(), NO_SEAL)


class Hungry(SoloCollectives):
    """Collectives for which there is no memory."""

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        raise MemoryError("cannot allocate")


def test_want_of_memory_is_no_reason_for_another_round() -> None:
    engine = PlainEngine(lambda group: Hungry(), rank=0, size=2, round_id=1, build_s=5.0, collective_s=60.0)
    engine.connect(lambda scope, **unused: [], timeout_s=5.0)
    for name in ("first", "second"):  # what comes later, too
        with pytest.raises(MemoryError, match="cannot allocate"):
            engine.submit(Operation(Kind.BARRIER, name=name)).result()
    engine.close()


_STRUCK = """
import random, signal, sys
import numpy as np
import elastic_driver as hvd
from elastic_driver.worker.rounds.current import current

class Strike(Exception):
    pass

# A signal that another thread receives strikes some time after the timer was stopped.
armed = False

def strike(*unused):
    global armed
    if armed:
        armed = False
        raise Strike

signal.signal(signal.SIGALRM, strike)
hvd.init()
struck, draw = 0, random.Random(1)
while struck < 1500:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-6, 150e-6))
        hvd.allreduce(np.ones(64, np.float32), name="always the same")
        signal.setitimer(signal.ITIMER_REAL, 0)
        armed = False
    except Strike:
        struck += 1
signal.signal(signal.SIGALRM, signal.SIG_IGN)
context = current()
print(context.engine.progress()[1], context.writing.wait(0), flush=True)
context.settle()
hvd.shutdown()
"""


def test_signals_that_strike_in_a_collective_leave_nothing_under_way() -> None:
    """In a process of its own: strikes come by the timer that ends tests."""
    ran = subprocess.run([sys.executable, "-c", _STRUCK], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("False True\n", 0), ran.stderr
