"""Values that identify places and processes: hosts, slots, workers, and a worker's place in a round.

Owns the text forms ("host:slots rack=a spot", "host[slot]#attempt") and their parsing. Knows nothing of discovery.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_driver.errors import SettingsError

# A host name, an IPv4 address, or (in brackets in the text form) an IPv6 address with an optional zone.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
# A DNS name has at most 253 characters. It is in the environment of each worker, and in everything that is logged.
_MAX_NAME = 255
# More than any machine has cores for. A typo in a list must not start workers until the machine is down.
MAX_SLOTS_PER_HOST = 4096
_INTEGER = re.compile(r"(?P<sign>-?)0*(?P<number>[0-9]+)")
_MAX_DIGITS = 18
# Accepts the labels of Kubernetes' nodes, such as topology.kubernetes.io/zone=eu-1a.
_LABEL = re.compile(r"(?P<key>[A-Za-z]([A-Za-z0-9._/-]*[A-Za-z0-9])?)(=(?P<value>[A-Za-z0-9._:/@+-]+))?")
MAX_LABELS = 32
_MAX_LABEL_PART = 63
# Words in the host lists of other launchers, which must not become labels by mistake.
_NO_LABELS = frozenset(("slots", "max_slots", "max-slots"))
RACK, PROTECTED = "rack", "protected"
"""The labels with a meaning here; all others are the user's."""
CHIEF = "chief"
"""In the place of a host's name: the chief, a process on the driver's own machine."""
_WORKER_KEY = re.compile(r"^(?P<hostname>[^\[\]\s]+)\[(?P<slot>\d+)\]#(?P<attempt>\d+)$")


def is_loopback(host: str) -> bool:
    """Whether this name or address means the machine itself, on each machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def with_number(host: str, number: int) -> str:
    """Format ``HOST:NUMBER``, a port or a number of slots, with brackets around an IPv6 address."""
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as discovery lists it, with its capacity for workers.

    Attributes:
        name: of the machine.
        slots: the number of workers that it can run.
        labels: ``key=value`` or a bare word each, in the order of the list; keys are unique.
        incarnation: counts the machines that have had this name while it was listed. A failure or a drain of one does
            not apply to the next.
    """

    name: str
    slots: int
    labels: tuple[str, ...] = ()
    incarnation: int = 0

    @property
    def rack(self) -> str:
        """The value of its label ``rack``; "" if it has none."""
        return next((value for key, _, value in map(_parts, self.labels) if key == RACK), "")

    @property
    def protected(self) -> bool:
        """Whether it has the label ``protected``."""
        return PROTECTED in self.labels

    def __str__(self) -> str:
        return " ".join((with_number(self.name, self.slots), *self.labels))


@dataclass(frozen=True, slots=True)
class Departure:
    """The announcement, by a discovery source, that a host will go away soon.

    Attributes:
        hostname: of the host.
        why: in words, "its pod is deleted".
        within_s: the time left until its machine is gone, seconds; None if unknown.
    """

    hostname: str
    why: str
    within_s: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """One process in one slot. A restarted process is another worker, with a higher attempt."""

    hostname: str
    slot: int
    attempt: int

    @property
    def key(self) -> str:
        """The text that identifies this worker in requests and in its environment: ``host[slot]#attempt``."""
        return f"{self.hostname}[{self.slot}]#{self.attempt}"

    @classmethod
    def parse(cls, key: str) -> WorkerId:
        """Parse a key; the inverse of :attr:`key`.

        Raises:
            SettingsError: the text is not of that form.
        """
        match = _WORKER_KEY.match(key)
        if match is None:
            raise SettingsError(f"cannot read {key!r} as a worker: it is not of the form host[slot]#attempt")
        return cls(match["hostname"], int(match["slot"]), int(match["attempt"]))

    def __str__(self) -> str:
        """Format it for users: ``host[slot]``, with the attempt only from the second on."""
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
    """Whether this is a valid host name, IPv4 or IPv6 address (without brackets)."""
    return len(text) <= _MAX_NAME and bool(_NAME.fullmatch(text) or _IPV6.fullmatch(text))


def _parts(label: str) -> tuple[str, str, str]:
    return label.partition("=")


