"""The command line that starts an agent: its words, and how they survive a login shell.

Owns both. A dialler runs them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from elastic_driver.launch.dial.here import AGENT, source_folder
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Bootstrap

# Unquoted words that sh, bash, zsh, csh and fish all leave as they are; no "=" or "%" at the beginning.
_PLAIN = re.compile(r"[A-Za-z0-9_@+:,./-][A-Za-z0-9_@%+=:,./-]*")
# Characters that one of them interprets inside single quotes: fish a backslash, csh an exclamation mark.
_ALWAYS_ESCAPED = re.compile(r"(['\\!])")
# From the start of an agent; the driver sends its bootstrap before that.
_GIVEN_WITHIN_S = 10


def agent_words(python: str = "", pythonpath: str | None = None, module: str = AGENT) -> list[str]:
    """Return the agent's command line on another host, as words.

    Args:
        python: the interpreter there; "" for the path of the one that runs here.
        pythonpath: the folder of the package there; "" if python finds it by itself, None for :func:`source_folder`.
        module: what to run.
    """
    folder = source_folder() if pythonpath is None else pythonpath
    # -P: files in the home directory there must not be mistaken for Python's modules.
    words = [python or sys.executable, "-P", "-m", module]
    return ["env", f"PYTHONPATH={folder}", *words] if folder else words


def with_limit(words: Sequence[str]) -> list[str]:
    """Return the words for an agent that ends with NOTHING_GIVEN if nothing arrives on its standard input."""
    return [*words, "--given-within", str(_GIVEN_WITHIN_S)]


def with_bootstrap(words: Sequence[str], bootstrap: Bootstrap) -> list[str]:
    """Return the words for an agent that gets its bootstrap from the command line."""
    return [*words, "--bootstrap", bootstrap.to_word()]


def quoted(words: Sequence[str]) -> str:
    """Return one line that a login shell (sh, bash, zsh, csh or fish) splits into these words.

    Raises:
        CommandNotFoundError: a word has a line break, which csh does not support.
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if "\n" in word or "\r" in word or "\0" in word:
        raise CommandNotFoundError(f"cannot start an agent on another host: {word!r} contains a line break")
    if _PLAIN.fullmatch(word):
        return word
    pieces = _ALWAYS_ESCAPED.split(word)
    escaped = (("\\" + piece if index % 2 else f"'{piece}'") for index, piece in enumerate(pieces) if piece)
    return "".join(escaped) or "''"
