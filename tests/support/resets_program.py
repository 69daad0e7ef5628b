"""Worker programs of test_resets.py."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from typing import Any

import pytest
import torch
from worker_program import hold, say

import elastic_driver.torch as hvd


def under_way() -> None:
    """All but rank 0 begin operations that never end; the first is waited for, the others are forgotten."""
    hvd.init()
    numbers: list[int] = []
    begun: list[Any] = []

    def begin() -> None:
        tensors = [torch.ones(1 << 16) for _ in range(4)]
        begun.extend(weakref.ref(tensor) for tensor in tensors)
        numbers.extend(hvd.allreduce_async_(tensor, name=f"never {index}") for index, tensor in enumerate(tensors))

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.size() > 2:
            if hvd.rank() == 0:
                say(entering=True)
                sys.stdin.read()
            begin()
            say(entering=True)
            hvd.synchronize(numbers[0])
            raise AssertionError("the collective ended well")
        for _ in range(3):
            hvd.synchronize(hvd.allreduce_async(torch.ones(1)))
        gc.collect()
        say(alive=[ref() is not None for ref in begun])
        for number in numbers[1:]:
            with pytest.raises(hvd.HorovodInternalError, match="another round"):
                hvd.synchronize(number)
            assert hvd.synchronize(number) is None

    loop(hvd.elastic.ObjectState(step=0))
    say(done=True)


def callbacks(steps: str) -> None:
    """Says what a reset callback sees, and has it change the state."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, rate=1.0)

    def on_reset() -> None:
        say(callback=state.step, size=hvd.size())
        state.rate = 0.5 * hvd.size()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        say(entered=state.step, size=hvd.size(), rate=state.rate)
        while state.step < int(steps):
            hold(state.step)
            time.sleep(0.005)
            state.step += 1
            say(step=state.step)
            state.commit()

    state.register_reset_callbacks([on_reset])
    loop(state)
    say(done=True)
