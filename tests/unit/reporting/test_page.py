"""The page's server, sessions and feed, with requests and streams that are none."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.sampler import Sampled
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.rendezvous.server.web import WebAnswer, WebRequest, WebStreaming
from elastic_driver.reporting.happenings import (
    HostLost,
    HostsChanged,
    JobEnded,
    NoticeGiven,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    Summary,
    TookOver,
)
from elastic_driver.reporting.page.feed import FRAME_S
from elastic_driver.reporting.page.sessions import ACTS_S, CODE_S, IDLE_S, Sessions
from elastic_driver.reporting.page.story import MOST, Story
from elastic_driver.reporting.page.tails import Tails
from elastic_driver.words import Backend, Bar, NoticeKind
from tests.support.fakes.shown_job import JOB, ShownJob

pytestmark = pytest.mark.unit

HOST = "127.0.0.1:4000"
WORKER = WorkerId("a", 0, 0)


class Clock:
    """Moves when told; its timers fire then."""

    def __init__(self) -> None:
        self.now = 1e9
        self.timers: list[Any] = []

    def __call__(self) -> float:
        return self.now

    def later(self, delay_s: float, act: Callable[[], None]) -> Any:
        clock = self

        class Timer:
            def cancel(self) -> None:
                clock.timers = [each for each in clock.timers if each[2] is not self]

        timer = Timer()
        self.timers.append((self.now + delay_s, act, timer))
        return timer

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted((each for each in self.timers if each[0] <= end), key=lambda each: float(each[0])):
            self.timers.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = end


class Reader:
    """A stream that keeps what it is sent."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = False

    def write(self, data: bytes) -> bool:
        self.data += data
        return not self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def take(self) -> list[tuple[str, Any]]:
        found = re.findall(rb"event: (\w+)\n(?:id: \d+\n)?data: (.*)\n\n", self.data)
        self.data = b""
        return [(name.decode(), json.loads(text)) for name, text in found]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def job(clock: Clock) -> ShownJob:
    shown = ShownJob(4, call_later=clock.later, clock=clock)
    shown.tell_start()
    return shown


def ask(job: ShownJob, path: str, *, method: str = "GET", body: bytes = b"", **headers: str) -> Any:
    path, _, query = path.partition("?")
    told = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    asked = dict(each.split("=", 1) for each in query.split("&") if each)
    return job.site.answer(WebRequest(method, path, asked, told, body))


def log_in(job: ShownJob, *, may_act: bool = False) -> str:
    return log_in_fully(job, may_act=may_act)[0]


def log_in_fully(job: ShownJob, *, may_act: bool = False) -> tuple[str, str]:
    """The cookie, and the page's token."""
    answer = ask(job, f"/login?code={job.sessions.new_code(may_act=may_act)}")
    assert answer.status == 303
    headers = dict(answer.headers)
    return str(headers["Set-Cookie"]).partition(";")[0], str(headers["Location"]).partition("#token=")[2]


def stream(job: ShownJob, cookie: str) -> Reader:
    reader = Reader()
    answer = ask(job, "/feed", cookie=cookie)
    assert isinstance(answer, WebStreaming)
    answer.began(reader)
    return reader


def asked(job: ShownJob, cookie: str, what: object, **headers: str) -> Any:
    told = {"cookie": cookie, "origin": f"http://{HOST}", **headers}
    body = what if isinstance(what, bytes) else json.dumps(what).encode()
    return ask(job, "/action", method="POST", body=body, **told)


def act(job: ShownJob, cookie: str, what: object, **headers: str) -> WebAnswer:
    """Asks for what is refused."""
    answer = asked(job, cookie, what, **headers)
    assert isinstance(answer, WebAnswer)
    return answer


def begun(job: ShownJob, cookie: str, what: object, **headers: str) -> Reader:
    """Asks for what is done."""
    answer, reader = asked(job, cookie, what, **headers), Reader()
    assert isinstance(answer, WebStreaming)
    answer.began(reader)
    return reader


def answered(job: ShownJob, cookie: str, what: object, **headers: str) -> str:
    async def main() -> str:
        reader = begun(job, cookie, what, **headers)
        while not reader.is_closed:
            await asyncio.sleep(0)
        return reader.data.decode()

    return asyncio.run(main())


