"""Who may see the page, and who may act on it: one-time codes, and the sessions that browsers get for them.

Owns how both are made, compared, counted and forgotten. Only digests are kept: what is in this process's memory opens
nothing. Knows nothing of HTTP.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

CODE_S = 600.0
"""For how long a code is good."""
IDLE_S = 24 * 3600.0
"""After how long a session that nobody uses ends."""
ACTS_S = 8 * 3600.0
"""For how long a session may act; from then on it may look."""

# A code is 192 bits, so nobody guesses one: these bound what is remembered, not what is tried.
_TOKEN_BYTES = 24
_MOST_CODES, _MOST_SESSIONS = 16, 64
# Wrong codes a minute that are answered as such.
_MOST_FAILURES, _FAILURES_S = 10, 60.0


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()


@dataclass(slots=True)
class Session:
    """A browser that has logged in.

    Attributes:
        digest: of what its cookie holds.
        token: what it has to say with each action: no other site can know it, nor who else is sent the cookie.
        began, used: when it logged in, and when it was last heard of; seconds.
        may_act: whether it came by an operator's link.
        streams: that it reads now.
    """

    digest: bytes
    token: str
    began: float
    used: float
    may_act: bool
    streams: int = 0


class Sessions:
    """See above.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._codes: dict[bytes, tuple[float, bool]] = {}
        self._sessions: dict[bytes, Session] = {}
        self._failures: deque[float] = deque(maxlen=_MOST_FAILURES)

    def new_code(self, *, may_act: bool) -> str:
        """A code for one login. Of too many that nobody has used the oldest is forgotten."""
        self._forget()
        while len(self._codes) >= _MOST_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(_TOKEN_BYTES)
        self._codes[_digest(code)] = self._clock() + CODE_S, may_act
        return code

    def log_in(self, code: str) -> tuple[Session, str] | None:
        """A session, and what its cookie is to hold; None where the code is not, or no more, a good one."""
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
        """Somebody had a wrong code. Returns whether there were too many of late.

        Who has a right one is let in all the same: a stranger must not be able to keep the owner out.
        """
        now = self._clock()
        too_many = len(self._failures) == _MOST_FAILURES and now - self._failures[0] < _FAILURES_S
        self._failures.append(now)
        return too_many

    def of(self, secret: str) -> Session | None:
        """The session whose cookie holds this; None for none."""
        self._forget()
        wanted, found = _digest(secret), None
        for digest, session in self._sessions.items():
            if hmac.compare_digest(digest, wanted):
                found = session
        if found is not None:
            found.used = self._clock()
        return found

    def end(self, session: Session) -> None:
        """It has logged out."""
        self._sessions.pop(session.digest, None)

    def acts(self, session: Session) -> bool:
        """Whether it may act now."""
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
