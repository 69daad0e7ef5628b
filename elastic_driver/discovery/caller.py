"""Hosts from an object in another process: in the program that called ``elastic_driver.run``.

Owns both ends of the socket between that process and the driver's. The object stays in the process that created it,
since it may hold open connections; a thread there calls it on the driver's request, and sends back the result. A
request is an empty line, an answer a line of JSON. There is one request at a time, so no two threads call the object at
once.
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
# A job that waits for an object that takes longer reports it.
_SLOW_S = 2.0
_HOSTS, _ERROR = "hosts", "error"


class Finder(Protocol):
    """An object with Horovod's method."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int | Host]:
        """Return host name -> slots, or the host with its labels. May block, and raise anything."""


# --- in the caller's process -----------------------------------------------------------------------------------------


def answer_questions(finder: Finder, connection: socket.socket) -> None:
    """Call the object at each request of the driver. Blocks until the driver's end is closed; closes this one.

    To be run in a thread that may be abandoned: a thread cannot be stopped while the object hangs.
    """
    with connection, contextlib.suppress(OSError), connection.makefile("rb") as questions:
        for _ in questions:
            connection.sendall(json.dumps(_answer(finder)).encode() + b"\n")


def _answer(finder: Finder) -> dict[str, Any]:
    try:
        found = finder.find_available_hosts_and_slots()
        hosts = [as_host(str(name), value) for name, value in found.items()]
        return {_HOSTS: [[host.name, host.slots, list(host.labels)] for host in hosts]}
    except BaseException as error:  # the thread has no caller to raise it to, and users look into the job's log
        reason = traceback.format_exception_only(error)[-1].strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {_ERROR: f"{reason} ({where.filename}:{where.lineno})"[:_MAX_SAID]}


def as_host(name: str, value: int | Host) -> Host:
    """Convert one item of an object's mapping to a host. Raises ValueError."""
    if not isinstance(value, Host):
        return Host(name, int(value))
    if value.name != name:
        raise ValueError(f"it returned host {value.name!r} under the name {name!r}")
    return Host(name, int(value.slots), tuple(map(str, value.labels)))


# --- in the driver's process -----------------------------------------------------------------------------------------


class CallerDiscovery:
    """The hosts of the caller's object: a HostDiscovery of :mod:`elastic_driver.discovery.source`.

    Args:
        connection: the driver's end; is closed when the job's process ends.
        timeout_s: the limit for an answer, seconds.
        call_later: the timer for that. By default the loop's, which counts the time while this process is stopped.
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
        self._answer: asyncio.Task[bytes] | None = None  # to the last request, until it is used
        self._asked_at = 0.0
        self._lists_none = False

    def departures(self) -> tuple[Departure, ...]:
        """Return an empty tuple: Horovod's method cannot announce departures."""
        return ()

    def remark(self) -> str:
        """Return the remark that the object takes long, or lists no hosts."""
        took_s = 0.0 if self._answer is None or self._answer.done() else time.monotonic() - self._asked_at
        if took_s >= _SLOW_S:
            return (
                f"the discovery object has not returned for {took_s:.0f} s (limit: {self._timeout_s:g} s, "
                "discovery_timeout)"
            )
        return "the discovery object lists no hosts" if self._lists_none else ""

    async def wait_change(self, limit_s: float) -> None:
        """Wait for ``limit_s``: the object is polled."""
        await asyncio.sleep(limit_s)

    async def find_hosts(self) -> tuple[Host, ...]:
        """Ask the object once, or wait for its answer to the previous request if that is outstanding.

        Returns:
            Its hosts, in the order of its mapping; none for an empty answer, which is not a failure.

        Raises:
            DiscoveryError: it raised, hung, did not return hosts, or returned an invalid one.
        """
        if self._answer is not None and self._answer.done():
            self._answer = None  # it arrived after the time limit, and may be out of date
        if self._answer is None:
            self._asked_at = time.monotonic()
            self._answer = asyncio.get_running_loop().create_task(self._ask(), name="discovery object")
        try:
            async with time_limit(self._timeout_s, self._call_later):
                line = await asyncio.shield(self._answer)
        except TimeoutError:
            raise DiscoveryError(
                f"the discovery object did not return within {self._timeout_s:g} s (discovery_timeout)", may_pass=True
            ) from None
        except OSError as error:
            self._answer = None
            raise DiscoveryError(f"cannot call the discovery object: {in_words(error)}") from error
        except asyncio.CancelledError:
            self._answer.cancel()
            raise
        self._answer = None
        hosts = _read(line)
        self._lists_none = not hosts
        return hosts

    async def _ask(self) -> bytes:
        """Send one request, and return its answer. Raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, b"\n")
        line = bytearray()
        while not line.endswith(b"\n"):
            piece = await loop.sock_recv(self._connection, 65536)
            if not piece:
                raise ConnectionError("the process that called elastic_driver.run() has ended")
            line += piece
            if len(line) > _MAX_ANSWER_BYTES:
                raise OSError(f"it listed more than {_MAX_ANSWER_BYTES} bytes")
        return bytes(line)


def _read(line: bytes) -> tuple[Host, ...]:
    """Parse the hosts of an answer. Raises DiscoveryError."""
    data = json.loads(line)
    if _ERROR in data:
        raise DiscoveryError(f"the discovery object raised {data[_ERROR]}", may_pass=True)
    return _checked(Host(name, slots, tuple(labels)) for name, slots, labels in data[_HOSTS])


def hosts_of(found: Mapping[str, int | Host]) -> tuple[Host, ...]:
    """Convert the mapping of an object to hosts, without those that have no slots.

    Raises:
        DiscoveryError: a name, a number of slots or a label is invalid.
    """
    try:
        return _checked(as_host(name, value) for name, value in found.items())
    except ValueError as error:
        raise DiscoveryError(f"the discovery object did not return valid hosts: {str(error)[:_MAX_SAID]}") from error


def _checked(hosts: Iterable[Host]) -> tuple[Host, ...]:
    try:
        # Parsed like a line of a script, so that invalid names are rejected here.
        return tuple(_checked_host(host) for host in hosts if host.slots != 0)
    except SettingsError as error:
        raise DiscoveryError(f"the discovery object did not return valid hosts: {str(error)[:_MAX_SAID]}") from error


def _checked_host(host: Host) -> Host:
    place = str(Host(host.name, host.slots))
    if len(place.split()) != 1:
        raise SettingsError(f"cannot read {place!r} as a host: expected host or host:slots")
    return replace(parse_host(place, default_slots=None), labels=parse_labels(host.labels))
