"""The driver's side of the page: what it shows beside the job's status, the actions of operators, its links.

Owns where the page is found. :mod:`elastic_driver.reporting.page` decides how it looks and who may see it.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic_driver.driver.agents import url_of
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.status import JobStatus
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.hosts import WorkerId, is_loopback
from elastic_driver.rendezvous.messages import DrainHostRequest, PageReply, PageRequest
from elastic_driver.rendezvous.routes import OPERATOR, Route, RouteRequest, Routes
from elastic_driver.rendezvous.server.web import Web
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.page.curves import Curves
from elastic_driver.reporting.page.feed import Feed
from elastic_driver.reporting.page.sessions import Sessions
from elastic_driver.reporting.page.site import Actions, Site, WebHandler

# Limits of the output that is stored with a job: workers while it runs (that costs the loop 10 ms each minute), workers
# when it ends, and bytes in all.
_RUNNING_TAILS, _MOST_TAILS, _MOST_TAIL_BYTES = 16, 128, 2 << 20
# The limit of the output that browsers get when the driver ends.
_MOST_LAST_BYTES = 256 << 10


class PageServer(Protocol):
    """The interface of the driver's server that is used here."""

    async def listen_at(self, host: str, port: int) -> int:
        """Listen on another address as well. Return the port there."""


