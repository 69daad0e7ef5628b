"""What is counted of a job, and what scrapers are told of it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from elastic_driver import codec
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.server.web import WebAnswer, WebRequest
from elastic_driver.reporting.happenings import (
    DiscoveryRan,
    DiskReported,
    Happening,
    HostLost,
    JobStarted,
    Member,
    NoticeGiven,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    TookOver,
    WorkerHung,
)
from elastic_driver.reporting.metrics import MetricsPage
from elastic_driver.reporting.tally import ROUND_CAUSES, Tally, TallyKept, cause_label
from elastic_driver.words import Backend, NoticeKind

pytestmark = [pytest.mark.unit]

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 1)
BEARER = b"Bearer 0123"


def formed(round_id: int, cause: str, *, old_size: int = 2, backend: Backend | None = Backend.NATIVE) -> RoundFormed:
    return RoundFormed(round_id, old_size, cause, 0, True, backend, 0.25, [Member(0, A, 7)], reinit=False)


def ended(worker: WorkerId, returncode: int, how: str, *, expected: bool = False) -> ProcessEnded:
    return ProcessEnded(worker, 7, "0", returncode, how, expected, foretold=False)


class Scraper:
    """A page of metrics, and what it says."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.status: dict[str, Any] = {
            "age_s": 12.5,
            "phase": "running",
            "on_change": "in-place",
            "round_id": 3,
            "commits": 40,
            "newest_commit": 41,
            "tells_commits": True,
            "hosts": [{"name": name, "slots": 2} for name in "abcde"],
            "blacklisted": ["c"],
            "silent": ["c", "d"],
            "left_out": [],
            "drained": [],
            "workers": [
                {"host": "a", "phase": "member", "running": True, "commits": 41},
                {"host": "b", "phase": "booting", "running": False, "commits": 0},
            ],
        }
        self.warnings: list[str] = []
        self.page = MetricsPage(self.tally, lambda: self.status, BEARER, "1.2.3", warn=self.warnings.append)

    def hear(self, *happenings: Happening) -> None:
        for happening in happenings:
            self.tally.hear(happening)

    def ask(self, path: str = "/metrics", method: str = "GET", **headers: str) -> WebAnswer:
        return self.page.answer(WebRequest(method, path, headers={"authorization": BEARER.decode(), **headers}))

    def samples(self) -> dict[str, float]:
        found = {}
        for family in parse(self.ask().body.decode()):
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return {name.removeprefix("elastic_driver_"): value for name, value in found.items()}


@pytest.fixture
def scraper() -> Scraper:
    return Scraper()


def test_what_cannot_be_told_ends_nothing() -> None:
    job = Scraper()
    job.status["workers"] = [{"host": "a", "phase": "of a later version", "running": True, "commits": 0}]
    answer = job.ask()
    assert answer.status == 500
    assert b"of a later version" in answer.body
    assert job.ask().status == 500
    assert job.warnings == ["cannot render /metrics (the job is unaffected): KeyError: 'of a later version'"], "once"


def test_what_has_happened_is_counted(scraper: Scraper) -> None:
    scraper.hear(
        JobStarted("http://x", "77"),
        formed(1, "start", old_size=0),
        RoundResumed(1, 0, 9.0),
        ProcessStarted(A, 1),
        ProcessStarted(B, 2),
        HostLost("b", "gone"),
        ended(B, -9, "lost with its host"),
        NoticeGiven(1, NoticeKind.ABORT, "x"),
        Remark("oh", warning=True),
        Remark("well", warning=False),
        formed(2, "host b lost (worker b[0]#1 killed by SIGKILL), host c added"),
        RoundResumed(2, 4, 0.7),
        RoundResumed(2, 4, 0.7),
        formed(3, "host d added", backend=None),
        DiscoveryRan(0.02, failed=False),
        DiscoveryRan(20.0, failed=True),
        WorkerHung(A, "no heartbeat"),
        ended(A, -9, "killed by SIGKILL"),
        ended(A, 1, "exited with code 1"),
        ended(A, -15, "killed by SIGTERM", expected=True),
        ended(A, 0, "exited with code 0"),
        TookOver(2, 1.5, 4, 2, 3, trained=True),
        TookOver(3, 0.25, 4, 2, 3, trained=True),
    )
    found = scraper.samples()
    assert found["job_info{77,in-place,1.2.3}"] == 1
    assert {name: value for name, value in found.items() if name.startswith("rounds_total{") and value} == {
        "rounds_total{start}": 1,
        "rounds_total{worker_failed}": 1,
        "rounds_total{hosts_added}": 1,
    }
    assert found["stall_seconds_total"] == pytest.approx(0.95), "the start is no stall"
    assert found["reset_duration_seconds_count"] == 2
    assert found["reset_duration_seconds_bucket{0.25}"] == 1
    assert found["reset_duration_seconds_bucket{+Inf}"] == 2
    assert {cause: found[f"worker_failures_total{{{cause}}}"] for cause in ("exit_code", "signal", "hung")} == {
        "exit_code": 1,
        "signal": 0,
        "hung": 1,
    }
    assert found["worker_failures_total{host_lost}"] == found["hosts_lost_total"] == 1
    assert (found["worker_starts_total"], found["worker_restarts_total"]) == (2, 1)
    assert (found["takeovers_total"], found["driverless_seconds_total"]) == (2, 1.75)
    assert (found["warnings_total"], found["notices_total{abort}"]) == (1, 1)
    assert (found["discovery_duration_seconds_count"], found["discovery_failures_total"]) == (2, 1)


