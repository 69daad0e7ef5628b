"""Who gets the arrays that operations make, and for how long they live."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import psutil

from elastic_driver.worker.engine.byte_collectives import array_spec

from . import conftest  # noqa: F401 - skips these tests where there is no extension
from .engines import Kind, Operation, engines, spec


def test_all_threads_that_wait_for_an_operation_get_its_arrays() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with engines(2) as made:
            for _ in range(300):
                mine, peers = [engine.submit(Operation(Kind.ALLGATHER, (spec(np.ones(3)),))) for engine in made]
                got: list[list[float]] = []
                gate = threading.Barrier(3)

                def wait(handle: Any = mine, got: list[list[float]] = got, gate: threading.Barrier = gate) -> None:
                    gate.wait()
                    got.extend(array.view(np.float64).tolist() for array in handle.result().arrays)

                threads = [threading.Thread(target=wait) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                peers.result()
                assert got == [[1.0] * 6] * 3
    finally:
        sys.setswitchinterval(interval)


def test_arrays_that_a_signal_made_a_caller_lose_are_there_for_the_next() -> None:
    with engines(2) as made:
        handles = [engine.submit(Operation(Kind.ALLGATHER, (spec(np.ones(3)),))) for engine in made]
        for handle in handles:
            handle._native.wait()
            handle._native.outputs()  # a handler raises here
        (array,) = handles[0].result().arrays
        (same,) = (memory for memory, _, _ in handles[0]._native.outputs())
        assert np.shares_memory(array, same)
        handles.clear()
        del same, handle
        assert array.view(np.float64).tolist() == [1.0] * 6


def test_arrays_are_freed_with_their_handle_and_whoever_has_them() -> None:
    process, most = psutil.Process(), 40 << 20
    with engines(2) as made:

        def run() -> None:
            mine = np.ones(most // 2, np.uint8)
            handles = [
                engine.submit(Operation(Kind.ALLGATHER, (array_spec(mine, mine),), keep=mine)) for engine in made
            ]
            for handle in handles:
                assert handle.result().arrays[0].nbytes == most

        run()
        before = process.memory_info().rss
        for _ in range(10):
            run()
        assert process.memory_info().rss - before < 4 * most  # of 20 that were made
