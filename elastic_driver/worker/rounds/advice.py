"""Advice about what a training script has most likely forgotten: its commits, or ``elastic.run``. Given once, by rank
0.

Owns the step count that decides it. A step costs an addition and a comparison; everything else happens once, or in the
watch thread. Knows nothing of rounds but this process's rank. It does not advise on what it cannot know.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import sys
import threading
import time
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from elastic_driver.system.installed import within_installed

_log = logging.getLogger("elastic_driver.worker")

STEPS = 100
"""Steps of an optimizer before any advice. Horovod's examples commit every tenth batch or more often."""
LONG_S = 60.0
"""Seconds before any advice if there was a step; or, without an optimizer, OPERATIONS of the engine."""
OPERATIONS = 100

_NEVER = sys.maxsize
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = ("elastic_driver", "horovod")
# Words that make a file worth a closer look.
_WORDS = re.compile(rb"commit|check_host_updates|\bsave\b", re.IGNORECASE)


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"elastic_driver: warning: {text}", file=sys.stderr, flush=True)


class Advice:
    """Watches one process. The training thread calls all methods except ``look``.

    Args:
        say: prints advice for the user.
        clock: seconds.
    """

    def __init__(self, say: Callable[[str], None] = _say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._rank = -1
        self._may_change = False
        self._thread = 0
        self._has_run = False  # elastic.run was entered
        self._function: Callable[..., object] | None = None  # the function it has called
        self._commits: Callable[[], int] = lambda: 0
        self._is_told: set[str] = set()
        self._begin(0, due=_NEVER)

    def _begin(self, finished: int, *, due: int = STEPS) -> None:
        """Reset the counters."""
        self._since = self._clock()
        self._finished = finished
        self._steps = 0
        self._due = due  # the step at which advice may be due

    def enter_round(self, rank: int, *, may_change: bool) -> None:
        """Note this process's rank; -1 if it must never advise.

        Args:
            rank: its rank.
            may_change: whether hosts may join and leave.
        """
        self._rank, self._may_change, self._thread = rank, may_change, threading.get_ident()
        if not self._has_run:
            self._begin(0, due=STEPS if rank == 0 and may_change else _NEVER)

    def enter_run(self, function: Callable[..., object], commits: Callable[[], int], finished: int) -> None:
        """Note that ``elastic.run`` is about to call a function.

        Args:
            function: the function.
            commits: returns the commits of its state.
            finished: operations that the engine has finished so far.
        """
        self._has_run = True
        self._function, self._commits = function, commits
        self._begin(finished, due=STEPS if self._rank == 0 and self._may_change else _NEVER)

    def leave_run(self) -> None:
        """Note that the function has returned: the rest of the script is not watched."""
        self._function = None
        self._due = _NEVER

    def note_step(self) -> None:
        """Count a step of an optimizer."""
        self._steps += 1
        if self._steps >= self._due:
            self._judge(sys._getframe(1))

    def look(self, finished: int) -> None:
        """Check, about every half minute, in the watch thread.

        Args:
            finished: operations that the engine has finished so far.
        """
        if self._due == _NEVER or self._clock() - self._since < LONG_S:
            return
        if self._steps:
            self._due = 0  # the next step shows the place
        elif finished - self._finished >= OPERATIONS:
            self._judge(sys._current_frames().get(self._thread))

    def _judge(self, frame: FrameType | None) -> None:
        self._due = _NEVER
        try:
            self._decide(frame)
        except Exception:  # whatever fails here, training must not notice
            _log.debug("elastic_driver: cannot give advice", exc_info=True)

    def _decide(self, frame: FrameType | None) -> None:
        took_s = self._clock() - self._since
        if self._steps < STEPS and took_s < LONG_S:  # the counters were reset just now
            self._due = STEPS
            return
        # Without an optimizer it is unknown whether it trains; an evaluation loses its work in the same way.
        what = f"trained for {self._steps} steps" if self._steps >= STEPS else f"run for {took_s:.0f} s"
        if self._function is not None:
            self._judge_commits(self._function, what)
        elif not self._has_run and "run" not in self._is_told:
            self._is_told.add("run")
            self._say(
                f"{_place(frame)} has {what} outside of elastic.run: if a worker is lost, all others fail with "
                "HorovodInternalError instead of continuing, and added hosts are not used. Put the loop into a "
                "function decorated with @hvd.elastic.run, and commit its state (docs/first-script.md)"
            )

    def _judge_commits(self, function: Callable[..., object], what: str) -> None:
        if self._commits() or "commit" in self._is_told or may_commit(function):
            return
        self._is_told.add("commit")
        self._say(
            f"{_name_of(function)} has {what} without a commit: if a worker is lost, the others return to the "
            "state that they started with, and added or leaving hosts are noticed only at commits. Add this line "
            "to its loop, after the step: state.commit()"
        )


def _name_of(function: Callable[..., object]) -> str:
    function = inspect.unwrap(function)
    name, code = getattr(function, "__name__", "the training function"), getattr(function, "__code__", None)
    return f"{name}()" + (f" ({_file(code)}:{code.co_firstlineno})" if isinstance(code, CodeType) else "")


def _file(code: CodeType) -> str:
    return os.path.basename(code.co_filename)


def _place(frame: FrameType | None) -> str:
    """Return the line of the user's own code that a thread is in, and its function."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "this script"
    where = f"{_file(frame.f_code)}:{frame.f_lineno}"
    name = frame.f_code.co_name
    return where if name.startswith("<") else f"{name}() ({where})"


def _is_users(path: str) -> bool:
    """Return whether a file belongs to neither this package, nor Python's library, nor anything installed."""
    return not path.startswith((_PACKAGE, _LIBRARY, "<")) and not within_installed(path)


def may_commit(function: Callable[..., object]) -> bool:
    """Return whether the code that a training function may run contains a commit, even a rare one.

    Checks the user's own modules, and installed ones that import this library. Unreadable code counts as containing
    one.
    """
    try:
        code = getattr(inspect.unwrap(function), "__code__", None)
        if not isinstance(code, CodeType):
            return True
        first = code.co_varnames[0] if code.co_argcount else ""
        return any(_has_commit(path, first) for path in {code.co_filename, *_sources()})
    except (OSError, ValueError, SyntaxError, tokenize.TokenError):
        return True


def _sources() -> Iterator[str]:
    """Yield files that may contain a commit. Module attributes are never accessed: many import or warn."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if issubclass(type(module), ModuleType)]
    ours = {id(module) for name, module in modules if name.partition(".")[0] in _OURS}
    for _, module in modules:
        names = ModuleType.__getattribute__(module, "__dict__")
        path = names.get("__file__")
        if not isinstance(path, str) or path.startswith(_PACKAGE):
            continue
        if _is_users(path) or any(id(value) in ours for value in list(names.values())):
            yield path  # a compiled module has its names in it, and is not text


def _has_commit(path: str, state: str) -> bool:
    """Return whether a file's code, not its comments, names a commit, a check for host updates, or a save of the
    state.
    """
    text = Path(path).read_bytes()
    if not _WORDS.search(text):
        return False
    before = ["", ""]
    for token in tokenize.tokenize(io.BytesIO(text).readline):  # unlike a parser it does not warn about the text
        name = token.string.strip("\"'") if token.type == tokenize.STRING else token.string
        is_name = token.type in (tokenize.NAME, tokenize.STRING) and name.isidentifier()
        if is_name and ("commit" in name.lower() or name == "check_host_updates"):
            return True
        if [*before, name] == [state, ".", "save"]:
            return True
        before = [before[1], token.string]
    return False


_advice = Advice()


def advice() -> Advice:
    """Return the process's one Advice."""
    return _advice
