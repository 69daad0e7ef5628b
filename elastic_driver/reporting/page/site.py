"""The page's server: its paths, the login, and the rejection of requests.

Owns the requests that browsers may send, and the headers that keep other sites out. The content comes from the feed
(:mod:`~elastic_driver.reporting.page.feed`), the identity of users from the sessions; actions are callables passed in.
Codes and cookies are never logged.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from elastic_driver.rendezvous.server.web import WebAnswer, WebRequest, WebStream, WebStreaming
from elastic_driver.reporting.page.document import document, policy
from elastic_driver.reporting.page.feed import Feed
from elastic_driver.reporting.page.sessions import Session, Sessions

WebHandler = Callable[[WebRequest], WebAnswer | WebStreaming]

_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_MOST_STREAMS, _MOST_STREAMS_EACH = 32, 6
_ACTION_S = 60.0
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_REFUSED = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>elasticrun: not logged in</title><style>:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem}</style>
<h1>Not logged in</h1><p>WHY</p>
<p>To get a link, which is valid for one login within ten minutes, run this on the driver's machine:</p>
<pre>elasticrun page JOB</pre>
<p>If you have just followed such a link from another page, <a href="/">open this page again</a>.</p>
<script>document.querySelector("a").href = "/" + location.hash;</script></html>"""

