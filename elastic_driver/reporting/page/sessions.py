"""The access to the page, and the permission to act on it: one-time codes, and the sessions of browsers.

Owns how both are created, compared, counted and forgotten. Only digests are kept: this process's memory contains no
usable secret. Does not know HTTP.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

CODE_S = 600.0
"""How long a code is valid, seconds."""
IDLE_S = 24 * 3600.0
"""How long an unused session lasts, seconds."""
ACTS_S = 8 * 3600.0
"""How long a session may act, seconds; after that it may only read."""

# A code has 192 bits and cannot be guessed: these limits bound memory, not attempts.
_TOKEN_BYTES = 24
_MOST_CODES, _MOST_SESSIONS = 16, 64
# Wrong codes a minute that get a normal answer.
_MOST_FAILURES, _FAILURES_S = 10, 60.0


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()


@dataclass(slots=True)
class Session:
    """A logged-in browser.

    Attributes:
        digest: of its cookie's value.
        token: required with each action: neither another site nor another recipient of the cookie can know it.
        began, used: when it logged in, and when it was last used; seconds.
        may_act: whether it logged in with an operator's link.
        streams: the number of its open streams.
    """

    digest: bytes
    token: str
    began: float
    used: float
    may_act: bool
    streams: int = 0


class Sessions:
    """Keeps codes and sessions.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._codes: dict[bytes, tuple[float, bool]] = {}
        self._sessions: dict[bytes, Session] = {}
        self._failures: deque[float] = deque(maxlen=_MOST_FAILURES)

    def new_code(self, *, may_act: bool) -> str:
        """Create a code for one login. If too many are unused, the oldest is forgotten."""
        self._forget()
        while len(self._codes) >= _MOST_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(_TOKEN_BYTES)
        self._codes[_digest(code)] = self._clock() + CODE_S, may_act
        return code

    def log_in(self, code: str) -> tuple[Session, str] | None:
        """Return a new session, and the value of its cookie; None if the code is invalid or has expired."""
        self._forget()
        found, wanted = None, _digest(code)
        for digest in self._codes:
            if hmac.compare_digest(digest, wanted):
                found = digest
        if found is None:
            return None
        _, may_act = self._codes.pop(found)
        while len(self._sessions) >= _MOST_SESSIONS:
            oldest = min(self._sessions.values(), key=lambda one: (one.streams > 0, one.used))
            del self._sessions[oldest.digest]
        secret, now = secrets.token_urlsafe(_TOKEN_BYTES), self._clock()
        session = Session(_digest(secret), secrets.token_urlsafe(_TOKEN_BYTES), now, now, may_act)
        self._sessions[session.digest] = session
        return session, secret

    def failed(self) -> bool:
        """Note a wrong code. Returns whether there were too many lately.

        A right code still works: a stranger must not be able to keep the owner out.
        """
        now = self._clock()
        too_many = len(self._failures) == _MOST_FAILURES and now - self._failures[0] < _FAILURES_S
        self._failures.append(now)
        return too_many

    def of(self, secret: str) -> Session | None:
        """Return the session with this cookie value; None if there is none."""
        self._forget()
        wanted, found = _digest(secret), None
        for digest, session in self._sessions.items():
            if hmac.compare_digest(digest, wanted):
                found = session
        if found is not None:
            found.used = self._clock()
        return found

    def end(self, session: Session) -> None:
        """End a session: it has logged out."""
        self._sessions.pop(session.digest, None)

    def acts(self, session: Session) -> bool:
        """Return whether it may act now."""
        return session.may_act and self._clock() - session.began < ACTS_S

    def _forget(self) -> None:
        now = self._clock()
        for code, (until, _) in tuple(self._codes.items()):
            if until <= now:
                del self._codes[code]
        for digest, session in tuple(self._sessions.items()):
            if session.streams:
                session.used = now
            elif now - session.used > IDLE_S:
                del self._sessions[digest]
