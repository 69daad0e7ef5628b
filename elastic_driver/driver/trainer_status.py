"""Progress reports to Kubeflow Trainer, if the job runs in a TrainJob that wants them (TrainJobStatus).

Owns their format (``pkg/statusserver`` of Trainer 2.2 and later), a thread that sends them, and the interval. They
never affect the job: a report that cannot be sent is dropped, with one warning. The driver provides their content.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elastic_driver.driver.progress import Estimate
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.safe_files import read_named

ENV_URL = "KUBEFLOW_TRAINER_SERVER_URL"
ENV_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
ENV_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
ENV_SWITCH = "ELASTIC_DRIVER_TRAINER_STATUS"

# Trainer asks its clients for 5 or more.
_INTERVAL_S = 10.0
# After failures; doubled from one to the next.
_MOST_PAUSE_S = 120.0
_CONNECT_S, _READ_S = 3.0, 5.0
# How long the job's end waits for the last report.
_LAST_S = 3.0
_MOST_TOKEN_BYTES = 1 << 16
_MOST_INT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of the job.

    Attributes:
        percentage: 0 to 100; None if unknown.
        left_s: seconds until its end; None if unknown.
        metrics: other values, by name.
    """

    percentage: int | None
    left_s: float | None
    metrics: Mapping[str, str]

    def to_json(self, now: datetime) -> dict[str, Any]:
        """Return the report in the form of UpdateTrainJobStatusRequest. Unknown values are omitted."""
        status: dict[str, Any] = {
            "metrics": [{"name": name, "value": value} for name, value in self.metrics.items()],
            "lastUpdatedTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        }
        if self.percentage is not None:
            status["progressPercentage"] = self.percentage
        if self.left_s is not None:
            status["estimatedRemainingSeconds"] = min(_MOST_INT, round(self.left_s))
        return {"trainerStatus": status}


def standing_of(status: Mapping[str, Any]) -> Standing:
    """Derive the progress from the answer of ``GET /v1/status``.

    A percentage and a time are included only if the script has reported its total: nothing else knows how much is left.
    """
    estimate = Estimate(**status["progress"])
    metrics = {
        "round": str(status["round_id"]),
        "workers": str(sum(worker["phase"] == "member" for worker in status["workers"])),
        "resets": str(status["resets"]),
        "commits": str(status["commits"]),
    }
    if estimate.step is not None and estimate.total is not None:
        metrics |= {"step": str(estimate.step), "total_steps": str(estimate.total)}
    if estimate.per_s is not None:
        metrics["steps_per_second"] = f"{estimate.per_s:.4g}"
    return Standing(estimate.percentage, estimate.left_s, metrics)


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """Where to send reports: the address, and the files of the authority and of the token, which change meanwhile."""

    url: str
    ca: Path
    token: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ReportTarget | None:
        """Read this from the environment that Trainer has set; None if it has not, or if reports are disabled.

        Raises:
            SettingsError: part of it is missing, or a token must not be sent to the address.
        """
        url = environ.get(ENV_URL, "")
        if not url or environ.get(ENV_SWITCH, "").lower() in ("0", "off", "false", "no"):
            return None
        missing = [name for name in (ENV_CA, ENV_TOKEN) if not environ.get(name)]
        if missing or not url.startswith("https://"):
            what = f"{missing[0]} is not set" if missing else f"{ENV_URL} is not an https:// URL"
            raise SettingsError(
                f"cannot report progress to Kubeflow Trainer: {what} (set {ENV_SWITCH}=off to disable the reports)"
            )
        return cls(url, Path(environ[ENV_CA]), Path(environ[ENV_TOKEN]))

    def tell(self, standing: Standing) -> None:
        """Send a report. Blocks for some seconds at most. Raises OSError, with a description of the problem."""
        import requests  # late: most jobs do not report

        try:
            token = read_named(self.token, _MOST_TOKEN_BYTES).decode("ascii").strip()
        except ValueError:
            token = ""
        # A token that is invalid in a header would be quoted by the error message.
        if not re.fullmatch(r"[!-~]+", token):
            raise OSError(f"the file {self.token} does not contain a token")
        # A new session each time: the files of the authority and of the token are replaced from time to time.
        with requests.Session() as session:
            session.trust_env = False
            answer = session.post(
                self.url,
                json=standing.to_json(datetime.now(UTC)),
                headers={"Authorization": f"Bearer {token}"},
                verify=str(self.ca),
                timeout=(_CONNECT_S, _READ_S),
                allow_redirects=False,
                stream=True,
            )
            if answer.status_code != 200:
                raise OSError(f"it answered {answer.status_code} {answer.reason}")


class TrainerStatus:
    """Sends reports for as long as the job runs. Used on the event loop only.

    Args:
        way: where to send them.
        look: returns the current progress; called on the loop.
        warn: called once when sending fails, and again only after it has succeeded.
    """

    def __init__(self, way: ReportTarget, look: Callable[[], Standing], warn: Callable[[str], None]) -> None:
        self._way = way
        self._look = look
        self._warn = warn
        self._loop = asyncio.get_running_loop()
        # One place: a slow thread sends the latest report, and skips those between.
        self._next: queue.SimpleQueue[Standing | None] = queue.SimpleQueue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failures = 0
        # A daemon: a missing response must not delay the end of the job.
        self._thread = threading.Thread(target=self._run, name="elasticrun-trainer", daemon=True)
        self._thread.start()
        self._task = self._loop.create_task(self._keep())

    async def close(self, exit_code: int | None) -> None:
        """Send the last report, and end. Blocks for some seconds at most.

        Args:
            exit_code: the exit code of the job; None if it has none.
        """
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self._idle.wait()
                if exit_code == 0:
                    last = self._look()
                    self._post(Standing(100, 0.0, last.metrics))
                    await self._idle.wait()
        self._next.put(None)

    async def _keep(self) -> None:
        while True:
            await self._idle.wait()
            self._post(self._look())
            await asyncio.sleep(min(_INTERVAL_S * 2.0 ** min(self._failures, 10), _MOST_PAUSE_S))

    def _post(self, standing: Standing) -> None:
        self._idle.clear()
        self._next.put(standing)

    def _run(self) -> None:
        while (standing := self._next.get()) is not None:
            try:
                self._way.tell(standing)
            except Exception as error:  # whatever it is, the job is unaffected
                failure = in_words(error)[:300]
            else:
                failure = ""
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._told, failure)

    def _told(self, failure: str) -> None:
        if failure and not self._failures:
            self._warn(f"cannot report progress to Kubeflow Trainer: {failure}; it keeps retrying")
        self._failures = self._failures + 1 if failure else 0
        self._idle.set()
