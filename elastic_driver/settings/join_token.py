"""The join token: the secret with which hosts join a running job, as its users keep it in a file.

Owns what may be one, and how it is read. It is never an argument of a command, which everybody on the machine can read.
"""

from __future__ import annotations

import stat
from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.token_file import MOST_BYTES, weakness
from elastic_driver.system.mounted_volumes import is_in_mounted_volume
from elastic_driver.system.safe_files import read_named

ENV_JOIN_TOKEN = "ELASTIC_DRIVER_JOIN_TOKEN"
ENV_JOIN_TOKEN_FILE = "ELASTIC_DRIVER_JOIN_TOKEN_FILE"


def read_join_token(path: Path) -> str:
    """The token in a file, without the white space around it. Blocks while a pipe is written, for 30 s at most.

    Raises:
        SettingsError: the file cannot be read, or holds none.
    """
    try:
        data = read_named(path, MOST_BYTES)
    except OSError as error:
        raise SettingsError(f"cannot read the join token's file {path}: {in_words(error)}") from error
    return join_token(data, f"the file {path}")


def join_token(data: bytes, source: str) -> str:
    """The token in what was read, without the white space around it.

    Args:
        data: as read.
        source: for messages, which never quote the token.

    Raises:
        SettingsError: it is none.
    """
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        raise SettingsError(f"cannot use {source} as a join token: it is not UTF-8 text") from None
    if why := weakness(text):
        raise SettingsError(f"cannot use {source} as a join token: {why}")
    return text


def who_else_reads(path: Path) -> str:
    """Who, besides this user, root and the file's group, may read it, in words; "" for nobody.

    A Secret that Kubernetes has mounted is there for one pod's containers only, and its mode is the manifest's.
    """
    if is_in_mounted_volume(path):
        return ""
    try:
        status = path.stat()
    except OSError:
        return ""
    return "all users may read it" if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH else ""