def test_who_comes_from_another_page_is_led_on_by_a_page_of_ours(job: ShownJob) -> None:
    """A browser sends a cookie of the strict kind only where one of our pages has led."""
    answer = ask(job, f"/login?code={job.sessions.new_code(may_act=False)}", sec_fetch_site="cross-site")
    headers = dict(answer.headers)
    assert (answer.status, headers["Cache-Control"]) == (200, "no-store")
    assert "Location" not in headers
    assert headers["Set-Cookie"].startswith(f"elastic-{JOB}=")
    assert re.search(rb'<meta http-equiv="refresh" content="0; url=/#token=[\w-]{32}">', answer.body)


def test_a_link_is_good_once_and_its_cookie_is_the_jobs_own(job: ShownJob) -> None:
    code = job.sessions.new_code(may_act=False)
    assert ask(job, f"/login?code={code}", method="HEAD").status == 200  # does not take it
    assert ask(job, f"/login?code={code}", sec_purpose="prefetch").status == 503
    answer = ask(job, f"/login?code={code}")
    headers = dict(answer.headers)
    assert (answer.status, headers["Referrer-Policy"]) == (303, "no-referrer")
    assert re.fullmatch(r"/#token=[\w-]{32}", headers["Location"])
    assert re.fullmatch(rf"elastic-{JOB}=[\w-]{{32}}; Path=/; HttpOnly; SameSite=Strict", headers["Set-Cookie"])
    assert ask(job, f"/login?code={code}").status == 403
    encrypted = WebRequest("GET", "/login", {"code": job.sessions.new_code(may_act=False)}, {"host": HOST}, b"", True)
    answer = job.site.answer(encrypted)
    assert dict(answer.headers)["Set-Cookie"].endswith("; Secure")


def test_codes_and_sessions_end(job: ShownJob, clock: Clock) -> None:
    code = job.sessions.new_code(may_act=False)
    clock.pass_time(CODE_S)
    assert ask(job, f"/login?code={code}").status == 403
    cookie = log_in(job)
    clock.pass_time(IDLE_S - 1)
    assert ask(job, "/state", cookie=cookie).status == 200
    clock.pass_time(IDLE_S + 1)
    assert ask(job, "/state", cookie=cookie).status == 401


def test_they_are_bounded_and_wrong_codes_keep_nobody_out(clock: Clock) -> None:
    sessions = Sessions(clock)
    codes = [sessions.new_code(may_act=False) for _ in range(17)]
    assert sessions.log_in(codes[0]) is None
    entered = [sessions.log_in(sessions.new_code(may_act=False)) for _ in range(65)]
    assert entered[0] is not None
    assert entered[-1] is not None
    assert sessions.of(entered[0][1]) is None
    assert sessions.of(entered[-1][1]) is entered[-1][0]
    code = sessions.new_code(may_act=False)
    assert [sessions.failed() for _ in range(12)] == [False] * 10 + [True] * 2
    assert sessions.log_in(code) is not None
    clock.pass_time(61)
    assert not sessions.failed()


@pytest.mark.parametrize("path", ["/", "/feed", "/state", "/output?worker=a", "/favicon.ico"])
def test_nobody_sees_anything_without_a_session(job: ShownJob, path: str) -> None:
    for cookie in ("", "a=b", f"elastic-{JOB}=wrong", "elastic-other=x"):
        answer = ask(job, path, cookie=cookie)
        assert answer.status == 401
        assert b"node000" not in answer.body
    assert job.looks == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("[::1]:1", 200),
        ("10.0.0.7", 200),
        ("driver.example:80", 200),
        ("DRIVER.example.", 200),
        ("evil.example", 421),
        ("", 421),
        ("127.0.0.1.evil.example", 421),
        ("[", 421),
    ],
)
def test_under_a_strangers_name_there_is_no_page(job: ShownJob, host: str, status: int) -> None:
    assert ask(job, "/", cookie=log_in(job), host=host).status == status


