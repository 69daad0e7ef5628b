"""``/metrics``: a job's numbers, for Prometheus and other readers of its formats.

Owns the names of the metrics, and the access to them. :mod:`elastic_driver.reporting.tally` counts past events; the
present state is taken at each request, from the same source as ``GET /v1/status``. The library that writes the formats
is optional, and imported at the first request.

Unknown numbers are omitted: a zero would be a statement. No label contains the name of a host or a worker: each process
has its own name, so that a job of weeks would have a series for each process it ever had. ``elasticrun status`` shows
single workers.
"""

from __future__ import annotations

import hmac
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from elastic_driver.rendezvous.server.web import WebAnswer, WebRequest
from elastic_driver.reporting.tally import FAILURE_CAUSES, ROUND_CAUSES, Histogram, Tally
from elastic_driver.words import NoticeKind

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PATH = "/metrics"
_OPEN = "application/openmetrics-text"
_NO_LIBRARY = (
    "metrics need the package prometheus_client where the driver runs: pip install 'elastic-driver[metrics]'\n"
)
_JOB_PHASES = ("waiting", "starting", "running", "stalled", "resetting", "ended")
_WORKER_PHASES = ("booting", "ready", "member", "leaving")
# A host is counted once: in the first of these states that applies.
_HOST_STATES = ("blacklisted", "left_out", "silent", "drained", "in_use", "unused")
_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")
_OTHER = "other"
_Status: TypeAlias = Mapping[str, Any]
_Write: TypeAlias = Callable[[object], bytes]


class MetricsPage:
    """Answers requests of scrapers.

    Args:
        tally: counts of past events.
        status: returns the job's state as in ``GET /v1/status``.
        bearer: the value required in a reader's ``Authorization``.
        version: of this package.
        warn: called with a message if the metrics cannot be rendered; only once, since they are requested every few
            seconds.
    """

    def __init__(
        self,
        tally: Tally,
        status: Callable[[], _Status],
        bearer: bytes,
        version: str,
        *,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._warn = warn
        self._has_failed = False
        self._bearer = bearer
        self._source = _Source(tally, status, version)

    def answer(self, request: WebRequest) -> WebAnswer:
        """Answer a request (Web); 404 at other paths."""
        if request.path != PATH:
            return WebAnswer(404, b"not found\n")
        if request.method not in ("GET", "HEAD"):
            return WebAnswer(405, b"read it with GET\n", headers=(("Allow", "GET, HEAD"),))
        said = request.headers.get("authorization", "").encode(errors="replace")
        if not hmac.compare_digest(said, self._bearer):
            text = b"metrics are read with the reader's token: elasticrun jobs --write-reader-token FILE\n"
            return WebAnswer(401, text, headers=(("WWW-Authenticate", "Bearer"),))
        try:
            from prometheus_client import exposition
            from prometheus_client.openmetrics import exposition as open_metrics
        except ImportError:
            return WebAnswer(501, _NO_LIBRARY.encode())
        # The library would choose by the complete header, and raise if it cannot parse it.
        content_type, write = "text/plain; version=0.0.4; charset=utf-8", cast(_Write, exposition.generate_latest)
        if _OPEN in request.headers.get("accept", ""):
            content_type = f"{_OPEN}; version=1.0.0; charset=utf-8"
            write = cast(_Write, open_metrics.generate_latest)
        try:
            return WebAnswer(200, write(self._source), content_type)
        except Exception as error:
            # An observer must not end the job.
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"cannot render /metrics (the job is unaffected): {type(error).__name__}: {error}")
            return WebAnswer(500, f"the driver cannot answer this request: {type(error).__name__}: {error}\n".encode())


