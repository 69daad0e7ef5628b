"""Keeps a job in the history while it runs: its events, the last state of its page, and its entry in the list.

Owns when these are written, and how much for one job. The folder, and the deletion of old jobs, belong to
:mod:`elastic_driver.reporting.history_folder`.

The user has not asked for a history, so it must not do any harm: whatever the state of the home folder, all work is
done in a thread, a failure costs at most one line, and the job's end waits for it only for a moment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elastic_driver.errors import in_words, with_path
from elastic_driver.reporting.event_log import EventWriter
from elastic_driver.reporting.event_records import line_of, records_of
from elastic_driver.reporting.happenings import (
    ChiefStarted,
    Happening,
    JobEnded,
    JobStarted,
    LogCut,
    MomentPassed,
    PhaseChanged,
    ProcessDying,
    ProcessEnded,
    Remark,
    RoundFormed,
    TookOver,
)
from elastic_driver.reporting.history_folder import (
    FACTS,
    PAGE,
    SHORT_ID,
    Facts,
    NoHistoryError,
    make_history_folder,
    open_job,
    put_facts,
    tidy,
)
from elastic_driver.reporting.instant import Instant
from elastic_driver.system.file_writer import FileWriter
from elastic_driver.system.safe_files import open_inside, put_text
from elastic_driver.words import ExitCode

MOST_BYTES = 20 << 20
"""Limit of the events of one job. A round of 4,000 workers has some 300 kB."""
# How much may be waiting for a disk that hangs.
_ROOM_BYTES = 16 << 20
# How long the job's end waits for such a disk.
_FLUSH_S = 1.5
# The page is kept in case the driver is killed: soon after the start, then each minute; and when workers end, with
# their last figures, but not too often. Together that takes at most a fortieth of a processor.
_PAGE_S, _SOON_S, _PAGE_COSTS = 60.0, 5.0, 40
# A job of one round that ended sooner has been described completely on the terminal.
_LONG_S = 60.0
_START = "job_started"
# The events written for a job whose log has grown too large: less than half a megabyte a day.
_LAST_EVENTS = ("goodput", "first_failure", "job_ended")


class History(EventWriter):
    """Writes a job's history; a Listener. Used on the event loop only, except for the work of the writer's thread.

    Args:
        job_id: of the job.
        command: of the job.
        journal: where its journal is; "" for none.
        environ: variables that determine where the history is.
        on_warning: called once if the job cannot be kept, or not to its end.
        on_detail: called if this user has no place for a history.
        instant: see EventWriter.
        most_bytes: limit of its events.

    Attributes:
        page: returns the present page as JSON, given whether the job has ended; b"" if it cannot be shown. None for a
            job without a page.
    """

    def __init__(
        self,
        job_id: str,
        command: Sequence[str],
        *,
        journal: str = "",
        environ: Mapping[str, str] = os.environ,
        on_warning: Callable[[str], None] = lambda text: None,
        on_detail: Callable[[str], None] = lambda text: None,
        instant: Instant | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        super().__init__("the history of this job", on_warning=self._warn, instant=instant)
        self._tell, self._on_detail = on_warning, on_detail
        self._has_warned = False
        self._most_bytes = most_bytes
        self._size = 0
        self._had = 0  # bytes of the driver before; set by the thread
        self._is_cut = self._has_gap = False
        self._workers_before = 0  # likewise; workers in the last round of the driver before
        self._folder: Path | None = None  # set by the thread, once
        self._start = b""  # the line that the others depend on, until it is written
        self._own_facts: tuple[int, int] | None = None  # used by the thread: the mark of its last write
        self._is_nowhere = False  # likewise: the user cannot do anything about that
        directory = ""
        with contextlib.suppress(OSError):  # the folder may have been removed
            directory = os.getcwd()
        began = time.time() - (self._instant() - self._instant.began)
        self._facts = Facts(job_id, tuple(command), directory, began, journal)
        self._rounds = 0
        self._page_due = self._page_may = self._instant() + _SOON_S
        self._page_is_waiting = False
        self.page: Callable[[bool], bytes] | None = None
        self._writer = FileWriter("elasticrun-history", room=_ROOM_BYTES)
        self._environ = dict(environ)
        self._writer.put(self._open)

    @property
    def is_kept(self) -> bool:
        """Whether the job can be opened again later, as far as is known now."""
        return not self._trouble and not self._has_warned

    def hear(self, happening: Happening) -> None:
        """Write what has to be kept of a happening (Listener)."""
        if self._writer is None:
            return
        match happening:
            case RoundFormed(members=members):
                self._rounds += 1
                self._facts = replace(self._facts, workers=len(members))
            case ChiefStarted(servers=servers, workers=workers):
                self._facts = replace(self._facts, workers=servers + workers)
            case TookOver(workers=workers) if workers:
                self._facts = replace(self._facts, workers=workers)
            case _:
                pass
        if isinstance(happening, JobStarted) and not happening.again:
            [record] = records_of(happening)
            self._start = line_of(record, self._instant)
        super().hear(happening)
        match happening:
            case JobStarted() | RoundFormed() | ChiefStarted():
                self._put_facts()
            case MomentPassed() if self._instant() >= self._page_due:
                self._keep_page(is_last=False)
            case ProcessDying() | ProcessEnded() | PhaseChanged() if self._instant() >= self._page_may:
                self._keep_page(is_last=False)
            case JobEnded(exit_code, message) if exit_code != ExitCode.OTHER_DRIVER:  # else it has not ended
                self._facts = replace(self._facts, ended=time.time(), exit_code=exit_code, message=message)
                self._put_facts()
                self._keep_page(is_last=True)
            case _:
                pass

    def told(self) -> str:
        """Return how to open the job again, once it is closed; "" if it was not worth it, or is not possible."""
        facts = self._facts
        if not self.is_kept or self._folder is None or facts.ended is None:
            return ""
        if self._rounds < 2 and facts.ended - facts.began < _LONG_S:
            return ""
        name = facts.job_id[:SHORT_ID]
        page = "" if self.page is None else f"elasticrun page {name}, "
        return f"to see this job again: {page}elasticrun report {name}"

    def close(self, timeout_s: float = _FLUSH_S) -> None:
        """Close the history when all is written, or the time has run out. Idempotent."""
        if self._writer is not None:
            self._writer.put(self._tidy)
        super().close(timeout_s)

    # --- writing ---------------------------------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        if self._is_nowhere:
            self._on_detail(text)
        elif not self._has_warned:
            self._tell(f"{text}; elasticrun --no-history turns it off")
        self._has_warned = True

    def write(self, event: str, **fields: object) -> None:
        """Append an event (EventWriter). A log grown too large gets only goodput, first failure and job's end."""
        if self._trouble:
            # Not closed: there may be room again later, at the latest when the job ends.
            self._warn(f"cannot write {self._what}: {self._trouble}; continuing without it")
            self._has_gap = True
        elif self._has_gap:
            self._has_gap = False
            [record] = records_of(
                Remark("events before this one may be missing: the log could not be written", warning=True)
            )
            super()._put(functools.partial(self._append, line_of(record, self._instant)), 0)
        if self._is_nowhere or (self._is_cut and event not in _LAST_EVENTS):
            return
        data = line_of({"event": event, **fields}, self._instant)
        self._put(functools.partial(self._append, data, event), len(data))
        if not self._is_cut and self._had + self._size >= self._most_bytes:
            self._is_cut = True
            [record] = records_of(LogCut(self._had + self._size))
            super()._put(functools.partial(self._append, line_of(record, self._instant)), 0)

    def _put(self, work: Callable[[], object], size: int) -> None:
        self._size += size
        super()._put(work, size)

    def _put_facts(self) -> None:
        self._put_file(functools.partial(self._write_facts, self._facts))

    def _keep_page(self, *, is_last: bool) -> None:
        if self.page is None or (self._page_is_waiting and not is_last):
            return
        began = time.thread_time()
        data = self.page(is_last)
        if data:
            self._page_is_waiting = True  # first: the thread may finish at once
            if not self._put_file(functools.partial(self._write_page, data), len(data)):
                self._page_is_waiting = False
        cost_s = time.thread_time() - began
        self._page_due, self._page_may = (
            self._instant() + max(each_s, _PAGE_COSTS * cost_s) for each_s in (_PAGE_S, _SOON_S)
        )

    def _put_file(self, work: Callable[[], object], size: int = 0) -> bool:
        return self._writer is not None and self._writer.put(work, size)

    # --- in the writer's thread ------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            history = make_history_folder(self._environ)
            self._folder, self._descriptor = open_job(history, self._facts.job_id)
            self._had = _size_of(self._descriptor)
            self._workers_before = _workers_in(self._folder)
        except NoHistoryError as error:
            self._is_nowhere = True
            self._trouble = in_words(error)
        except OSError as error:
            self._trouble = with_path(error)
        else:
            if not self._trouble:
                self._end_torn_line()
            self._tidy()

    def _append(self, data: bytes, event: str = "") -> None:
        """Write a line (EventWriter). Events without room are dropped; the log continues once there is room."""
        if self._folder is None:
            return
        if self._trouble:
            self._trouble = ""
            self._end_torn_line()
            if self._start and event != _START:
                self._append(self._start, _START)
        super()._append(data, event)
        if event == _START and not self._trouble:
            self._start = b""

    def _write_facts(self, facts: Facts) -> None:
        if self._folder is None and not self._is_nowhere:
            self._open()  # try again
        if self._folder is not None and self._is_ours(self._folder):
            try:
                put_facts(self._folder, replace(facts, workers=facts.workers or self._workers_before))
            except OSError as error:
                self._trouble = self._trouble or with_path(error)
            self._own_facts = _mark_of(self._folder)

    def _write_page(self, data: bytes) -> None:
        self._do(lambda folder: put_text(folder, PAGE, data.decode(), mode=0o600) if self._is_ours(folder) else None)
        self._page_is_waiting = False

    def _is_ours(self, folder: Path) -> bool:
        """Return whether no other driver has taken the job over, unknown to this one, which may have stood still."""
        return self._own_facts is None or _mark_of(folder) in (None, self._own_facts)

    def _tidy(self) -> None:
        self._do(lambda folder: tidy(folder.parent))

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            if self._folder is not None and not (self._folder / FACTS).exists() and not _size_of(self._descriptor):
                shutil.rmtree(self._folder, ignore_errors=True)  # a job that has not begun, or found no room at all
        super()._close()

    def _do(self, work: Callable[[Path], None]) -> None:
        """Do something in the job's folder, if there is one."""
        if self._folder is None:
            return
        try:
            work(self._folder)
        except OSError as error:
            self._trouble = self._trouble or with_path(error)


def _size_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _workers_in(folder: Path) -> int:
    """Return the number of workers in the last round, as written by the driver before; 0 if there was none."""
    try:
        with os.fdopen(open_inside(folder / FACTS, os.O_RDONLY), "rb") as file:
            return int(json.load(file)["workers"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def _mark_of(folder: Path) -> tuple[int, int] | None:
    """Return a mark that changes when another driver writes the job's facts; None if unknown."""
    try:
        # Opened: else a network file system may answer from its cache.
        with os.fdopen(open_inside(folder / FACTS, os.O_RDONLY)) as file:
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
