"""Watches for the end of this machine, as announced by its cloud: a thread that asks the metadata endpoint.

Owns the thread, how often it asks, and that each notice, advice and failure is reported once. The protocol of an
endpoint is in :mod:`elastic_driver.launch.agent.clouds`; what follows from a notice is up to the agent.
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

# Between two looks, seconds: AWS recommends 5, Azure 1. At Google a request waits for the change itself.
_PAUSE_S: Mapping[Cloud, float] = {Cloud.AWS: 5.0, Cloud.GCP: 1.0, Cloud.AZURE: 1.0}
# An endpoint that has answered may fail for a moment (Google's does while it migrates a machine), and may have news
# then. One that has never answered is usually not there: another cloud, or a pod that cannot reach it.
_RETRY_S = 5.0
_NEVER_THERE_S = 60.0
# So many failures in a row are not momentary.
_TELL_AFTER = 3
# Azure announces failing hardware days ahead: until so many seconds before, the machine is useful.
_AHEAD_S = 900.0


@dataclass(frozen=True, slots=True)
class SpotReceivers:
    """The receivers of reports, called on the event loop.

    Attributes:
        notice: called when this machine is going away.
        remark: called with anything else that the user should know, a sentence.
    """

    notice: Callable[[Notice], None]
    remark: Callable[[str], None]


class SpotWatch:
    """Watches one endpoint until it is closed. Used on the event loop only.

    Args:
        cloud: whose endpoint it is.
        endpoint: makes it; called in the thread, since that may take long.
        told: receives the reports.
    """

    def __init__(self, cloud: Cloud, endpoint: Callable[[], Endpoint], told: SpotReceivers) -> None:
        self._cloud = cloud
        self._endpoint = endpoint
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()  # wakes the thread from its pauses, and ends it
        self._known: set[str] = set()  # keys and advice already reported
        # A daemon: a request that the endpoint does not answer must not delay the agent's end.
        self._thread = threading.Thread(target=self._run, name="elastic-spot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reporting. The thread ends when the request in progress has."""
        self._closing.set()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._say(
                f"internal error while watching for spot notices of {self._cloud} (the watch has stopped): {error!r}"
            )

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
                        self._say(f"cannot get notices of {self._cloud} (--spot-notices): {error}; retrying")
                    most_s = _RETRY_S if has_answered else _NEVER_THERE_S
                    self._closing.wait(min(0.5 * 2.0 ** min(failures, 10), most_s))
                    continue
                if was_told and failures:
                    self._say(f"the metadata endpoint of {self._cloud} now answers")
                    was_told = False
                failures, has_answered = 0, True
                self._take(seen)
                # Machines of one job that start together must not ask together forever.
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
                    left = f"in {notice.within_s / 3600:.1f} hours"
                    self._say(f"{notice.why} {left}; this host leaves the job {_AHEAD_S / 60:.0f} minutes before that")
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
