"""Worker programs of test_resets.py."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from worker_program import hold, say

import elastic_driver.torch as hvd
from elastic_driver.worker.rounds import runtime
from elastic_driver.worker.rounds.current import current


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
            with pytest.raises(hvd.HorovodInternalError, match="an earlier round"):
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


class _Restored(hvd.elastic.TorchState):
    """Says, before it restores, whether the end of all that writes was waited for."""

    waited: tuple[bool, ...] = ()

    def watch(self) -> None:
        """From now on it is noted who waits for this round's engine."""
        self._old = current()
        wait = self._old.engine.quiesce

        def quiesce(limit_s: float) -> bool:
            self.waited += (wait(limit_s),)
            return self.waited[-1]

        self._old.engine.quiesce = quiesce  # type: ignore[method-assign]

    def restore(self) -> None:
        say(waited=self.waited, shut=self._old.writing.is_shut)
        super().restore()


def overwritten(count: str) -> None:
    """Rank 2 dies while the others reduce their parameters in place; are those as they were committed after that?"""
    hvd.init(process_sets=[pair := hvd.ProcessSet([0, 1])])
    model = torch.nn.Linear(int(count) // 1000, 1000, bias=False)
    with torch.no_grad():
        model.weight.fill_(7)
    turned = model.weight.detach().t()  # not contiguous: its result is copied into it by who waits for it

    def submit() -> None:
        """A second thread's, which knows nothing of rounds."""
        with contextlib.suppress(hvd.HorovodInternalError):
            for number in range(4):
                hvd.synchronize(hvd.allreduce_async_(turned, name=f"turned {number}", process_set=pair, op=hvd.Sum))

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.size() > 2:
            say(entering=True)
            hvd.barrier()
            if hvd.rank() == 2:
                sys.stdin.readline()
                raise AssertionError("it was to be killed")
            threading.Thread(target=submit, daemon=True).start()
            for number in range(100):
                hvd.allreduce_async_(model.weight.detach(), name=f"{number}", process_set=pair, op=hvd.Sum)
            state.watch()
            say(submitted=True)
            # Not by waiting for an operation: one that fails has ended, and this is to be before the end.
            while True:
                current().check()
        for _ in range(20):
            hvd.barrier()
            say(intact=bool(torch.all(model.weight == 7)))

    loop(_Restored(model=model))
    say(done=True)


def planned(kind: str) -> None:
    """Hosts come while operations are under way; says what became of the operations, and of the parameters."""
    hvd.init(process_sets=[pair := hvd.ProcessSet([0, 1])])
    straight, turned = torch.full((300, 400), hvd.rank() + 1.0), torch.full((300, 400), hvd.rank() + 1.0)
    handles: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.size() > 2:
            say(straight=straight.unique().tolist(), turned=turned.unique().tolist(), step=state.step)
            return
        say(entering=True)
        while True:
            hold(state.step)
            state.step += 1
            if kind == "lonely" and hvd.rank() == 0 and state.step == 4:
                hvd.allreduce_async_(straight, name="lonely", process_set=pair)
            if kind == "completed" and state.step == 4:
                handles.append(hvd.allreduce_async_(straight, name="straight", op=hvd.Sum))
                handles.append(hvd.allreduce_async_(turned.t(), name="turned", op=hvd.Sum))
            state.commit()

    loop(hvd.elastic.ObjectState(step=0))
    say(done=True)


def shut_down() -> None:
    """Both ranks submit what takes longer than shutdown() waits for a peer; rank 0 calls it at once.

    Says how often each tensor was doubled, at least and at most.
    """
    runtime.LINGER_S = 0.5
    hvd.init()
    tensors = [torch.ones(1 << 21, dtype=torch.float64) for _ in range(4)]

    def submit(times: int, op: Any) -> list[int]:
        return [
            hvd.allreduce_async_(tensor, name=f"{number} {index}", op=op)
            for number in range(times)
            for index, tensor in enumerate(tensors)
        ]

    began = time.monotonic()
    for handle in submit(8, hvd.Average):
        hvd.synchronize(handle)
    once_s = (time.monotonic() - began) / 8
    times = hvd.broadcast_object(min(1000, 1 + int(2 * runtime.LINGER_S / once_s)), name="times")
    handles = submit(times, hvd.Sum)
    if hvd.rank() == 1:
        for handle in handles:
            hvd.synchronize(handle)
    hvd.shutdown()
    say(times=times, doubled=[[float(tensor.min().log2()), float(tensor.max().log2())] for tensor in tensors])