def test_the_document_may_run_only_what_stands_in_it(job: ShownJob) -> None:
    answer = ask(job, "/", cookie=log_in(job))
    policy = dict(answer.headers)["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert len(answer.body) < 100_000
    text = answer.body.decode()
    assert not re.search(
        r"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3\.org/2000/svg)", text
    )
    assert " style=" not in text


def test_actions_are_the_pages_own_and_an_operators(job: ShownJob) -> None:
    (looker, theirs), (operator, mine) = log_in_fully(job), log_in_fully(job, may_act=True)
    streams = stream(job, operator), stream(job, looker)
    assert [dict(each.take())["you"]["may_act"] for each in streams] == [True, False]
    drain, token = {"do": "drain", "host": "node000"}, {"x_elastic_token": mine}
    assert act(job, operator, drain).status == 403
    assert act(job, operator, drain, x_elastic_token=theirs).status == 403
    assert act(job, operator, drain, **token, origin="http://evil.example").status == 403
    assert act(job, operator, drain, **token, origin="").status == 403
    assert act(job, looker, drain, x_elastic_token=theirs).status == 403
    assert act(job, "", drain, **token).status == 401
    assert ask(job, "/action", cookie=operator).status == 405
    for rubbish in (b"", b"{", b"[]", b"3", b'{"do": 1}', b'{"do": "x"}', b'{"do": "drain", "host": 1}', b"[" * 4000):
        assert act(job, operator, rubbish, **token).status == 400
    assert answered(job, operator, {"do": "drain", "host": "nowhere"}, **token) == "the job has no host nowhere"
    assert job.done == []
    assert answered(job, operator, drain, **token) == "host node000 is drained"
    assert answered(job, operator, {"do": "end"}, **token) == "the job is ending"
    assert job.done == [("drain", "node000"), ("end", "")]


def test_an_action_is_answered_when_it_is_done(job: ShownJob) -> None:
    """With a journal, when it is on disk: a driver that dies behind the answer does not forget it."""
    operator, token = log_in_fully(job, may_act=True)

    async def main() -> None:
        for is_over in (False, True):
            job.is_on_disk.clear()
            reader = begun(job, operator, {"do": "end"}, x_elastic_token=token)
            await asyncio.sleep(0)
            assert (job.done.pop(), reader.data) == (("end", ""), b"")
            if is_over:
                job.site.close()
            else:
                job.is_on_disk.set()
            while not reader.is_closed:
                await asyncio.sleep(0)
            assert reader.data == (b"the driver has ended" if is_over else b"the job is ending")

    asyncio.run(main())


def test_who_has_only_the_cookie_is_never_told_the_token(job: ShownJob) -> None:
    """Browsers send it to whatever listens on another port of that name."""
    cookie, token = log_in_fully(job, may_act=True)
    seen = stream(job, cookie).data
    for path in ("/", "/state", "/output?worker=a", "/login", "/action", "/nowhere"):
        answer = ask(job, path, cookie=cookie)
        seen += answer.body + repr(answer.headers).encode()
    assert token.encode() not in seen


def test_an_operators_session_looks_only_after_some_hours(job: ShownJob, clock: Clock) -> None:
    cookie, token = log_in_fully(job, may_act=True)
    reader = stream(job, cookie)
    job.feed.remove(reader)
    assert clock.timers == []  # hours of frames for nobody
    clock.pass_time(ACTS_S)
    assert act(job, cookie, {"do": "end"}, x_elastic_token=token).status == 403
    assert ask(job, "/state", cookie=cookie).status == 200
    assert job.done == []


def test_a_browser_gets_all_and_then_what_has_changed(job: ShownJob, clock: Clock) -> None:
    job.status = lambda: {**ShownJob.status(job), "steps_per_s": 1.0, "workers": []}  # type: ignore[method-assign]
    looks = job.looks
    clock.pass_time(60)
    assert job.looks == looks  # nobody looks
    reader = stream(job, log_in(job))
    (_, _), (kind, whole) = reader.take()
    assert (kind, whole["whole"], len(whole["workers"])) == ("whole", True, 4)
    job.drained.add("node001")
    clock.pass_time(1.2)
    changes = [frame for kind, frame in reader.take() if kind == "change"]
    hosts = [frame["hosts"] for frame in changes if "hosts" in frame]
    assert hosts == [{"node001": {"drained": True}}]
    assert not any("story" in frame or "gone" in frame for frame in changes)
    assert all("since" not in row for frame in changes for row in frame.get("workers", {}).values())
    job.lose_host("node000")
    clock.pass_time(1.0)
    frames = [frame for kind, frame in reader.take() if kind == "change"]
    gone = {name for frame in frames for name in frame.get("gone", {}).get("workers", [])}
    assert gone == {"node000[0]#0", "node000[1]#0"}
    assert "host node000 is lost: its agent is not heard any more" in str(frames)


def test_what_is_told_of_a_loss_and_of_a_stall(job: ShownJob, clock: Clock) -> None:
    """What is done again is training only, and ended when the stall began."""
    worker = job.workers[3]
    job.more["stalled"] = {"since_s": 6.0, "waits_for": [worker.key]}
    job.feed.hear(Stalled(6.0, [worker]))
    found = json.loads(job.feed.state())
    assert found["job"]["stalled"] == {"since": round(clock() - 6.0, 1), "waits_for": [worker.key]}
    clock.pass_time(54)
    job.more["stalled"] = None
    job.feed.hear(StallEnded(60.0, [worker], resumed=False))
    job.feed.hear(NoticeGiven(1, NoticeKind.ABORT, "a worker hung"))
    formed = RoundFormed(2, 4, "a worker hung", 7, True, Backend.NATIVE, 0.5, [], False, 3.0, 63.0)
    clock.pass_time(0.5)
    job.feed.hear(formed)
    story = {entry["kind"]: entry for entry in json.loads(job.feed.state())["story"]}
    ended = clock() - 0.5
    assert (story["stalled"]["t0"], story["stalled"]["t"]) == pytest.approx((ended - 60.0, ended), abs=0.1)
    assert story["stalled"]["text"] == f"stalled for 60.0 s: no worker completes a step, waiting for worker {worker}"
    lost = story["lost"]
    assert (lost["t0"], lost["t1"]) == pytest.approx((ended - 63.0, ended - 60.0), abs=0.1)
    assert lost["text"] == "3.0 s of training are recomputed"
    assert story["notice"]["text"] == "round 1 is over: a worker hung"


def test_a_takeover_is_told_with_the_time_without_a_driver(job: ShownJob, clock: Clock) -> None:
    job.feed.hear(TookOver(2, 1.5, 4, 2, 1, trained=True))
    story = {entry["kind"]: entry for entry in json.loads(job.feed.state())["story"]}
    assert story["took_over"]["text"] == (
        "took over: no driver for 1.5 s; 4 workers on 2 hosts kept training, no step is lost; earlier events are "
        "not shown on this page"
    )
    assert story["took_over"]["t"] - story["took_over"]["t0"] == pytest.approx(1.5, abs=0.02)


def test_browsers_get_one_encoding_and_at_most_two_a_second(job: ShownJob, clock: Clock) -> None:
    readers = [stream(job, log_in(job)) for _ in range(3)]
    before = job.looks
    for reader in readers:
        reader.data = b""
    clock.pass_time(10)
    assert job.looks - before <= 20
    assert readers[0].data == readers[1].data == readers[2].data != b""


def test_the_end_is_told_and_stays(job: ShownJob) -> None:
    reader = stream(job, log_in(job))
    reader.take()
    job.feed.hear(JobEnded(1, "all workers failed", Summary()))
    ((kind, frame),) = reader.take()
    assert (kind, frame["job"]["ended"]["exit_code"]) == ("change", 1)
    job.feed.close()
    assert reader.take() == [("bye", {})]
    assert reader.is_closed


def test_workers_that_have_ended_stay_with_how_they_did(job: ShownJob, clock: Clock) -> None:
    reader = stream(job, log_in(job))
    reader.take()
    job.lose_host("node000")
    clock.pass_time(0.6)
    [ended] = [frame["ended_workers"] for kind, frame in reader.take() if "ended_workers" in frame]
    assert [(row["worker"], row["host"], row["rank"], row["how"], row["failed"]) for row in ended] == [
        ("node000[0]#0", "node000", 0, "killed by SIGKILL", True),
        ("node000[1]#0", "node000", 1, "killed by SIGKILL", True),
    ]
    assert {"t", "steps", "commits", "rss_mb"} <= ended[0].keys()
    clock.pass_time(5)
    assert not any("ended_workers" in frame for _, frame in reader.take())
    assert json.loads(job.feed.state())["ended_workers"] == ended
    assert job.feed.names == ["node000[1]#0", "node000[0]#0", "node001[0]#0", "node001[1]#0"]


def test_one_that_has_ended_is_shown_as_it_was_seen_last_also_where_nobody_had_looked(job: ShownJob) -> None:
    worker = job.workers[0]
    job.feed.seen_last(worker.key, {"commits": 41, "steps": 410, "rss_bytes": 3 << 20})
    job.feed.hear(ProcessEnded(worker, 1, "0", 0, "ended", expected=True, foretold=False))
    [ended] = json.loads(job.feed.state())["ended_workers"]
    assert (ended["commits"], ended["steps"], ended["rss_mb"]) == (41, 410, 3)


def test_a_killed_worker_is_shown_with_the_memory_that_it_had_alive(job: ShownJob) -> None:
    worker = job.workers[0]
    before = json.loads(job.feed.state())["workers"][worker.key]["rss_mb"]
    job.feed.seen_last(worker.key, {"state": "Z", "rss_bytes": 0})
    job.feed.hear(ProcessEnded(worker, 1, "0", -9, "killed by SIGKILL", expected=False, foretold=False))
    [ended] = json.loads(job.feed.state())["ended_workers"]
    assert ended["rss_mb"] == before > 0


def test_one_that_ends_before_its_round_is_told_of_has_its_rank_there(job: ShownJob, clock: Clock) -> None:
    reader, worker = stream(job, log_in(job)), job.workers[2]
    job.feed.hear(ProcessEnded(worker, 1, "2", 1, "ended", expected=False, foretold=False))
    job.round_id, job.workers = 2, [worker]
    job.tell_round("start", 0, 0.1)
    clock.pass_time(0.6)
    ends = [frame["ended_workers"] for kind, frame in reader.take() if kind == "change" and "ended_workers" in frame]
    assert [row["rank"] for row in ends[-1]] == [0]


def test_of_many_that_have_ended_those_that_failed_first_and_last_stay(job: ShownJob) -> None:
    def end(number: int, code: int, *, expected: bool) -> None:
        worker = WorkerId("far", number, 0)
        job.feed.hear(ProcessEnded(worker, 1, "0", code, "ended", expected=expected, foretold=False))

    end(0, 1, expected=False)
    for number in range(1, 100):
        end(number, 1, expected=True)
    ended = json.loads(job.feed.state())["ended_workers"]
    assert [row["slot"] for row in ended] == [0, *range(37, 100)]
    for number in range(100, 200):
        end(number, 1, expected=False)
    ended = json.loads(job.feed.state())["ended_workers"]
    assert [row["slot"] for row in ended] == [0, *range(100, 131), *range(168, 200)]


def test_a_job_that_has_ended_keeps_the_last_of_its_figures(job: ShownJob) -> None:
    job.more = {"steps_per_s": None}
    assert json.loads(job.feed.state())["job"]["steps_per_s"] is None
    job.more = {}
    speed = json.loads(job.feed.state())["job"]["steps_per_s"]
    job.more = {"steps_per_s": None, "workers": []}
    job.feed.hear(JobEnded(0, "done", Summary()))
    for _ in range(2):
        assert json.loads(job.feed.state())["job"]["steps_per_s"] == speed > 0


def test_the_last_output_comes_with_the_drivers_end(job: ShownJob) -> None:
    reader = Reader()
    job.feed.add(reader, {})
    reader.take()
    job.feed.close({WORKER.key: ["step 1", "</script>"]})
    assert reader.take() == [("bye", {"outputs": {WORKER.key: ["step 1", "</script>"]}})]
    assert reader.is_closed


def test_the_story_stays_short(clock: Clock) -> None:
    story = Story(clock)
    for index in range(5000):
        story.hear(ProcessStarted(WorkerId("a", index, 0), 1))
    (entry,) = story.all()
    assert entry["count"] == 5000
    assert len(entry["text"]) < 200
    for index in range(5000):
        clock.now += 2
        story.hear(Remark(f"{index}", warning=False))
    entries = story.all()
    assert len(entries) <= MOST
    assert entries[-1]["text"] == "4999"
    assert entries[0]["dropped"] + len(entries) - 1 == 5001
    numbers = [entry["n"] for entry in entries]
    assert numbers == sorted(set(numbers))


def test_what_is_counted_of_a_story_that_was_cut_does_not_fall(clock: Clock) -> None:
    story, losses, stood_s = Story(clock), 0, 0.0
    for index in range(2 * MOST):
        clock.now += 5
        if index % 3:
            story.hear(ProcessEnded(WORKER, 1, "0", -9, "killed by SIGKILL", expected=False, foretold=False))
            losses += 1
        else:
            story.hear(RoundResumed(index, None, 1.5))
            stood_s += 1.5
    entries = story.all()
    assert len(entries) <= MOST
    cut = entries[0]
    assert cut["losses"] + sum(entry["kind"] == "worker_died" for entry in entries) == losses
    resumed = [entry["t"] - entry["t0"] for entry in entries if entry["kind"] == "resumed"]
    assert cut["stood_s"] + sum(resumed) == pytest.approx(stood_s)


def test_a_story_that_nobody_reads_does_not_grow(clock: Clock) -> None:
    story = Story(clock)
    for index in range(3 * MOST):
        clock.now += 2
        story.hear(Remark(f"{index}", warning=False))
    assert len(story._changed) <= MOST
    news, first = story.news()
    assert [entry["n"] for entry in news] == [entry["n"] for entry in story.all()]
    assert first == news[0]["n"]


def test_hosts_of_the_story_are_all_there(clock: Clock) -> None:
    story = Story(clock)
    story.hear(HostsChanged([Host(f"n{index}", 1) for index in range(500)]))
    clock.now += 5
    story.hear(HostsChanged([Host("n0", 1)]))
    came, left = story.all()
    assert (len(came["names"]), len(left["names"])) == (500, 499)


class Nowhere:
    """Takes output."""

    def __init__(self) -> None:
        self.data = b""

    def begin(self, *_: object) -> None:
        pass

    def write(self, worker: WorkerId, stream: str, data: bytes) -> None:
        self.data += data

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        pass

    def end(self, worker: WorkerId) -> None:
        pass


def test_workers_that_are_lost_with_their_host_are_one_entry(clock: Clock) -> None:
    story = Story(clock)
    story.hear(HostLost("a", "it did not respond for 5.0 s"))
    for slot in range(8):
        worker = WorkerId("a", slot, 0)
        story.hear(ProcessEnded(worker, 7, str(slot), -9, "lost with its host", expected=False, foretold=True))
    lost, ended = story.all()
    assert (lost["kind"], lost["warning"]) == ("host_lost", True)
    assert (ended["kind"], ended["count"]) == ("worker_ended", 8)
    assert ended["text"].endswith("lost with its host")
    assert not ended.get("warning")


def test_who_is_slow_or_suspected_is_told_and_shown(job: ShownJob, clock: Clock) -> None:
    reader = Reader()
    job.feed.add(reader, {})
    slow, suspected = job.workers[1], job.workers[2]
    job.feed.hear(StragglerFound(slow, 1, 0.2, 0.1, 0.5, 0.5, 100))
    why = "its last step was 31 s ago"
    job.feed.hear(WorkerSuspected(suspected, 2, "idle", why, "", "", (), 31.0, 30.0, "30 s", None, 0))
    clock.pass_time(1)
    told = next(data for name, data in reader.take() if name == "change" and "story" in data)
    assert [entry["kind"] for entry in told["story"]] == ["straggler", "suspected"]
    assert all(entry["warning"] for entry in told["story"])
    assert f"worker {slow} (rank 1) is slow" in told["story"][0]["text"]
    assert why in told["story"][1]["text"]
    assert told["workers"][slow.key]["slow"] is True
    job.feed.hear(StragglerGone(slow, 1, "it is as fast as the others", 62.0))
    job.feed.hear(WorkerCleared(suspected, 2, "it went on", 33.0))
    clock.pass_time(1)
    told = next(data for name, data in reader.take() if name == "change" and "story" in data)
    assert [entry["kind"] for entry in told["story"]] == ["straggler_gone", "cleared"]
    assert not any("warning" in entry for entry in told["story"])
    assert told["workers"][slow.key]["slow"] is None
    job.feed.hear(StragglerFound(slow, 1, 0.2, 0.1, 0.5, 0.5, 100))
    job.feed.hear(ProcessEnded(slow, 4711, "1", 0, "ended", expected=True, foretold=False))
    assert job.feed.story.slow == set()


def test_the_last_output_is_kept_without_escape_sequences() -> None:
    sink = Nowhere()
    tails = Tails(sink)
    assert tails.of(WORKER.key) is None
    tails.begin(WORKER, 1, 0, "0")
    for index in range(5000):
        tails.write(WORKER, "stdout", f"line {index}\n".encode())
    tails.write(WORKER, "stderr", b"\x1b[31mred\x1b[0m <script>\x07 \x1b]0;title\x07\xff\n")
    lines = tails.of(WORKER.key)
    assert lines is not None
    assert (lines[-1], lines[-2], len(lines)) == ("red <script>  \ufffd", "line 4999", 100)
    assert sink.data.count(b"\n") == 5001
    tails.end(WORKER)
    assert tails.of(WORKER.key) == lines


def test_of_a_bar_the_last_output_has_a_line_now_and_then() -> None:
    tails = Tails(Nowhere())
    tails.begin(WORKER, 1, 0, "0")
    for percent in range(3):
        tails.bar(WORKER, Bar("stderr", "0", b"%d%%\n" % percent, is_line=percent == 1))
    assert tails.of(WORKER.key) == ["1%"]


def test_dots_take_no_more_room_than_lines() -> None:
    tails = Tails(Nowhere())
    tails.begin(WORKER, 1, 0, "0")
    for _ in range(20_000):
        tails.write(WORKER, "stdout", b".\n")
    tail = tails._living[WORKER.key]
    assert len(tail._pieces) == len(tails.of(WORKER.key) or ()) == 100


def test_a_state_that_cannot_be_shown_when_a_browser_comes_is_told(job: ShownJob, clock: Clock) -> None:
    failed: list[Exception] = []
    job.feed._failed = failed.append
    good, job.feed._status = job.feed._status, lambda: {"workers": 1 / 0}
    reader = stream(job, log_in(job))
    assert [name for name, _ in reader.take()] == ["you", "whole", "trouble"]
    assert [type(error) for error in failed] == [ZeroDivisionError]
    job.feed._status = good
    clock.pass_time(6)
    assert len(next(frame for name, frame in reader.take() if name == "change")["workers"]) == 4


def test_a_state_that_cannot_be_shown_is_told_and_ends_nothing(job: ShownJob, clock: Clock) -> None:
    cookie = log_in(job)
    reader = stream(job, cookie)
    reader.take()
    failed: list[Exception] = []
    good, job.feed._status = job.feed._status, lambda: {"workers": 1 / 0}
    job.feed._failed = job.site._failed = failed.append
    clock.pass_time(6)
    assert {name for name, _ in reader.take()} >= {"trouble"}
    assert {type(error) for error in failed} == {ZeroDivisionError}
    del job.feed._streams[reader]  # type: ignore[arg-type]
    answer = ask(job, "/state", cookie=cookie)
    assert answer.status == 500
    assert b"ZeroDivisionError" in answer.body
    job.feed._status = good
    assert ask(job, "/state", cookie=cookie).status == 200


def test_curves_come_whole_at_first_and_point_by_point_then(job: ShownJob, clock: Clock) -> None:
    job.curves.add(clock.now, Sampled(cpu=1.0))
    first, second = Reader(), Reader()
    job.feed.add(first, {})
    (_, whole) = first.take()[1]
    assert whole["curves"] == {"t": [round(clock.now, 1)], "series": {"cpu": [1.0]}}
    job.curves.add(clock.now + 2, Sampled(cpu=2.0, figures={"loss": 0.5}))
    job.feed.add(second, {})
    assert second.take()[1][1]["curves"]["series"] == {"cpu": [1.0]}
    clock.pass_time(FRAME_S)
    news = [frame["curves_new"] for name, frame in first.take() if name == "change"]
    assert news == [{"t": [round(clock.now - FRAME_S + 2, 1)], "series": {"cpu": [2.0], "figures": {"loss": [0.5]}}}]
    assert json.loads(job.feed.state())["curves"]["series"]["cpu"] == [1.0, 2.0]
