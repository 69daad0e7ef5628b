"""The engine (native/engine/engine.h) and the Gloo contexts (native/gloo/context_group.h) of one worker in one round.

All calls that may take long release the interpreter's lock. Times are in seconds. Buffers are C-contiguous, with the
buffer protocol.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import Buffer

from elastic_driver.worker.engine.protocol import Operation

def park_threads_at_exit() -> None:
    """From now on, threads with C++ frames that wake up while the interpreter ends wait for its end, and do no harm."""

def vitals_open(path: str) -> bool:
    """Makes this file the page of this process (see native/vitals/page.h), and beats on it from now on, in a thread.

    Returns whether it has it: not one that is no page, or that another living process has. Harmless when repeated.
    """

def vitals_close() -> None:
    """Ends the thread; nothing is written any more."""

def vitals_round(round_id: int, rank: int) -> None:
    """The round that this process is in, and its rank there; 0 and -1 for none."""

def vitals_step() -> None:
    """A step of the training begins."""

def vitals_commit(commits: int) -> None:
    """The state counts so many commits, the last one just now."""

def vitals_dumps_at(signal: int) -> None:
    """At this signal stacks are written behind the page."""

def stacks_take_over(signal: int) -> bool:
    """The thread in ``stacks_asked`` answers this signal (see native/vitals/stacks.h). Returns whether so."""

def stacks_asked() -> int:
    """Blocks until a signal is to be answered, and returns which; the caller answers it, and says so."""

def stacks_answered(signal: int) -> None:
    """The answer is written."""

def stacks_die_of(signal: int) -> NoReturn:
    """Has the handler that the signal had before write, with the interpreter's lock, and ends this process by it."""

class CollectiveError(RuntimeError):
    """A collective, or the building of the contexts, did not succeed."""

class AbortedError(CollectiveError):
    """It was ended by abort(); the message is abort's reason."""

class UnreachableError(CollectiveError):
    """A peer cannot be reached, or nothing was heard of its machine for host_timeout_s."""

class CollectiveTimeout(CollectiveError):
    """It did not end in the time allowed."""

class ContextGroup:
    unreachable: list[int]
    """The ranks that could not be reached, or of which nothing was heard any more."""

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[int], int]],
        *,
        host: str,
        key: bytes = b"",
        purpose: str = "",
        ports: tuple[int, int] = (0, 0),
        host_timeout_s: float = 0.0,
    ) -> None:
        """Groups as (name, global ranks of the members in order, this worker's index); host: local address.

        ports: the lowest and the highest at which to listen; 0 and 0 for any.

        key and purpose: the same on all members, which prove to each other that they have them.

        host_timeout_s: for how long a member's machine may be silent while it is waited for; 0 for no limit.
        """
    def prepare(self) -> bytes:
        """Listens. Returns what this worker publishes to the others."""
    def connect(self, blobs: Sequence[bytes], timeout_s: float) -> None:
        """Connects to all; blobs by global rank. Blocks. Who fails here is done: close it and make another."""
    def allreduce(self, group: str, buffer: Buffer, dtype: str, op: str, timeout_s: float) -> None:
        """In place. dtype by its numpy name or bfloat16; op: sum, average, min, max, product. Blocks."""
    def broadcast(self, group: str, buffer: Buffer, root: int, timeout_s: float) -> None:
        """Overwrites the buffer with that of the member at index root. Blocks."""
    def allgather(self, group: str, input: Buffer, output: Buffer, counts: Sequence[int], timeout_s: float) -> None:
        """Fills output with the members' bytes, end to end; counts are their numbers. Blocks.

        The input may be its own place in the output.
        """
    def barrier(self, group: str, timeout_s: float) -> None:
        """Blocks until all members are here."""
    def abort(self, reason: str) -> None:
        """Ends what blocks and refuses what comes. Any thread, any time. Does nothing in a forked child."""
    def close(self) -> None:
        """Ends what blocks; frees sockets and threads. Idempotent. Does nothing in a forked child."""

class MismatchError(RuntimeError):
    """The ranks submitted operations of one name that do not fit together."""

class DuplicateNameError(RuntimeError):
    """An operation of this name is under way."""

class Handle:
    """An operation under way."""

    last_joined: int
    """After a join: who joined last."""

    number: int
    """Tells it from others under way."""

    def done(self) -> bool:
        """Whether wait() would not block."""
    def wait(self) -> None:
        """Blocks until it is done; signals are handled. Raises what it failed with."""
    def outputs(self) -> list[tuple[Any, int, tuple[int, ...]]]:
        """Memory (uint8), rows, and rows from each member, for each tensor. Once; then []."""

class Turn:
    """An operation on a device's memory, to be run by the caller."""

class Engine:
    """See native/engine/engine.h. Connect, add process set 0, start."""

    machines: list[list[int]]
    """The ranks by machine. After connect()."""
    unshared: str
    """Why the ranks of one machine do not share memory."""
    unreachable: list[int]
    """The ranks that could not be reached, or of which nothing was heard any more."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        fusion_bytes: int,
        stall_warn_s: float,
        stall_fail_s: float,
        timeout_s: float,
        shared_memory: bool,
        direct_reads: bool,
        machine: str = "",
        key: bytes = b"",
        purpose: str = "",
        host_timeout_s: float = 0.0,
    ) -> None:
        """machine: ranks with different ones share no memory; key, purpose, host_timeout_s: as for ContextGroup."""
    def prepare(self, host: str, ports: tuple[int, int] = (0, 0)) -> bytes:
        """On rank 0: listens, and returns how the others find it. On the others: nothing.

        ports: the lowest and the highest at which to listen; 0 and 0 for any.
        """
    def connect(self, where: bytes, timeout_s: float) -> None:
        """Connects to all; where: what rank 0's prepare() returned. Blocks."""
    def connect_contexts(self, contexts: ContextGroup, timeout_s: float) -> None:
        """Prepares and connects contexts of all ranks, through rank 0; before start(). Blocks."""
    def start(self) -> None:
        """Starts the engine's thread."""
    def add_process_set(self, number: int, ranks: Sequence[int], contexts: ContextGroup | None) -> None:
        """Contexts, for a set on several machines: groups "global" and "cross"."""
    def remove_process_set(self, number: int) -> Handle:
        """Begins to forget it, on all ranks alike; what is under way in it fails."""
    def submit(self, operation: Operation) -> Handle:
        """Begins an operation, whose memory the caller keeps until it is done."""
    def next_turn(self, timeout_s: float) -> tuple[Any, ...] | None:
        """What the caller is to run next: number of its handle or 0, Turn, kind, reduction, root, prescale, postscale,
        process set, [(dtype, shape), ...], sizes of all members. None when there is nothing in that time."""
    def conclude(self, turn: Turn, error: str) -> None:
        """It was run; error: what it failed with."""
    def allocate(self, nbytes: int) -> Any:
        """Shared memory, zeroed (uint8); None where there is none."""
    def progress(self) -> tuple[int, bool]:
        """Operations finished so far, and whether others are under way."""
    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Begins a trace. Raises OSError."""
    def stop_timeline(self) -> None:
        """Ends it; all that has happened is in the file then."""
    def abort(self, reason: str) -> None:
        """Ends what is under way and refuses what comes. Any thread, any time."""
    def close(self) -> None:
        """Aborts, ends the thread, frees sockets. Idempotent."""
