"""checkpoint_point(): decides when a script that is restarted by SIGTERM writes a checkpoint and exits.

At a planned change the driver sends SIGTERM to all workers and waits for them (``--drain-timeout``). The signal reaches
each rank at a different place of the script, but a checkpoint, and any collective on the way to it, needs all ranks at
the same place: here they agree, all in the same call. Owns the signal's handler, the agreement, and the progress
reports to the driver. Works under any launcher that ends its workers with SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from elastic_driver.errors import ElasticError, RendezvousClosedError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS, ENV_ROUND, ENV_WORKER
from elastic_driver.rendezvous.messages import RunningReport

if TYPE_CHECKING:
    from elastic_driver.rendezvous.client import RendezvousClient

# Least time between two progress reports.
_REPORT_S = 1.0
_COUNTS_ANEW = (
    "elastic_driver: warning: checkpoint_point() without step= counts its calls from 0 again in a restarted "
    "worker, so the driver may see no progress for a long time: pass the training step"
)


def checkpoint_point(*, step: int | None = None, every: int = 1, total: int | None = None) -> bool:
    """Return whether a planned change is due: if so, write a checkpoint now and end with ``sys.exit(0)``.

    All ranks must call it at the same place, in the main thread, best once a step. All get the same answer in the same
    call, and True from then on. The first call installs a SIGTERM handler, unless the script has its own; then the
    script's handler alone gets the signal.

    Args:
        step: progress of the training since it first began, for the driver's status and its rule on jobs without
            progress. If omitted, calls are counted, from 0 in each process: a restarted worker shows no progress until
            it has made more calls than the last one. Best always given.
        every: the ranks agree only in every so many calls; the others return False.
        total: how many steps the training has in all, from which the driver computes how much is left.

    Raises:
        RuntimeError: there are several workers, and ``torch.distributed`` is not initialized.
        ValueError: ``every`` or ``total`` is below 1.
    """
    return _point.ask(step, every, total)


class _Point:
    """The state of this process."""

    def __init__(self) -> None:
        self._calls = 0
        self._noticed = False
        self._is_due = False
        self._world: Any = None  # the default group that _group is a copy of
        self._group: Any = None
        self._reporter: _Reporter | None = None

    def ask(self, step: int | None, every: int, total: int | None) -> bool:
        """Count a call, report progress, and agree if it is time."""
        if every < 1:
            raise ValueError(f"checkpoint_point(every={every}): it must be 1 or more")
        if total is not None and total < 1:
            raise ValueError(f"checkpoint_point(total={total}): it must be 1 or more")
        if not self._calls:
            self._begin()
        self._calls += 1
        if self._reporter is not None:
            if step is None and self._calls == 1 and self._reporter.tells_of_calls:
                print(_COUNTS_ANEW, file=sys.stderr, flush=True)
            self._reporter.came_to(self._calls if step is None else step, total or 0)
        if not self._is_due and self._calls % every == 0:
            self._is_due = self._agreed()
        return self._is_due

    def _begin(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
        # Where hvd.init() was called, the driver learns of progress from commits.
        if ENV_RENDEZVOUS in os.environ and not _is_in_a_round():
            with contextlib.suppress(ElasticError, ValueError, KeyError):
                self._reporter = _Reporter.of_this_worker()

    def _note(self, number: int, frame: object) -> None:
        self._noticed = True

    def _agreed(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise RuntimeError(
                    "checkpoint_point() needs torch.distributed, for the workers to agree: call "
                    "torch.distributed.init_process_group() first"
                )
            return self._noticed
        if dist.get_world_size() < 2:
            return self._noticed
        if self._world is not dist.group.WORLD:
            # A group of its own: the script's collectives may be in flight on another thread or device.
            self._world, self._group = dist.group.WORLD, dist.new_group(backend="gloo")
        torch = sys.modules["torch"]
        noticed = torch.tensor([self._noticed], dtype=torch.int32, device="cpu")
        dist.all_reduce(noticed, op=dist.ReduceOp.MAX, group=self._group)
        return bool(noticed.item())


def _is_in_a_round() -> bool:
    """Return whether this process has called hvd.init(); it may have imported the library for something else."""
    runtime = sys.modules.get("elastic_driver.worker.rounds.runtime")
    return runtime is not None and bool(runtime.current_round().initialized)


class _Reporter:
    """Reports the script's progress to the driver, in a thread that never disturbs the training.

    Args:
        url: the address to report to.
        credential: of this worker.
        worker: this worker.
        round_id: the round that it was started for.

    Attributes:
        tells_of_calls: whether to warn the user if calls are counted instead of steps.
    """

    def __init__(self, url: str, credential: Credential, worker: WorkerId, round_id: int) -> None:
        self._way = url, credential
        self._worker = worker
        self._round_id = round_id
        # In the first round all begin at 0; and one rank's warning is enough.
        self.tells_of_calls = round_id > 1 and os.environ.get("RANK", "0") == "0"
        self._progress = self._total = 0
        self._news = threading.Event()
        threading.Thread(target=self._run, name="elastic-driver-progress", daemon=True).start()

    @classmethod
    def of_this_worker(cls) -> _Reporter:
        """Make a reporter. Raises ElasticError, ValueError or KeyError if this process is not one of our workers."""
        credential = Credential.of_worker(os.environ)
        worker = WorkerId.parse(os.environ[ENV_WORKER])
        return cls(os.environ[ENV_RENDEZVOUS], credential, worker, int(os.environ[ENV_ROUND]))

    def came_to(self, progress: int, total: int) -> None:
        """Note the progress. Costs nothing: the thread sends it later."""
        self._progress, self._total = progress, total
        self._news.set()

    def _run(self) -> None:
        from elastic_driver.rendezvous.client import RendezvousClient

        with contextlib.suppress(Exception):  # whatever fails here, the training continues
            self._tell(RendezvousClient(*self._way))

    def _tell(self, client: RendezvousClient) -> None:
        pause = threading.Event()
        while True:
            self._news.wait()
            self._news.clear()
            report = RunningReport(self._worker, self._round_id, self._progress, total=self._total)
            try:
                client.running(report)
            except RendezvousClosedError:
                client.close()
                return
            except ElasticError:
                pass  # the round has ended or the driver does not answer: the next report may arrive
            pause.wait(_REPORT_S)


_point = _Point()