def test_another_driver_goes_on_counting(scraper: Scraper) -> None:
    scraper.hear(
        JobStarted("http://x", "77"),
        formed(1, "start", old_size=0),
        ProcessStarted(A, 1),
        ended(A, 1, "exited with code 1"),
        NoticeGiven(1, NoticeKind.ABORT, "x"),
        formed(2, "worker a[0] exited with code 1"),
        RoundResumed(2, 4, 0.7),
        DiscoveryRan(0.02, failed=True),
        Remark("oh", warning=True),
    )
    before = scraper.samples()
    successor = Scraper()
    successor.tally.go_on(codec.decode(TallyKept, codec.encode(TallyKept, scraper.tally.kept())))
    successor.hear(JobStarted("http://x", "77"))
    after = successor.samples()
    counted = [name for name in before if not name.startswith(("process_", "python_"))]
    assert {name: after[name] for name in counted} == {name: before[name] for name in counted}
    successor.hear(ProcessStarted(A, 1), Remark("oh", warning=True))
    after = successor.samples()
    assert (after["worker_starts_total"], after["warnings_total"]) == (2, 2)


def test_how_it_stands_comes_with_each_look(scraper: Scraper) -> None:
    found = scraper.samples()
    assert (found["workers{member}"], found["workers{ready}"], found["training_workers"]) == (1, 0, 1)
    assert {state: found[f"hosts{{{state}}}"] for state in ("blacklisted", "silent", "in_use", "unused")} == {
        "blacklisted": 1,
        "silent": 1,
        "in_use": 2,
        "unused": 1,
    }
    assert (found["slots"], found["round"], found["age_seconds"], found["commits"]) == (10, 3, 12.5, 41)
    assert (found["job_phase{running}"], found["job_phase{waiting}"]) == (1, 0)
    assert found["process_resident_memory_bytes"] > 1e6
    scraper.status["phase"] = "waiting"
    found = scraper.samples()
    assert (found["job_phase{running}"], found["job_phase{waiting}"]) == (0, 1)


def test_what_nobody_has_told_is_left_out(scraper: Scraper) -> None:
    text = scraper.ask().body.decode()
    for name in (
        *("steps", "collective", "goodput", "suspected", "straggl", "durable", "discovery", "lost_steps"),
        "lost_training",
    ):
        assert f"elastic_driver_{name}" not in text, name
    scraper.status["tells_commits"] = False
    assert "elastic_driver_commits" not in scraper.ask().body.decode()


def test_what_others_tell_is_passed_on_and_counters_never_fall(scraper: Scraper) -> None:
    def tell(steps: float, operations: int, kind: str = "allreduce") -> dict[str, float]:
        traffic = [{"kind": kind, "operations": operations, "payload_bytes": 8 * operations}]
        scraper.status |= {
            "steps_per_s": 2.5,
            "steps": steps,
            "waited_s": steps / 10,
            "lost_steps": 3,
            "collectives": traffic,
            "suspected": [{"worker": "a[0]#0"}],
            "stragglers": [],
            "goodput": {"seconds": {"training": 10.0, "start": 2.0}},
        }
        return scraper.samples()

    found = tell(100, 1000)
    assert (found["steps_per_second"], found["steps_total"], found["lost_steps_total"]) == (2.5, 100, 3)
    assert found["collectives_total{allreduce}"] == 1000
    assert found["collective_payload_bytes_total{allreduce}"] == 8000
    assert found["collective_wait_seconds_total"] == 10
    assert (found["suspected_workers"], found["straggling_workers"]) == (1, 0)
    assert (found["goodput_seconds{training}"], found["goodput_seconds{start}"]) == (10, 2)
    found = tell(60, 500)  # a worker has gone, with what it had counted
    assert (found["steps_total"], found["collectives_total{allreduce}"]) == (100, 1000)
    found = tell(70, 600)
    assert (found["steps_total"], found["collectives_total{allreduce}"]) == (110, 1100)
    assert found["lost_steps_total"] == 3
    found = tell(70, 5, kind="x" * 99)
    assert found["collectives_total{other}"] == 5, "a worker makes no new series"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "7", True])
def test_what_is_no_number_is_left_out(scraper: Scraper, value: object) -> None:
    scraper.status |= {"steps": value, "steps_per_s": value, "waited_s": value}
    assert "elastic_driver_steps" not in scraper.ask().body.decode()


