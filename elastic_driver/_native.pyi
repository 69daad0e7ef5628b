"""Gloo contexts of one worker in one round (native/context_group.h).

All calls release the interpreter's lock. Times are in seconds. Buffers are C-contiguous, with the buffer protocol.
"""

from collections.abc import Sequence

from typing_extensions import Buffer

class CollectiveError(RuntimeError):
    """A collective, or the building of the contexts, did not succeed."""

class AbortedError(CollectiveError):
    """It was ended by abort(); the message is abort's reason."""

class CollectiveTimeout(CollectiveError):
    """It did not end in the time allowed."""

class ContextGroup:
    def __init__(self, groups: Sequence[tuple[str, Sequence[int], int]], *, host: str) -> None:
        """Groups as (name, global ranks of the members in order, this worker's index); host: local address."""
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
