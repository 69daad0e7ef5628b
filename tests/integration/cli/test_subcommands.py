"""elasticrun jobs, status and end, and drain from elsewhere, with a real job on this machine."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_driver.cli import target as target_module
from elastic_driver.cli.end import end
from elastic_driver.cli.jobs import jobs
from elastic_driver.cli.main import main
from elastic_driver.cli.status import status
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.certificate import Certificate
from elastic_driver.rendezvous.credentials import Identity, JobKey, Role
from elastic_driver.rendezvous.job_files import Posting
from tests.support.fakes.rendezvous_service import serving
from tests.support.processes.jobs import Job
from tests.support.processes.subcommands import elasticrun

pytestmark = [pytest.mark.integration]


@pytest.fixture
def job(tmp_path: Path, runtime: Path) -> Iterator[Job]:
    with Job(tmp_path, "localhost:2\n", "-np", "2", "--grace-time", "20") as running:
        running.wait_for_steps(2)
        yield running


def test_a_job_is_listed_looked_at_and_ended(job: Job, tmp_path: Path, runtime: Path) -> None:
    started = job.events("job_started")[0]
    job_id, here = started["job_id"], started["rendezvous"]
    assert here.startswith("unix:/")
    listed = elasticrun("jobs")
    assert (listed.returncode, listed.stderr) == (0, "")
    head, row = listed.stdout.splitlines()
    assert head.split() == ["JOB", "STATE", "AGE", "WORKERS", "PID", "FOLDER", "COMMAND"]
    cells = re.split(r"  +", row)
    assert cells[:2] == [job_id, "running"]
    assert cells[3:6] == ["2", str(job.process.pid), os.getcwd()]
    [as_json] = json.loads(elasticrun("jobs", "--json").stdout)
    of_driver = {"phase", "age_s", "workers"}
    assert as_json.keys() == {"job", "pid", "driver", "command", "folder", "no_driver_s", *of_driver}, "and no secret"
    assert as_json["driver"] == here
    assert (as_json["phase"], as_json["workers"], as_json["age_s"] > 0) == ("running", 2, True)

    pids = {line["rank"]: line["pid"] for line in job.steps()}
    shown = elasticrun("status")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"job {job_id}, running, ")
    assert [line.split()[:3] for line in shown.stdout.splitlines()[-2:]] == [
        ["0", "localhost[0]", "training"],
        ["1", "localhost[1]", "training"],
    ]
    answer = json.loads(elasticrun("status", "--json", job_id[:6]).stdout)
    assert (answer["job_id"], answer["phase"], answer["round_id"]) == (job_id, "running", 1)
    assert answer["command"][-1].endswith("step_program.py")
    assert {each["rank"]: each["pid"] for each in answer["workers"]} == pids
    assert {(each["host"], each["slot"]) for each in answer["workers"]} == {("localhost", 0), ("localhost", 1)}
    assert all(each["since_s"] >= 0 for each in answer["workers"])

    token = tmp_path / "token"
    written = elasticrun("jobs", "--write-token", str(token), job_id)
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text().strip() not in written.stdout
    words = shlex.split(written.stdout)
    assert words[:3] == ["elasticrun", "status", "--driver"]
    url = words[3]
    assert re.fullmatch(r"https://127\.0\.0\.1:\d+#sha256:[0-9a-f]{64}", url)
    place = url.partition("#")[0]
    assert written.stderr == "the driver listens on loopback only, because the job uses no other machine\n"
    elsewhere = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert (
        elasticrun("jobs", **elsewhere).stdout
        == "no job of yours runs on this machine; elasticrun history lists jobs that have ended\n"
    )
    assert elasticrun(*words[1:], **elsewhere).stdout.startswith(f"job at {place}, running, ")
    drained = elasticrun("drain", *words[2:], "--undo", "localhost", **elsewhere)
    assert drained.stdout == f"host localhost was not drained (job at {place})\n"

    ended = elasticrun("end", *words[2:], **elsewhere)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        f"job at {place}: the job is ending; 2 workers get SIGTERM, then SIGKILL after 20 s (--grace-time)\n"
    )
    assert job.wait() == 128 + signal.SIGTERM
    assert "elasticrun end: stopping all workers" in job.said()
    assert "interrupted by elasticrun end" in job.said()
    gone = elasticrun("status", job_id)
    assert (gone.returncode, gone.stdout) == (2, "")
    assert gone.stderr.startswith(f"elasticrun: error: job {job_id} ended ")
    assert gone.stderr.endswith(f"see elasticrun page {job_id[:8]} or elasticrun report {job_id[:8]}\n")


def test_a_reader_that_has_seen_enough_ends_a_subcommand(job: Job) -> None:
    assert job.events("job_started")
    for words in ("status", "status --watch", "jobs"):
        command = f"{shlex.join([sys.executable, '-m', 'elastic_driver'])} {words} | true; echo $PIPESTATUS"
        ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=150, check=False)
        assert (ran.stdout, ran.stderr) == (f"{128 + signal.SIGPIPE}\n", "")


def test_a_watch_ends_with_the_job(job: Job) -> None:
    job_id = job.events("job_started")[0]["job_id"]
    command = [sys.executable, "-m", "elastic_driver", "status", "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert json.loads(watch.stdout.readline())["phase"] == "running"
        assert elasticrun("end", job_id[:4]).returncode == 0
        job.wait()
        for line in watch.stdout:
            json.loads(line)
        assert watch.stderr.read() == f"job {job_id} has ended\n"
        assert watch.wait(150) == 0


# --- against a server of the test's -----------------------------------------------------------------------------------


def posted(job_id: str, socket: Path = Path("/no/such/driver.sock")) -> Posting:
    posting = Posting.post(job_id, socket, ["python", "train.py"])
    assert posting is not None
    return posting


def test_over_tls_with_the_certificate_of_the_job_only(
    runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = Certificate.new()
    with serving(certificate=certificate) as service:
        elsewhere = f"https://10.0.0.1:1#sha256:{certificate.fingerprint}"
        service.handler.url = elsewhere
        posting = posted("1f", service.socket())
        assert main(["end", "1f"]) == 0
        assert service.handler.ends == 1
        token = tmp_path / "token"
        assert main(["jobs", "--write-token", str(token)]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out == ["job 1f: it ends", f"elasticrun status --driver {elsewhere} --token-file {token}"]
        own, other = service.url, f"{service.url.partition('#')[0]}#sha256:{Certificate.new().fingerprint}"
        assert main(["end", "--driver", own, "--token-file", str(token)]) == 0
        assert service.handler.ends == 2
        assert main(["end", "--driver", other, "--token-file", str(token)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line == (
            f"elasticrun: error: cannot contact the driver at 127.0.0.1 port {service.port}: the certificate there "
            "does not match the fingerprint in the URL: another driver answers there, or the driver was "
            "restarted; use the URL that elasticrun jobs --write-token FILE, on the driver's machine, prints"
        )
        assert service.handler.ends == 2
        posting.remove()


def test_a_stolen_port_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target_module, "_STRANGER_S", 0.0)
    token = tmp_path / "token"
    token.write_text(JobKey.new().of(Identity(Role.OPERATOR)).hex())
    with serving() as service:
        url, fingerprint = service.url.split("#")
        command = "elasticrun jobs --write-token FILE, on the driver's machine,"
        for words in (["status"], ["end"], ["drain", "a"], ["status", "--watch"]):
            differs = f"this job's operator's key is not the one from the file {token} (--token-file); {command}"
            for mark, said in (
                (f"#{fingerprint}", f"{differs} writes the current one"),
                ("", f"either another job's driver answers there, or {differs} prints the URL and writes the key"),
            ):
                assert main([*words, "--driver", f"{url}{mark}", "--token-file", str(token)]) == 2
                [line] = capsys.readouterr().err.splitlines()
                assert line == f"elasticrun: error: cannot contact the driver at 127.0.0.1 port {service.port}: {said}"
        assert (service.handler.ends, service.handler.drained) == (0, [])


def test_http_is_warned_of_once_as_of_other_things() -> None:
    words = ("--driver", "http://127.0.0.1:1", "--driver", "http://127.0.0.1:2", "--slots", "1")
    warning = (
        "elasticrun: warning: http:// in the driver's URL is read as https://, because drivers only speak TLS: write "
        "https://"
    )
    for command in (("join", *words), ("status", *words[:2], "--token-file", "/no/such")):
        ran = subprocess.run([sys.executable, "-m", "elastic_driver", *command], capture_output=True, text=True)
        first, second = ran.stderr.splitlines()
        assert (ran.returncode, first) == (2, warning)
        assert second.startswith("elasticrun: error: ")


def test_the_join_token_is_written_for_jobs_that_accept_agents(
    runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as one, serving() as other:
        other.handler.url, other.handler.join_token = "https://b:1", "0123456789abcdef"
        closed, open_ = posted("1f", one.socket()), posted("2f", other.socket())
        _check_join_token(tmp_path, capsys)
        closed.remove()
        open_.remove()


def _check_join_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    with pytest.raises(SettingsError, match="job 1f accepts no joining hosts: it was started without --accept-agents"):
        jobs(["--write-join-token", str(token), "1f"])
    assert not token.exists()
    assert jobs(["--write-join-token", str(token), "2"]) == 0
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("0123456789abcdef\n", 0o600)
    out = capsys.readouterr().out
    assert out == f"elasticrun join --slots N --driver https://b:1 --join-token-file {token}\n"
    with pytest.raises(SettingsError, match=r"cannot write the new file .*: File exists"):
        jobs(["--write-join-token", str(token), "2f"])
    with pytest.raises(SettingsError, match=r"cannot write the new file /no/such/file: No such file"):
        jobs(["--write-token", "/no/such/file", "2f"])
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="cannot write the new file"):
        jobs(["--write-token", str(link), "2f"])
    assert not (tmp_path / "elsewhere").exists()


def test_a_job_whose_socket_is_not_seen_here_is_told_in_a_sentence(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its driver has another /tmp, and the same folder of job files."""
    monkeypatch.setattr(target_module, "_PATIENCE_S", 0.1)
    posting = posted("1f", Path("/tmp/elasticrun-no-such/driver.sock"))
    assert main(["jobs"]) == 0
    out, err = capsys.readouterr()
    assert re.search(rf"^1f +does not respond +- +- +{os.getpid()} ", out, re.MULTILINE), out
    assert err == (
        "cannot reach job 1f from here: /tmp/elasticrun-no-such/driver.sock does not exist; either its driver uses "
        "another /tmp than this process (a container, a service with a private /tmp), or the socket was removed\n"
    )
    for words in (["status"], ["jobs", "--write-token", "/no/such"]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "/tmp/elasticrun-no-such does not exist: the process that created it has ended" in err
        assert err.count("\n") == 1
    posting.remove()


class Terminal(io.StringIO):
    """Standard input or error of somebody who can be asked."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_whose_end_is_meant_is_asked(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as service:
        posting = posted("1f", service.socket())
        for words, says, code in (("end 1f", "", 1), ("end 1f", "no\n", 1), ("end 1f", "y\n", 0), ("end -y 1f", "", 0)):
            shown = Terminal()
            monkeypatch.setattr(sys, "stdin", Terminal(says))
            monkeypatch.setattr(sys, "stderr", shown)
            assert main(words.split()) == code
            asked = "" if "-y" in words else "end job 1f (python train.py)? [y/N] "
            assert shown.getvalue() == asked + ("the job keeps running\n" if code else "")
        assert service.handler.ends == 2
        posting.remove()


@pytest.fixture
def two_jobs(runtime: Path) -> Iterator[None]:
    postings = posted("1f"), posted("1fe")
    yield
    for posting in postings:
        posting.remove()


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize("run", [status, end])
def test_which_job_is_meant(run: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "_PATIENCE_S", 0.01)
    for job_id, complaint in (
        ("1", r"several jobs are running, name one: 1f \(python train.py\); 1fe \(python train.py\)"),
        ("2", r"no such job: 2; running: 1f "),
        ("1f", "job 1f: cannot reach the driver at its local socket /no/such/driver.sock: /no/such"),
        ("1fe", "job 1fe: cannot reach the driver at its local socket "),
    ):
        with pytest.raises(SettingsError, match=complaint):
            run([job_id])


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("status", "several jobs are running, name one: 1f"),
        ("status --no-such", "unrecognized arguments: --no-such"),
        ("status 1f 2f", "unrecognized arguments: 2f"),
        ("status --driver http://a:1", "--driver and --token-file must be given together"),
        ("status --token-file x", "--driver and --token-file must be given together"),
        ("status 1f --driver http://a:1 --token-file x", "--driver selects the job: drop the job id"),
        ("status --driver a:1 --token-file x", "argument --driver: cannot read 'a:1' as the driver's address"),
        ("status --driver http://a:1 --token-file /no/such", "cannot read the token file /no/such: No such file"),
        ("status --driver http://a:1 --token-file /dev/null", "it does not hold a key of 64 hexadecimal digits"),
        ("end", "no job given: name one by its id"),
        ("end --driver", "argument --driver: expected one argument"),
        ("drain", "the following arguments are required: HOST"),
        ("jobs --write-token x --write-join-token y 1f", "not allowed with argument"),
        ("jobs 3", "no such job: 3; running: 1f"),
    ],
)
def test_bad_usage_is_one_line(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("elasticrun: error: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize("name", ["jobs", "status", "drain", "end"])
def test_each_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: elasticrun {name} ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("jobs --token-file x", "--token-file needs --write-reader-token"),
        ("jobs --write-reader-token r --token-file x 1f", "and excludes JOB"),
        ("jobs --write-reader-token r --token-file /no/such", "cannot read the token file /no/such"),
        ("jobs --write-reader-token r", "no job of yours runs on this machine"),
    ],
)
def test_a_readers_token_that_cannot_be_written(
    words: str, complaint: str, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_readers_token_is_written_for_its_reader_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "operator"
    key.write_text("0123456789abcdef" * 4)
    assert main(["jobs", "--write-reader-token", str(tmp_path / "r"), "--token-file", str(key)]) == 0
    assert capsys.readouterr().out == ""
    written = (tmp_path / "r").read_text().strip()
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600
    assert written == JobKey.new(bytes.fromhex("0123456789abcdef" * 4)).of(Identity(Role.READER)).hex()
    assert written != JobKey.new().of(Identity(Role.READER)).hex()
    assert main(["jobs", "--write-reader-token", str(tmp_path / "r"), "--token-file", str(key)]) == 2, "never over it"


def test_what_others_log_stays_as_it_is() -> None:
    """asyncio tells of an error that nobody took with its traceback, which a bug report needs."""
    code = (
        "import logging; from elastic_driver.cli.main import _tell_warnings; _tell_warnings();"
        "logging.getLogger('elastic_driver.x').warning('one\\nline'); logging.getLogger('asyncio').error('lost')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('elastic_driver').exception('a bug')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second, third, *rest = ran.stderr.splitlines()
    assert (first, second, third) == ("elasticrun: warning: one line", "lost", "a bug")
    assert rest[-1] == "ZeroDivisionError: division by zero"
