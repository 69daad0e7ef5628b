"""The workers' output according to torchrun's options: to files or to the terminal or to both, by local rank.

Owns which lines go where, and their prefix on the terminal. Files are ``DIR/ID/LOCAL_RANK/stdout.log``,
``DIR/ID/HOST/LOCAL_RANK/stdout.log`` if there may be several hosts: the output of a worker, without a prefix, after a
line that says which process begins there. All generations of a job are in the same files, one after the other, and so
are jobs with the same name: nothing is ever deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.log_files import LogFiles
from elastic_driver.launch.words import Stream
from elastic_driver.settings.logs import ERR, OUT, Logs
from elastic_driver.system.file_writer import FileWriter

# The prefix of each line that comes from a host (WorkerOutput): the time if asked for, then the rank and the stream.
_PREFIX = re.compile(rb"^[^\[\n]*\[(?P<rank>[^\]\n]*)\]<(?:stdout|stderr)>:", re.MULTILINE)
_BITS: dict[Stream, int] = {"stdout": OUT, "stderr": ERR}
_FILES: dict[Stream, str] = {"stdout": "stdout.log", "stderr": "stderr.log"}


class RankLogs:
    """Distributes the output of a job's workers. Used on the event loop.

    Args:
        logs: what goes where.
        folder: for the files (DIR).
        name: of the job (ID).
        role: of the workers.
        with_hosts: whether each host has a folder of its own.
    """

    def __init__(self, logs: Logs, *, folder: Path, name: str, role: str, with_hosts: bool) -> None:
        self._logs = logs
        self._folder = folder
        self._name = name
        self._role = role
        self._with_hosts = with_hosts
        self._files: dict[WorkerId, LogFiles] = {}
        self._matches: LogFiles | None = None

    @property
    def folder(self) -> Path:
        """The folder of the job's files."""
        return self._folder / self._name

    @property
    def keeps_files(self) -> bool:
        """Whether a thread that writes files is needed."""
        return self._logs.keeps_files

    def begin(self, worker: WorkerId, pid: int, writer: FileWriter, warn: Callable[[str], None]) -> None:
        """Open the files of a worker that runs. Called before its output; only if files are kept.

        Args:
            worker: the worker.
            pid: of its process.
            writer: does everything that may block.
            warn: called with warnings, in any thread.
        """
        streams: list[Stream] = [stream for stream in _BITS if self._is_kept(worker, stream)]
        if streams:
            folder = self.folder / worker.hostname if self._with_hosts else self.folder
            names = {stream: _FILES[stream] for stream in streams}
            files = self._files[worker] = LogFiles(folder, str(worker.slot), writer, warn, names=names)
            files.begin(worker, pid)
        if self._matches is None:
            filtered: dict[Stream, str] = {
                stream: f"filtered_{name}" for stream, name in _FILES.items() if self._logs.filters(stream)
            }
            if filtered:
                self._matches = LogFiles(self._folder, self._name, writer, warn, names=filtered)

    def take(self, worker: WorkerId, stream: Stream, data: bytes) -> bytes:
        """Write whole lines with their prefix to the files. Returns the part to show on the terminal."""
        files = self._files.get(worker)
        if files is not None and self._is_kept(worker, stream):
            files.write(stream, _PREFIX.sub(b"", data))
        shown = self._with_prefix(data, worker)
        filters = self._logs.filters(stream)
        if filters and self._matches is not None:
            found = _matching(shown, filters)
            if found:
                self._matches.write(stream, found)
        return shown if self.is_shown(worker, stream) else b""

    def on_terminal(self, worker: WorkerId, stream: Stream, data: bytes) -> bytes:
        """Return the part of such lines to show on the terminal, without keeping any."""
        return self._with_prefix(data, worker) if self.is_shown(worker, stream) else b""

    def end(self, worker: WorkerId) -> None:
        """Close the files of a worker that has ended."""
        files = self._files.pop(worker, None)
        if files is not None:
            files.close()

    def close(self) -> None:
        """Close all files."""
        for worker in tuple(self._files):
            self.end(worker)
        if self._matches is not None:
            self._matches.close()
            self._matches = None

    def _is_kept(self, worker: WorkerId, stream: Stream) -> bool:
        bits = self._logs.redirects.of(worker.slot) | self._logs.tee.of(worker.slot)
        return bool(bits & _BITS[stream])

    def is_shown(self, worker: WorkerId, stream: Stream) -> bool:
        """Return whether the terminal shows a stream of a worker."""
        redirected = self._logs.redirects.of(worker.slot) & ~self._logs.tee.of(worker.slot)
        chosen = self._logs.shown is None or worker.slot in self._logs.shown
        return chosen and not redirected & _BITS[stream]

    def _with_prefix(self, data: bytes, worker: WorkerId) -> bytes:
        if self._logs.prefix is None:
            return data
        template = Template(self._logs.prefix)

        def prefix(match: re.Match[bytes]) -> bytes:
            rank = match["rank"].decode(errors="replace")
            text = template.safe_substitute(role_name=self._role, rank=rank, local_rank=worker.slot)
            return text.encode(errors="surrogateescape")

        return _PREFIX.sub(prefix, data)


def _matching(data: bytes, filters: Sequence[str]) -> bytes:
    wanted = [text.encode(errors="surrogateescape") for text in filters]
    return b"".join(line for line in data.splitlines(keepends=True) if any(text in line for text in wanted))
