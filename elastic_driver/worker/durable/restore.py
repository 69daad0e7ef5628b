"""Which commit on disk a round resumes from: the ranks' views of their folders, and the choice of one.

Every rank may have its own folder (a disk of its machine) or share one with others. All see the same views and
outcomes, so all take the same steps; a commit of another rank than 0 is sent to rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from elastic_driver.errors import DurableError, HorovodInternalError, in_words
from elastic_driver.worker.api.objects import allgather_object, broadcast_object
from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.folder import CommitId, commit_path
from elastic_driver.worker.engine.byte_collectives import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_driver.worker.rounds.context import Context

_CHUNK_BYTES = 64 << 20
# How many times the folders are listed again because files vanished before they were read.
_LISTINGS = 3


class DurableState(Protocol):
    """The part of a state that durable commits use. Underscores leave all other names to the training's attributes."""

    _commits: int

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """Return the restore point, by attribute; ``lend``: later saves leave it unchanged, until the next is lent."""

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """Set the state and the restore point to what ``_durable_values`` was at that commit."""


@dataclass(frozen=True, slots=True)
class View:
    """The knowledge of one rank at the beginning of a round.

    Attributes:
        folder: identifies the folder: equal for all ranks that see the same one.
        path: the folder's path.
        host: the rank's host; "" if there is only one.
        state_commits: commits of its state in memory.
        commits: commits in its folder, oldest first; not checked to be whole.
        trouble: why the folder cannot be read; "" if it can.
        begun: whether this job has made commits, by the folder's mark.
        drivers: whether it is the driver's folder, so that a missing mark is conclusive.
        was_member: whether the process is not new: it was in the first round, or has trained since.
        reached: the most commits that the job had at the beginning of one of its rounds.
    """

    folder: str
    path: str
    host: str
    state_commits: int
    commits: tuple[CommitId, ...] = ()
    trouble: str = ""
    begun: bool = False
    drivers: bool = False
    was_member: bool = False
    reached: int = 0

    @property
    def where(self) -> str:
        """The folder's name, for messages."""
        return f"{self.path} on {self.host}" if self.host else self.path


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of reading a commit.

    Attributes:
        size: the file's size in bytes.
        why: what is wrong with it; "" for nothing.
        local: whether that may be so on this rank only: it could not be read, rather than read as torn.
        vanished: whether the file has vanished.
        fatal: whether no other commit would be any better.
    """

    size: int = 0
    why: str = ""
    local: bool = False
    vanished: bool = False
    fatal: bool = False


def why_not_anew(views: Sequence[View], round_id: int) -> str:
    """Return why a round that found no commit must not restart the training; "" if it may."""
    lost = "all workers that had the training's state are lost, and there is no commit of it in "
    lost += ", ".join(dict.fromkeys(view.where for view in views))
    if any(view.reached for view in views):
        return lost
    if any(view.was_member for view in views):
        return ""  # before the first commit, a process's initial state is the state
    troubles = [f"{view.where}: {view.trouble}" for view in views if view.trouble]
    if troubles:
        return f"cannot determine whether there are commits: {'; '.join(dict.fromkeys(troubles))}"
    if round_id == 1 or not any(view.begun or not view.drivers for view in views):
        return ""
    # A begun mark, or disks of machines, of which those with the commits may be gone for good.
    return lost


def find_and_load(state: DurableState, context: Context, look: Callable[[], View], say: Callable[[str], None]) -> None:
    """Load the newest whole commit of any rank into rank 0's state. Called on all ranks. Blocks.

    Args:
        state: this rank's state; changed on rank 0 only.
        context: the round.
        look: returns this rank's view.
        say: prints a line for the user.

    Raises:
        DurableError: there are or must be commits, but none can be used. On all ranks alike.
        HorovodInternalError: a peer is gone.
    """
    reasons: list[str] = []
    bad: set[tuple[str, CommitId]] = set()  # in a folder, for all ranks that share it
    unread: set[tuple[int, CommitId]] = set()  # on a rank
    for _ in range(_LISTINGS):
        views: list[View] = allgather_object(look(), name="durable.views")
        vanished = False
        while True:
            choice = _newest(views, bad, unread)
            if choice is None:
                break
            commit, rank = choice
            outcome = _load_from(state, context, commit, rank, Path(views[rank].path))
            if not outcome.why:
                if context.slot.rank == rank:
                    say(f"resuming from commit {commit.commits} in {views[rank].where}")
                return
            if outcome.fatal:
                raise DurableError(outcome.why)
            if context.slot.rank == rank:
                say(f"{outcome.why}; trying the previous commit")
            if outcome.local:
                unread.add((rank, commit))
            else:
                bad.add((views[rank].folder, commit))
            vanished |= outcome.vanished
            reasons.append(f"{views[rank].host}: {outcome.why}" if views[rank].host else outcome.why)
        if not vanished:
            break
    if reasons:
        unique = list(dict.fromkeys(reasons))
        raise DurableError(
            f"none of the {len(unique)} commits can be used: {'; '.join(unique)}. To start over, empty the folder"
        )
    why = why_not_anew(views, context.assignment.round_id)
    if why:
        raise DurableError(why)


def _newest(
    views: Sequence[View], bad: set[tuple[str, CommitId]], unread: set[tuple[int, CommitId]]
) -> tuple[CommitId, int] | None:
    """Return the most commits that a rank may have on disk, of the latest round that made them, and its lowest such
    rank.
    """
    choices = [
        (commit, -rank)
        for rank, view in enumerate(views)
        for commit in view.commits
        if (view.folder, commit) not in bad and (rank, commit) not in unread
    ]
    if not choices:
        return None
    commit, negative = max(choices)
    return commit, -negative


def _load_from(state: DurableState, context: Context, commit: CommitId, rank: int, folder: Path) -> _Outcome:
    """Read the commit on one rank, and load it on rank 0."""
    path = commit_path(folder, commit)
    content, outcome = bytearray(), _Outcome()
    if context.slot.rank == rank:
        try:
            content = durable_format.load(path)
            outcome = _Outcome(len(content))
        except DurableError as error:
            outcome = _Outcome(why=str(error))
        except OSError as error:
            why = f"cannot read {path}: {in_words(error)}"
            outcome = _Outcome(why=why, local=True, vanished=isinstance(error, FileNotFoundError))
    reading: _Outcome = broadcast_object(outcome, root_rank=rank, name="durable.read")
    if reading.why:
        return reading
    if rank != 0:
        content = _send(context, content, reading.size, rank)
    if context.slot.rank == 0:
        outcome = _take(state, content, commit.commits, path)
    taken: _Outcome = broadcast_object(outcome, name="durable.taken")
    return taken


def _send(context: Context, content: bytearray, size: int, root: int) -> bytearray:
    """Send a file from one rank to rank 0; the others forward its bytes without keeping them."""
    if context.slot.rank == 0:
        content = bytearray(size)
    keeps = context.slot.rank in (0, root)
    scratch = np.empty(0 if keeps else min(size, _CHUNK_BYTES), np.uint8)
    for low in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - low)
        piece = np.frombuffer(content, np.uint8, length, low) if keeps else scratch[:length]
        broadcast(context.engine, piece, root, "durable.file")
    return content


def _take(state: DurableState, content: bytearray, commits: int, path: Path) -> _Outcome:
    try:
        facts, values = durable_format.decode(content, path)
        if facts.get("commits") != commits:
            return _Outcome(why=f"{path} is not a complete commit: its name belongs to another commit")
    except DurableError as error:
        return _Outcome(why=str(error))
    try:
        state._load_durable(values, commits)
    except HorovodInternalError:
        raise
    except Exception as error:
        return _Outcome(why=f"cannot resume from {path}: {error}", fatal=True)
    return _Outcome()
