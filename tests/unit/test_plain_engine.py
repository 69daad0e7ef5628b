"""What the plain engine does about collectives that do not end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from elastic_driver.errors import HorovodInternalError, SettingsError
from elastic_driver.hosts import SlotInfo
from elastic_driver.rendezvous.messages import Backend, RoundAssignment
from elastic_driver.worker.collectives import Bytes, Exchange, Group, SoloCollectives
from elastic_driver.worker.context import Limits, make_engine
from elastic_driver.worker.engine import Kind, Operation, TensorSpec
from elastic_driver.worker.plain_engine import PlainEngine
from elastic_driver.worker.seal import NO_SEAL

pytestmark = pytest.mark.unit


class Stuck(SoloCollectives):
    """Collectives whose waits no abort ends, as happens with a half received message in torch's Gloo."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        pass

    def allgather(self, group: str, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        self.entered.set()
        self.released.wait()


def test_an_aborted_collective_that_does_not_end_is_given_up() -> None:
    made: list[Stuck] = []

    def make(groups: tuple[Group, ...]) -> Stuck:
        made.append(Stuck(groups))
        return made[-1]

    def exchange(scope: str, **unused: Any) -> list[bytes]:
        raise AssertionError("nobody to meet")

    engine = PlainEngine(make, rank=0, size=2, round_id=1, build_s=5.0, collective_s=60.0)
    engine.connect(exchange, timeout_s=5.0)
    array = np.ones(3)
    spec = TensorSpec(array.ctypes.data, array.nbytes, "float64", array.shape, array.ctypes.data)
    handles = [engine.submit(Operation(Kind.ALLREDUCE, (spec,), name=f"n{i}")) for i in range(3)]
    assert made[0].entered.wait(20)
    engine.abort("a peer is gone")
    for handle in handles:
        with pytest.raises(HorovodInternalError, match="a peer is gone"):
            handle.result()
    engine.close()
    made[0].released.set()


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
    assert made[0].entered.wait(20)
    engine.close()
    with pytest.raises(HorovodInternalError):
        handle.result()
    made[0].released.set()


def test_the_engine_that_went_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = SlotInfo(0, 2, 0, 2, 0, 1)
    assignment = RoundAssignment(1, slot, (0, 1), (0,), sync=True, commits=0, backend=Backend.NATIVE, cause="a test")
    monkeypatch.setenv("ELASTIC_DRIVER_ENGINE", "plain")
    with pytest.raises(SettingsError, match="ELASTIC_DRIVER_BACKEND=torch"):
        make_engine(assignment, "127.0.0.1", Limits(), NO_SEAL)
