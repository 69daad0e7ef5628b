"""Sockets in folders of this user's: found by him, believed by him, and gone with the process that made them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.system.local_socket import OtherUserError, SocketFolder, connect, is_ours, named_paths
from tests.support.paths import ROOT

pytestmark = pytest.mark.unit

NOBODY = 65534
PATIENCE_S = 100.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")

# Makes a folder in argv[1], of the name argv[2] if there is one, listens, and says where.
_OWNER = """
import sys
from pathlib import Path
from elastic_driver.system.local_socket import SocketFolder
places = [Path(sys.argv[1])]
folder = SocketFolder.named(sys.argv[2], places) if sys.argv[2:] else SocketFolder.new(places)
listening = folder.listen("s")
print(folder.path, flush=True)
sys.stdin.read()
"""
_CONNECTS = """
import os, sys
from pathlib import Path
from elastic_driver.system.local_socket import connect
if sys.argv[2:]:
    os.setuid(int(sys.argv[2]))  # now that it has read the modules, which others may not be allowed to
try:
    connect(Path(sys.argv[1]), 10.0)
except OSError as error:
    print(type(error).__name__, error.strerror)
else:
    print("connected")
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder like /tmp, that other users can get to."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def python(source: str, *words: object, by: tuple[str, ...] = ()) -> str:
    command = [*by, sys.executable, "-c", source, *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=150, env=environ).stdout.strip()


def owner(*words: object) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that has a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().decode().strip())


def end(process: subprocess.Popen[bytes]) -> None:
    """As the kernel ends one when there is no memory."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


# --- ours ------------------------------------------------------------------------------------------------------------


def test_both_ends_are_this_user_and_nothing_is_left(place: Path) -> None:
    folder = SocketFolder.new([place])
    assert folder.path.parent == place
    assert folder.path.stat().st_mode & 0o777 == 0o700
    with folder.listen("s") as listening, connect(folder.path / "s", PATIENCE_S), listening.accept()[0] as taken:
        assert is_ours(taken)
    folder.close()
    folder.close()
    assert list(place.iterdir()) == []


def test_paths_may_be_longer_than_an_address(place: Path) -> None:
    deep = place.joinpath(*["x" * 100] * 5)
    deep.mkdir(parents=True)
    folder = SocketFolder.new([deep])
    with folder.listen("s"), connect(folder.path / "s", PATIENCE_S):
        pass
    folder.close()
    assert list(deep.iterdir()) == []


def test_the_first_place_that_can_hold_sockets(place: Path) -> None:
    (place / "file").touch()
    (place / "open").mkdir()
    (place / "open").chmod(0o777)  # anybody can rename what is in there
    (place / "open/below").mkdir()
    bad = [place / "missing", place / "file", place / "open", place / "open/below"]
    with pytest.raises(SettingsError, match=r"cannot make a folder for sockets: .*missing: No such file") as caught:
        SocketFolder.new(bad)
    assert str(caught.value).endswith("; set TMPDIR to a usable folder")
    assert str(caught.value).count(f"all users can rename what is in {place}/open (chmod +t)") == 2
    assert list((place / "open/below").iterdir()) == []
    folder = SocketFolder.new([*bad, place])
    assert folder.path.parent == place
    folder.close()


def test_where_sockets_cannot_be_bound_the_next_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = place / "other"
    other.mkdir()
    listen = SocketFolder.listen

    def refuses(folder: SocketFolder, name: str) -> socket.socket:
        if folder.path.parent == place:
            raise PermissionError(errno.EPERM, "no sockets here")
        return listen(folder, name)

    monkeypatch.setattr(SocketFolder, "listen", refuses)  # as vfat or some networks' file systems do
    folder = SocketFolder.new([place, other])
    assert folder.path.parent == other
    folder.close()
    assert list(place.iterdir()) == [other]


def test_a_relative_place_is_the_same_from_everywhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    folder = SocketFolder.new([Path()])
    assert folder.path.parent == place
    folder.close()


def test_a_place_that_leads_to_itself_is_passed_over(place: Path) -> None:
    (place / "loop").symlink_to(place / "loop")
    with pytest.raises(SettingsError, match="loop: Too many levels of symbolic links"):
        SocketFolder.new([place / "loop"])


@needs_root
@pytest.mark.parametrize("name", [(), ("job",)])
def test_a_place_that_nobody_can_list(place: Path, name: tuple[str, ...]) -> None:
    place.chmod(0o1733)
    source = f"import os, elastic_driver.system.local_socket; os.setuid({NOBODY}); exec(os.environ['OWNER'])"
    with_owner = ("env", f"OWNER={_OWNER}")
    assert python(source, place, *name, by=with_owner).startswith(f"{place}/elasticrun-{NOBODY}-")


@needs_root
def test_without_proc_it_says_so(place: Path) -> None:
    by = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"')
    source = """
