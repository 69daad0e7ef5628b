"""Fixed hosts as users write them: ``-H HOST:N,HOST:N`` and hostfiles. Owns the two notations, and reads the file.

In both, a host's labels stand behind it, and in front of it may be the name with which ssh logs in there: ``me@a:2``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.hosts import Host, parse_host, parse_hosts
from elastic_driver.system.safe_files import read_named

# Room for 65,536 hosts with names as long as names can be.
_HOSTFILE_BYTES = 20 << 20
# No option of ssh's, and nothing that a shell would read.
_LOGIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class HostList(NamedTuple):
    """What is read of either.

    Attributes:
        hosts: in their order.
        logins: by the name of a host, that with which ssh logs in there, where it is given.
    """

    hosts: tuple[Host, ...]
    logins: dict[str, str]


def parse_list(text: str, default_slots: int) -> HostList:
    """Reads ``HOST:N,HOST:N``.

    Raises:
        SettingsError: a host cannot be read, or is named twice.
    """
    try:
        parts = [_parts(word) for word in text.split(",") if word.strip()]
        hosts = [parse_host(word, default_slots=default_slots) for _, word in parts]
    except SettingsError as error:
        raise SettingsError(f"cannot read -H {text!r}: {error}") from None
    names = [host.name for host in hosts]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise SettingsError(f"cannot read -H {text!r}: host {twice!r} is named twice")
    return _with_logins(hosts, parts)


def _parts(text: str) -> tuple[str, str]:
    """The name in front of a host, "" for none; and the rest."""
    place, space, labels = text.strip().partition(" ")
    login, at, host = place.rpartition("@")
    if at and not (host and _LOGIN.fullmatch(login)):
        raise SettingsError(f"cannot read {login!r} as a login name, in front of host {host!r}")
    return login, host + space + labels


def _with_logins(hosts: Sequence[Host], parts: Sequence[tuple[str, str]]) -> HostList:
    logins = (login for login, host in parts if host)
    return HostList(tuple(hosts), {host.name: login for host, login in zip(hosts, logins, strict=True) if login})


def read_hostfile(path: Path, default_slots: int) -> HostList:
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
        parts = [_parts(line) for line in plain]
        return _with_logins(parse_hosts([line for _, line in parts], default_slots=default_slots), parts)
    except SettingsError as error:
        raise SettingsError(f"cannot read the hostfile {path}: {error}") from None
