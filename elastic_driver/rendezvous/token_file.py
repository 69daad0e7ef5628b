"""Tokens as their users keep them in files: that of ``elasticrun rendezvous``, and the one with which hosts join a job.

Owns what may be one, how it is read, and how one is made. It is never an argument of a command, which everybody on the
machine can read, and never travels.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.safe_files import read_named

ENV_TOKEN_FILE = "ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE"
RENDEZVOUS, JOIN, JOURNAL_KEY = "rendezvous", "join", "journal"  # the kinds of tokens

# Sixteen characters of a random text are 64 bits or more. What is longer than this is no secret but a wrong file.
LEAST_CHARACTERS = 16
MOST_BYTES = 4096
# Of 16 random hexadecimal digits so few are different once in two million times.
_LEAST_DIFFERENT = 5


def new_token() -> str:
    """One that nobody can guess."""
    return secrets.token_hex(32)


def weakness(token: str) -> str:
    """Why a text cannot be a secret; "" where nothing is seen to be wrong. Whether it is random, nobody can see."""
    length = len(token)
    if length < LEAST_CHARACTERS:
        return f"it has {length} characters, and {LEAST_CHARACTERS} are the least"
    if not token.isprintable():
        return "it has more than one line, or control characters"
    if len(set(token)) < _LEAST_DIFFERENT:
        return f"it has only {len(set(token))} different characters: elasticrun token makes one that cannot be guessed"
    period = next((size for size in range(1, LEAST_CHARACTERS) if token.startswith(token[size:])), length)
    if 2 * period <= length:
        return f"it repeats {period} characters: elasticrun token makes one that cannot be guessed"
    return ""


def read_token(path: Path, kind: str = RENDEZVOUS) -> str:
    """The token in a file, without the white space around it. Blocks while a pipe is written, for 30 s at most.

    Args:
        path: the file.
        kind: for messages: which token it is.

    Raises:
        SettingsError: the file cannot be read, or holds none.
    """
    try:
        data = read_named(path, MOST_BYTES)
    except OSError as error:
        raise SettingsError(f"cannot read the {kind} token's file {path}: {in_words(error)}") from error
    return token_in(data, f"the file {path}", kind)


def token_in(data: bytes, source: str, kind: str) -> str:
    """The token in what was read, without the white space around it.

    Args:
        data: as read.
        source: for messages, which never quote the token.
        kind: likewise, which token it is.

    Raises:
        SettingsError: it is none.
    """
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        raise SettingsError(f"cannot use {source} as a {kind} token: it is not UTF-8 text") from None
    if why := weakness(text):
        raise SettingsError(f"cannot use {source} as a {kind} token: {why}")
    return text


def make_token(path: Path) -> str:
    """A token that nobody can guess, in a new file that only this user can read.

    Raises:
        FileExistsError: there is a file already.
        SettingsError: it cannot be written.
    """
    token = new_token()
    try:
        write_secret(path, token)
    except FileExistsError:
        raise
    except OSError as error:
        raise SettingsError(f"cannot write a token to {path}: {in_words(error)}") from error
    return token


def write_secret(path: Path, secret: str) -> None:
    """Writes a new file that only this user can read. Never over what is there: that may be open to others, or theirs.

    Raises:
        OSError: there is something already, or it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secret}\n")
