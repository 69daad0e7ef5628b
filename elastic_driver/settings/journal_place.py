"""The place of a job's journal: a folder, or a prefix in etcd and the key that seals its contents.

Owns how it is specified. Imports little: a process that parses it may become the parent of a driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic_driver.errors import SettingsError
from elastic_driver.words import ETCD

KEY_FLAG = "--journal-key"


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """Where a journal is: either a folder, or a place in etcd and its key.

    Attributes:
        folder: an absolute path; None for a place in etcd.
        url: ``etcd://host:port,…/prefix``; "" for a folder.
        key: file with the key; None for a folder.
    """

    folder: Path | None = None
    url: str = ""
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.folder is None) != bool(self.url):
            raise ValueError("a journal is either in a folder or in etcd")
        if self.key is not None and not self.url:
            raise SettingsError(f"{KEY_FLAG} applies to a journal in etcd only: a folder has no key")
        if self.url and self.key is None:
            raise SettingsError(
                f"a journal in etcd and {KEY_FLAG} FILE must be given together: the key encrypts what the job "
                "writes there (elasticrun token FILE generates one)"
            )

    def __str__(self) -> str:
        return self.url or str(self.folder)


def place_of(journal: str | Path, key: str | Path | None) -> JournalPlace:
    """Parse the place of a journal.

    Args:
        journal: a folder, or ``etcd://…``.
        key: file with the key; None or "" for none.

    Raises:
        SettingsError: the key is missing or unused, or the URL has another scheme.
    """
    scheme = str(journal).partition("://")[0] if "://" in str(journal) else ""
    if scheme.isalnum() and f"{scheme}://" != ETCD:
        raise SettingsError(f"--journal {journal}: a journal is either in a folder or in etcd ({ETCD}HOST:PORT/PREFIX)")
    url = str(journal) if str(journal).startswith(ETCD) else ""
    return JournalPlace(None if url else Path(journal).absolute(), url, Path(key).absolute() if key else None)
