"""The operator's key, as its users keep it in a file: with it a job is asked for its status, drained and ended.

Owns what such a file holds, and how it is read: by who asks, and by a driver that is given its key beforehand.
"""

from __future__ import annotations

from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.credentials import KEY_BYTES
from elastic_driver.rendezvous.token_file import MOST_BYTES, weakness
from elastic_driver.system.safe_files import read_named


def read_operator_key(path: Path) -> bytes:
    """The key in a file, without the white space around it. Blocks while a pipe is written, for 30 s at most.

    Raises:
        SettingsError: the file cannot be read, or holds none.
    """
    try:
        text = read_named(path, MOST_BYTES).decode()
        key = bytes.fromhex(text.strip())
    except OSError as error:
        raise SettingsError(f"cannot read the token's file {path}: {in_words(error)}") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(
            f"cannot use the file {path} as a token: it does not hold a key of {2 * KEY_BYTES} hexadecimal digits"
        )
    if why := weakness(key.hex()):
        raise SettingsError(f"cannot use the file {path} as a token: {why}")
    return key
