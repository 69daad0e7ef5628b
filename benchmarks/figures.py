"""What it costs a training to report figures, and its agent to read them.

    python benchmarks/figures.py [--runs 5]

    call      hvd.report(loss=x) with a float, of which one line a second is passed on; yardsticks, in the same run: a
              call of a function that does nothing, and values.update(loss=x)
    tensor    the same with a tensor of PyTorch's that requires grad
    step      a step of some 1 ms of NumPy with hvd.report(loss=..., step=...) at its end, as a share of one without
    script    a line of JSON that a script writes to the descriptor by itself
    agent     a second of the agent's loop, of a worker that writes 10,000 lines in it; of one that writes one line

Each figure is the median of the runs, with the range in brackets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from elastic_driver.launch.agent.figures import FiguresFile
from elastic_driver.worker.api.figures import report

CALLS = 200_000
STEPS = 400
LINES = 10_000


def _each_ns(act: Callable[[], object], count: int = CALLS) -> float:
    for _ in range(100):
        act()
    began = time.perf_counter_ns()
    for _ in range(count):
        act()
    return (time.perf_counter_ns() - began) / count


def _nothing(**figures: Any) -> None:
    pass


def _steps_ns() -> tuple[float, float]:
    """A step without, and with, in turn, so that both have the same machine."""
    left = np.random.default_rng(1).normal(size=(256, 256))
    took = [0, 0]
    for step in range(2 * STEPS):
        began = time.perf_counter_ns()
        loss = float((left @ left).mean())
        if step % 2:
            report(loss=loss, step=step)
        took[step % 2] += time.perf_counter_ns() - began
    return took[0] / STEPS, took[1] / STEPS


def _read_ms(file: FiguresFile, lines: int) -> float:
    # What a training writes in a second, at one look: no agent has it worse.
    data = b'{"loss": 0.31234567, "accuracy": 0.91}\n' * lines
    os.write(file.descriptor, data)
    began = time.thread_time_ns()
    file.read()
    file.news()
    return (time.thread_time_ns() - began) / 1e6


def _run(file: FiguresFile) -> dict[str, float]:
    values: dict[str, float] = {}
    found = {
        "an empty function": _each_ns(lambda: _nothing(loss=0.31)),
        "a dictionary's update": _each_ns(lambda: values.update(loss=0.31)),
        "hvd.report of a float": _each_ns(lambda: report(loss=0.31)),
    }
    try:
        import torch
    except ImportError:
        pass
    else:
        loss = torch.ones((), requires_grad=True) * 2
        found["hvd.report of a tensor"] = _each_ns(lambda: report(loss=loss), CALLS // 10)
    without_ns, with_ns = _steps_ns()
    line = b'{"loss": 0.31}\n'
    found |= {
        "a step without": without_ns,
        "a step with": with_ns,
        "a line of a script's": _each_ns(lambda: os.write(file.descriptor, line), CALLS // 10),
        "agent, ms for 10,000 lines": _read_ms(file, LINES),
        "agent, ms for one line": _read_ms(file, 1),
    }
    return found


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    file = FiguresFile()
    os.environ.update(file.environment)
    runs = [_run(file) for _ in range(arguments.runs)]
    for name in runs[0]:
        values = [run[name] for run in runs]
        unit = "" if "ms for" in name else " ns"
        print(f"{name:28}{statistics.median(values):12.4g}{unit}  [{min(values):.4g} to {max(values):.4g}]")


if __name__ == "__main__":
    main()
