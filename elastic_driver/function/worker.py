"""The worker side of ``elastic_driver.run``: fetches the call, makes it, and sends its outcome to the driver.

``python -m elastic_driver.function.worker``; with the argument ``restarted`` for a worker that has its rank from its
start, and may never call ``init()`` (:mod:`elastic_driver.function.torch_launcher`). The pickles that it loads were
made by the caller: the driver sends them over a connection on which both ends have authenticated each other.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import cloudpickle

from elastic_driver.errors import SettingsError
from elastic_driver.function.outcome import ENV_OUTCOMES, RESTARTED, Outcome, Place, Raised, Returned, keep
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.environment import ENV_ROUND, ENV_WORKER
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.rounds.runtime import DriverClient, new_client, runtime
from elastic_driver.worker.settings import way_to_driver


class _LastRound:
    """Remembers the last round in which this process took part, even after ``shutdown()``."""

    def __init__(self) -> None:
        self.round_id = 0
        self.slot: SlotInfo | None = None

    def on_round_changed(self) -> None:
        """Remember the new round (RoundListener)."""
        context = current()
        self.round_id, self.slot = context.assignment.round_id, context.slot


def _raised(error: BaseException, prefix: str = "") -> Raised:
    text = f"{prefix}{''.join(traceback.format_exception(error))}"
    try:
        packed = cloudpickle.dumps(error)
        cloudpickle.loads(packed)
    except Exception:  # not every exception can be pickled; its text can
        packed = None
    return Raised(packed, type(error).__name__, text, _place())


def _place() -> Place:
    environ = os.environ
    return Place(
        environ.get(ENV_WORKER, ""),
        int(environ.get(ENV_ROUND, "0")),
        int(environ.get("RANK", "0")),
        int(environ.get("LOCAL_RANK", "0")),
        os.getpid(),
        time.time(),
    )


def _client() -> DriverClient:
    try:
        return new_client()
    except SettingsError:
        # A variable is invalid: hvd.init() is to raise that error, and the caller is to get it.
        return RendezvousClient(*way_to_driver())


def _fetch() -> tuple[list[str], bytes]:
    """Return the caller's sys.path, and the pickled call."""
    client = _client()
    try:
        paths, call = pickle.loads(client.call())
    finally:
        client.close()
    return paths, call


def _tell(outcome: Outcome) -> None:
    folder = os.environ.get(ENV_OUTCOMES)
    if folder:
        keep(Path(folder), WorkerId.parse(os.environ[ENV_WORKER]), outcome)
        return
    client = _client()
    try:
        client.post_outcome(pickle.dumps(outcome))
    finally:
        client.close()


def main(words: Sequence[str] = ()) -> int:
    """Make the call. Returns the process's exit code: 1 if the function raised.

    Args:
        words: command-line arguments, without the program.

    Raises:
        RendezvousError: the driver cannot be reached.
    """
    last = _LastRound()
    current_round().listen(last)
    paths, call = _fetch()
    try:
        sys.path += [entry for entry in paths if entry not in sys.path]
        func, args, kwargs = cloudpickle.loads(call)
        del call
        value = func(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        _tell(_raised(error))
        runtime().note_exception(raised=True)
        return 1
    if last.slot is None and RESTARTED not in words:
        # A function without collectives: its process still has to become a member, to have a rank.
        runtime().init()
        runtime().join_late()
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        traceback.print_exc()
        _tell(_raised(error, "cannot pickle what the function returned\n"))
        return 1
    if last.slot is None:
        environ = os.environ
        _tell(Returned(int(environ[ENV_ROUND]), int(environ["RANK"]), int(environ["WORLD_SIZE"]), pickled))
    else:
        _tell(Returned(last.round_id, last.slot.rank, last.slot.size, pickled))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
