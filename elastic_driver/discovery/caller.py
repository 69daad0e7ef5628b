"""Hosts from an object that lives in another process: that of the program that called ``elastic_driver.run``.

Owns both ends of the socket between that process and the driver's. The object stays where it was made, since it may
hold open connections; a thread there asks it when the driver wants to know, and sends back what it said. A question is
an empty line, an answer a line of JSON. Until a question is answered no other is put, so the object is never asked by
two at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from elastic_driver.errors import DiscoveryError, SettingsError, in_words
from elastic_driver.hosts import Departure, Host, parse_host, parse_labels
from elastic_driver.system.job_clock import CallLater, time_limit

# A list of 4,096 hosts with long names is under 300 KB.
_MAX_ANSWER_BYTES = 1 << 20
_MAX_SAID = 1000
# An object that takes longer is reported while a job waits for it.
_SLOW_S = 2.0
_HOSTS, _ERROR = "hosts", "error"


class Finder(Protocol):
    """What is asked: any object with Horovod's method."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int | Host]:
        """Host name -> slots, or the host with its labels. May block, and raise anything."""


# --- in the caller's process -----------------------------------------------------------------------------------------


def answer_questions(finder: Finder, connection: socket.socket) -> None:
    """Asks the object whenever the driver wants to know. Blocks until the driver's end is closed; closes this one.

    To be run in a thread that may be left behind: who is in an object that hangs cannot be ended.
    """
    with connection, contextlib.suppress(OSError), connection.makefile("rb") as questions:
        for _ in questions:
            connection.sendall(json.dumps(_answer(finder)).encode() + b"\n")


def _answer(finder: Finder) -> dict[str, Any]:
    try:
        found = finder.find_available_hosts_and_slots()
        hosts = [as_host(str(name), value) for name, value in found.items()]
        return {_HOSTS: [[host.name, host.slots, list(host.labels)] for host in hosts]}
    except BaseException as error:  # a thread has nobody else to raise it to, and the job's log is where users look
        reason = traceback.format_exception_only(error)[-1].strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {_ERROR: f"{reason} ({where.filename}:{where.lineno})"[:_MAX_SAID]}


def as_host(name: str, value: int | Host) -> Host:
    """A host as an object gives it, under its name. Raises ValueError."""
    if not isinstance(value, Host):
        return Host(name, int(value))
    if value.name != name:
        raise ValueError(f"it gives host {value.name!r} under the name {name!r}")
    return Host(name, int(value.slots), tuple(map(str, value.labels)))


# --- in the driver's process -----------------------------------------------------------------------------------------


class CallerDiscovery:
    """Asks the caller's object. See HostDiscovery of :mod:`elastic_driver.discovery.source`.

    Args:
        connection: the driver's end; is closed when the job's process ends.
        timeout_s: how long an answer may take.
        call_later: measures that. The loop's, when not given; but that lets none go on over a stop of this process.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout_s: float,
        *,
        call_later: CallLater | None = None,
    ) -> None:
        connection.setblocking(False)
        connection.set_inheritable(False)
        self._connection = connection
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._answer: asyncio.Task[bytes] | None = None  # to the question that was put last, until it is used
        self._asked_at = 0.0
        self._lists_none = False

    def departures(self) -> tuple[Departure, ...]:
        """None: Horovod's method has no word for it."""
        return ()

    def remark(self) -> str:
        """That it takes long, or lists no hosts."""
        took_s = 0.0 if self._answer is None or self._answer.done() else time.monotonic() - self._asked_at
        if took_s >= _SLOW_S:
            return (
                f"the discovery object has not answered for {took_s:.0f} s of {self._timeout_s:g} (discovery_timeout)"
            )
        return "the discovery object lists no hosts" if self._lists_none else ""

    async def wait_change(self, limit_s: float) -> None:
        """It is asked again and again."""
        await asyncio.sleep(limit_s)

    async def find_hosts(self) -> tuple[Host, ...]:
        """Asks the object once; one that still thinks about the question before is waited for instead.

        Returns:
            Its hosts, in the order of its mapping; none for an empty answer, which is no failure.

        Raises:
            DiscoveryError: it raised, hung, gave something else than hosts, or named one that cannot be had.
        """
        if self._answer is not None and self._answer.done():
            self._answer = None  # it came after the time limit, and may be old by now
        if self._answer is None:
            self._asked_at = time.monotonic()
            self._answer = asyncio.get_running_loop().create_task(self._ask(), name="discovery object")
        try:
            async with time_limit(self._timeout_s, self._call_later):
                line = await asyncio.shield(self._answer)
        except TimeoutError:
            raise DiscoveryError(
                f"the discovery object did not answer within {self._timeout_s:g} s (discovery_timeout)", may_pass=True
            ) from None
        except OSError as error:
            self._answer = None
            raise DiscoveryError(f"cannot ask the discovery object: {in_words(error)}") from error
        except asyncio.CancelledError:
            self._answer.cancel()
            raise
        self._answer = None
        hosts = _read(line)
        self._lists_none = not hosts
        return hosts

    async def _ask(self) -> bytes:
        """One question and its answer. Raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, b"\n")
        line = bytearray()
        while not line.endswith(b"\n"):
            piece = await loop.sock_recv(self._connection, 65536)
            if not piece:
                raise ConnectionError("the process that called elastic_driver.run is gone")
            line += piece
            if len(line) > _MAX_ANSWER_BYTES:
                raise OSError(f"it listed more than {_MAX_ANSWER_BYTES} bytes")
        return bytes(line)


def _read(line: bytes) -> tuple[Host, ...]:
    """The hosts of an answer. Raises DiscoveryError."""
    data = json.loads(line)
    if _ERROR in data:
        raise DiscoveryError(f"the discovery object raised {data[_ERROR]}", may_pass=True)
    return _checked(Host(name, slots, tuple(labels)) for name, slots, labels in data[_HOSTS])


def hosts_of(found: Mapping[str, int | Host]) -> tuple[Host, ...]:
    """What an object has found, as hosts; those without slots are left out.

    Raises:
        DiscoveryError: a name cannot be a host's, slots are too few or too many, or a label is none.
    """
    try:
        return _checked(as_host(name, value) for name, value in found.items())
    except ValueError as error:
        raise DiscoveryError(f"the discovery object gave no list of hosts: {str(error)[:_MAX_SAID]}") from error


def _checked(hosts: Iterable[Host]) -> tuple[Host, ...]:
    try:
        # As a script's line would be read, so that no name goes further that cannot be a host's.
        return tuple(_checked_host(host) for host in hosts if host.slots != 0)
    except SettingsError as error:
        raise DiscoveryError(f"the discovery object gave no list of hosts: {str(error)[:_MAX_SAID]}") from error


def _checked_host(host: Host) -> Host:
    place = str(Host(host.name, host.slots))
    if len(place.split()) != 1:
        raise SettingsError(f"cannot read {place!r} as a host: expected host or host:slots")
    return replace(parse_host(place, default_slots=None), labels=parse_labels(host.labels))