class _Levels:
    """Makes counters of others' counts, which drop when a worker leaves together with its count."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self._totals: dict[tuple[str, str], float] = {}

    def total(self, name: str, label: str, value: float) -> float:
        """Return the accumulated total, given the present count."""
        key = name, label
        grown = max(0.0, value - self._last.get(key, 0.0))
        self._last[key] = value
        self._totals[key] = self._totals.get(key, 0.0) + grown
        return self._totals[key]


class _Source:
    """Collects the metric families, as a registry of the library does."""

    def __init__(self, tally: Tally, status: Callable[[], _Status], version: str) -> None:
        self._tally = tally
        self._status = status
        self._version = version
        self._levels = _Levels()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        from prometheus_client.process_collector import ProcessCollector

        status = self._status()
        yield from self._of_job(status)
        yield from self._of_changes(status)
        yield from self._of_members(status)
        yield from self._of_training(status)
        yield from self._of_commits(status)
        yield from self._of_discovery()
        yield from ProcessCollector(registry=None).collect()

    def _of_job(self, status: _Status) -> Iterator[Metric]:
        from prometheus_client.core import InfoMetricFamily

        labels = {
            "job_id": self._tally.job_id,
            "version": self._version,
            "on_change": str(status["on_change"]),
        }
        yield InfoMetricFamily("elastic_driver_job", "The job, and the version of its driver.", labels)
        yield _one("age_seconds", "Seconds since the job began.", status["age_s"])
        phase = "stalled" if status.get("stalled") else status["phase"]
        yield _by_label(
            "job_phase",
            "1 for the current phase of the job: waiting for its first workers, starting them, training, stalled, "
            "or resetting.",
            "phase",
            {each: float(each == phase) for each in _JOB_PHASES},
        )
        yield _one("round", "Number of the current round; 0 before the first.", status["round_id"])
        yield _counter("warnings", "Warnings that the driver has logged.", self._tally.warnings)
        yield _counter("takeovers", "Takeovers of the job by another driver.", self._tally.takeovers)
        yield _counter("driverless_seconds", "Seconds that the job had no driver.", self._tally.driverless_s)

    def _of_changes(self, status: _Status) -> Iterator[Metric]:
        tally = self._tally
        yield _counters(
            "rounds",
            "Rounds formed, by cause; if there were several causes, the worst.",
            "cause",
            {cause: tally.rounds[cause] for cause in ROUND_CAUSES},
        )
        yield _counters(
            "notices",
            "Notifications sent to members of rounds: the round is over, or hosts have changed.",
            "kind",
            {kind.value: tally.notices[kind.value] for kind in NoticeKind if kind is not NoticeKind.NONE},
        )
        yield _histogram(
            "reset_duration_seconds",
            "Seconds from the last activity of a round before a change until all members of the next round train.",
            tally.stalls,
        )
        yield _counter("stall_seconds", "Seconds lost to changes, until all members trained again.", tally.stall_s)
        if tally.lost_s is not None:
            yield _counter("lost_training_seconds", "Seconds of training undone by losses.", tally.lost_s)
        if (lost := _number(status.get("lost_steps"))) is not None:
            total = self._levels.total("lost_steps", "", lost)
            yield _counter("lost_steps", "Training steps repeated after a loss.", total)
        yield _counter("worker_starts", "Worker processes started.", tally.starts)
        yield _counter(
            "worker_restarts", "Worker processes that replaced an earlier one in their slot.", tally.restarts
        )
        yield _counters(
            "worker_failures",
            "Failed workers, by kind: exit code, signal, hung, or lost with their host.",
            "cause",
            {cause: tally.failures[cause] for cause in FAILURE_CAUSES},
        )
        yield _counter("hosts_lost", "Hosts that were lost with all their workers.", tally.hosts_lost)
        yield _counter("hosts_unready", "Times that a listed host was not usable.", tally.hosts_unready)

    def _of_members(self, status: _Status) -> Iterator[Metric]:
        workers, hosts = status["workers"], status["hosts"]
        phases = dict.fromkeys(_WORKER_PHASES, 0)
        used: set[str] = set()
        for worker in workers:
            phases[worker["phase"]] += 1
            used.add(worker["host"])
        yield _by_label("workers", "Running workers, by phase.", "phase", phases)
        yield _one(
            "training_workers", "Members of the round that are training.", sum(worker["running"] for worker in workers)
        )
        states = dict.fromkeys(_HOST_STATES, 0)
        named = {state: set(status[state]) for state in ("blacklisted", "left_out", "silent", "drained")}
        for host in hosts:
            name = host["name"]
            fallback = "in_use" if name in used else "unused"
            states[next((state for state, names in named.items() if name in names), fallback)] += 1
        yield _by_label("hosts", "Hosts that discovery lists and that have an agent, by state.", "state", states)
        yield _one("slots", "Slots of these hosts.", sum(host["slots"] for host in hosts))
        for key, name, text in (
            ("suspected", "suspected_workers", "Workers suspected of hanging."),
            ("stragglers", "straggling_workers", "Workers that are slower than the others."),
        ):
            if key in status:
                yield _one(name, text, len(status[key]))

    def _of_training(self, status: _Status) -> Iterator[Metric]:
        levels = self._levels
        rate = _number(status.get("steps_per_s"))
        if rate is not None:
            yield _one("steps_per_second", "Training steps per second, now.", rate)
        steps = _number(status.get("steps"))
        if steps is not None:
            yield _counter("steps", "Training steps.", levels.total("steps", "", steps))
        traffic = status.get("collectives")
        if traffic is not None:
            operations, sizes = dict.fromkeys((*_KINDS, _OTHER), 0.0), dict.fromkeys((*_KINDS, _OTHER), 0.0)
            for one in traffic:
                kind = one["kind"] if one["kind"] in _KINDS else _OTHER  # as reported by workers
                operations[kind] += one["operations"]
                sizes[kind] += one["payload_bytes"]
            yield _counters(
                "collectives",
                "Completed collectives, counted once per rank.",
                "kind",
                {kind: levels.total("collectives", kind, value) for kind, value in operations.items()},
            )
            yield _counters(
                "collective_payload_bytes",
                "Bytes of the ranks' own tensors in collectives.",
                "kind",
                {kind: levels.total("bytes", kind, value) for kind, value in sizes.items()},
            )
        waited_s = _number(status.get("waited_s"))
        if waited_s is not None:
            total_s = levels.total("waited", "", waited_s)
            yield _counter("collective_wait_seconds", "Seconds that workers have waited in collectives.", total_s)
        figures = status.get("figures")
        if figures:
            yield _by_label(
                "reported",
                "Figure reported by the training: the latest value, from the lowest rank that reports it.",
                "name",
                {name: math.nan if value is None else value for name, value in figures.items()},
            )
        goodput = status.get("goodput")
        if goodput is not None:
            # Not a counter: training becomes another category when a failure discards it.
            yield _by_label(
                "goodput_seconds",
                "Seconds of the job so far, by category.",
                "category",
                dict(goodput["seconds"]),
            )

    def _of_commits(self, status: _Status) -> Iterator[Metric]:
        tally = self._tally
        if status["tells_commits"]:
            newest = max(status["newest_commit"], *(commits for _, commits in tally.durable.values()), 0)
            yield _one("commits", "Number of the newest commit reported to the driver.", newest)
        if tally.durable:
            written = max(written for written, _ in tally.durable.values())
            yield _one("durable_commits", "Number of the newest commit on disk; -1 for none.", written)
            yield _one("durable_folders_in_trouble", "Folders to which commits cannot be written.", len(tally.troubled))

    def _of_discovery(self) -> Iterator[Metric]:
        if self._tally.discovery.count:
            yield _histogram("discovery_duration_seconds", "Runs of host discovery.", self._tally.discovery)
            yield _counter("discovery_failures", "Runs of host discovery that failed.", self._tally.discovery_failures)


def _number(value: object) -> float | None:
    """Return a number that can be exported; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _one(name: str, text: str, value: float) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"elastic_driver_{name}", text, value=value)


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"elastic_driver_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"elastic_driver_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"elastic_driver_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, durations: Histogram) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(f"elastic_driver_{name}", text)
    buckets: Iterable[tuple[str, float]] = (
        ("+Inf" if math.isinf(bound) else f"{bound:g}", float(count)) for bound, count in durations.cumulative()
    )
    family.add_metric([], list(buckets), sum_value=durations.sum_s)
    return family
