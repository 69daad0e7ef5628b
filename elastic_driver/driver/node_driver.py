"""The process beside a node that drives its job, or stands by to drive it: a second run of the node's own command.

Owns that process: it is restarted when it is lost while the job continues, and released when the node's part in the
job is over (:mod:`elastic_driver.system.leash`). Its work, and the outcome of the job, are not handled here.
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

# How long a released driver may take to hand the job over.
_LETS_GO_S = 10.0


class NodeDriver:
    """Keeps that process running. A context manager: on exit the process has ended.

    Args:
        command: its command line.
        environ: its environment, without the variable that marks it as held.
        has_ended: whether the job has ended, as far as known, so that no more are started. Called on another thread.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], *, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._command, self._environ, self._has_ended = command, {**environ, ENV_HELD: "1"}, has_ended
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_refused = self._is_idle = self._is_over = False
        self._thread = threading.Thread(target=self._keep, name="elasticrun-node-driver", daemon=True)

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
        """Whether it cannot drive the job, and has said why: then it is not restarted."""
        with self._changed:
            return self._is_refused

    def wait(self, limit_s: float) -> None:
        """Block until it has ended by itself, or for this long. It is not restarted any more."""
        self._begin_no_more()
        self._thread.join(limit_s)

    def _begin_no_more(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def again(self) -> None:
        """Restart it, if it has ended with its job."""
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
        """Run one. Return its exit code, in Popen's form; None if it could not be started."""
        with self._changed:
            if self._is_over:
                return None
            try:
                # In a session of its own: signals from the terminal to the command's processes do not reach it.
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
    """End the process, which hands the job over. Blocks until it is dead."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_LETS_GO_S)
    except subprocess.TimeoutExpired:  # it is stopped, for example
        process.kill()
        process.wait()
