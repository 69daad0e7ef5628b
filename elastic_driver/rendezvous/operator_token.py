"""The file with the operator's key, which allows its holder to ask for a job's status, drain hosts and end the job.

Owns the file's content and how it is read: by commands, and by a driver that is given its key in advance.
"""

from __future__ import annotations

from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.credentials import KEY_BYTES
from elastic_driver.rendezvous.token_file import MOST_BYTES, weakness
from elastic_driver.system.safe_files import read_named


def read_operator_key(path: Path) -> bytes:
    """Return the key in a file, stripped of white space. Blocks while a pipe is written, for 30 s at most.

    Raises:
        SettingsError: the file cannot be read, or does not hold a key.
    """
    try:
        text = read_named(path, MOST_BYTES).decode()
        key = bytes.fromhex(text.strip())
    except OSError as error:
        raise SettingsError(f"cannot read the token file {path}: {in_words(error)}") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(
            f"cannot use the file {path} as a token: it does not hold a key of {2 * KEY_BYTES} hexadecimal digits"
        )
    if why := weakness(key.hex()):
        raise SettingsError(f"cannot use the file {path} as a token: {why}")
    return key
