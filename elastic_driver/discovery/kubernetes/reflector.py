"""A list that stays like the API server's: read once, then kept up by a watch, over whatever happens to that.

Owns the API's rules for this: pages, resource versions, bookmarks, what 401, 403, 410 and 429 mean, how long to wait
before the next try. Knows nothing of what is listed.
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
_PAGE = 250  # objects; a pod has 5 to 15 KB of JSON, and reading it keeps the loop busy
# As client-go has it: watches end after 5 to 10 min, so that they are spread anew over the servers.
_WATCH_S = (300.0, 600.0)
# What a watch may go on beyond what it was asked for; then its end got lost.
_OVERTIME_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# A server that asks for more is asked again then.
_LONGEST_ASKED_S = 60.0
# Somebody has to change a Role; it is looked at now and then whether somebody has.
_FORBIDDEN_PAUSE_S = 30.0
# Servers send a bookmark each minute where nothing happens. One that is silent for longer may be dead, behind a proxy
# that keeps the connection; to ask anew costs little.
_SILENT_S = 120.0
# A connection whose other end has vanished is seen within 20 s: 8 s of silence, 3 probes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 8), (socket.TCP_KEEPINTVL, 4), (socket.TCP_KEEPCNT, 3))
_MOST_SAID = 500


class Read(Protocol):
    """The API's method that lists or watches."""

    def __call__(self, **query: Any) -> Awaitable[aiohttp.ClientResponse]:
        """As kubernetes_asyncio has it, without reading the answer."""


class _RefusedError(Exception):
    """The server answered with something else than 200.

    Attributes:
        code: of HTTP, or of the Status object.
        retry_s: how long to wait until the next try, if the server has said so.
    """

    def __init__(self, code: int, said: str, retry_s: float | None = None) -> None:
        super().__init__(said)
        self.code = code
        self.retry_s = retry_s


class Reflector(Generic[_T]):
    """See above. Used on one event loop.

    Args:
        what: is listed, in words: "pods in namespace a".
        right: what a Role has to allow for it: "list and watch on pods".
        reads: given a client, its method.
        query: what else to ask for, as labels.
        parse: an object as it is kept. Raises KeyError, TypeError, AttributeError, ValueError.
        renew: reads anew who asks. Raises DiscoveryError.
        changed: called after a change of the objects, and when it begins to be in trouble.
        patience_s: how long an answer may take.

    Attributes:
        objects: by their uids. Those that were there when something broke stay.
        trouble: why they may be out of date by now; "" where they are not.
        since: when that began, by ``time.monotonic``.
        is_forbidden: whether the trouble is that somebody may not read them.
        settled: set once they were listed, or could not be.
        listed: whether they ever were.
        ahead_s: by how much the server's clock is ahead of this machine's.
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
        """Keeps the list. Runs until it is cancelled."""
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
                # One that ends again and again as soon as it has begun is none.
                if time.monotonic() - began >= _FIRST_PAUSE_S or self._version != seen:
                    pause_s = _FIRST_PAUSE_S
                    continue
            except _RefusedError as error:
                retry_s = error.retry_s
                if error.code == 410:
                    self._version = ""  # what has happened since is lost, so all is listed again
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
                self._fail(f"it answers what cannot be read: {type(error).__name__}: {error}")
            # Many that were cut off together do not come back together.
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s if retry_s is None else retry_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _refused(self, error: _RefusedError, client: ApiClient) -> None:
        said = f"{error} ({error.code})"
        if error.code == 403:
            self._fail(f"{said}: its Role needs {self._right}", is_forbidden=True)
            return
        self._fail(said)
        if error.code == 401:
            try:
                await self._renew(client)
            except DiscoveryError as why:
                self._fail(f"{said}; {why}")
        elif error.code == 504:  # it is behind the server that was asked before
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
            for each in made.get("items") or ():
                found[each["metadata"]["uid"]] = self._parse(each)
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
        """Follows the changes until the watch ends in order."""
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
        """The next line; none at the end, and when it is silent for too long."""
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
        """Raises _RefusedError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._patience_s)
        answer = await read(**self._query, **query, _preload_content=False, _request_timeout=timeout)
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):  # it need not say what time it is
            there = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
            # It has no fractions of a second: on average a half is missing.
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
    """What Retry-After says, in seconds."""
    text = answer.headers.get("Retry-After", "")
    if not text.isdecimal() or len(text) > 9:
        return None
    return min(float(text), _LONGEST_ASKED_S)


def _keep_alive(answer: aiohttp.ClientResponse) -> None:
    """Has the system find out when the other end of a connection is gone without a word."""
    transport = None if answer.connection is None else answer.connection.transport
    end = None if transport is None else transport.get_extra_info("socket")
    if end is None:
        return
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
