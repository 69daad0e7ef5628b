"""Files with tokens: that of ``elasticrun rendezvous``, and the one with which hosts join a job.

Owns which texts are acceptable, and how a token is read and made. A token is never an argument of a command, which
everybody on the machine can read, and is never sent.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.safe_files import read_named

ENV_TOKEN_FILE = "ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE"
RENDEZVOUS, JOIN, JOURNAL_KEY = "rendezvous", "join", "journal"  # kinds of tokens

# Sixteen random characters have 64 bits or more. A file longer than this is not a token but a mistake.
LEAST_CHARACTERS = 16
MOST_BYTES = 4096
# 16 random hexadecimal digits have this few different ones once in two million times.
_LEAST_DIFFERENT = 5


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(32)


def weakness(token: str) -> str:
    """Return why a text cannot be a secret; "" if no flaw is found. Whether it is random cannot be seen."""
    length = len(token)
    if length < LEAST_CHARACTERS:
        return f"it has {length} characters; at least {LEAST_CHARACTERS} are required"
    if not token.isprintable():
        return "it has more than one line, or control characters"
    if len(set(token)) < _LEAST_DIFFERENT:
        return (
            f"it has only {len(set(token))} different characters, so it can be guessed: create one with elasticrun "
            "token"
        )
    period = next((size for size in range(1, LEAST_CHARACTERS) if token.startswith(token[size:])), length)
    if 2 * period <= length:
        return f"it repeats {period} characters, so it can be guessed: create one with elasticrun token"
    return ""


def read_token(path: Path, kind: str = RENDEZVOUS) -> str:
    """Return the token in a file, stripped of white space. Blocks while a pipe is written, for 30 s at most.

    Args:
        path: the file.
        kind: the kind of token, for messages.

    Raises:
        SettingsError: the file cannot be read, or holds no acceptable token.
    """
    try:
        data = read_named(path, MOST_BYTES)
    except OSError as error:
        raise SettingsError(f"cannot read the {kind} token file {path}: {in_words(error)}") from error
    return token_in(data, f"the file {path}", kind)


def token_in(data: bytes, source: str, kind: str) -> str:
    """Return the token in the data read, stripped of white space.

    Args:
        data: the data.
        source: its source, for messages, which never quote the token.
        kind: the kind of token, for messages.

    Raises:
        SettingsError: it is not an acceptable token.
    """
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        raise SettingsError(f"cannot use {source} as a {kind} token: it is not UTF-8 text") from None
    if why := weakness(text):
        raise SettingsError(f"cannot use {source} as a {kind} token: {why}")
    return text


def make_token(path: Path) -> str:
    """Write a random token to a new file that only this user can read, and return it.

    Raises:
        FileExistsError: the file exists already.
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
    """Write a new file that only this user can read. An existing file is never overwritten: it may be readable by
    others, or be theirs.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secret}\n")
