"""Jobs of two or four workers in which somebody stands still: what the event log has of them, and who lives."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import FORKED, Job

FRAMES_OF = "hang_program.py"
# How the end of a suspicion begins that says nothing of the worker: nobody could look.
UNHEARD = "it did not report for "
_DISK_MB = 16
# Whoever started it may die: then its input ends, and nothing stays frozen or mounted.
_FREEZER = """
mount -o loop "$1" "$2" && echo mounted || exit 1
read -r _
fsfreeze -f "$2" && echo frozen
read -r _
fsfreeze -u "$2"
for _ in $(seq 1500); do umount "$2" 2>/dev/null && exit 0; sleep 0.1; done
exit 1
"""


class HangJob(Job):
    """``elasticrun`` with ``hang_program.py`` on fixed hosts: nothing but the workers costs anything.

    Args:
        folder: of its files; it is made.
        stands: "KIND RANK STEP..." of the program, or of somebody else's doing: "nothing -1".
        flags: more.
        env: more.
        slots: on each of the two hosts.
        command: instead of that program.
    """

    # A proof takes 60 of the slowest steps, and begins anew where the machine was too busy to look.
    patience_s = 400.0

    def __init__(
        self,
        folder: Path,
        stands: str,
        *flags: str,
        env: dict[str, str] | None = None,
        slots: int = 1,
        command: list[str] | None = None,
    ) -> None:
        folder.mkdir()
        self.size = 2 * slots
        self.mark_file = folder / "marks"
        self.where = Path((env or {}).get("WHERE", folder / "where"))
        hosts = f"localhost:{slots},127.0.0.1:{slots}"
        more = {"STANDS": stands, "ONCE": str(folder / "once"), "MARK_FILE": str(self.mark_file)}
        super().__init__(
            folder,
            None,
            *("-H", hosts, "-np", str(self.size), "--min-np", str(slots), "--no-preload", *flags),
            command=command or [sys.executable, str(PROGRAMS / FRAMES_OF)],
            env={**more, "WHERE": str(self.where), **(env or {})},
            elasticrun=FORKED,
        )

    def pids(self) -> dict[int, int]:
        """Of the first round's members, by rank, once all train."""
        return {line["rank"]: line["pid"] for line in self.wait_for_steps(self.size, 3)}

    def stood(self, count: int = 1) -> list[tuple[int, int, float, float]]:
        """Rank, process, time and duration of those that have begun to stand still, once there are so many."""

        def marks() -> list[tuple[int, int, float, float]]:
            lines = self.mark_file.read_text().splitlines() if self.mark_file.exists() else []
            return [(int(rank), int(pid), float(at), float(s)) for rank, pid, at, s in (line.split() for line in lines)]

        found: list[tuple[int, int, float, float]] = self.wait_for(
            f"{count} that stand still", lambda: (seen := marks()) and len(seen) >= count and seen
        )
        return found

    def suspected(self, rank: int, *, after: float = 0.0) -> dict[str, Any]:
        """The first suspicion of a rank since then, once there is one. On a busy machine others are suspected, too."""
        found: list[dict[str, Any]] = self.wait_for(
            f"a suspicion of rank {rank}", lambda: self._told("worker_suspected", rank, after)
        )
        return found[0]

    def cleared(self, suspected: dict[str, Any], *, not_before: float) -> None:
        """Blocks until that suspicion is over, because it goes on: not before it does.

        Where the machine was too busy to look at it for seconds, that may come first: evidence begins anew then.
        """
        rank, since = suspected["rank"], suspected["time"]
        over = self.wait_for(f"the end of the suspicion of {rank}", lambda: self._told("worker_cleared", rank, since))[
            0
        ]
        if not over["why"].startswith(UNHEARD):
            assert over["why"] == "it makes progress again"
            assert over["time"] >= not_before
            assert over["took_s"] > suspected["still_s"]

    def was_suspected_once(self, rank: int, *, after: float, before: float = math.inf) -> bool:
        """Whether a standstill was told once; and once more wherever the machine was too busy to look at it."""
        told = [event for event in self._told("worker_suspected", rank, after) if event["time"] < before]
        unheard = [event for event in self._told("worker_cleared", rank, after) if event["why"].startswith(UNHEARD)]
        return 1 <= len(told) <= 1 + len(unheard)

    def _told(self, kind: str, rank: int, since: float) -> list[dict[str, Any]]:
        return [event for event in self.events(kind) if event["rank"] == rank and event["time"] >= since]

    def one(self, kind: str) -> dict[str, Any]:
        """The only event of a kind, once it is there."""
        found: list[dict[str, Any]] = self.wait_for(f"an event {kind}", lambda: self.events(kind))
        assert len(found) == 1, found
        return found[0]

    def same_go_on(self, pids: dict[int, int], *, after: float) -> None:
        """Blocks until exactly these processes have made steps since then; nobody was ended before."""
        lines = self.wait_for_steps(len(pids), 3, after=after)
        assert {line["rank"]: line["pid"] for line in lines} == pids
        assert self.events("worker_hung") == []
        assert self.events("worker_exited") == []
        assert len(self.events("round_formed")) == 1


class FrozenDisk:
    """A file system of its own at a folder, which answers nothing from ``freeze`` on. Needs root; use as a context."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(_DISK_MB << 20)
        self.folder = folder / "disk"
        self.folder.mkdir()
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        self._process = subprocess.Popen(
            ["sh", "-c", _FREEZER, "sh", str(image), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._expect("mounted")

    def freeze(self) -> None:
        self._write()
        self._expect("frozen")

    def thaw(self) -> None:
        """Answers again, and goes away as soon as nobody uses it. Harmless when repeated."""
        if self._process.returncode is None:
            self._process.communicate(timeout=150)
        assert self._process.returncode == 0, "left mounted"

    def _write(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != word:
            self._process.communicate()
            raise OSError(f"no file system that can be frozen is to be had here ({word} is missing)")


@contextlib.contextmanager
def debugged(pid: int) -> Iterator[subprocess.Popen[str]]:
    """gdb has stopped this process inside, and has let go of it outside."""
    command = ["gdb", "-q", "-nx", "-iex", "set auto-solib-add off", "-iex", "set debuginfod enabled off"]
    gdb = subprocess.Popen(
        [*command, "-p", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield gdb
    finally:
        gdb.communicate("detach\nquit\n", timeout=150)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