_LED_ON = """<!doctype html><html lang="en"><meta charset="utf-8"><title>elasticrun</title>
<meta http-equiv="refresh" content="0; url=WHERE"><p><a href="WHERE">The job's page</a></p></html>"""


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of an operator. Each returns its result as text when it is done.

    Attributes:
        drain: makes a host's workers leave at their next commit.
        undo: lets a host have workers again.
        end: ends the job.
        stacks: returns the workers' stacks as text; None if not available.
    """

    drain: Callable[[str], Awaitable[str]]
    undo: Callable[[str], Awaitable[str]]
    end: Callable[[], Awaitable[str]]
    stacks: Callable[[], Awaitable[str]] | None = None


class Site:
    """Answers browsers. Implements :class:`~elastic_driver.rendezvous.server.web.Web`.

    Args:
        job_id: of the job; part of the cookie's name, since cookies are not bound to ports.
        feed: the content of the page.
        sessions: the logged-in browsers.
        actions: the actions of an operator.
        output: returns the last lines of a worker's output, by its key; None for an unknown worker.
        names: accepted host names of this machine, in addition to its addresses and "localhost".
        more: handlers of other paths with a credential of their own ("/metrics").
        failed: called with an error that prevented an answer.
    """

    def __init__(
        self,
        job_id: str,
        feed: Feed,
        sessions: Sessions,
        actions: Actions,
        *,
        output: Callable[[str], Sequence[str] | None],
        names: Collection[str] = (),
        more: Mapping[str, WebHandler] | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._failed = failed
        self._cookie = f"elastic-{job_id}"
        self._feed = feed
        self._sessions = sessions
        self._actions = actions
        self._output = output
        self.names = {name.lower().rstrip(".") for name in names}
        self.more: dict[str, WebHandler] = dict(more or {})
        self._streams: dict[WebStream, Session] = {}
        self._asking: dict[WebStream, asyncio.Task[None]] = {}
        page = document()
        self._page = page.encode(), _unframed(page)

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        """Answer a request (Web)."""
        try:
            return self._answer(request)
        except Exception as error:
            # Otherwise the server would treat it as a bug that ends the job.
            self._failed(error)
            return _error(500, f"the driver cannot answer this request: {type(error).__name__}: {error}")

    def _answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        handler = self.more.get(request.path)
        if handler is not None:
            return handler(request)
        if not self._is_ours(request.headers.get("host", "")):
            # A foreign name that resolves to this machine: its pages would have the same origin as ours.
            return _error(421, "the page is not served under that host name: see --page-address")
        wanted = "POST" if request.path in ("/action", "/logout") else "GET"
        if request.method != wanted and not (wanted == "GET" and request.method == "HEAD"):
            return _error(405, f"{request.path} accepts only {wanted}", (("Allow", wanted),))
        if request.path == "/login":
            return self._log_in(request)
        session = self._session_of(request)
        if session is None:
            why = "This browser is not logged in to this job."
            return _refusal(401, why) if request.path == "/" else _error(401, "not logged in")
        match request.path:
            case "/":
                return self._show()
            case "/feed":
                return _error(405, "/feed does not accept HEAD") if request.method == "HEAD" else self._stream(session)
            case "/state":
                return _answer(200, self._feed.state(), _JSON)
            case "/output":
                return self._show_output(request)
            case "/action":
                return self._act(request, session)
            case "/logout":
                return self._log_out(request, session)
            case _:
                return _error(404, "no such page")

    # --- login -----------------------------------------------------------------------------------------------------

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if name in self.names or name == "localhost":
            return True
        try:
            # An address, unlike a name, cannot point elsewhere tomorrow.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _log_in(self, request: WebRequest) -> WebAnswer:
        ahead = request.headers.get("sec-purpose", "") + request.headers.get("purpose", "")
        if request.method == "HEAD" or "prefetch" in ahead:
            return _answer(503 if ahead else 200)  # neither HEAD nor a prefetch uses up the code
        entered = self._sessions.log_in(request.query.get("code", ""))
        if entered is None:
            if self._sessions.failed():
                return _refusal(429, "Too many invalid links. Wait a minute, then try again.")
            why = "This link has already been used, is older than ten minutes, or belongs to another job."
            return _refusal(403, why)
        session, secret = entered
        flags = "; Secure" if request.encrypted else ""
        cookie = f"{self._cookie}={secret}; Path=/; HttpOnly; SameSite=Strict{flags}"
        # Browsers send a cookie to every port of this name, and so to any stranger's server there. The part after the
        # "#" is not sent at all, and the page stores it where only pages of this port can read it.
        where = f"/#token={session.token}"
        if request.headers.get("sec-fetch-site") == "cross-site":
            # A browser that comes from another page (the file that elasticrun page --open writes) would not send the
            # cookie after a redirect. It does after a page of ours that leads on.
            return _answer(200, _LED_ON.replace("WHERE", where).encode(), _HTML, (("Set-Cookie", cookie),))
        return _answer(303, headers=(("Location", where), ("Set-Cookie", cookie)))

    def _session_of(self, request: WebRequest) -> Session | None:
        for cookie in request.headers.get("cookie", "").split(";"):
            name, _, secret = cookie.strip().partition("=")
            if name == self._cookie:
                return self._sessions.of(secret)
        return None

    def _why_foreign(self, request: WebRequest, session: Session) -> str:
        """Return why a request that changes something does not come from our page; "" if it does."""
        scheme = "https" if request.encrypted else "http"
        if request.headers.get("origin", "") != f"{scheme}://{request.headers.get('host', '')}":
            return "this request does not come from the job's page"
        token = request.headers.get("x-elastic-token", "")
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), session.token.encode()):
            return "this request lacks the page's token: log in with a new link"
        return ""

    # --- reading ---------------------------------------------------------------------------------------------------

    def _show(self) -> WebAnswer:
        page, policy = self._page
        return WebAnswer(200, page, _HTML, (*_HEADERS, ("Content-Security-Policy", policy)))

    def _stream(self, session: Session) -> WebAnswer | WebStreaming:
        each = sum(other is session for other in self._streams.values())
        if len(self._streams) >= _MOST_STREAMS or each >= _MOST_STREAMS_EACH:
            return _error(503, "too many pages are open")
        may_act = self._sessions.acts(session)
        you = {"may_act": may_act, "stacks": may_act and self._actions.stacks is not None}

        def began(stream: WebStream) -> None:
            self._streams[stream] = session
            session.streams += 1
            self._feed.add(stream, you)

        def ended(stream: WebStream) -> None:
            if self._streams.pop(stream, None) is not None:
                session.streams -= 1
            self._feed.remove(stream)

        return WebStreaming(began, ended, headers=_HEADERS)

    def _show_output(self, request: WebRequest) -> WebAnswer:
        lines = self._output(request.query.get("worker", ""))
        if lines is None:
            return _error(404, "no output of this worker was kept")
        return _answer(200, json.dumps({"lines": list(lines)}).encode(), _JSON)

    # --- actions ---------------------------------------------------------------------------------------------------

    def _log_out(self, request: WebRequest, session: Session) -> WebAnswer:
        why = self._why_foreign(request, session)
        if why:
            return _error(403, why)
        self._sessions.end(session)
        for stream in [stream for stream, other in self._streams.items() if other is session]:
            stream.close()
        return _answer(200, b"{}", _JSON)

    def _act(self, request: WebRequest, session: Session) -> WebAnswer | WebStreaming:
        why = self._why_foreign(request, session)
        if not why and not self._sessions.acts(session):
            why = "this session is read-only: elasticrun page --operator prints a link that permits actions"
        if why:
            return _error(403, why)
        try:
            asked = json.loads(request.body)
            kind, host = asked["do"], asked.get("host", "")
            if not isinstance(kind, str) or not isinstance(host, str):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return _error(400, "cannot read the requested action")
        acts: dict[str, Callable[[], Awaitable[str]] | None] = {
            "drain": partial(self._actions.drain, host),
            "undo": partial(self._actions.undo, host),
            "end": self._actions.end,
            "stacks": self._actions.stacks,
        }
        act = acts.get(kind)
        if act is None:
            return _error(400, "no such action")
        return WebStreaming(partial(self._ask, act), self._drop, "text/plain; charset=utf-8", _HEADERS)

    def _ask(self, act: Callable[[], Awaitable[str]], stream: WebStream) -> None:
        async def told() -> None:
            try:
                async with asyncio.timeout(_ACTION_S):
                    text = await act()
            except TimeoutError:
                text = f"no answer within {_ACTION_S:.0f} s"
            except Exception as error:
                text = f"cannot do that: {error}"
            self._asking.pop(stream, None)
            _finish(stream, text)

        self._asking[stream] = asyncio.get_running_loop().create_task(told())

    def _drop(self, stream: WebStream) -> None:
        task = self._asking.pop(stream, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Close all streams: the driver ends, but the job may continue with another one."""
        while self._asking:
            stream, task = self._asking.popitem()
            task.cancel()
            _finish(stream, "the driver has ended")


def _finish(stream: WebStream, text: str) -> None:
    stream.write(text.encode("utf-8", "replace"))
    stream.close()


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _unframed(page: str) -> str:
    return policy(page) + "; frame-ancestors 'none'"


def _answer(
    status: int,
    body: bytes = b"",
    content_type: str = "text/plain; charset=utf-8",
    headers: tuple[tuple[str, str], ...] = (),
) -> WebAnswer:
    policy = ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
    return WebAnswer(status, body, content_type, (*_HEADERS, policy, *headers))


def _error(status: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> WebAnswer:
    return _answer(status, json.dumps({"error": text}).encode(), _JSON, headers)


def _refusal(status: int, why: str) -> WebAnswer:
    page = _REFUSED.replace("WHY", why)
    return WebAnswer(status, page.encode(), _HTML, (*_HEADERS, ("Content-Security-Policy", _unframed(page))))
