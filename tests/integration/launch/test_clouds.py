"""The metadata endpoints of three clouds, against servers that answer as theirs are documented to, and otherwise."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from elastic_driver.launch.agent import clouds
from elastic_driver.launch.agent.clouds import ENV_AWS, ENV_AZURE, ENV_GCP, Endpoint, NotThereError, Seen, endpoint_of
from elastic_driver.words import Cloud
from tests.support.clusters.fake_clouds import Asked, FakeCloud, Says, fake_cloud

pytestmark = pytest.mark.integration

GOOGLE = {"Metadata-Flavor": "Google"}
ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
EVENTS, NAME = "/metadata/scheduledevents?api-version=2020-07-01", "/metadata/instance/compute/name"
VARIABLES = {Cloud.AWS: ENV_AWS, Cloud.GCP: ENV_GCP, Cloud.AZURE: ENV_AZURE}


def in_s(seconds: float) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)


def http_date(seconds: float) -> str:
    return format_datetime(in_s(seconds), usegmt=True)


@contextlib.contextmanager
def endpoint(cloud: Cloud, answers: Callable[[Asked], Says | None]) -> Iterator[tuple[Endpoint, FakeCloud]]:
    with fake_cloud(answers) as fake:
        environ = {VARIABLES[cloud]: fake.place if cloud is Cloud.GCP else fake.url}
        with contextlib.closing(endpoint_of(cloud, environ)) as each:
            yield each, fake


def look(cloud: Cloud, answers: Callable[[Asked], Says | None]) -> Seen:
    with endpoint(cloud, answers) as (each, _):
        return each.look()


class Aws:
    """Answers as IMDSv2 does: without a token that is good, 401."""

    def __init__(self, action: Says | None = None, rebalance: Says | None = None) -> None:
        self.items = {ACTION: action, REBALANCE: rebalance}
        self.tokens = 0

    def __call__(self, asked: Asked) -> Says:
        if (asked.method, asked.path) == ("PUT", "/latest/api/token"):
            assert asked.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            self.tokens += 1
            return Says(body=f"token-{self.tokens}==")
        if asked.headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}==":
            return Says(401)
        return self.items[asked.path] or Says(404, "Not Found")


def action(at: datetime, what: object = "terminate", **more: object) -> str:
    return json.dumps({"action": what, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ"), **more})


# --- AWS -----------------------------------------------------------------------------------------------------------


def test_aws_takes_an_instance_back() -> None:
    for what, left_s in (("terminate", 110.0), ("stop", 110.0), ("hibernate", 0.0)):
        seen = look(Cloud.AWS, Aws(Says(body=action(in_s(110), what))))
        [notice] = seen.notices
        assert notice.within_s is not None
        assert left_s - 80 <= notice.within_s <= left_s
        assert notice.why.startswith("AWS is reclaiming this spot instance: it will be ")
        assert seen.advice == ()


def test_aws_has_nothing_to_say() -> None:
    assert look(Cloud.AWS, Aws()) == Seen()


def test_aws_recommends_to_rebalance() -> None:
    seen = look(Cloud.AWS, Aws(rebalance=Says(body='{"noticeTime": "2020-10-27T08:22:00Z"}')))
    assert seen.notices == ()
    assert "its risk of interruption is elevated" in seen.advice[0]
    assert look(Cloud.AWS, Aws(rebalance=Says(body='{"noticeTime": "soon"}'))) == Seen()


def test_a_token_of_aws_is_kept_and_fetched_anew_when_it_has_expired() -> None:
    answers = Aws()
    with endpoint(Cloud.AWS, answers) as (each, fake):
        each.look()
        each.look()
        assert answers.tokens == 1
        answers.tokens = 7  # the first one is good no more
        answers.items[ACTION] = Says(body=action(in_s(100)))
        assert len(each.look().notices) == 1
        assert answers.tokens == 8
        assert [each.method for each in fake.asked].count("PUT") == 2


def test_an_endpoint_of_aws_that_takes_no_token() -> None:
    def never(asked: Asked) -> Says:
        return Says(body="token") if asked.method == "PUT" else Says(401)

    for answers in (never, lambda _: Says(403), lambda _: Says(404), lambda _: Says(body="a\nb: c"), lambda _: Says()):
        with pytest.raises(NotThereError, match="returned HTTP status"):
            look(Cloud.AWS, answers)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "terminate",
        "[]",
        "[" * 50_000,
        "{}",
        '{"action": "terminate"}',
        '{"action": "none", "time": "2020-10-27T08:22:00Z"}',
        '{"action": ["stop"], "time": "2020-10-27T08:22:00Z"}',
        '{"action": "stop", "time": 5}',
        '{"action": "stop", "time": "2020-13-27T08:22:00Z"}',
        '{"action": "stop", "time": "2020-10-27T08:22:00"}',
        b"\xff\xfe\x00",
    ],
)
def test_rubbish_is_no_notice_of_aws(body: str | bytes) -> None:
    assert look(Cloud.AWS, Aws(Says(body=body))).notices == ()


def test_the_clock_of_the_cloud_counts() -> None:
    """A machine whose clock is hours off has as long as any other."""
    for off_s in (-7200.0, 7200.0):
        now = in_s(off_s)
        says = Says(body=action(now + timedelta(seconds=100)), date=format_datetime(now, usegmt=True))
        [notice] = look(Cloud.AWS, Aws(says)).notices
        assert notice.within_s == 100.0
    # Without its date: what cannot be is counted from now.
    for off_s in (-7200.0, 7200.0):
        [notice] = look(Cloud.AWS, Aws(Says(body=action(in_s(off_s)), date=None))).notices
        assert notice.within_s == 120.0
    for date in ("yesterday", "Mon, 99 Foo 2020 00:00:00 GMT", None):
        [notice] = look(Cloud.AWS, Aws(Says(body=action(in_s(60)), date=date))).notices
        assert notice.within_s is not None
        assert 0 < notice.within_s <= 60
    [late] = look(Cloud.AWS, Aws(Says(body=action(in_s(-5))))).notices
    assert late.within_s == 0.0


# --- Google --------------------------------------------------------------------------------------------------------


class Gcp:
    def __init__(self, preempted: str = "FALSE", maintenance: str = "NONE") -> None:
        self.preempted, self.maintenance = preempted, maintenance

    def __call__(self, asked: Asked) -> Says:
        if asked.headers.get("Metadata-Flavor") != "Google":
            return Says(403)
        path, _, query = asked.path.partition("?")
        assert not query or query == "wait_for_change=true&timeout_sec=5&last_etag=ab12"
        value = {
            "/computeMetadata/v1/instance/preempted": self.preempted,
            "/computeMetadata/v1/instance/maintenance-event": self.maintenance,
        }[path]
        return Says(body=value, headers={**GOOGLE, "ETag": "ab12"})


def test_google_preempts_a_machine() -> None:
    answers = Gcp()
    with endpoint(Cloud.GCP, answers) as (each, fake):
        assert each.look() == Seen()
        assert each.look() == Seen()
        answers.preempted = "TRUE"
        [notice] = each.look().notices
        assert notice.within_s == 30.0
        queries = [asked.path.partition("?")[2] for asked in fake.asked if "preempted" in asked.path]
        assert [bool(query) for query in queries] == [False, True, True], "a change from before is not waited for"


def test_google_maintains_a_host() -> None:
    [notice] = look(Cloud.GCP, Gcp(maintenance="TERMINATE_ON_HOST_MAINTENANCE")).notices
    assert notice.within_s is None
    seen = look(Cloud.GCP, Gcp(maintenance="MIGRATE_ON_HOST_MAINTENANCE"))
    assert (seen.notices, len(seen.advice)) == ((), 1)


@pytest.mark.parametrize("value", ["", "true", "FALSE TRUE", "<html>TRUE</html>", "YES"])
def test_rubbish_is_no_notice_of_google(value: str) -> None:
    assert look(Cloud.GCP, Gcp(value, value)) == Seen()


def test_what_is_not_google_is_not_believed() -> None:
    for answers in (
        lambda _: Says(body="TRUE"),
        lambda _: Says(404, headers=GOOGLE),
        lambda _: Says(503, headers=GOOGLE),
        lambda _: Says(302, headers={**GOOGLE, "Location": "http://127.0.0.1:1/"}),
    ):
        with pytest.raises(NotThereError):
            look(Cloud.GCP, answers)


# --- Azure ---------------------------------------------------------------------------------------------------------


def event(kind: object = "Preempt", **more: object) -> dict[str, object]:
    usual = {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["other_1", "Train_0"],
        "EventStatus": "Scheduled",
        "NotBefore": http_date(25),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return usual | more


class Azure:
    def __init__(self, *events: object, body: str | None = None, name: str = "train_0") -> None:
        self.body = json.dumps({"DocumentIncarnation": 2, "Events": events}) if body is None else body
        self.name = name

    def __call__(self, asked: Asked) -> Says:
        assert asked.method == "GET", "no event is acknowledged"
        if asked.headers.get("Metadata") != "true":
            return Says(400)
        if asked.path.partition("?")[0] == NAME:
            assert asked.path.endswith("?api-version=2021-02-01&format=text")
            return Says(body=self.name)
        assert asked.path == EVENTS
        return Says(body=self.body)


def test_azure_takes_machines_away() -> None:
    for kind in ("Preempt", "Terminate", "Redeploy", "Reboot"):
        [notice] = look(Cloud.AZURE, Azure(event(kind))).notices
        assert notice.within_s is not None
        assert 0 < notice.within_s <= 25
        assert f"({kind})" in notice.why
    [notice] = look(Cloud.AZURE, Azure(event(EventStatus="Started", NotBefore=""))).notices
    assert notice.within_s == 0.0


def test_azure_has_nothing_to_say() -> None:
    assert look(Cloud.AZURE, Azure()) == Seen()
    assert look(Cloud.AZURE, Azure(event(Resources=["other_1"]))) == Seen()
    assert look(Cloud.AZURE, Azure(event(), name="")) == Seen()


def test_azure_freezes_a_machine() -> None:
    seen = look(Cloud.AZURE, Azure(event("Freeze")))
    assert (seen.notices, len(seen.advice)) == ((), 1)


@pytest.mark.parametrize(
    "more",
    [
        {"EventType": "Explode"},
        {"EventType": ["Preempt"]},
        {"EventId": 5},
        {"EventId": ""},
        {"EventStatus": "Completed"},
        {"NotBefore": ""},
        {"NotBefore": "2016-09-19T18:29:47Z"},
        {"NotBefore": 5},
        {"Resources": "train_0"},
        {"Resources": [5, None]},
    ],
)
def test_rubbish_is_no_notice_of_azure(more: dict[str, object]) -> None:
    assert look(Cloud.AZURE, Azure(event(**more), "rubbish", None)) == Seen()


def test_what_is_not_azure_is_not_believed() -> None:
    for body in ("", "[]", "{}", '{"Events": {}}', "<html>"):
        with pytest.raises(NotThereError):
            look(Cloud.AZURE, Azure(body=body))
    with pytest.raises(NotThereError):
        look(Cloud.AZURE, lambda _: Says(404))


# --- all -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", Cloud)
def test_nobody_there_and_one_that_hangs(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint(cloud, lambda _: Says()) as (each, fake):
        url = fake.place if cloud is Cloud.GCP else fake.url
    with contextlib.closing(endpoint_of(cloud, {VARIABLES[cloud]: url})) as each, pytest.raises(NotThereError):
        each.look()
    with monkeypatch.context() as patch:
        for name, limit_s in (("_READ_S", 0.3), ("_AZURE_FIRST_S", 0.3), ("_GCP_WAIT_S", 0.1)):
            patch.setattr(clouds, name, limit_s)
        with pytest.raises(NotThereError, match="does not answer"):
            look(cloud, lambda _: None)
    with pytest.raises(NotThereError, match="is too long or too slow"):
        look(cloud, lambda _: Says(body=b"x" * 100_000, headers=GOOGLE))
    with (
        contextlib.closing(endpoint_of(cloud, {VARIABLES[cloud]: "no url at all"})) as each,
        pytest.raises(NotThereError),
    ):
        each.look()


@pytest.mark.parametrize("cloud", Cloud)
def test_no_proxy_is_asked(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    answers: dict[Cloud, Callable[[Asked], Says]] = {Cloud.AWS: Aws(), Cloud.GCP: Gcp(), Cloud.AZURE: Azure()}
    assert look(cloud, answers[cloud]) == Seen()
