"""From which commit on disc a round goes on: what its ranks see in their folders, and how one of them is chosen.

Every rank may have a folder of its own (a disc of its machine) or share one with others. All see the same views and
the same outcomes, so all go through the same steps; a commit that another rank than 0 has is sent to it.
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
# How often the folders are listed anew because files vanished before they were read.
_LISTINGS = 3


class DurableState(Protocol):
    """What durable commits need of a state. Its names leave all others to the attributes of the training."""

    _commits: int

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """The restore point, by attribute; ``lend``: later saves leave it as it is, until the next is lent."""

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """Makes the state, and the restore point, what ``_durable_values`` was at that commit."""


@dataclass(frozen=True, slots=True)
class View:
    """What one rank knows when a round begins.

    Attributes:
        folder: the same for all ranks that see the same folder.
        path: the folder's.
        host: the rank's; "" where there is but one.
        state_commits: commits of its state in memory.
        commits: those in its folder, oldest first; whether they are whole is not looked at.
        trouble: why the folder cannot be read; "" when it can.
        begun: whether this job has made commits, by the folder's mark.
        drivers: whether it is the driver's folder, so that this mark can be trusted to be there.
        was_member: whether the process is no newcomer: it was there from the first round on, or has trained since.
        reached: the most commits the job had at the beginning of a round that it was in.
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
    """How reading a commit went.

    Attributes:
        size: the file's bytes.
        why: what is wrong with it; "" for nothing.
        local: whether that may be so on this rank only: it could not be read, rather than read as torn.
        vanished: whether the file has.
        fatal: whether no other commit would be any better.
    """

    size: int = 0
    why: str = ""
    local: bool = False
    vanished: bool = False
    fatal: bool = False


def why_not_anew(views: Sequence[View], round_id: int) -> str:
    """Why a round in which no commit was found must not begin the training anew; "" when it may."""
    lost = "all workers that had the training's state are lost, and none of its commits is in "
    lost += ", ".join(dict.fromkeys(view.where for view in views))
    if any(view.reached for view in views):
        return lost
    if any(view.was_member for view in views):
        return ""  # before the first commit, what a process is born with is the state
    troubles = [f"{view.where}: {view.trouble}" for view in views if view.trouble]
    if troubles:
        return f"cannot tell whether there are commits: {'; '.join(dict.fromkeys(troubles))}"
    if round_id == 1 or not any(view.begun or not view.drivers for view in views):
        return ""
    # A begun mark, or discs of machines of which those that held the commits may be gone for good.
    return lost


def find_and_load(state: DurableState, context: Context, look: Callable[[], View], say: Callable[[str], None]) -> None:
    """Makes rank 0's state the newest whole commit that any rank has. Called on all ranks. Blocks.

    Args:
        state: this rank's state; changed on rank 0 only.
        context: the round.
        look: gives this rank's view.
        say: tells the user a line.

    Raises:
        DurableError: there are or must be commits, but none can be used. On all ranks alike.
        HorovodInternalError: a peer is gone.
    """
    reasons: list[str] = []
    bad: set[tuple[str, CommitId]] = set()  # in a folder, for all who share it
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
                    say(f"going on from commit {commit.commits} in {views[rank].where}")
                return
            if outcome.fatal:
                raise DurableError(outcome.why)
            if context.slot.rank == rank:
                say(f"{outcome.why}; going back to the one before")
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
            f"none of the {len(unique)} commits can be used: {'; '.join(unique)}. To begin anew, empty the folder"
        )
    why = why_not_anew(views, context.assignment.round_id)
    if why:
        raise DurableError(why)


def _newest(
    views: Sequence[View], bad: set[tuple[str, CommitId]], unread: set[tuple[int, CommitId]]
) -> tuple[CommitId, int] | None:
    """The most commits that a rank may have on disc, of the latest round that made them, and the lowest such rank."""
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
    """Has one rank read its commit, and rank 0 take it."""
    path = commit_path(folder, commit)
    content, outcome = bytearray(), _Outcome()
    if context.slot.rank == rank:
        try:
            content = durable_format.load(path)
            outcome = _Outcome(len(content))
        except DurableError as error:
            outcome = _Outcome(why=str(error))
        except OSError as error:
            why = f"{path} cannot be read: {in_words(error)}"
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
    """A file's bytes from one rank to rank 0; the others pass them on, and keep none."""
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
            return _Outcome(why=f"{path} is no whole commit: its name is that of another")
    except DurableError as error:
        return _Outcome(why=str(error))
    try:
        state._load_durable(values, commits)
    except HorovodInternalError:
        raise
    except Exception as error:
        return _Outcome(why=f"cannot go on from {path}: {error}", fatal=True)
    return _Outcome()
