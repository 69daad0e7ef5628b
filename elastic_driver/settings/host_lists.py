"""Fixed hosts as users write them: ``-H HOST:N,HOST:N`` and hostfiles. Owns the two notations, and reads the file.

In both, a host's labels stand behind it.
"""

from __future__ import annotations

from pathlib import Path

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.hosts import Host, parse_host, parse_hosts
from elastic_driver.system.safe_files import read_named

# Room for 65,536 hosts with names as long as names can be.
_HOSTFILE_BYTES = 20 << 20


def parse_list(text: str, default_slots: int) -> tuple[Host, ...]:
    """Reads ``HOST:N,HOST:N``.

    Raises:
        SettingsError: a host cannot be read, or is named twice.
    """
    try:
        hosts = [parse_host(word, default_slots=default_slots) for word in text.split(",") if word.strip()]
    except SettingsError as error:
        raise SettingsError(f"cannot read -H {text!r}: {error}") from None
    names = [host.name for host in hosts]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise SettingsError(f"cannot read -H {text!r}: host {twice!r} is named twice")
    return tuple(hosts)


def read_hostfile(path: Path, default_slots: int) -> tuple[Host, ...]:
    """Reads lines ``HOST slots=N`` (or ``HOST:N``, or ``HOST``), each with labels behind that or without.

    Raises:
        SettingsError: the file cannot be read, or a line of it.
    """
    try:
        lines = read_named(path, _HOSTFILE_BYTES).decode().splitlines()
    except OSError as error:
        raise SettingsError(f"cannot read the hostfile {path}: {in_words(error)}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"cannot read the hostfile {path}: it is not UTF-8 text") from error
    plain = []
    for line in lines:
        words = line.split("#", 1)[0].split()
        if len(words) > 1 and words[1].startswith("slots="):
            words[:2] = [f"{words[0]}:{words[1].removeprefix('slots=')}"]
        plain.append(" ".join(words))
    try:
        return parse_hosts(plain, default_slots=default_slots)
    except SettingsError as error:
        raise SettingsError(f"cannot read the hostfile {path}: {error}") from None
