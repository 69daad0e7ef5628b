"""The files by which ``elasticrun drain`` finds jobs: whose they are, and whether their driver lives."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_driver.cli.drain import drain
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.job_files import Posting, forget, left_jobs, running_jobs
from tests.support.fakes.rendezvous_service import serving

pytestmark = pytest.mark.integration

NOBODY = 65534


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "elasticrun"


SOCKET = Path("/no/such/driver.sock")


def post(job_id: str = "1f", socket: Path = SOCKET) -> Posting:
    posting = Posting.post(job_id, socket, ["python", "train.py"])
    assert posting is not None
    return posting


def test_a_job_is_found_with_what_one_may_do_with_it(folder: Path) -> None:
    first, second = post("1f"), post("2f")
    jobs = running_jobs()
    assert [job.job_id for job in jobs] == ["1f", "2f"]
    assert jobs[0].url == f"unix:{SOCKET}"
    assert jobs[0].command == ("python", "train.py")
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600] * 2
    said = json.loads((folder / "1f.json").read_text())
    names = {"job_id", "socket", "pid", "command", "meets_at", "journal", "parent", "folder"}
    assert said.keys() == names, "and no secret"
    first.remove()
    assert [job.job_id for job in running_jobs()] == ["2f"]
    second.remove()
    assert not folder.exists()
    assert running_jobs() == []


def test_a_job_whose_driver_was_killed_is_none_whoever_has_its_process_id_now(folder: Path) -> None:
    code = (
        "import os, signal; from elastic_driver.rendezvous.job_files import Posting;"
        "keep = Posting.post('1f', '', []); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    [path] = folder.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": os.getpid()}))
    assert running_jobs() == []
    assert not folder.exists()


def test_the_next_job_removes_what_dead_ones_have_left(folder: Path) -> None:
    code = (
        "import os, signal\n"
        "from elastic_driver.rendezvous.job_files import Posting, put_page\n"
        "kept = Posting.post('dead', '/no/such', ())\n"
        "put_page('dead', 'x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert {path.name for path in folder.iterdir()} == {"dead.json", "dead.html"}
    posted = post()
    assert {path.name for path in folder.iterdir()} == {"1f.json"}
    posted.remove()


def test_one_that_names_a_journal_stays_until_it_is_forgotten(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from elastic_driver.rendezvous.job_files import Posting\n"
        "kept = Posting.post('dead', '/no/such', ('true',), journal=Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    kept.mkdir()
    subprocess.run([sys.executable, "-c", code, str(kept)], check=False)
    posted = post()
    assert [job.job_id for job in running_jobs()] == ["1f"]
    [left] = left_jobs()
    assert (left.job_id, left.journal, left.command) == ("dead", str(kept), ("true",))
    again = Posting.post("dead", SOCKET, (), journal=kept)  # somebody goes on with it
    assert again is not None
    assert left_jobs() == []
    forget(left)
    assert [job.job_id for job in running_jobs()] == ["1f", "dead"], "it has a driver"
    again.remove()
    subprocess.run([sys.executable, "-c", code, str(kept)], check=False)
    forget(left)
    assert left_jobs() == []
    subprocess.run([sys.executable, "-c", code, str(kept)], check=False)
    kept.rmdir()
    assert left_jobs() == []
    assert {path.name for path in folder.iterdir()} == {"1f.json"}, "without a journal there is none to go on with"
    posted.remove()


def test_a_file_that_somebody_has_removed_is_written_anew(folder: Path) -> None:
    posting = post()
    path = folder / "1f.json"
    before = path.stat()
    posting.renew(SOCKET)
    assert os.path.samestat(before, path.stat()), "it is there"
    path.unlink()
    folder.rmdir()
    posting.renew(SOCKET)
    posting.renew(Path("/another/driver.sock"))
    assert [job.url for job in running_jobs()] == ["unix:/another/driver.sock"], "and its driver lives"
    assert [each.name for each in folder.iterdir()] == ["1f.json"]
    posting.remove()
    assert not folder.exists()


def test_one_that_cannot_be_written_anew_is_told_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    posting = post()
    (folder / "1f.json").unlink()
    folder.chmod(0o755)
    for _ in range(2):
        posting.renew(SOCKET)
    assert caplog.text.count("elasticrun status, drain and end will not find this job: the folder of job files") == 1
    folder.chmod(0o700)
    posting.renew(SOCKET)
    assert [job.job_id for job in running_jobs()] == ["1f"]
    posting.remove()


def test_who_has_read_a_file_that_its_driver_replaces_removes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posting = post()
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        posting.renew(Path("/another/driver.sock"))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    running_jobs()
    assert [job.url for job in running_jobs()] == ["unix:/another/driver.sock"]
    posting.remove()


def test_what_a_driver_starts_does_not_keep_its_job_alive(folder: Path) -> None:
    code = (
        "import os, signal, subprocess; from elastic_driver.rendezvous.job_files import Posting;"
        "keep = Posting.post('1f', '', []);"
        "print(subprocess.Popen(['sleep', '3600'], close_fds=False, stdout=subprocess.DEVNULL).pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE)
    try:
        assert running_jobs() == []
    finally:
        os.kill(int(ran.stdout), 9)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job_id": "1f"}', "null"])
def test_rubbish_of_a_living_process_is_no_job(folder: Path, text: str) -> None:
    posting = post()
    (folder / "1f.json").write_text(text)
    assert running_jobs() == []
    posting.remove()


def told(caplog: pytest.LogCaptureFixture, expected: str) -> None:
    """Both the job and the command say what is wrong with the folder."""
    with caplog.at_level(logging.WARNING, logger="elastic_driver"):
        assert Posting.post("1f", SOCKET, []) is None
    assert (
        f"elasticrun status, drain and end will not find this job: the folder of job files, {expected}" in caplog.text
    )
    with pytest.raises(SettingsError) as caught:
        drain(["localhost"])
    assert str(caught.value).startswith(f"the folder of job files, {expected}")


def test_a_folder_that_another_user_has_made_first(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    told(caplog, f"{folder}, belongs to user nobody, and this process to user root; have it removed, or set XDG_")


def test_a_folder_that_is_open_to_others(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    told(caplog, f"{folder}, is open to other users (chmod 700); have it removed, or set")


def test_there_is_no_folder_that_can_be_written_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container whose whole file system is read-only."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/no/such/folder"])
    with caplog.at_level(logging.WARNING):
        assert Posting.post("1f", SOCKET, ["true"]) is None
    assert "elasticrun status, drain and end will not find this job" in caplog.text
    with pytest.raises(SettingsError, match="cannot list jobs: No usable temporary directory found"):
        running_jobs()


def test_a_link_in_the_place_of_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")
    told(caplog, f"{folder}, is a symbolic link; have it removed, or set")


def test_the_driver_is_asked_at_its_socket(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as service:
        posting = post(socket=service.socket())
        assert drain(["a"]) == 0
        assert [one.hostname for one in service.handler.drained] == ["a"]
        posting.remove()
    assert capsys.readouterr().out == "host a is drained (job 1f: python train.py)\n"
