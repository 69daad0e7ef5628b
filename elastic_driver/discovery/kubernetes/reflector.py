"""A local copy of a list of the API server: read once, then kept up to date by a watch, which is resumed on failures.

Owns the API's rules for this: pages, resource versions, bookmarks, the meanings of 401, 403, 410 and 429, and the
pauses between retries. Knows nothing of the listed objects' meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
from kubernetes_asyncio.client import ApiClient

from elastic_driver.errors import DiscoveryError, in_words

_T = TypeVar("_T")
_PAGE = 250  # objects; a pod has 5 to 15 KB of JSON, and parsing it blocks the loop
# As in client-go: watches end after 5 to 10 min, so that they spread over the servers again.
_WATCH_S = (300.0, 600.0)
# How much longer than requested a watch may last; after that, its end was lost.
_OVERTIME_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# The limit of a pause that a server asks for.
_LONGEST_ASKED_S = 60.0
# A person has to change a Role, so it suffices to retry now and then.
_FORBIDDEN_PAUSE_S = 30.0
# Servers send a bookmark each minute if there are no changes. A server that is silent for longer may be dead behind a
# proxy that keeps the connection open; a new watch costs little.
_SILENT_S = 120.0
# A vanished peer is noticed within 20 s: 8 s of silence, and 3 probes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 8), (socket.TCP_KEEPINTVL, 4), (socket.TCP_KEEPCNT, 3))
_MOST_SAID = 500


class Read(Protocol):
    """An API method that lists or watches."""

    def __call__(self, **query: Any) -> Awaitable[aiohttp.ClientResponse]:
        """Send a request, as kubernetes_asyncio's methods do, and return the answer unread."""


class _RefusedError(Exception):
    """The server answered with a status other than 200.

    Attributes:
        code: the status of HTTP, or of the Status object.
        retry_s: the pause before the next try, if the server gave one, seconds.
    """

    def __init__(self, code: int, said: str, retry_s: float | None = None) -> None:
        super().__init__(said)
        self.code = code
        self.retry_s = retry_s


