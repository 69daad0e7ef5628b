"""Fixed hosts as users write them: ``-H HOST:N,HOST:N`` and hostfiles. Owns the two notations, and reads the file.

In both, a host's labels may follow it, and the login name for ssh may precede it: ``me@a:2``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.hosts import Host, parse_host, parse_hosts
from elastic_driver.system.safe_files import read_named

# Room for 65,536 hosts with names of the greatest length.
_HOSTFILE_BYTES = 20 << 20
# Cannot be mistaken for an option of ssh, nor be expanded by a shell.
_LOGIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class HostList(NamedTuple):
    """The hosts in either notation.

    Attributes:
        hosts: in their order.
        logins: login names for ssh, by host, where given.
    """

    hosts: tuple[Host, ...]
    logins: dict[str, str]


def parse_list(text: str, default_slots: int) -> HostList:
    """Parse ``HOST:N,HOST:N``.

    Raises:
        SettingsError: a host cannot be parsed, or is named twice.
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
    """Split off the login name in front of a host, "" for none."""
    place, space, labels = text.strip().partition(" ")
    login, at, host = place.rpartition("@")
    if at and not (host and _LOGIN.fullmatch(login)):
        raise SettingsError(f"cannot read {login!r} as a login name before host {host!r}")
    return login, host + space + labels


def _with_logins(hosts: Sequence[Host], parts: Sequence[tuple[str, str]]) -> HostList:
    logins = (login for login, host in parts if host)
    return HostList(tuple(hosts), {host.name: login for host, login in zip(hosts, logins, strict=True) if login})


def read_hostfile(path: Path, default_slots: int) -> HostList:
    """Parse lines ``HOST slots=N`` (or ``HOST:N``, or ``HOST``), each optionally followed by labels.

    Raises:
        SettingsError: the file cannot be read, or a line cannot be parsed.
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
