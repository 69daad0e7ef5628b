"""``elasticrun report [JOB|EVENTS.jsonl]``: shows a job from its event log, as a table or as a picture."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_driver.cli.kept import all_kept, choose_kept, listed
from elastic_driver.cli.parser import Parser
from elastic_driver.cli.tables import table, width_of_output
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.reporting.history_folder import EVENTS
from elastic_driver.reporting.picture import HEADS, cells_of, clock, duration, ending_of, page, svg
from elastic_driver.reporting.printable import one_line
from elastic_driver.reporting.story import Reader, Story
from elastic_driver.system.safe_files import put_named

# An event with a few thousand members has some 300 kB. Longer lines do not belong to a log.
_LONGEST_LINE = 1 << 26
_JOB_ID = re.compile(r"[0-9a-f]{1,16}")


def parser_of_report() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun report",
        description="Shows a job from its event log: its changes and their cost, and where its time went. The job may "
        "still be running. With -o, draws it into one self-contained file.",
    )
    parser.add_argument(
        "events",
        metavar="JOB|FILE",
        nargs="?",
        help="job id or its first characters (elasticrun history), or a file written by --event-log; default: your "
        "last job",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="draw the job into this file: a page (.html) or a picture (.svg)"
    )
    parser.add_argument(
        "--job", metavar="ID", default="", help="job id, if the file holds several jobs; default: the last one"
    )
    return parser


def report(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; the log cannot be read, or has no such job; the picture cannot be written.
    """
    arguments = parser_of_report().parse_args(words)
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and output.suffix not in (".html", ".svg"):
        raise SettingsError(f"cannot draw into {output}: the file name must end with .html or .svg")
    events, job = _log_of(arguments.events, arguments.job)
    story = _story(events, job)
    if story.skipped:
        lines = "1 line" if story.skipped == 1 else f"{story.skipped} lines"
        print(f"elasticrun: warning: {lines} of {one_line(events)} could not be read", file=sys.stderr)
    if output is None:
        _print(story)
        return 0
    _write(output, page(story) if output.suffix == ".html" else svg(story))
    return 0


def _log_of(given: str | None, job: str) -> tuple[str, str]:
    """Return the selected event log, and the job in it. The argument is a file if there is one of that name.

    Raises:
        SettingsError: there is no such job, or there are several.
    """
    if given and (os.path.lexists(given) or not _JOB_ID.fullmatch(given)):
        return given, job
    if job:
        raise SettingsError("--job selects a job in a file with several jobs: name the file, too")
    found = choose_kept(given or "")
    if found is not None:
        return str(found.folder / EVENTS), found.job_id
    if given:
        raise SettingsError(
            f"there is no file {given}, and no job in the history has an id that begins so: {listed(all_kept())}"
        )
    raise SettingsError("the history holds no job of yours yet: name a file written by --event-log")


def _story(path: str, job: str) -> Story:
    try:
        with Path(path).open("rb") as file:
            story = Reader(job).read(iter(lambda: file.readline(_LONGEST_LINE), b""))
    except OSError as error:
        raise SettingsError(f"cannot read the event log {path}: {in_words(error)}") from error
    if story is None:
        raise SettingsError(f"the event log {path} contains no job" + (f" {job}" if job else ""))
    return story


def _write(path: Path, text: str) -> None:
    try:
        put_named(path, text)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {in_words(error)}") from error


def _rows(story: Story) -> Iterator[tuple[str, ...]]:
    for round_ in story.rounds:
        yield cells_of(round_, is_first=round_ is story.rounds[0])


def _print(story: Story) -> None:
    version = f"elasticrun {story.version}, " if story.version else ""
    print(one_line(f"job {story.job_id}, {version}{duration(story.last)}; {ending_of(story)}"))
    rows = list(_rows(story))
    if rows:
        right = set(HEADS) - {"cause"}
        print(table(HEADS, rows, right=right, width=width_of_output()))
    print(story.booked.told())
    if story.cut_at is not None:
        print(f"from {clock(story.cut_at)} on: {story.cut}")
