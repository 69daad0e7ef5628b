"""Files in folders where others may have put something: nothing is followed, cut, shared or waited for."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_driver.system.safe_files import (
    make_folder,
    new_file,
    open_folder_inside,
    open_inside,
    open_named,
    put_named,
    put_text,
    read_mark,
    read_named,
    who_else_writes,
)

pytestmark = pytest.mark.unit

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
ANEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def soft(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


def listener(path: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def as_nobody(source: str, *words: object) -> None:
    """Runs a program as another user."""
    subprocess.run(
        [sys.executable, "-S", "-c", f"import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n{source}"]
        + [str(word) for word in words],
        check=True,
        timeout=150,
    )


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder like /tmp that other users can get to, too: the test's own cannot be passed through by them."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("flags", [APPEND, ANEW, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize(
    ("put", "why"),
    [
        (soft, "it is a symbolic link"),
        (hard, "it is a hard link: the file has other names"),
        (pipe, "(it is a pipe|no process reads that pipe)"),
        (folder, "Is a directory"),
        (listener, "no process reads that pipe|it is a socket"),
    ],
)
def test_what_stands_under_a_name_of_ours_is_refused(
    tmp_path: Path, victim: Path, put: Callable[[Path, Path], None], why: str, flags: int
) -> None:
    put(tmp_path / "name", victim)
    with pytest.raises(OSError, match=why):
        open_inside(tmp_path / "name", flags)
    assert victim.read_text() == "precious"


def test_a_dangling_link_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(tmp_path / "not there")
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_inside(tmp_path / "name", ANEW)
    assert not (tmp_path / "not there").exists()


def test_plain_files_are_opened_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "name"
    for text, flags in (("one", APPEND), ("two", APPEND), ("three", ANEW)):
        descriptor = open_inside(path, flags)
        assert os.get_blocking(descriptor)
        assert not os.get_inheritable(descriptor)
        os.write(descriptor, text.encode())
        os.close(descriptor)
        if text == "two":
            assert path.read_text() == "onetwo"
    assert path.read_text() == "three"


def test_a_pipe_that_is_read_will_do_where_it_is_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "name")
    with pytest.raises(OSError, match="no process reads that pipe"):
        open_inside(tmp_path / "name", APPEND, pipes=True)
    reader = os.open(tmp_path / "name", os.O_RDONLY | os.O_NONBLOCK)
    descriptor = open_inside(tmp_path / "name", APPEND, pipes=True)
    assert not os.get_blocking(descriptor)
    os.close(descriptor)
    with pytest.raises(OSError, match="it is a pipe"):
        open_inside(tmp_path / "name", APPEND)
    os.close(reader)


def test_a_file_that_the_user_named_may_be_what_he_likes(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    for path in (tmp_path / "link", Path("/dev/null"), Path("/dev/stderr")):
        os.close(open_named(path, APPEND))
    os.close(open_named(tmp_path / "link", ANEW))
    assert victim.read_text() == ""
    (tmp_path / "other").hardlink_to(victim)
    with pytest.raises(OSError, match="hard link"):
        open_named(tmp_path / "other", ANEW)


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_links_of_other_users_are_not_followed(reachable: Path, mode: int) -> None:
    reachable.chmod(mode)
    victim = reachable / "victim"
    victim.write_text("precious")
    as_nobody("os.symlink(sys.argv[1], sys.argv[2])", victim, reachable / "name")
    for open_it in (open_named, open_inside):
        # The kernel itself refuses to create through it where the folder is sticky.
        with pytest.raises(OSError, match=r"it is a symbolic link|Permission denied"):
            open_it(reachable / "name", ANEW)
    assert victim.read_text() == "precious"
    as_nobody("os.symlink(sys.argv[1], sys.argv[2])", reachable, reachable / "folder")
    with pytest.raises(OSError, match="it is a symbolic link of user"):
        make_folder(reachable / "folder")


@needs_root
def test_an_own_link_that_others_can_exchange_is_not_followed(reachable: Path) -> None:
    (reachable / "victim").write_text("precious")
    (reachable / "name").symlink_to(reachable / "victim")
    os.close(open_named(reachable / "name", APPEND))
    reachable.chmod(0o777)
    with pytest.raises(OSError, match="another user may have created"):
        open_named(reachable / "name", APPEND)


@needs_root
def test_files_and_folders_that_others_have_put_into_a_folder_like_tmp(reachable: Path) -> None:
    as_nobody(
        "os.close(os.open(sys.argv[1], os.O_CREAT, 0o666)); os.chmod(sys.argv[1], 0o666); os.mkdir(sys.argv[2]);"
        "os.mkfifo(sys.argv[3])",
        reachable / "name",
        reachable / "rank.0",
        reachable / "pipe",
    )
    reader = os.open(reachable / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for path in (reachable / "name", reachable / "pipe"):
        with pytest.raises(OSError, match=r"it was created by user \w+|Permission denied"):
            open_named(path, APPEND)
        with pytest.raises(OSError, match=r"it was created by user \w+|Permission denied"):
            open_inside(path, APPEND, pipes=True)
    os.close(reader)
    with pytest.raises(OSError, match=r"it was created by user \w+"):
        open_folder_inside(reachable, "rank.0")


def test_a_folder_of_ours_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "rank.0").symlink_to(tmp_path / "target")
    (tmp_path / "rank.1").write_text("a file")
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_folder_inside(tmp_path, "rank.0")
    with pytest.raises(OSError, match="Not a directory"):
        open_folder_inside(tmp_path, "rank.1")
    for _ in range(2):
        descriptor = open_folder_inside(tmp_path / "new", "rank.2")
        os.close(open_inside("stdout", APPEND, dir_fd=descriptor))
        os.close(descriptor)
    assert (tmp_path / "new" / "rank.2" / "stdout").exists()


def test_new_files_have_names_of_their_own(tmp_path: Path) -> None:
    made = [new_file(tmp_path, "x") for _ in range(3)]
    for descriptor, _ in made:
        os.close(descriptor)
    assert len({path for _, path in made}) == 3
    assert all(re.fullmatch(r"\.x\.[0-9a-f]{16}\.tmp", path.name) for _, path in made)


def test_a_text_is_put_over_a_link_not_through_it(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "mark").symlink_to(victim)
    put_text(tmp_path, "mark", "mine")
    assert victim.read_text() == "precious"
    assert read_mark(tmp_path / "mark") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "victim"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        put_text(tmp_path, "folder", "mine")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_text_that_the_user_wants_somewhere_goes_through_a_link_of_the_users(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    put_named(tmp_path / "link", "mine")
    assert (victim.read_text(), (tmp_path / "link").is_symlink()) == ("mine", True)
    put_named(tmp_path / "new", "mine", mode=0o600)
    put_named(victim, "other", mode=0o600)
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("new", "victim")] == ["0o600"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new", "victim"]
    with pytest.raises(IsADirectoryError):
        put_named(tmp_path, "mine")
    put_named(Path("/dev/null"), "mine")
    assert Path("/dev/null").is_char_device()


def test_a_text_goes_into_a_pipe_as_a_whole(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no process reads that pipe"):
        put_named(tmp_path / "pipe", "x")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    read = 0
    writer = threading.Thread(target=put_named, args=(tmp_path / "pipe", "x" * 300_000))
    writer.start()
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.poll()
    os.set_blocking(reader, True)
    while piece := os.read(reader, 65536):
        read += len(piece)
    writer.join()
    os.close(reader)
    assert read == 300_000


def test_marks(tmp_path: Path, victim: Path) -> None:
    assert read_mark(tmp_path / "absent") == ""
    (tmp_path / "long").write_bytes(b"\xff" * 100_000)
    assert len(read_mark(tmp_path / "long")) <= 4096
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="it is a"):
            read_mark(tmp_path / name)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_a_file_without_end_is_not_read_for_ever(path: str) -> None:
    with pytest.raises(OSError, match="it is larger than 100000 bytes") as caught:
        read_named(Path(path), 100_000)
    assert caught.value.errno == errno.EFBIG


def test_what_a_user_names_to_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert read_named(tmp_path / "file", 100_000) == b"x" * 100_000
    assert read_named(Path("/dev/null"), 1) == b""
    with pytest.raises(IsADirectoryError):
        read_named(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_named(tmp_path / "absent", 10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it did not end within 0\.05 s"):
        read_named(tmp_path / "pipe", 10, patience_s=0.05)
    # As with <(...): the writer comes, and writes, when it likes.
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("later"))
    writer.start()
    assert read_named(tmp_path / "pipe", 10) == b"later"
    writer.join()


@needs_root
def test_who_else_writes(tmp_path: Path) -> None:
    def said() -> tuple[str, str]:
        return who_else_writes(tmp_path, only_adding=True), who_else_writes(tmp_path, only_adding=False)

    assert said() == ("", "")
    tmp_path.chmod(0o1777)
    assert said() == ("it is writable by all users", "")
    tmp_path.chmod(0o777)
    assert said() == ("it is writable by all users",) * 2
    tmp_path.chmod(0o775)
    assert said() == ("", "")
    os.chown(tmp_path, 54321, 0)
    assert said() == ("it belongs to user 54321",) * 2
    assert who_else_writes(tmp_path / "absent", only_adding=True) == ""
