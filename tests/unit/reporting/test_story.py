"""Stories and pictures of jobs, from event logs."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from elastic_driver.reporting.drawing import text_of
from elastic_driver.reporting.picture import clock, duration, page, svg
from elastic_driver.reporting.story import BOOTS, DRAINED, ENDS, WAITS, WORKS, Reader, Story

pytestmark = [pytest.mark.unit]

SVG = "{http://www.w3.org/2000/svg}"


class Log:
    """An event log that is written by hand; its first job begins at 100 s of its clock."""

    def __init__(self, job_id: str = "feedface") -> None:
        self.lines: list[bytes] = []
        self.now = 100.0
        self.add("job_started", rendezvous="http://a:1", job_id=job_id)

    def add(self, event: str, after: float = 0.0, **fields: Any) -> None:
        self.now += after
        line = {"time": 1.7e9 + self.now, "at_s": self.now, "event": event, **fields}
        self.lines.append(json.dumps(line).encode() + b"\n")

    def phase(self, doing: str, after: float = 0.0, *, on_change: str = "in-place") -> None:
        self.add("phase", after, phase="running", doing=doing, on_change=on_change)

    def round(
        self, number: int, *workers: str, lost_s: float | None = 0.0, cause: str = "start", **more: float
    ) -> None:
        members = [{"rank": rank, "worker": worker, "pid": 1} for rank, worker in enumerate(workers)]
        fields: dict[str, Any] = {"round_id": number, "size": len(members), "old_size": 2 * (number > 1)}
        fields |= {"cause": cause, "commits": 7, "sync": True, "backend": "native", "formed_in_s": 0.5}
        self.add("round_formed", **fields, lost_s=lost_s, members=members, **more)

    def resumed(self, number: int, after: float) -> None:
        self.phase("training", after)
        self.add("round_resumed", round_id=number, commits=7, took_s=after)


def a_job() -> Log:
    """Two workers on two hosts; one is killed after 20 s, and its host comes back."""
    log = Log()
    log.add("hosts_discovered", hosts={"a": 1, "b": 1})
    log.phase("forming")
    log.add("worker_started", worker="a[0]#0", pid=1)
    log.add("worker_started", worker="b[0]#0", pid=2)
    log.add("worker_ready", 4.0, worker="a[0]#0")
    log.add("worker_ready", worker="b[0]#0")
    log.round(1, "a[0]#0", "b[0]#0")
    log.resumed(1, 1.0)
    log.add("worker_dying", 20.0, worker="b[0]#0", pid=2, how="killed by SIGKILL")
    log.phase("forming")
    log.add("worker_exited", worker="b[0]#0", pid=2, returncode=-9, expected=False)
    log.round(2, "a[0]#0", lost_s=3.0, cause="host b lost")
    log.resumed(2, 2.0)
    log.add("worker_started", 10.0, worker="b[0]#1", pid=3)
    log.add("worker_ready", 5.0, worker="b[0]#1")
    log.phase("forming", 1.0)
    log.round(3, "a[0]#0", "b[0]#1", cause="host b added")
    log.resumed(3, 1.0)
    log.phase("ended", 30.0)
    log.add("job_ended", 1.0, exit_code=0, message="all workers of round 3 exited with code 0")
    return log


def read(log: Log, job: str = "") -> Story:
    story = Reader(job).read(log.lines)
    assert story is not None
    return story


def test_a_story() -> None:
    story = read(a_job())
    assert (story.job_id, story.last, story.exit_code) == ("feedface", 75.0, 0)
    assert [(each.round_id, each.size, each.took_s, each.lost_s) for each in story.rounds] == [
        (1, 2, 1.0, 0.0),
        (2, 1, 2.0, 3.0),
        (3, 2, 1.0, 0.0),
    ]
    lives = {life.worker.key: [(piece.kind, piece.since) for piece in life.pieces] for life in story.lives}
    assert lives == {
        "a[0]#0": [(BOOTS, 0.0), (WORKS, 4.0)],
        "b[0]#0": [(BOOTS, 0.0), (WORKS, 4.0), (ENDS, 25.0)],
        "b[0]#1": [(BOOTS, 37.0), (WAITS, 42.0), (WORKS, 43.0)],
    }
    booked = story.booked
    assert booked.seconds == {
        "start": 5.0,
        "training": 17.0 + 16.0 + 30.0,
        "waiting_for_slots": 0.0,
        "reset": 3.0,
        "stalled": 0.0,
        "recomputed": 3.0,
        "idle": 1.0,
        "unexplained": 0.0,
    }
    assert (booked.wall_s, story.resets) == (75.0, 2)
    assert booked.told() == (
        "goodput 84.0 %: training 63.0 s, reset 3.0 s (2), recomputed 3.0 s, start 5.0 s, idle 1.0 s, unexplained 0.0 s"
    )


def test_a_host_that_is_lost_is_one_mark_however_many_workers_it_had() -> None:
    log = Log()
    log.phase("forming")
    for worker in ("a[0]#0", "b[0]#0", "b[1]#0"):
        log.add("worker_started", worker=worker, pid=1)
    log.add("host_lost", 9.0, host="b", reason="it did not respond for 5.0 s")
    for worker in ("b[0]#0", "b[1]#0"):
        log.add("worker_exited", worker=worker, pid=1, returncode=-9, expected=False)
    log.add("worker_exited", 1.0, worker="a[0]#0", pid=1, returncode=-9, expected=False)
    story = read(log)
    assert [life.how for life in story.lives] == ["killed by signal 9", "lost with its host", "lost with its host"]
    assert [mark.text for mark in story.marks] == [
        "host b is lost: it did not respond for 5.0 s",
        "worker a[0]: killed by signal 9",
    ]


def test_a_loss_and_the_next_round_in_one_step() -> None:
    """The round is told before the phase."""
    log = Log()
    log.round(1, "a[0]#0", "b[0]#0")
    log.resumed(1, 5.0)
    log.now += 20.0
    log.round(2, "a[0]#0", lost_s=3.0, cause="host b lost")
    log.phase("forming")
    log.resumed(2, 2.0)
    log.phase("ended", 10.0)
    seconds = read(log).booked.seconds
    assert (seconds["training"], seconds["recomputed"], seconds["reset"]) == (27.0, 3.0, 2.0)


def test_stalls() -> None:
    """What is done again is training only. One stall ends by itself, and another with its round."""
    log = Log()
    log.round(1, "a[0]#0", "b[0]#0")
    log.resumed(1, 5.0)
    log.add("stalled", 20.0, stood_s=4.0, waits_for=["b[0]#0"])
    log.add("stall_ended", 6.0, stood_s=10.0, waits_for=["b[0]#0"], resumed=True)
    log.add("stalled", 20.0, stood_s=4.0, waits_for=["b[0]#0"])
    log.add("stall_ended", stood_s=4.0, waits_for=["b[0]#0"], resumed=False)
    log.round(2, "a[0]#0", lost_s=18.0, cause="host b lost", since_commit_s=32.0)
    log.phase("forming")
    log.resumed(2, 2.0)
    log.phase("ended", 10.0)
    story = read(log)
    seconds = story.booked.seconds
    # From 25 to 51 s it trained, with a stall from 21 to 31 s; from 47 s on it stalled again, and 32 s were lost.
    assert (seconds["stalled"], seconds["recomputed"], seconds["training"], seconds["reset"]) == (14.0, 18.0, 24.0, 2.0)
    assert [mark.text for mark in story.marks if "stalled" in mark.text] == [
        "stalled for 10.0 s, waiting for b[0]",
        "stalled for 4.0 s, waiting for b[0]",
    ]


def test_a_standstill_of_the_driver_in_which_the_workers_trained_is_training() -> None:
    log = Log()
    log.resumed(1, 5.0)
    log.add("stood_still", 20.0, stood_s=8.0, ended_s=1.5, trained=True)
    log.add("stood_still", 20.0, stood_s=8.0, ended_s=1.5, trained=False)
    log.phase("ended")
    seconds = read(log).booked.seconds
    assert (seconds["training"], seconds["unexplained"]) == (32.0, 8.0)


def test_of_a_log_that_was_cut_the_figures_are_what_the_driver_says() -> None:
    log = a_job()
    log.lines.pop()  # its end
    seconds = {"start": 5.0, "training": 60.0, "waiting_for_slots": 0.0, "reset": 3.0, "stalled": 0.0, "idle": 0.0}
    log.add("goodput", seconds={**seconds, "unexplained": 0.0}, wall_s=68.0, share=0.88)
    log.add("log_cut", 1.0, size_bytes=1000)
    killed = read(log)
    assert killed.booked.told() == "goodput 88.2 %: training 60.0 s, reset 3.0 s (2), start 5.0 s, unexplained 0.0 s"
    assert "from 1:16 on: the log reached its size limit" in svg(killed)
    assert all(piece.until is not None and piece.until <= 76.0 for piece in killed.pieces), "nobody knows the rest"
    log.add("log_cut", 10.0, size_bytes=1000)  # by the next driver
    log.phase("finishing", 90.0)
    log.add("goodput", seconds={**seconds, "training": 160.0, "unexplained": 0.0}, wall_s=168.0, share=0.95)
    log.add("job_ended", exit_code=0, message="all is done")
    assert read(log).booked.share == pytest.approx(160 / 168)
    assert [mark.text for mark in read(log).marks].count(killed.cut) == 1
    bare = a_job()
    bare.lines.pop()
    bare.add("log_cut", size_bytes=1000)
    bare.add("job_ended", 100.0, exit_code=0, message="all is done")
    assert (read(bare).last, read(bare).booked.wall_s) == (175.0, 75.0)


def test_a_takeover_is_marked_and_changes_no_account() -> None:
    """One worker the driver before has not told of any more."""
    log = Log()
    log.add("worker_started", worker="a[0]#0", pid=1)
    log.resumed(1, 5.0)
    log.now += 20
    log.phase("training")
    pids = {"a[0]#0": 1, "a[1]#0": 2}
    log.add("took_over", epoch=2, away_s=1.5, workers=2, hosts=1, round_id=1, trained=True, pids=pids)
    log.phase("ended", 10.0)
    story = read(log)
    assert {name: spent for name, spent in story.booked.seconds.items() if spent} == {"start": 5.0, "training": 30.0}
    assert [str(life.worker) for life in story.lives] == ["a[0]", "a[1]"]
    assert [mark.text for mark in story.marks] == ["another driver took over, after 1.5 s without a driver"]
    assert story.booked.seconds["unexplained"] == 0
    assert "another driver took over" in svg(story)


def test_a_running_job_and_a_broken_last_line() -> None:
    log = a_job()
    whole = b"".join(log.lines)
    # Wherever the log breaks off, there is a story, and a picture of it.
    for length in range(len(log.lines[0]), len(whole), 97):
        story = Reader().read(whole[:length].splitlines(keepends=True))
        assert story is not None
        assert story.exit_code is None
        assert story.skipped <= 1
        ET.fromstring(svg(story))


def test_rubbish_is_counted() -> None:
    log = a_job()
    good = [event["event"] for event in map(json.loads, log.lines)]
    rubbish = [
        b"\xff\xfe\n",
        b"{\n",
        b"[]\n",
        b"7\n",
        b"null\n",
        b'{"event": "phase"}\n',
        b'{"event": [], "at_s": "x"}\n',
        b'{"event": "round_formed", "at_s": 105.5, "members": 7}\n',
        b'{"event": "worker_started", "at_s": 106, "worker": "no worker"}\n',
        b'{"event": "notice", "at_s": 1e999}\n',
        b'{"event": "phase", "at_s": NaN, "doing": "training", "on_change": "in-place"}\n',
        b'{"event": "phase", "at_s": -Infinity, "doing": "training", "on_change": "in-place"}\n',
        b'{"event": "phase", "at_s": 1e308, "doing": "training", "on_change": "in-place"}\n',
        b'{"event": "stood_still", "at_s": 106, "stood_s": NaN}\n',
        b'{"event": "job_started", "at_s": 1, "time": NaN, "job_id": "f"}\n',
        b"[" * 100_000 + b"\n",
    ]
    assert len(rubbish) < len(good)
    lines = log.lines[:1]
    for index, line in enumerate(log.lines[1:]):
        lines += [rubbish[index % len(rubbish)], line]
    story = Reader().read(lines)
    assert story is not None
    assert story.skipped == len(good) - 1
    assert story.booked.seconds == read(log).booked.seconds
    assert f"{len(good) - 1} lines of the event log could not be read" in svg(story)


def test_of_several_jobs_the_last_or_the_one_that_is_named() -> None:
    first, second = a_job(), Log("cafe0001")
    second.phase("forming")
    lines = [*first.lines, *second.lines]
    last = Reader().read(lines)
    assert last is not None
    assert last.job_id == "cafe0001"
    named = Reader("feed").read(lines)
    assert named is not None
    assert (named.job_id, named.last, named.exit_code) == ("feedface", 75.0, 0)
    assert Reader("beef").read(lines) is None
    assert Reader().read([]) is None


def test_a_drain_a_standstill_and_workers_without_commits() -> None:
    log = Log()
    log.phase("forming", on_change="restart")
    log.add("worker_started", worker="a[0]#0", pid=1)
    log.phase("training", 2.0, on_change="restart")
    log.add("worker_drained", 3.0, worker="a[0]#0", undone=False)
    log.add("worker_drained", 1.0, worker="a[0]#0", undone=True)
    log.add("stood_still", 10.0, stood_s=8.0)
    log.add("worker_exited", 1.0, worker="a[0]#0", pid=1, returncode=3, expected=False)
    story = read(log)
    assert "recomputed" not in story.booked.seconds
    assert story.booked.seconds["unexplained"] == 8.0
    (life,) = story.lives
    assert [piece.kind for piece in life.pieces] == [BOOTS, DRAINED, WORKS]
    assert life.how == "exit code 3"
    assert "drained workers" in svg(story)


@pytest.mark.parametrize(("resets", "words"), [(1, " %), 1 time<"), (2, " %), 2 times<")])
def test_resets_are_counted(resets: int, words: str) -> None:
    story = read(a_job())
    story.resets = resets
    assert words in svg(story)


def test_deaths_and_stalls_have_marks() -> None:
    log = a_job()
    end = log.lines.pop()
    log.now -= 1.0
    log.add("worker_suspected", worker="a[0]#0", rank=0, why="it has not submitted the allreduce 'loss'")
    log.add("straggler", 0.5, worker="b[0]#1", rank=1, own_s=0.284, median_s=0.2, against_others=0.7042)
    story = Reader().read([*log.lines, end])
    assert story is not None
    root = layout(svg(story), "wide")
    marks = [element[0].text for element in root.iter(SVG + "path") if element.get("class") == "x"]
    assert marks == [
        "1:14: worker a[0]: it has not submitted the allreduce 'loss'",
        "0:25: worker b[0] killed by SIGKILL",
        "1:14: worker b[0]#1 takes 1.42 times as long for a step as the others",
    ]


def test_who_was_told_to_end_has_no_mark() -> None:
    log = Log()
    log.add("worker_started", worker="a[0]#0", pid=1)
    log.add("worker_started", worker="b[0]#0", pid=2)
    log.add("worker_exited", 1.0, worker="a[0]#0", pid=1, returncode=-15, expected=True)
    log.add("worker_exited", worker="b[0]#0", pid=2, returncode=-11, expected=False)
    log.add("job_ended", exit_code=143, message="ended")
    assert [mark.text for mark in read(log).marks] == ["worker b[0]: killed by signal 11"]


NASTY = "</title><script>alert(1)</script>\x1b[31m\ud800\ufffe&\"'\u202e"


def nasty() -> Story:
    log = Log(NASTY)
    log.add("hosts_discovered", hosts={NASTY: 1})
    log.phase("forming")
    log.add("worker_started", worker=f"h{NASTY.replace('[', '').replace(' ', '')}[0]#0", pid=1)
    log.add("notice", round_id=1, kind="abort", reason=NASTY)
    log.round(1, "a[0]#0", cause=NASTY)
    log.add("host_lost", host=NASTY, reason=NASTY)
    log.add("job_ended", 1.0, exit_code=1, message=NASTY)
    return read(log)


def test_what_scripts_print_is_escaped() -> None:
    for text in (svg(nasty()), page(nasty())):
        assert "<script" not in text
        assert "alert(1)" in text
        assert not any(character in text for character in "\x1b\ud800\ufffe\u202e")
        text.encode()
    root = ET.fromstring(svg(nasty()))
    assert {element.tag for element in root.iter()} <= {
        SVG + tag for tag in ("svg", "title", "style", "rect", "text", "path", "g")
    }


def test_a_long_text_is_cut() -> None:
    assert len(text_of("x" * 10_000)) == 400
    assert text_of("a\nb<\x00") == "a b&lt; "


def layout(drawn: str, name: str) -> ET.Element:
    """One of the two layouts of a picture."""
    (found,) = [each for each in ET.fromstring(drawn).iter(SVG + "svg") if each.get("class") == name]
    return found


def a_job_with_samples() -> Story:
    log = a_job()
    end = log.lines.pop()
    log.now -= 1.0
    known = {"steps_per_s": 20.0, "waiting": 0.05, "cpu": 3.9, "memory_bytes": 3 << 30}
    for index in range(40):
        figures = {"loss": 2.0 / (index + 1), NASTY[:60]: None if index == 7 else 1e308 * (-1) ** index}
        log.add("sampled", 1.0, **known, gpu=None, gpu_memory_bytes=None, workers=2, figures=figures)
    story = Reader().read([*log.lines, end])
    assert story is not None
    return story


def test_samples_are_drawn_as_curves_with_their_names_and_last_values() -> None:
    for name in ("wide", "narrow"):
        root = layout(svg(a_job_with_samples()), name)
        curves = [each for each in root.iter(SVG + "path") if each.get("class") == "curve"]
        assert [(each[0].text or "").partition(", scale")[0] for each in curves][:5] == [
            "steps/s: last 20",
            "waiting (of the workers' time): last 5 %",
            "CPU (cores busy): last 3.9",
            "memory (of all workers): last 3 GB",
            "loss: last 0.05",
        ]
        texts = [each.text for each in root.iter(SVG + "text")]
        assert {"steps/s", "loss", "last 0.05", "training"} <= set(texts)


def test_on_a_telephone_a_picture_has_its_own_layout_in_letters_that_can_be_read() -> None:
    for drawn in (svg(a_job_with_samples()), page(a_job_with_samples())):
        # Chromium reports a device of width 0 for a picture in an <img>: that is not a telephone.
        telephone = "(max-width:600px),(min-device-width:1px) and (max-device-width:600px)"
        assert f"@media {telephone}{{.wide{{display:none}}.narrow{{display:" in drawn
        assert min(map(float, re.findall(r"font[^}]*?([\d.]+)px", drawn))) >= 11
    root = layout(svg(a_job_with_samples()), "narrow")
    assert root.attrib["viewBox"].startswith("0 0 360 ")
    for each in root.iter(SVG + "text"):
        assert len(each.text or "") <= 56
    assert 'data-label="time lost"' in page(a_job_with_samples())


def test_nothing_is_loaded_from_anywhere() -> None:
    for text in (svg(read(a_job())), page(read(a_job()))):
        assert not any(word in text for word in ("href", "src=", "url(", "@import", "<script"))
        assert not re.search(r"http://(?!www\.w3\.org/2000/svg)", text), "the name of SVG's own words"


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_everything_is_inside_the_picture(name: str) -> None:
    root = layout(svg(a_job_with_samples()), name)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter(SVG + "rect"):
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        assert 0 <= x <= x + float(element.attrib["width"]) <= width + 0.6
        assert 0 <= y <= y + float(element.attrib["height"]) <= height
    for element in root.iter(SVG + "text"):
        assert 0 <= float(element.attrib["y"]) < height


def large(changes: int, hosts: int, slots: int) -> Story:
    """Hosts that come and go for three weeks."""
    log, step = Log(), 21 * 86400 / changes
    names = [f"node-{index:04d}.cluster.example.org" for index in range(hosts)]
    living = {name: [f"{name}[{slot}]#0" for slot in range(slots)] for name in names}
    log.add("hosts_discovered", hosts=dict.fromkeys(names, slots))
    log.phase("forming")
    for worker in itertools.chain.from_iterable(living.values()):
        log.add("worker_started", worker=worker, pid=1)
    log.round(1, *itertools.chain.from_iterable(living.values()))
    log.resumed(1, 3.0)
    for change in range(2, changes):
        name = names[change * 7919 % hosts]
        if living[name]:
            log.phase("forming", step)
            for worker in living.pop(name):
                log.add("worker_exited", worker=worker, pid=1, returncode=-9, expected=False)
            living[name] = []
        else:
            living[name] = [f"{name}[{slot}]#{change}" for slot in range(slots)]
            for worker in living[name]:
                log.add("worker_started", worker=worker, pid=1)
            log.phase("forming", step)
        log.round(change, lost_s=30.0, *itertools.chain.from_iterable(living.values()))  # noqa: B026
        log.resumed(change, 5.0)
    return read(log)


@pytest.mark.parametrize(("changes", "hosts", "slots"), [(300, 125, 8), (150, 1500, 1), (1000, 5, 2), (60, 200, 8)])
def test_a_large_job_stays_below_a_megabyte(changes: int, hosts: int, slots: int) -> None:
    story = large(changes, hosts, slots)
    drawn = svg(story)
    ET.fromstring(drawn)
    assert len(drawn.encode()) < 1_000_000
    assert len(page(story).encode()) < 1_000_000
    assert "are merged with their neighbors" in drawn
    if hosts * slots > 1200:
        assert "the workers of a host share a row" in drawn
    if hosts > 1200:
        assert "300 more hosts are not drawn" in drawn


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (9.876, "9.88 s"), (95, "95 s"), (150, "2.5 min"), (9000, "2.5 h"), (2e5, "2.3 d")],
)
def test_lengths(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (3605, "1:00:05"), (90061, "1 d 01:01")])
def test_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_samples_are_kept_for_curves() -> None:
    log = Log()
    fields = {"steps_per_s": 2.5, "waiting": 0.25, "cpu": 1.5, "memory_bytes": 1 << 30, "gpu": None}
    log.add("sampled", 5.0, **fields, gpu_memory_bytes=None, workers=2, figures={"loss": 0.5, "bad": None})
    log.add("sampled", 5.0, **fields, gpu_memory_bytes=None, workers=2, figures={"loss": float("nan")})
    log.add("sampled", 5.0, **fields, gpu_memory_bytes=[], workers=2, figures={})
    story = Reader().read(log.lines)
    assert story is not None
    first, second = story.samples
    assert (second.at - first.at, first.steps_per_s, first.gpu) == (5.0, 2.5, None)
    assert (first.figures, second.figures) == ({"loss": 0.5, "bad": None}, {"loss": None})
    assert story.skipped == 1
