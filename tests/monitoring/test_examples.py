"""examples/monitoring, as promtool sees it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_driver.rendezvous.server.web import WebRequest
from elastic_driver.reporting.happenings import DiscoveryRan, DiskReported, JobStarted
from elastic_driver.reporting.metrics import MetricsPage
from elastic_driver.reporting.tally import Tally

pytestmark = [pytest.mark.monitoring]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/monitoring"
_NAME = re.compile(r"\b(?:elastic_driver|process)_\w+")


def promtool(*words: str, cwd: Path = EXAMPLES, stdin: str = "") -> str:
    ran = subprocess.run(["promtool", *words], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def page() -> str:
    """Metrics of a job, with all that others may tell of it."""
    tally = Tally()
    for happening in (JobStarted("u", "1"), DiscoveryRan(0.1, failed=False), DiskReported("f", "/a", 3, 4, "")):
        tally.hear(happening)
    status: dict[str, Any] = {
        **{"age_s": 1.0, "phase": "running", "on_change": "in-place", "round_id": 1, "commits": 4},
        **{"newest_commit": 4, "tells_commits": True, "hosts": [], "workers": []},
        **{key: [] for key in ("blacklisted", "silent", "left_out", "drained", "suspected", "stragglers")},
        **{"steps_per_s": 1.0, "steps": 5, "waited_s": 1.0, "lost_steps": 3, "collectives": []},
        "goodput": {"seconds": {"training": 1.0}},
    }
    answer = MetricsPage(tally, lambda: status, b"Bearer x", "1").answer(
        WebRequest("GET", "/metrics", headers={"authorization": "Bearer x"})
    )
    assert answer.status == 200
    return answer.body.decode()


def test_promtool_finds_nothing_wrong_with_the_metrics() -> None:
    assert promtool("check", "metrics", stdin=page()).strip() == ""


def test_the_configuration_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"
    shutil.copytree(EXAMPLES, folder)
    (folder / "reader.token").write_text("00\n")
    said = promtool("check", "config", "prometheus.yml", cwd=folder)
    assert "10 rules found" in said


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")
    alerts = [rule["alert"] for rule in rules()]
    tests = yaml.safe_load((EXAMPLES / "rules_test.yml").read_text())["tests"]
    fires, rests = (
        {
            check["alertname"]
            for test in tests
            for check in test["alert_rule_test"]
            if bool(check["exp_alerts"]) == expected
        }
        for expected in (True, False)
    )
    assert fires == rests == set(alerts)


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_each_alert_says_what_to_do() -> None:
    for rule in rules():
        assert len(rule["annotations"]["runbook"]) > 60, rule["alert"]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((EXAMPLES / "grafana.json").read_text())
    return board


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_what_prometheus_understands(tmp_path: Path) -> None:
    asked = [each.replace("$__rate_interval", "5m").replace("$instance", ".*") for each in expressions()]
    records = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", "rules.yml", cwd=tmp_path)


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        across, down = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        cells = {(x, y) for x in across for y in down}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def test_what_alerts_and_dashboard_ask_for_is_told() -> None:
    told = set(_NAME.findall(page()))
    asked = {name for text in (*expressions(), *(rule["expr"] for rule in rules())) for name in _NAME.findall(text)}
    assert {name for name in asked - {"elastic_driver"} if name not in told} == set()
