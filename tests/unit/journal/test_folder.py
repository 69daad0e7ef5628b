"""A journal's folder: whose it may be, and that one process at a time has it."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_driver.journal import folder
from elastic_driver.journal.file import read
from elastic_driver.journal.folder import JOURNAL, LOCK, JournalError, JournalFolder, JournalHeldError
from elastic_driver.system.process_name import ProcessName

pytestmark = pytest.mark.unit

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def take(path: Path) -> JournalFolder:
    return JournalFolder.take(path, "job")


def test_it_is_made_and_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with take(tmp_path / "new") as taken:
            assert taken.is_ours
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / LOCK).stat().st_mode) == 0o600


def test_it_can_be_taken_again_when_it_is_released(tmp_path: Path) -> None:
    for _ in range(3):
        held = pytest.raises(JournalHeldError, match=rf"job job is driven by process {os.getpid()}")
        with take(tmp_path / "new"), held:
            take(tmp_path / "new")


def open_to_group(path: Path) -> None:
    path.chmod(0o750)


def linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def no_folder(path: Path) -> None:
    path.rmdir()
    path.touch()


def open_above(path: Path) -> None:
    path.parent.chmod(0o777)


def group_above(path: Path) -> None:
    path.parent.chmod(0o770)


def given_away(path: Path) -> None:
    os.chown(path, 4321, -1)


def given_away_above(path: Path) -> None:
    os.chown(path.parent, 4321, -1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (open_to_group, r"it is open to other users \(chmod 700\)"),
        (linked, "it is a symbolic link"),
        (no_folder, "it is not a folder"),
        (open_above, "all users can rename what is in .*above"),
        (group_above, "a group can rename what is in .*above"),
        pytest.param(given_away, "it belongs to user 4321", marks=as_root),
        pytest.param(given_away_above, "above belongs to user 4321", marks=as_root),
    ],
)
def test_a_folder_that_is_not_its_users_alone_is_refused(
    tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "above" / "journal"
    path.mkdir(mode=0o700, parents=True)
    change(path)
    with pytest.raises(JournalError, match=why):
        take(path)


def test_a_sticky_folder_above_will_do(tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o1777)
    with take(tmp_path / "above" / "journal"):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"its parent folder .*/no does not exist"):
        take(tmp_path / "no" / "new")


def test_a_link_above_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")
    with take(tmp_path / "link" / "journal") as taken:
        assert taken.path == tmp_path.resolve() / "one" / "journal"
        (tmp_path / "link").unlink()
        assert taken.is_ours


def open_to_others(path: Path) -> None:
    path.touch(mode=0o600)
    path.chmod(0o640)


def link_to_other(path: Path) -> None:
    path.with_name("other").touch(mode=0o600)
    path.symlink_to("other")


def hard_link(path: Path) -> None:
    path.with_name("other").touch(mode=0o600)
    path.hardlink_to(path.with_name("other"))


def others_file(path: Path) -> None:
    path.touch(mode=0o600)
    os.chown(path, 4321, -1)


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (open_to_others, "other users can open it"),
        (link_to_other, "it is a symbolic link"),
        (hard_link, "it is a hard link"),
        (pipe, "it is not a regular file"),
        pytest.param(others_file, "it belongs to user 4321", marks=as_root),
    ],
)
@pytest.mark.parametrize("name", [LOCK, JOURNAL])
def test_files_that_are_not_its_users_alone_are_refused(
    tmp_path: Path, put: Callable[[Path], None], why: str, name: str
) -> None:
    path = tmp_path / "journal"
    path.mkdir(mode=0o700)
    put(path / name)
    with pytest.raises(JournalError, match=why):
        take(path) if name == LOCK else read(path / name)


def test_a_file_system_over_a_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "file_system", lambda path: 0x6969)
    with pytest.raises(JournalError, match=r"on a network file system \(NFS\)"):
        take(tmp_path / "journal")


def test_what_the_kernel_says_of_file_systems_it_does_make_up() -> None:
    assert folder.file_system(Path("/proc")) == 0x9FA0  # PROC_SUPER_MAGIC
    assert folder.file_system(Path("/sys")) == 0x62656572  # SYSFS_MAGIC


def test_a_lock_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    with take(tmp_path / "journal") as taken:
        (taken.path / LOCK).unlink()
        assert not taken.is_ours
        taken.take_again()
        assert taken.is_ours
        with pytest.raises(JournalHeldError):
            take(tmp_path / "journal")


def test_a_folder_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    with take(tmp_path / "journal") as taken:
        (taken.path / LOCK).unlink()
        taken.path.rmdir()
        assert not taken.is_ours
        taken.take_again()
        assert taken.is_ours


def test_a_folder_that_was_renamed_is_not_the_one(tmp_path: Path) -> None:
    with take(tmp_path / "journal") as taken:
        taken.path.rename(tmp_path / "other")
        assert not taken.is_ours


def test_a_lock_that_somebody_else_has_now_is_lost(tmp_path: Path) -> None:
    with take(tmp_path / "journal") as first:
        (first.path / LOCK).unlink()
        with JournalFolder.take(tmp_path / "journal", "second") as second:
            with pytest.raises(JournalHeldError, match="job second is driven by"):
                first.take_again()
            assert second.is_ours
        assert not first.is_ours


def test_a_lock_that_is_removed_while_it_is_locked_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fcntl.flock
    removed: list[Path] = []

    def flock(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(tmp_path / "journal" / LOCK)
            removed[0].unlink()
        whole(descriptor, how)

    monkeypatch.setattr(folder.fcntl, "flock", flock)
    with take(tmp_path / "journal") as taken:
        assert removed
        assert taken.is_ours


HOLDER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from elastic_driver.journal.folder import JournalFolder, JournalHeldError
    sys.stdin.readline()
    try:
        folder = JournalFolder.take(Path(sys.argv[1]), "job")
    except JournalHeldError:
        print("held", flush=True)
    else:
        print("took", flush=True)
    sys.stdin.readline()
    """
)


def holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_process_holds_it_no_more(tmp_path: Path) -> None:
    process = holder(tmp_path / "journal")
    say(process, "\n")
    assert heard(process) == "took"
    with pytest.raises(JournalHeldError, match=rf"process {process.pid}"):
        take(tmp_path / "journal")
    process.kill()
    process.communicate()
    with take(tmp_path / "journal"):
        pass


def held_for_the_dead(path: Path) -> tuple[JournalFolder, int]:
    """A folder that is locked for a process that is dead, as by a child of its that has not come to its exec."""
    taken = take(path)
    process = holder(path)
    name = replace(ProcessName.of(process.pid), started=1)
    process.kill()
    process.communicate()
    (taken.path / LOCK).write_text(f"here\n{name}\njob\n")
    return taken, process.pid


def test_whoever_finds_it_held_for_a_dead_process_waits_and_says_so_once(tmp_path: Path) -> None:
    taken, dead = held_for_the_dead(tmp_path / "journal")
    told: list[str] = []

    def wait(text: str) -> None:
        told.append(text)
        taken.release()

    with JournalFolder.take(tmp_path / "journal", "next", on_wait=wait) as mine:
        assert mine.is_ours
    assert len(told) == 1
    assert f"process {dead}, which is dead" in told[0]


def test_whoever_waits_can_be_interrupted(tmp_path: Path) -> None:
    taken, _ = held_for_the_dead(tmp_path / "journal")
    looks = iter([None, None, SystemExit(143)])

    def look(*, drives: bool) -> None:
        assert not drives
        if error := next(looks):
            raise error

    before = os.listdir("/proc/self/fd")
    with taken, pytest.raises(SystemExit, match="143"):
        JournalFolder.take(tmp_path / "journal", "next", look=look)
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1, "that of the lock"


def test_one_that_stands_by_waits_for_the_end_of_a_living_process(tmp_path: Path) -> None:
    process = holder(tmp_path / "journal")
    say(process, "\n")
    assert heard(process) == "took"
    told: list[str] = []
    looks: list[None] = []

    def look(*, drives: bool) -> None:
        assert drives
        looks.append(None)
        if len(looks) == 2:
            process.kill()

    with JournalFolder.take(tmp_path / "journal", "next", stands_by=True, on_wait=told.append, look=look) as mine:
        assert (mine.is_ours, mine.waited_for) == (True, "job")
        assert (mine.path / LOCK).read_text().splitlines()[2] == "job"
        mine.is_of("next")
        assert (mine.path / LOCK).read_text().splitlines()[2] == "next"
    process.communicate()
    assert told == [f"standing by: job job is driven by process {process.pid}"]


def test_how_a_job_has_ended_outlasts_whoever_does_not_come_to_look_at_it(tmp_path: Path) -> None:
    with take(tmp_path / "journal") as mine:
        mine.has_ended(3)
    for _ in range(2):
        with JournalFolder.take(tmp_path / "journal", "next") as mine:
            assert (mine.last.job, mine.last.exit_code) == ("job", 3)
    with JournalFolder.take(tmp_path / "journal", "next") as mine:
        mine.is_of("next")
    with JournalFolder.take(tmp_path / "journal", "another") as mine:
        assert (mine.last.job, mine.last.exit_code) == ("next", None)


@pytest.mark.parametrize("removed", ["lock", "folder"])
def test_one_that_stands_by_takes_no_folder_whose_files_were_removed_under_a_living_driver(
    tmp_path: Path, removed: str
) -> None:
    path = tmp_path / "journal"
    stood_by, is_over = threading.Event(), threading.Event()
    looks: list[JournalFolder] = []

    def stand_by() -> None:
        with JournalFolder.take(path, "next", stands_by=True, on_wait=lambda _: stood_by.set()) as mine:
            looks.append(mine)
            is_over.wait()

    with take(path) as taken:
        waiting = threading.Thread(target=stand_by)
        waiting.start()
        stood_by.wait()
        stood_by.clear()
        (path / LOCK).unlink()
        if removed == "folder":
            path.rmdir()
        assert not taken.is_ours
        taken.take_again()
        assert taken.is_ours
        assert not looks
    while not looks:
        time.sleep(0.01)
    assert looks[0].is_ours
    is_over.set()
    waiting.join()


def test_one_that_stands_by_waits_for_nobody_where_the_folder_is_free(tmp_path: Path) -> None:
    with JournalFolder.take(tmp_path / "journal", "job", stands_by=True) as mine:
        assert mine.waited_for == ""


RACER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from elastic_driver.journal.folder import JournalFolder, JournalHeldError
    for line in sys.stdin:
        if line == "release\\n":
            folder.release()
            continue
        try:
            folder = JournalFolder.take(Path(line.strip()), "job")
            print("took", flush=True)
        except JournalHeldError:
            print("held", flush=True)
    """
)


def test_of_two_at_once_one_has_it_fifty_times(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for number in range(50):
            # Half of the folders are there already, with the lock of a driver that has gone.
            path = tmp_path / f"journal{number // 2}"
            for racer in racers:
                say(racer, f"{path}\n")
            answers = [heard(racer) for racer in racers]
            assert sorted(answers) == ["held", "took"]
            say(racers[answers.index("took")], "release\n")
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