class Page:
    """The page of one job. Used on the event loop only.

    Args:
        job_id: the id of the job.
        stepper: has the state.
        rounds: handles the requests of operators.
        status: the status of the job.
        chronicle: reports events; the page listens from now on.
        clock: the job's time, seconds.
        curves: the samples so far.
        output: returns the last lines of a worker's output, by its key.
        stacks: returns the workers' stacks as text.
        more: other paths and their handlers, as in Site.
        open_loopback: lets the driver's server listen on loopback, and returns the URL there. Raises SettingsError.

    Attributes:
        is_kept: whether the job is stored when it has ended, so that it can be opened again.
    """

    def __init__(
        self,
        job_id: str,
        *,
        stepper: Stepper,
        rounds: Rounds,
        status: JobStatus,
        chronicle: Chronicle,
        clock: Callable[[], float],
        curves: Curves,
        output: Callable[[str], Sequence[str] | None],
        stacks: Callable[[], Awaitable[str]],
        more: Mapping[str, WebHandler],
        open_loopback: Callable[[], Awaitable[str]],
    ) -> None:
        self._stepper = stepper
        self._rounds = rounds
        self._status = status
        self._chronicle = chronicle
        self._clock = clock
        self._open_loopback = open_loopback
        self._output = output
        self.is_kept: Callable[[], bool] = lambda: False
        self._sessions = Sessions(clock)
        self._has_failed = False
        # Frames may be late, and the loop exists only once the job runs.
        self._feed = Feed(
            self.status,
            curves=curves,
            call_later=lambda s, act: asyncio.get_running_loop().call_later(s, act),
            failed=self._fail,
        )
        chronicle.also(self._feed)
        self.site = Site(
            job_id,
            self._feed,
            self._sessions,
            Actions(
                lambda host: self._drain(host, undo=False),
                lambda host: self._drain(host, undo=True),
                self._end,
                stacks,
            ),
            output=output,
            names=[socket.gethostname()],
            more=more,
            failed=self._fail,
        )
        self._address_url = ""  # of --page-address

    @property
    def web(self) -> Web:
        """The handler of browsers' requests."""
        return self.site

    @property
    def routes(self) -> Routes:
        """The route by which an operator gets a link."""
        return (Route("POST", "page", OPERATOR, self._give_link),)

    async def listen(self, server: PageServer, address: str) -> None:
        """Listen on the page's own address, now that the driver's server listens.

        Args:
            server: the driver's server.
            address: where to serve the page in addition to loopback, HOST or HOST:PORT; "" for nowhere.

        Raises:
            SettingsError: that address is not available.
        """
        if address:
            host, port = page_address(address)
            actual = await server.listen_at(host, port)
            self.site.names.add(host.lower())
            self._address_url = url_of(host, actual, scheme="http" if is_loopback(host) else "https")

    async def link(self) -> str:
        """Create a link with read-only access. It is a secret, good once.

        Raises:
            SettingsError: there is no port for the page.
        """
        return (await self._links(may_act=False))[0]

    async def _links(self, *, may_act: bool) -> list[str]:
        urls = filter(None, (self._address_url, await self._open_loopback()))
        code = self._sessions.new_code(may_act=may_act)
        return [f"{url}/login?code={code}" for url in urls]

    def seen_last(self, worker: WorkerId, vitals: Mapping[str, object]) -> None:
        """Record the last vitals of a worker whose process has ended, in the status's form."""
        self._feed.seen_last(worker.key, vitals)

    def recorded(self, is_last: bool) -> bytes:  # noqa: FBT001 - a callable that is passed on
        """Return the page as it is now, with the workers' last output, as JSON; b"" if it cannot be rendered.

        It is stored in the history (:mod:`elastic_driver.reporting.history`).

        Args:
            is_last: whether the job has ended; otherwise it includes the output of fewer workers.
        """
        try:
            frame = self._feed.state()
            tails = self._tails(_MOST_TAILS if is_last else _RUNNING_TAILS, _MOST_TAIL_BYTES)
        except Exception as error:  # a bug; the job is unaffected
            self._fail(error)
            return b""
        return b'{"version":1,"frame":%b,"outputs":%b}' % (frame, json.dumps(tails).encode())

    def _tails(self, most: int, most_bytes: int) -> dict[str, list[str]]:
        """Return the last output of workers, those that ended last first."""
        tails, size = dict[str, list[str]](), 0
        for name in self._feed.names:
            lines = self._output(name)
            if lines:
                tails[name] = list(lines)
                size += sum(map(len, lines))
            if len(tails) >= most or size >= most_bytes:
                break
        return tails

    def close(self) -> None:
        """Notify browsers that the driver ends, and send what they cannot request afterwards."""
        self.site.close()
        tails: Mapping[str, Sequence[str]] = {}
        try:
            if self._feed.streams:
                tails = self._tails(_MOST_TAILS, _MOST_LAST_BYTES)
        except Exception as error:  # a bug; the job's end is unaffected
            self._fail(error)
        self._feed.close(tails)

    def _fail(self, error: Exception) -> None:
        """Report once that the page, or the metrics beside it, cannot be rendered; the job is unaffected."""
        if not self._has_failed:
            self._has_failed = True
            at = "".join(
                f", {frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-1:]
            )
            self._chronicle.warning(
                f"cannot render the page or /metrics (the job is unaffected): {type(error).__name__}: {error}{at}"
            )

    async def _give_link(self, request: RouteRequest) -> PageReply:
        wanted = PageRequest.from_json(request.body)
        try:
            return PageReply(await self._links(may_act=wanted.may_act))
        except SettingsError as error:
            raise RendezvousProtocolError(str(error)) from error

    async def _drain(self, host: str, *, undo: bool) -> str:
        return (await self._rounds.drain(DrainHostRequest(host, undo))).text

    async def _end(self) -> str:
        return (await self._rounds.end()).text

    # --- contents --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the job's status, and what else the page shows of it."""
        status = self._status.document()
        state, now = self._stepper.state, self._clock()
        marks: Mapping[str, set[str]] = {
            mark: set(_texts(status.get(mark))) for mark in ("blacklisted", "silent", "left_out", "drained")
        }
        hosts: list[dict[str, Any]] = []
        rows, slots = status.get("hosts"), status.pop("drained_slots", None)
        for host in rows if isinstance(rows, list) else []:
            row: dict[str, Any] = {**host, **{mark: True for mark, names in marks.items() if host["name"] in names}}
            entry = state.blacklist.entry_of(host["name"])
            if isinstance(slots, Mapping) and host["name"] in slots:
                row["drained_slots"] = slots[host["name"]]
            if "blacklisted" in row and entry is not None and entry.until is not None and math.isfinite(entry.until):
                row["ready_in_s"] = max(0.0, entry.until - now)
            hosts.append(row)
        status["hosts"] = hosts
        for mark in marks:
            status.pop(mark, None)
        status.pop("urls", None)
        status["history"] = self.is_kept()
        outage = state.discovery.outage
        # Its beginning as a fixed point in time: the feed sends only changes.
        status["discovery_fails"] = None if outage is None else {"reason": outage.error, "age_s": now - outage.since}
        status["durable"] = [
            {"where": report.where, "written": report.written, "commits": report.commits, "trouble": report.trouble}
            for report in self._chronicle.disk_reports
        ]
        return status


def _texts(value: object) -> list[str]:
    return value if isinstance(value, list) else []


def page_address(text: str) -> tuple[str, int]:
    """Parse HOST or HOST:PORT, [ADDRESS]:PORT for IPv6; port 0 for any free one.

    Raises:
        SettingsError: it is not an address.
    """
    host, port = text, "0"
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise SettingsError(
                f"cannot use {json.dumps(text)} as --page-address: expected HOST, HOST:PORT or [ADDRESS]:PORT"
            )
        port = rest[1:] or "0"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(
            f"cannot use {json.dumps(text)} as --page-address: expected HOST, HOST:PORT or [ADDRESS]:PORT"
        )
    return host, int(port)
