"""What the end of a command that should have started an agent means, in the words of the failing program.

Owns the choice of the decisive line, and which reasons no further try can change. Runs nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from elastic_driver.launch.dial.dialler import DialFailure

_CLOSED = "kex_exchange_identification: Connection closed by remote host"
# Lines that frame others or accompany them, and are no reason by themselves.
_NOISE = re.compile(
    r"@+$|@ .* @$"  # the frame of ssh's warning of a changed key
    r"|\++ "  # a shell's `set -x`
    r"|Warning: Permanently added "
    r"|Connection (closed|reset|to) .*UNKNOWN port 65535"  # ssh, about the pipe to its jump host
    rf"|{_CLOSED}"  # a result of the reason reported before, or the reason itself
    r"|env: use -"  # advice
    r"|(stdio forwarding failed|mux_client_request_session: .*)$"
    r"|srun: error: .*: task \d+: Exited with exit code \d+$"
    r"|srun: cluster configuration lacks support for cpu binding$"
    r"|command terminated with (non-zero )?exit code"
)
# Causes that a user has to fix first: a key, a file, an installation.
_PERMANENT = re.compile(
    r"Permission denied \("  # ssh: it accepts no key, and no agent of the user's
    r"|Too many authentication failures"
    r"|Host key verification failed"
    r"|REMOTE HOST IDENTIFICATION HAS CHANGED"
    r"|No user exists for uid"
    r"|No module named "  # this package, or one that it needs
    r"|Unknown option: -P"
    r"|(Bad configuration option|Bad owner or permissions on|Missing argument|missing argument)"  # ssh's configuration
)
_CHANGED_KEY = re.compile(r"Host key for .* has changed")
_UNKNOWN_KEY = "its host key is unknown here: log in once manually, or see StrictHostKeyChecking in ssh's configuration"
# Exit codes of a shell, env and a container runtime: no such program, and one that cannot be executed.
_NO_PROGRAM = (126, 127)
_SAYS_NO_PROGRAM = re.compile(
    r"command terminated with (non-zero )?exit code 12[67]\b"  # kubectl, whose own exit code differs
    r"|slurmstepd.*: error: execve\(\): "
)
_OLD_PYTHON = "Python 3.11 or later is required there; select one with --remote-python"
_NO_PYTHON = "cannot run Python by this name there; select another with --remote-python"


def failure(program: str, host: str, returncode: int, lines: Sequence[str], *, hidden: str = "") -> DialFailure:
    """Return why no agent came up.

    Args:
        program: what was run here: "ssh", "kubectl"; "" for the agent itself.
        host: on which the agent was to start.
        returncode: of the program; negative for a signal's number.
        lines: the last lines of its standard error.
        hidden: a word not to be shown.
    """
    said = [(line.replace(hidden, "...") if hidden else line).strip() for line in lines]
    no_program = returncode in _NO_PROGRAM or any(_SAYS_NO_PROGRAM.match(line) for line in said)
    words = _words(said) or _how(returncode)
    if no_program:
        words += f" ({_NO_PYTHON})"
    elif words.startswith("Unknown option"):
        words += f" ({_OLD_PYTHON})"
    prefix = f"{program}: " if program and not words.startswith(f"{program}: ") else ""
    named = "" if re.search(rf"(?<![\w.:-]){re.escape(host)}(?![\w-])", words) else f"{host}: "
    permanent = no_program or any(_PERMANENT.search(line) for line in said)
    # The rest of the sentence follows it.
    words = words if words.endswith("..") else words.removesuffix(".")
    return DialFailure(prefix + named + words, permanent=permanent)


def _words(said: Sequence[str]) -> str:
    telling = [line for line in said if line and not _NOISE.match(line)]
    telling = telling or [line for line in said if line.startswith(_CLOSED)]
    if not telling:
        return ""
    # The reason that ended the program may be before its last line.
    decisive = [line for line in telling if _PERMANENT.search(line)]
    words = (decisive or telling)[-1]
    if words != "Host key verification failed.":
        return words
    changed = next(filter(_CHANGED_KEY.match, telling), None)
    return f"{changed} {words}" if changed else f"{words.rstrip('.')} ({_UNKNOWN_KEY})"


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode} without output"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    return f"was killed by {name}"
