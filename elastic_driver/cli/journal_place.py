"""Where a job's journal is, as subcommands are given it: a folder, or a place in etcd and the key that seals it.

Owns the flags. Imports little: a process that reads them may become the parent of a driver.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_driver.errors import SettingsError
from elastic_driver.words import ETCD


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """See above.

    Attributes:
        folder: an absolute path; None for a place in etcd.
        url: ``etcd://…``; "" for a folder.
        key: file with the key; None for a folder.
    """

    folder: Path | None
    url: str = ""
    key: Path | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Those that name it."""
        return {"journal": self.folder, "journal_etcd": self.url, "journal_key": self.key}


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that goes with a journal in etcd."""
    parser.add_argument(
        "--journal-key", metavar="FILE", type=Path, help="the key of a journal in etcd, as its job was given it"
    )


def place_of(journal: str, key: Path | None) -> JournalPlace:
    """The place that is meant.

    Raises:
        SettingsError: the key is missing, or of no use.
    """
    if not journal.startswith(ETCD):
        if key is not None:
            raise SettingsError("--journal-key is for a journal in etcd: a folder has no key")
        return JournalPlace(Path(journal).absolute())
    if key is None:
        raise SettingsError("a journal in etcd is sealed: give its key, too (--journal-key FILE)")
    return JournalPlace(None, journal, key.absolute())
