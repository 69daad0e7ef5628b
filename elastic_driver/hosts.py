"""Values that name places and processes: hosts, slots, workers, and a worker's place in a round.

Owns the text forms ("host:slots", "host[slot]#attempt") and their parsing. Knows nothing of how hosts are found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_driver.errors import SettingsError

# A host name, an IPv4 address, or (in brackets in the text form) an IPv6 address with an optional zone.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
# More than any machine has cores for. A list with a slip in it must not start workers until the machine is down.
MAX_SLOTS_PER_HOST = 4096
_INTEGER = re.compile(r"(?P<sign>-?)0*(?P<number>[0-9]+)")
_MAX_DIGITS = 18
_WORKER_KEY = re.compile(r"^(?P<hostname>[^\[\]\s]+)\[(?P<slot>\d+)\]#(?P<attempt>\d+)$")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as discovery names it, and how many workers it has room for."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.slots}" if ":" in self.name else f"{self.name}:{self.slots}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """One process in one slot. A restarted process is another worker, with a higher attempt."""

    hostname: str
    slot: int
    attempt: int

    @property
    def key(self) -> str:
        """The text that names this worker in requests and in its environment: ``host[slot]#attempt``."""
        return f"{self.hostname}[{self.slot}]#{self.attempt}"

    @classmethod
    def parse(cls, key: str) -> WorkerId:
        """The inverse of :attr:`key`.

        Raises:
            SettingsError: the text is not of that form.
        """
        match = _WORKER_KEY.match(key)
        if match is None:
            raise SettingsError(f"cannot read {key!r} as a worker: it is not of the form host[slot]#attempt")
        return cls(match["hostname"], int(match["slot"]), int(match["attempt"]))

    def __str__(self) -> str:
        """What users read: ``host[slot]``; the attempt shows only from the second on."""
        return f"{self.hostname}[{self.slot}]" + (f"#{self.attempt}" if self.attempt else "")


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A worker's place in one round (Horovod's SlotInfo): six numbers that every worker of the round agrees on."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def is_host_name(text: str) -> bool:
    """Whether this can name a host: a name, an IPv4 or an IPv6 address (without brackets)."""
    return bool(_NAME.fullmatch(text) or _IPV6.fullmatch(text))


def parse_host(text: str, *, default_slots: int | None) -> Host:
    """Reads ``host``, ``host:slots``, ``[ipv6]`` or ``[ipv6]:slots``.

    Args:
        text: one host, surrounding space allowed.
        default_slots: slots of a host that names none; None makes that an error.

    Raises:
        SettingsError: the text is not of these forms, or slots is not an integer from 1 to 4096.
    """
    text = text.strip()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or not _IPV6.fullmatch(name) or (rest and not rest.startswith(":")):
            raise SettingsError(f"cannot read {text!r} as a host: expected [IPv6] or [IPv6]:slots")
        has_slots, slots_text = bool(rest), rest[1:]
    else:
        name, colon, slots_text = text.partition(":")
        has_slots = bool(colon)
        if ":" in slots_text:
            raise SettingsError(f"cannot read {text!r} as a host: write an IPv6 address in brackets, as [::1]:2")
        if not _NAME.fullmatch(name):
            raise SettingsError(f"cannot read {text!r} as a host: expected host or host:slots")
    if not has_slots:
        if default_slots is None:
            raise SettingsError(
                f"cannot tell how many slots host {name!r} has: write {name}:SLOTS, or give --slots-per-host"
            )
        return Host(name, default_slots)
    digits = _INTEGER.fullmatch(slots_text)
    if digits is None:
        raise SettingsError(f"cannot read {text!r} as a host: slots {slots_text!r} is not an integer")
    # Python reads no integer of thousands of digits; that it is too many is seen without.
    slots = MAX_SLOTS_PER_HOST + 1 if len(digits["number"]) > _MAX_DIGITS else int(digits["number"])
    if digits["sign"] or slots < 1:
        raise SettingsError(f"cannot use host {text!r}: slots must be at least 1, not {slots_text}")
    if slots > MAX_SLOTS_PER_HOST:
        raise SettingsError(f"cannot use host {text!r}: slots must be at most {MAX_SLOTS_PER_HOST}, not {slots_text}")
    return Host(name, slots)


def parse_hosts(lines: Iterable[str], *, default_slots: int | None) -> tuple[Host, ...]:
    """Reads the lines of a discovery script: one host each; blank lines and ``#`` comments are skipped, order is kept.

    Raises:
        SettingsError: a line is not a host, or names one that an earlier line named; the message has its number.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        try:
            host = parse_host(text, default_slots=default_slots)
        except SettingsError as error:
            raise SettingsError(f"line {number}: {error}") from None
        if host.name in line_of:
            raise SettingsError(
                f"line {number}: host {host.name!r} is named twice (first on line {line_of[host.name]})"
            )
        line_of[host.name] = number
        hosts.append(host)
    return tuple(hosts)


def total_slots(hosts: Sequence[Host]) -> int:
    """Sum of the hosts' slots."""
    return sum(host.slots for host in hosts)