import os
from elastic_driver.errors import SettingsError
try:
    exec(os.environ['OWNER'])
except SettingsError as error:
    print(error)
"""
    said = python(source, place, by=("env", f"OWNER={_OWNER}", *by))
    assert said == "cannot make a folder for sockets: /proc is not mounted"
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("named", [False, True])
def test_where_folders_do_not_stay_private_none_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    make = Path.mkdir

    def opened(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        path.chmod(0o777)  # as on CIFS or vfat

    monkeypatch.setattr(Path, "mkdir", opened)
    with pytest.raises(SettingsError, match="is open to other users"):
        SocketFolder.named("job", [place]) if named else SocketFolder.new([place])
    assert list(place.iterdir()) == []


def test_a_later_listener_takes_the_name_over(place: Path) -> None:
    folder = SocketFolder.new([place])
    with folder.listen("s") as first, folder.listen("s") as second:
        with connect(folder.path / "s", PATIENCE_S):
            second.accept()[0].close()
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.accept()
    folder.close()


def test_a_full_backlog_is_waited_for(place: Path) -> None:
    folder = SocketFolder.new([place])
    with folder.listen("s") as listening:
        listening.listen(0)  # one waits
        with connect(folder.path / "s", PATIENCE_S):
            with pytest.raises(TimeoutError, match="too busy to accept a connection"):
                connect(folder.path / "s", 0.1)
            made: list[socket.socket] = []
            waiting = threading.Thread(target=lambda: made.append(connect(folder.path / "s", PATIENCE_S)))
            waiting.start()
            listening.accept()[0].close()
            waiting.join()
        listening.accept()[0].close()
        made[0].close()
    folder.close()


# --- owners that die, and two of them --------------------------------------------------------------------------------


def test_what_a_killed_owner_has_left_the_next_one_removes(place: Path) -> None:
    living, kept = owner(place)
    process, left = owner(place)
    end(process)
    with pytest.raises(ConnectionRefusedError):
        connect(left / "s", PATIENCE_S)
    others = [place / "elasticrun-0-of another machine-x", place / f"{left.name[:-1]}"]
    for other in others:
        other.mkdir(mode=0o700)
    others[1].chmod(0o755)  # it is none of ours
    folder = SocketFolder.new([place])
    assert sorted(place.iterdir()) == sorted([folder.path, kept, *others])
    connect(kept / "s", PATIENCE_S).close()
    folder.close()
    end(living)


def test_a_name_has_one_owner(place: Path) -> None:
    process, path = owner(place, "job")
    assert named_paths("job", [place]) == [path]
    with pytest.raises(BlockingIOError):
        SocketFolder.named("job", [place, place / "next"])
    SocketFolder.new([place]).close()
    connect(path / "s", PATIENCE_S).close()
    end(process)
    folder = SocketFolder.named("job", [place])
    with pytest.raises(ConnectionRefusedError):
        connect(path / "s", PATIENCE_S)
    with folder.listen("s"):
        connect(path / "s", PATIENCE_S).close()
    folder.close()
    assert list(place.iterdir()) == []


def test_who_looks_for_what_is_left_does_not_take_a_name_away(place: Path) -> None:
    path = named_paths("job", [place])[0]
    path.mkdir(mode=0o700)
    looking = SocketFolder.at(path)
    timer = threading.Timer(0.1, looking.close)
    timer.start()
    folder = SocketFolder.named("job", [place])
    timer.join()
    with folder.listen("s"):
        connect(path / "s", PATIENCE_S).close()
    folder.close()


def test_one_that_is_removed_before_it_is_locked_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock
    found = []

    def late(descriptor: int, operation: int) -> None:
        if not found:
            found.extend(place.iterdir())
            found[0].rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    folder = SocketFolder.new([place])
    assert list(place.iterdir()) == [folder.path] != found
    folder.close()


def test_a_file_system_without_locks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    first, second = SocketFolder.new([place]), SocketFolder.new([place])
    assert first.path.is_dir(), "nobody can tell whether it is used"
    with pytest.raises(SettingsError, match="No locks available"):
        SocketFolder.named("job", [place])
    assert not named_paths("job", [place])[0].exists()
    first.close()
    second.close()


def test_a_folder_that_was_removed(place: Path) -> None:
    folder = SocketFolder.new([place])
    with folder.listen("s") as listening, connect(folder.path / "s", PATIENCE_S) as connection:
        shutil.rmtree(folder.path)
        with pytest.raises(FileNotFoundError):
            connect(folder.path / "s", PATIENCE_S)
        with listening.accept()[0] as taken:
            connection.sendall(b"x")
            assert taken.recv(1) == b"x"
    with pytest.raises(FileNotFoundError):
        folder.listen("t")
    folder.path.mkdir()  # another's, by now
    folder.close()
    assert list(place.iterdir()) == [folder.path]


@needs_root
def test_what_strangers_leave_under_our_names_is_not_even_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [place / f"{named_paths('job')[0].name}{number}" for number in range(3)]
    for path in theirs:
        path.mkdir(mode=0o700)
        os.chown(path, NOBODY, NOBODY)
    opened = []
    at = SocketFolder.at
    monkeypatch.setattr(SocketFolder, "at", lambda path, lock: opened.append(path) or at(path, lock))
    folder = SocketFolder.new([place])
    assert opened == [folder.path]
    folder.close()
    assert sorted(place.iterdir()) == theirs


# --- strangers -------------------------------------------------------------------------------------------------------


def test_another_folder_in_its_place_is_not_believed(place: Path) -> None:
    folder = SocketFolder.new([place])
    with folder.listen("s") as listening:
        link, plain = place / "link", place / "plain"
        link.symlink_to(folder.path)
        plain.touch()
        for path, why in ((link, "is a symbolic link"), (plain, "is not a folder")):
            with pytest.raises(OtherUserError, match=why):
                connect(path / "s", PATIENCE_S)
            with pytest.raises(OtherUserError, match=why):
                SocketFolder.at(path)
        folder.path.chmod(0o750)
        with pytest.raises(OtherUserError, match="is open to other users"):
            connect(folder.path / "s", PATIENCE_S)
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    folder.close()


def test_a_link_at_a_name_is_not_followed(place: Path) -> None:
    precious = place / "precious"
    precious.mkdir(mode=0o700)
    named_paths("job", [place])[0].symlink_to(precious)
    with pytest.raises(SettingsError, match="is a symbolic link"):
        SocketFolder.named("job", [place])
    SocketFolder.new([place]).close()
    assert precious.is_dir()


@needs_root
def test_another_user_neither_enters_nor_is_believed(place: Path) -> None:
    folder = SocketFolder.new([place])
    as_nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    with folder.listen("s") as listening:
        assert python(_CONNECTS, folder.path / "s", NOBODY) == (
            f"OtherUserError {folder.path} belongs to user root, and this process to user nobody"
        )
        raw = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        with pytest.raises(subprocess.CalledProcessError) as caught:
            python(raw, folder.path / "s", by=as_nobody)
        assert b"PermissionError" in str(caught.value.stderr).encode()
        # Who can reach it nevertheless is found out when he is there.
        folder.path.chmod(0o755)
        (folder.path / "s").chmod(0o777)
        python(raw, folder.path / "s", by=as_nobody)
        with listening.accept()[0] as taken:
            assert not is_ours(taken)
        folder.path.chmod(0o700)
    folder.close()


@needs_root
def test_another_user_who_listens_in_a_folder_of_ours_is_not_believed(place: Path) -> None:
    folder = SocketFolder.new([place])
    listening = folder.listen("s")
    # The kernel notes who listens at listen().
    source = f"import os, socket, sys; os.setuid({NOBODY}); socket.socket(fileno=int(sys.argv[1])).listen()"
    number = listening.fileno()
    subprocess.run([sys.executable, "-S", "-c", source, str(number)], pass_fds=[number], check=True, timeout=150)
    with pytest.raises(OtherUserError, match=f"the process that listens at .* belongs to user {NOBODY}"):
        connect(folder.path / "s", PATIENCE_S)
    listening.close()
    folder.close()


@needs_root
@pytest.mark.parametrize("theirs", [("--map-root-user",), ()])
def test_users_of_another_namespace(place: Path, theirs: tuple[str, ...]) -> None:
    """One that maps nobody has all users alike; one that maps root has a root that is ours here."""
    folder = SocketFolder.new([place])
    with folder.listen("s"):
        said = python(_CONNECTS, folder.path / "s", by=("unshare", "--user", *theirs))
        if theirs:
            assert said == "connected"
        else:
            assert f"this user namespace does not map user {NOBODY}" in said
    folder.close()


@needs_root
def test_a_container_with_files_of_its_own_has_no_such_path(place: Path) -> None:
    folder = SocketFolder.new([place])
    by = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", 'mount -t tmpfs none /tmp && "$0" "$@"')
    with folder.listen("s"):
        assert python(_CONNECTS, folder.path / "s", by=by) == (
            f"FileNotFoundError {folder.path} does not exist: the process that created it has ended, or it "
            "is not mounted in this container"
        )
    folder.close()


def test_one_that_somebody_has_removed_can_be_made_again_where_it_was(place: Path) -> None:
    folder = SocketFolder.new([place])
    assert folder.is_there()
    folder.path.rmdir()
    assert not folder.is_there()
    again = SocketFolder.again(folder.path)
    assert again.path == folder.path
    assert again.path.stat().st_mode & 0o777 == 0o700
    assert not folder.is_there(), "another has its name"
    folder.close()
    with again.listen("s"):
        connect(again.path / "s", PATIENCE_S).close()
    with pytest.raises(BlockingIOError):  # it is locked: nobody removes it
        SocketFolder.at(again.path, fcntl.LOCK_EX)
    again.close()
    assert list(place.iterdir()) == []


def test_it_is_not_made_again_where_others_could_have_it_in_our_place(place: Path) -> None:
    folder = SocketFolder.new([place])
    folder.path.rmdir()
    folder.path.symlink_to(place)
    with pytest.raises(OtherUserError, match="is a symbolic link"):
        SocketFolder.again(folder.path)
    folder.path.unlink()
    place.chmod(0o777)
    with pytest.raises(OtherUserError, match="all users can rename what is in"):
        SocketFolder.again(folder.path)
    place.chmod(0o700)
    folder.path.mkdir()
    folder.path.chmod(0o755)
    with pytest.raises(OtherUserError, match="is open to other users"):
        SocketFolder.again(folder.path)
    folder.close()
