"""The end of a process that must not continue: its last message, and a sure exit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

from elastic_driver.worker.rounds.stacks import all_stacks

# How long the message may take: milliseconds, unless standard error is a pipe that nobody reads.
_WORDS_S = 2.0


def end_process(message: str, exit_code: int) -> NoReturn:
    """End this process with a message and the stacks of all its threads. Nothing is cleaned up.

    If standard error does not accept them within 2 s, the process ends without them.
    """
    try:
        text = f"{message}\n{all_stacks()}"
        # A daemon that may block forever in its write; the end of the process ends it.
        writer = threading.Thread(target=_write, args=(text,), name="elastic-last-words", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started any more
            writer.start()
            writer.join(_WORDS_S)
    finally:  # even if a signal handler raises
        os._exit(exit_code)


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # standard error is missing or closed
        sys.stderr.write(text)
        sys.stderr.flush()