class Reflector(Generic[_T]):
    """A local copy of a list of the API server. Used on one event loop.

    Args:
        what: the listed objects, in words: "pods in namespace a".
        right: the permission that it needs, in words: "the verbs list and watch on pods".
        reads: returns a client's method for this list.
        query: further arguments of the requests, such as a label selector.
        parse: converts an object to the kept form. Raises KeyError, TypeError, AttributeError, ValueError.
        renew: reloads the client's credentials. Raises DiscoveryError.
        changed: called after a change of the objects, and when trouble begins.
        patience_s: the limit of one answer, seconds.

    Attributes:
        objects: uid -> object. They are kept during trouble.
        trouble: why the objects may be out of date; "" if they are up to date.
        since: when the trouble began, by ``time.monotonic``.
        is_forbidden: whether the trouble is a missing permission.
        settled: set after the first attempt to list, successful or not.
        listed: whether the objects have been listed at least once.
        ahead_s: how far the server's clock is ahead of this machine's, seconds.
    """

    def __init__(
        self,
        what: str,
        right: str,
        *,
        reads: Callable[[ApiClient], Read],
        query: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], _T],
        renew: Callable[[ApiClient], Awaitable[None]],
        changed: Callable[[], None],
        patience_s: float,
    ) -> None:
        self._what = what
        self._right = right
        self._reads = reads
        self._query = dict(query)
        self._parse = parse
        self._renew = renew
        self._changed = changed
        self._patience_s = patience_s
        self._version = ""
        self.objects: dict[str, _T] = {}
        self.trouble = ""
        self.since = 0.0
        self.is_forbidden = False
        self.settled = asyncio.Event()
        self.listed = False
        self.ahead_s = 0.0

    async def keep(self, client: ApiClient) -> None:
        """Keep the copy up to date. Runs until it is canceled."""
        read = self._reads(client)
        pause_s = _FIRST_PAUSE_S
        listed_anew = 0.0
        while True:
            retry_s: float | None = None
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list(read)
                seen = self._version
                await self._watch(read)
                # A watch that ends at once without any change counts as a failure.
                if time.monotonic() - began >= _FIRST_PAUSE_S or self._version != seen:
                    pause_s = _FIRST_PAUSE_S
                    continue
            except _RefusedError as error:
                retry_s = error.retry_s
                if error.code == 410:
                    self._version = ""  # the changes since then are lost, so list everything again
                    is_first = began - listed_anew >= _LONGEST_PAUSE_S
                    listed_anew = began
                    if is_first:
                        continue
                await self._refused(error, client)
                if error.code == 403:
                    retry_s = _FORBIDDEN_PAUSE_S
            except TimeoutError:
                self._fail(f"no answer within {self._patience_s:g} s")
            except aiohttp.ClientConnectorError as error:
                self._fail(f"{error.host}:{error.port}: {in_words(error.os_error)}")
            except (aiohttp.ClientError, OSError) as error:
                self._fail(in_words(error))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self._version = ""
                self._fail(f"cannot parse the answer: {type(error).__name__}: {error}")
            # Jitter: clients that lost the server at the same time should not reconnect at the same time.
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s if retry_s is None else retry_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _refused(self, error: _RefusedError, client: ApiClient) -> None:
        said = f"{error} ({error.code})"
        if error.code == 403:
            self._fail(f"{said}: the Role needs {self._right}", is_forbidden=True)
            return
        self._fail(said)
        if error.code == 401:
            try:
                await self._renew(client)
            except DiscoveryError as why:
                self._fail(f"{said}; {why}")
        elif error.code == 504:  # this server is behind the one queried before
            self._version = ""

    def _fail(self, why: str, *, is_forbidden: bool = False) -> None:
        is_news = not self.trouble
        if is_news:
            self.since = time.monotonic()
        self.trouble = f"cannot read {self._what} from Kubernetes: {why[:_MOST_SAID]}"
        self.is_forbidden = is_forbidden
        self.settled.set()
        if is_news:
            self._changed()

    def _works(self) -> None:
        self.trouble, self.is_forbidden = "", False

    # --- lists -----------------------------------------------------------------------------------------------------

    async def _list(self, read: Read) -> None:
        found: dict[str, _T] = {}
        more, version = "", ""
        while True:
            page: dict[str, Any] = {"_continue": more} if more else {}
            async with asyncio.timeout(self._patience_s):
                answer = await self._ask(read, limit=_PAGE, **page)
                async with answer:
                    made = json.loads(await answer.read())
            for item in made.get("items") or ():
                found[item["metadata"]["uid"]] = self._parse(item)
            version, more = made["metadata"]["resourceVersion"], made["metadata"].get("continue") or ""
            if not more:
                break
        is_news = found != self.objects or not self.listed
        self.objects, self._version, self.listed = found, version, True
        self._works()
        self.settled.set()
        if is_news:
            self._changed()

    # --- watches ---------------------------------------------------------------------------------------------------

    async def _watch(self, read: Read) -> None:
        """Apply changes until the watch ends regularly."""
        limit_s = random.uniform(*_WATCH_S)
        async with asyncio.timeout(self._patience_s):
            answer = await self._ask(
                read,
                watch=True,
                resource_version=self._version,
                allow_watch_bookmarks=True,
                timeout_seconds=int(limit_s),
            )
        async with answer, asyncio.timeout(limit_s + _OVERTIME_S):
            _keep_alive(answer)
            self._works()
            while line := await self._next(answer):
                self._take(json.loads(line))

    async def _next(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the next line; empty at the end, and after too long a silence."""
        try:
            async with asyncio.timeout(_SILENT_S):
                return await answer.content.readline()
        except TimeoutError:
            return b""

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, made = event["type"], event["object"]
        if kind == "ERROR":
            code = int(made.get("code") or 0)
            self._version = self._version if code == 410 else ""
            raise _RefusedError(code, str(made.get("message") or "the watch has failed"))
        version = made["metadata"]["resourceVersion"]
        if kind in ("ADDED", "MODIFIED"):
            uid, parsed = made["metadata"]["uid"], self._parse(made)
            if self.objects.get(uid) != parsed:
                self.objects[uid] = parsed
                self._changed()
        elif kind == "DELETED" and self.objects.pop(made["metadata"]["uid"], None) is not None:
            self._changed()
        self._version = version

    # --- requests --------------------------------------------------------------------------------------------------

    async def _ask(self, read: Read, **query: Any) -> aiohttp.ClientResponse:
        """Send a request, and return a successful answer. Raises _RefusedError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._patience_s)
        answer = await read(**self._query, **query, _preload_content=False, _request_timeout=timeout)
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):  # the header is optional
            there = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
            # The header has whole seconds: on average, half a second is cut off.
            self.ahead_s = there + 0.5 - time.time()
        if answer.status == 200:
            return answer
        async with answer:
            text = await answer.read()
        said = text[:_MOST_SAID].decode(errors="replace")
        with contextlib.suppress(ValueError, AttributeError):
            said = str(json.loads(text).get("message") or said)
        raise _RefusedError(answer.status, " ".join(said.split()) or answer.reason or "refused", _asked_s(answer))


def _asked_s(answer: aiohttp.ClientResponse) -> float | None:
    """Return the pause from the Retry-After header, limited, in seconds; None without a number there."""
    text = answer.headers.get("Retry-After", "")
    if not text.isdecimal() or len(text) > 9:
        return None
    return min(float(text), _LONGEST_ASKED_S)


def _keep_alive(answer: aiohttp.ClientResponse) -> None:
    """Enable TCP keepalive, so that the kernel detects a peer that has vanished silently."""
    transport = None if answer.connection is None else answer.connection.transport
    end = None if transport is None else transport.get_extra_info("socket")
    if end is None:
        return
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
