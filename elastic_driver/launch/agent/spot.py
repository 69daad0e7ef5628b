"""The watch for the end of this machine, as its cloud announces it: a thread that asks the metadata endpoint.

Owns the thread, how often is asked, and that each notice, advice and failure is told once. What an endpoint says is
:mod:`elastic_driver.launch.agent.clouds`'s; what becomes of a notice, the agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_driver.launch.agent.clouds import Endpoint, Notice, NotThereError, Seen
from elastic_driver.words import Cloud

# Between two looks, seconds: AWS asks for 5, Azure for 1. At Google's a request waits for the change itself.
_PAUSE_S: Mapping[Cloud, float] = {Cloud.AWS: 5.0, Cloud.GCP: 1.0, Cloud.AZURE: 1.0}
# An endpoint that has answered may be away for a moment (Google's is, while it migrates a machine), and may have news
# then. One that never has is not there, mostly: another cloud, a pod that may not reach it.
_RETRY_S = 5.0
_NEVER_THERE_S = 60.0
# So many failures in a row are no moment.
_TELL_AFTER = 3
# Azure tells of failing hardware days before: that long the machine is of use.
_AHEAD_S = 900.0


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told, on the event loop.

    Attributes:
        notice: this machine goes away.
        remark: anything else that the user should know, a sentence.
    """

    notice: Callable[[Notice], None]
    remark: Callable[[str], None]


class SpotWatch:
    """Watches one endpoint until it is closed. Used on the event loop only.

    Args:
        cloud: whose endpoint it is.
        endpoint: makes it; called in the thread, since that may take long.
        told: hears of what is seen.
    """

    def __init__(self, cloud: Cloud, endpoint: Callable[[], Endpoint], told: Told) -> None:
        self._cloud = cloud
        self._endpoint = endpoint
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()  # wakes the thread from its pauses, and ends it
        self._known: set[str] = set()  # keys and advice that were told
        # A daemon: a request that the endpoint does not answer must not hold up the agent's end.
        self._thread = threading.Thread(target=self._run, name="elastic-spot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells nobody anything any more. The thread ends when the request that is under way has."""
        self._closing.set()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._say(f"internal error in the watch for notices of {self._cloud}, which ends here: {error!r}")

    def _watch(self) -> None:
        failures, has_answered, was_told = 0, False, False
        with contextlib.closing(self._endpoint()) as endpoint:
            while not self._closing.is_set():
                try:
                    seen = endpoint.look()
                except NotThereError as error:
                    failures += 1
                    if failures == _TELL_AFTER and not was_told:
                        was_told = True
                        self._say(f"no notices of {self._cloud} (--spot-notices): {error}; trying on")
                    most_s = _RETRY_S if has_answered else _NEVER_THERE_S
                    self._closing.wait(min(0.5 * 2.0 ** min(failures, 10), most_s))
                    continue
                if was_told and failures:
                    self._say(f"the metadata endpoint of {self._cloud} answers now")
                    was_told = False
                failures, has_answered = 0, True
                self._take(seen)
                # Machines of one job that start together must not ask together for ever.
                self._closing.wait(_PAUSE_S[self._cloud] * random.uniform(0.9, 1.1))

    def _take(self, seen: Seen) -> None:
        for advice in seen.advice:
            if advice not in self._known:
                self._known.add(advice)
                self._say(advice)
        for notice in seen.notices:
            if notice.within_s is not None and notice.within_s > _AHEAD_S:
                early = f"early {notice.key}"
                if early not in self._known:
                    self._known.add(early)
                    some = f"{notice.within_s / 3600:.1f} hours: it leaves {_AHEAD_S / 60:.0f} minutes before"
                    self._say(f"{notice.why}, in {some}")
            elif notice.key not in self._known:
                self._known.add(notice.key)
                self._post(self._told.notice, notice)

    def _say(self, text: str) -> None:
        self._post(self._told.remark, text)

    def _post(self, tell: Callable[..., None], what: object) -> None:
        def unless_closed() -> None:
            if not self._closing.is_set():
                tell(what)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(unless_closed)