def test_figures_of_the_training_have_their_names_as_labels(scraper: Scraper) -> None:
    scraper.status |= {"figures": {"loss": 0.25, 'a "name"/\\': 2.0, "nan": None}}
    found = scraper.samples()
    assert found["reported{loss}"] == 0.25
    assert math.isnan(found["reported{nan}"])
    assert 'elastic_driver_reported{name="a \\"name\\"/\\\\"} 2.0' in scraper.ask().body.decode()
    scraper.status |= {"figures": {}}
    assert "elastic_driver_reported" not in scraper.ask().body.decode()


def test_commits_on_disk(scraper: Scraper) -> None:
    scraper.hear(DiskReported("f", "/a", 30, 44, ""), DiskReported("g", "/b", -1, 44, "disk full"))
    found = scraper.samples()
    assert (found["commits"], found["durable_commits"], found["durable_folders_in_trouble"]) == (44, 30, 1)
    scraper.hear(DiskReported("g", "/b", 44, 44, ""), DiskReported("f", "/a", -1, 0, ""))
    found = scraper.samples()
    assert (found["durable_commits"], found["durable_folders_in_trouble"]) == (44, 0)
    for number in range(1000):
        scraper.hear(DiskReported(str(number), "/c", -1, 0, "full"))
    assert len(scraper.tally.durable) == 64
    assert scraper.samples()["durable_folders_in_trouble"] == 64


def test_the_causes_of_all_scenarios_are_known() -> None:
    line = re.compile(r"^ +round \d+: [^;]*; (?:(?:no )?sync, )?(?:from commit \d+; )?(.+)$", re.M)
    texts = {match[1] for path in SCENARIOS.glob("*.txt") for match in line.finditer(path.read_text())}
    assert len(texts) > 100
    assert [text for text in sorted(texts) if cause_label(text) == "other"] == []
    labels = {cause_label(text) for text in texts}
    assert labels == set(ROUND_CAUSES) - {"other"}


@pytest.mark.parametrize(
    ("cause", "label"),
    [
        ("start", "start"),
        ("start; worker a[0] killed by SIGKILL before its first round", "start"),
        ("host b lost (worker b[0] lost with its host)", "host_lost"),
        ("host c lost (worker c[0] hung: no heartbeat for 60.0 s)", "worker_hung"),
        ("host b lost (worker b[1] killed by SIGKILL), host c added", "worker_failed"),
        ("worker a[0] raised HorovodInternalError (boom)", "worker_failed"),
        ("host b left out, host c added", "host_left_out"),
        ("host b drained, host c added", "drained"),
        ("host c left over (--np-multiple 2), host d removed", "hosts_removed"),
        ("host a: 2 -> 1 slot, host e added", "slots_removed"),
        ("host a: 1 -> 2 slots", "slots_added"),
        ("host a: 1 -> 2 slots, host e added", "hosts_added"),
        ("all workers called shutdown() and init() again", "reinit"),
        ("hosts changed and changed back", "unchanged"),
        ("the moon is full", "other"),
        ("", "other"),
        ("\n", "other"),
    ],
)
def test_what_makes_a_round(cause: str, label: str) -> None:
    assert cause_label(cause) == label


def test_both_formats_are_read_by_their_own_parsers(scraper: Scraper) -> None:
    scraper.hear(JobStarted("u", "1"), DiscoveryRan(0.1, failed=False), formed(1, "start", old_size=0))
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    answer = scraper.ask(accept=accept)
    assert answer.content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name for family in parse_open(answer.body.decode())}
    plain = scraper.ask()
    assert plain.content_type == "text/plain; version=0.0.4; charset=utf-8"
    # The older format has no type for it.
    assert {family.name.removesuffix("_info") for family in parse(plain.body.decode())} == families
    assert {name for name in families if not name.startswith(("elastic_driver_", "process_"))} == set()


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=x.y", "text/plain; version=", "\udcff;;,,"])
def test_rubbish_in_what_it_accepts_is_borne(scraper: Scraper, accept: str) -> None:
    assert scraper.ask(accept=accept).status == 200


def test_who_may_not_read_is_told_nothing(scraper: Scraper) -> None:
    for said in ("", "Bearer", "Bearer 0124", "Bearer 01234", "Basic 0123", "bearer \udcff", "Bearer ü"):
        answer = scraper.ask(authorization=said)
        assert (answer.status, answer.headers) == (401, (("WWW-Authenticate", "Bearer"),))
        assert b"elastic_driver_" not in answer.body
    assert scraper.ask("/").status == scraper.ask("/metrics/").status == 404
    assert scraper.ask(method="POST").status == 405
    assert scraper.ask(method="HEAD").status == 200


def test_without_the_library_it_says_what_is_missing(scraper: Scraper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = scraper.ask()
    assert answer.status == 501
    assert b"pip install 'elastic-driver[metrics]'" in answer.body