def parse_labels(words: Sequence[str]) -> tuple[str, ...]:
    """Parse labels, each ``key=value`` or a bare word.

    Raises:
        SettingsError: a word is not a label, a key is not unique, or there are too many.
    """
    seen: set[str] = set()
    for word in words:
        match = _LABEL.fullmatch(word)
        shown = repr(word if len(word) <= 2 * _MAX_LABEL_PART else word[: 2 * _MAX_LABEL_PART] + "…")
        if match is None and word.isdecimal():
            raise SettingsError(f"cannot read {shown} as a label: slots are written as host:slots")
        if match is None:
            raise SettingsError(
                f"cannot read {shown} as a label: expected key=value or a word, of letters, digits and ._/-, "
                "with a letter first (in a value :@+ too)"
            )
        key, value = match["key"], match["value"]
        if max(len(key), len(value or "")) > _MAX_LABEL_PART:
            raise SettingsError(
                f"cannot use the label {shown}: key and value have at most {_MAX_LABEL_PART} characters"
            )
        if key in _NO_LABELS:
            raise SettingsError(f"cannot use the label {shown}: slots are written as host:slots")
        if key == RACK and value is None:
            raise SettingsError(f"cannot use the label {shown}: it needs a value, as in {RACK}=r1")
        if key == PROTECTED and value is not None:
            raise SettingsError(f"cannot use the label {shown}: it has no value; a host without it is not protected")
        if key in seen:
            raise SettingsError(f"the label {key!r} is there twice")
        seen.add(key)
    if len(words) > MAX_LABELS:
        raise SettingsError(f"{len(words)} labels are too many for a host: the most is {MAX_LABELS}")
    return tuple(words)


def parse_host(text: str, *, default_slots: int | None, least_slots: int = 1) -> Host:
    """Parse ``host``, ``host:slots``, ``[ipv6]`` or ``[ipv6]:slots``, followed by the host's labels.

    Args:
        text: one host; surrounding space is allowed.
        default_slots: slots of a host without a number of slots; None makes that an error.
        least_slots: the smallest number of slots allowed.

    Raises:
        SettingsError: the text is not of these forms, or slots is not an integer from the least to 4096.
    """
    place, *words = text.split() or [""]
    try:
        labels = parse_labels(words)
    except SettingsError as error:
        raise SettingsError(f"host {place!r}: {error}") from None
    host = _parse_place(place, default_slots, least_slots)
    return replace(host, labels=labels) if labels else host


def _parse_place(text: str, default_slots: int | None, least_slots: int) -> Host:
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
    if len(name) > _MAX_NAME:
        raise SettingsError(f"cannot use host {name[:40]}...: a host's name has at most {_MAX_NAME} characters")
    if not has_slots:
        if default_slots is None:
            raise SettingsError(
                f"cannot tell how many slots host {name!r} has: write {name}:SLOTS, or give --slots-per-host"
            )
        return Host(name, default_slots)
    digits = _INTEGER.fullmatch(slots_text)
    if digits is None:
        raise SettingsError(f"cannot read {text!r} as a host: slots {slots_text!r} is not an integer")
    # Python parses no integer of thousands of digits; that is too many slots anyway.
    slots = MAX_SLOTS_PER_HOST + 1 if len(digits["number"]) > _MAX_DIGITS else int(digits["number"])
    if digits["sign"] or slots < least_slots:
        raise SettingsError(f"cannot use host {text!r}: slots must be at least {least_slots}, not {slots_text}")
    if slots > MAX_SLOTS_PER_HOST:
        raise SettingsError(f"cannot use host {text!r}: slots must be at most {MAX_SLOTS_PER_HOST}, not {slots_text}")
    return Host(name, slots)


def parse_hosts(lines: Iterable[str], *, default_slots: int | None, least_slots: int = 1) -> tuple[Host, ...]:
    """Parse the lines of a discovery script: one host each, in this order, without blank lines and ``#`` comments.

    Args:
        lines: the list.
        default_slots, least_slots: see :func:`parse_host`. A host with 0 slots, if that is allowed, is omitted.

    Raises:
        SettingsError: a line is not a host, or repeats an earlier line's host; the message has its number.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        try:
            host = parse_host(text, default_slots=default_slots, least_slots=least_slots)
        except SettingsError as error:
            raise SettingsError(f"line {number}: {error}") from None
        if host.name in line_of:
            raise SettingsError(
                f"line {number}: host {host.name!r} is named twice (first on line {line_of[host.name]})"
            )
        line_of[host.name] = number
        if host.slots:
            hosts.append(host)
    return tuple(hosts)


def in_natural_order(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Sort hosts without an order of their own by name, with worker-2 before worker-10."""
    return tuple(sorted(hosts, key=lambda host: natural_key(host.name)))


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key for names that puts worker-2 before worker-10."""
    return _runs(name), name


def _runs(name: str) -> list[tuple[int, str]]:
    """Return the name's runs of digits and of other characters, as a sort key."""
    runs = re.findall(r"[0-9]+|[^0-9]+", name)
    numbers = [run.lstrip("0") if run[0] in "0123456789" else None for run in runs]
    # The longer of two numbers is the larger one; Python parses none of thousands of digits.
    return [(-1, run) if number is None else (len(number), number) for run, number in zip(runs, numbers, strict=True)]


def total_slots(hosts: Sequence[Host]) -> int:
    """Return the sum of the hosts' slots."""
    return sum(host.slots for host in hosts)
