"""The worker of ``elasticrun doctor``: ``python -m elastic_driver.doctor.worker``, one on each host.

Reports each fact about its machine as soon as it is known, so that a later failure loses none: first the machine, then
its clock and PyTorch's import, and last allreduces with all the other workers, until no further host is expected.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_driver.doctor.examine import facts_here, with_torch
from elastic_driver.doctor.facts import LARGE_BYTES, HostFacts, Meeting
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.reporting.printable import all_without_home, without_home
from elastic_driver.worker.settings import way_to_driver

# The shortest of this many round trips gives the best estimate of the clocks' difference.
_ASKS = 8
_ROUNDS = 5
# Between two allreduces, while waiting for other hosts.
_PAUSE_S = 0.2


def main() -> int:
    """Run the check. Returns the process's exit code: 1 if this worker failed, which it has reported then."""
    client = RendezvousClient(*way_to_driver())
    facts: HostFacts | None = None
    try:
        facts = facts_here(client.ask_checkup().folders)
        _say(facts, client)
        facts = _with_clock(facts, client)
        facts = with_torch(facts)
        _say(facts, client)
        _meet(facts, client)
    except Exception as error:
        if facts is None:
            # Its last line is shown to the user.
            print(without_home(traceback.format_exc()), end="", file=sys.stderr)
            return 1
        why = " ".join(without_home(f"{type(error).__name__}: {error}").split())[:300]
        _say(replace(facts, error=why), client)
        return 1
    finally:
        client.close()
    return 0


def _say(facts: HostFacts, client: RendezvousClient) -> None:
    """Send the facts, without the path of the home folder, which is known only on this machine."""
    client.post_facts(all_without_home(facts).to_json())


def _with_clock(facts: HostFacts, client: RendezvousClient) -> HostFacts:
    """Measure how far this clock is ahead of the driver's, which was read at some time during the round trip."""
    best_s, ahead_s = float("inf"), 0.0
    for _ in range(_ASKS):
        began, began_at = time.perf_counter(), time.time()
        there = client.ask_checkup().unix_s
        took_s = time.perf_counter() - began
        if took_s < best_s:
            best_s, ahead_s = took_s, began_at + took_s / 2 - there
    return replace(facts, clock_s=ahead_s, clock_error_s=best_s / 2)


def _meet(facts: HostFacts, client: RendezvousClient) -> None:
    """Do allreduces with all present workers. Returns when all agree that no further host is expected."""
    hvd, full = _api(facts)

    def meet(state: Any) -> None:
        while True:
            meeting = _allreduces(hvd, full)
            _say(replace(facts, meeting=meeting), client)
            over = hvd.allreduce(full(1, float(client.ask_checkup().is_over)), name="over", op=hvd.Min)
            if float(over[0]):
                return
            threading.Event().wait(_PAUSE_S)
            state.commit()  # workers that have arrived meanwhile join here

    hvd.init()
    hvd.elastic.run(meet)(hvd.elastic.ObjectState())
    hvd.shutdown()


def _api(facts: HostFacts) -> tuple[Any, Callable[[int, float], Any]]:
    """Return the API that scripts of this installation use, and a function that makes a tensor of N equal numbers.

    Raises:
        ImportError: there is neither numpy with our own engine, nor PyTorch.
    """
    if facts.numpy and not facts.native_error:
        import numpy as np

        import elastic_driver

        return elastic_driver, lambda count, value: np.full(count, value, dtype=np.float32)
    if not facts.torch or facts.torch_error:
        raise ImportError(f"no collectives here: {facts.native_error or 'numpy is not installed'}, and no PyTorch")
    import torch

    import elastic_driver.torch

    return elastic_driver.torch, lambda count, value: torch.full((count,), value, device="cpu")


def _allreduces(hvd: Any, full: Callable[[int, float], Any]) -> Meeting:
    size = hvd.size()
    mine, wanted = float(hvd.rank() + 1), size * (size + 1) / 2
    took_s: dict[int, list[float]] = {}
    correct = True
    for count in (1, LARGE_BYTES // 4):
        tensor = full(count, mine)
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            total = hvd.allreduce(tensor, name=f"doctor.{count}", op=hvd.Sum)
            took_s.setdefault(count, []).append(time.perf_counter() - began)
            correct = correct and bool((total == wanted).all())
    small_s, large_s = map(statistics.median, took_s.values())
    return Meeting(size, correct, small_s, large_s)


if __name__ == "__main__":
    sys.exit(main())
