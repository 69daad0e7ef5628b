"""The error in the last lines of a process's output.

Owns the distinction of a traceback, or a dump of stacks, from other output. Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic_driver.health.dumps import frame_of, is_head

# A line of a traceback.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# The line that faulthandler prints below all stacks.
_MODULES = "Extension modules: "
# The errors of Python's debugger, and of input(), if nothing can be read.
_NOTHING_TO_READ = ("bdb.BdbQuit", "BdbQuit", "EOFError: EOF when reading a line")
# The line above a traceback's frames.
_BEGIN = "Traceback (most recent call last):"
# Above the traceback of a finaliser or an exit handler that failed, after which Python continues.
_IGNORED = ("Exception ignored in", "Exception ignored while", "Exception ignored on")
# Installed packages, Python's own modules, and what is not a file.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^<")
# The prefix of each line of a traceback, where torch.distributed is initialized.
_RANK = re.compile(r"^\[rank\d+\]: ")


def last_words(lines: Sequence[str], *, of_traceback: bool = False) -> tuple[str, str]:
    """Return a process's last line, and the last line of code that it named, or "".

    Args:
        lines: its last ones.
        of_traceback: whether to return the error of its last traceback, if there is one, whatever came after it:
            progress bars that are closed, warnings of libraries at exit, more lines of a long message.
    """
    plain = [text for line in lines if (text := _RANK.sub("", line).rstrip())]
    dumped = next((number for number in range(len(plain) - 1, -1, -1) if is_head(plain[number])), None)
    if dumped is not None:
        # The process was made to dump its stacks, the innermost frame first, and ended: no error of its own.
        rest = [frame_of(text) for text in plain[dumped + 1 :] if not text.startswith(_MODULES)]
        frames = [frame for frame in rest if frame is not None]
        if len(frames) == len(rest):
            return "", f"{frames[0].file.rpartition('/')[2]}:{frames[0].line}" if frames else ""
    if of_traceback:
        plain = _without_ignored(plain)
    said = [text.strip() for text in plain]
    named = [(number, match) for number, line in enumerate(said) if (match := _FRAME.match(line))]
    if not named:
        return (said[-1] if said else ""), ""
    last = named[-1][0]
    raised = next((text for text in plain[last + 1 :] if not text[0].isspace()), said[-1])
    return (raised if of_traceback else said[-1]), _place(plain, named)


def _without_ignored(lines: list[str]) -> list[str]:
    """Return the lines before an exception that Python ignored at its exit, if they have a traceback of their own."""
    ignored = next((number for number, line in enumerate(lines) if line.startswith(_IGNORED)), len(lines))
    before = lines[:ignored]
    return before if any(_FRAME.match(line.strip()) for line in before) else lines


def _place(lines: list[str], frames: list[tuple[int, re.Match[str]]]) -> str:
    """Return the innermost line of the user's own code in the last traceback; of any code, if it shows none."""
    begin = max((number for number, line in enumerate(lines) if line.endswith(_BEGIN)), default=-1)
    own = [match for number, match in frames if number > begin and not _LIBRARY.search(match["file"])]
    match = own[-1] if own else frames[-1][1]
    return f"{match['file'].rpartition('/')[2]}:{match['line']}"


def waited_for_input(error: str) -> bool:
    """Return whether this is the error of ``breakpoint()`` or ``input()`` with standard input at its end."""
    return error.startswith(_NOTHING_TO_READ)
