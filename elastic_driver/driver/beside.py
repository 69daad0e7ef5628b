"""The process that a node has beside it, which drives its job, or stands by to: this one's own command once more.

Owns that process: it is started again when it is lost while the job goes on, and let go of when the node's part in the
job is over (:mod:`elastic_driver.system.leash`). What it does, and how a job has ended, is others' business.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from elastic_driver.errors import in_words
from elastic_driver.system.leash import ENV_HELD
from elastic_driver.words import LONG_ROUND_S, PAUSE_RANGE_S, ExitCode, pause_s

# How long a driver that is let go of may take to leave the job to another.
_LETS_GO_S = 10.0


class DriverBeside:
    """See above. A context manager: afterwards that process is gone.

    Args:
        command: its words.
        environ: its environment, but for what says that it is held.
        has_ended: whether the job has, as far as can be told, so that none is started again. Called by another thread.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], *, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._command, self._environ, self._has_ended = command, {**environ, ENV_HELD: "1"}, has_ended
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_refused = self._is_idle = self._is_over = False
        self._thread = threading.Thread(target=self._keep, name="elasticrun-beside", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin_no_more()
        with self._changed:
            process = self._process
        if process is not None:
            _let_go(process)
        self._thread.join()

    @property
    def is_refused(self) -> bool:
        """Whether it cannot drive the job, and has said why: then none is started again."""
        with self._changed:
            return self._is_refused

    def wait(self, limit_s: float) -> None:
        """Blocks until it has ended by itself, or for so long. None is started any more."""
        self._begin_no_more()
        self._thread.join(limit_s)

    def _begin_no_more(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def again(self) -> None:
        """There is to be one again, where it has ended with its job."""
        with self._changed:
            self._is_idle = False
            self._changed.notify_all()

    def _keep(self) -> None:
        losses = 0
        while True:
            began = time.monotonic()
            code = self._run()
            losses = 1 if time.monotonic() - began >= LONG_ROUND_S else losses + 1
            has_ended = code is not None and self._has_ended()
            with self._changed:
                if code == ExitCode.BAD_USAGE and not has_ended:
                    self._is_refused = True
                    return
                self._is_idle = has_ended
                if has_ended:
                    losses = 0
                    self._changed.wait_for(lambda: self._is_over or not self._is_idle)
                else:
                    self._changed.wait_for(lambda: self._is_over, pause_s(losses, PAUSE_RANGE_S))
                if self._is_over:
                    return

    def _run(self) -> int | None:
        """Runs one. Returns its exit code, as Popen says it; None where there could be none."""
        with self._changed:
            if self._is_over:
                return None
            try:
                # Of its own session: what a terminal sends to a command's processes is not for this one.
                process = subprocess.Popen(
                    self._command, env=self._environ, stdin=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:  # no process or descriptor is free
                print(
                    f"elasticrun: warning: cannot start a driver beside this node: {in_words(error)}", file=sys.stderr
                )
                return None
            self._process = process
        code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return code


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Ends it: it leaves the job to another. Blocks until it is dead."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_LETS_GO_S)
    except subprocess.TimeoutExpired:  # stopped, say
        process.kill()
        process.wait()
