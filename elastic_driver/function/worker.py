"""The worker's side of ``elastic_driver.run``: calls the function and leaves its result in the caller's folder.

``python -m elastic_driver.function.worker FOLDER``. The folder is the caller's own (mode 0700) and the only thing that
is unpickled; nothing comes over the network.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import cloudpickle

from elastic_driver.errors import SettingsError
from elastic_driver.function.outcome import Outcome, Raised, Returned, leave
from elastic_driver.hosts import SlotInfo
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.rounds.runtime import runtime
from elastic_driver.worker.settings import worker_settings

CALL, PATHS = "call.pickle", "paths.pickle"


class _Place:
    """Remembers the last round this process was in, also after ``shutdown()``."""

    def __init__(self) -> None:
        self.round_id = 0
        self.slot: SlotInfo | None = None

    def on_round_changed(self) -> None:
        """See RoundListener."""
        context = current()
        self.round_id, self.slot = context.assignment.round_id, context.slot


def _worker_key() -> str:
    try:
        credential = worker_settings().credential
    except SettingsError:  # which may be the very outcome
        return ""
    worker = credential.identity.worker if credential is not None else None
    return worker.key if worker is not None else ""


def _leave(folder: Path, outcome: Outcome) -> None:
    leave(folder, f"{_worker_key()}-{os.getpid()}".replace("/", "_"), outcome)


def _raised(error: BaseException, prefix: str = "") -> Raised:
    text = f"{prefix}{''.join(traceback.format_exception(error))}"
    try:
        packed = cloudpickle.dumps(error)
        cloudpickle.loads(packed)
    except Exception:  # not every exception can be pickled; its text can
        packed = None
    return Raised(packed, type(error).__name__, text, time.monotonic())


def main(argv: list[str]) -> int:
    """Runs the function of the folder. Returns the process's exit code: 1 when the function raised."""
    folder = Path(argv[0])
    place = _Place()
    current_round().listen(place)
    try:
        for entry in cloudpickle.loads((folder / PATHS).read_bytes()):
            if entry not in sys.path:
                sys.path.append(entry)
        func, args, kwargs = cloudpickle.loads((folder / CALL).read_bytes())
        value = func(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        _leave(folder, _raised(error))
        runtime().note_exception(raised=True)
        return 1
    if place.slot is None:
        # A function without collectives: its process has to be a member all the same, to have a rank.
        runtime().init()
        runtime().join_late()
    assert place.slot is not None
    try:
        pickled = cloudpickle.dumps(value)
        _leave(folder, Returned(place.round_id, place.slot.rank, place.slot.size, pickled))
    except Exception as error:
        traceback.print_exc()
        _leave(folder, _raised(error, "cannot pickle what the function returned\n"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
