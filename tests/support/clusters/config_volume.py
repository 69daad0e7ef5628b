"""A folder that changes as the kubelet's volumes of ConfigMaps do: all files at once, by a symlink that is replaced."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_CURRENT = "..data"


class ConfigVolume:
    """The folder ``path``, made here. Its files are ``NAME -> ..data/NAME``, and ``..data`` leads to the present ones.

    Args:
        path: of the folder.
        files: its first files, as for :meth:`write`.
        mode: of the files that are no scripts (``*.sh``).
        group: of all files; -1 for that of this process.
    """

    def __init__(
        self, path: Path, files: Mapping[str, str] | None = None, *, mode: int = 0o444, group: int = -1
    ) -> None:
        self._path = path
        self._mode, self._group = mode, group
        self._numbers = itertools.count()
        path.mkdir(parents=True)
        self.write(files or {})

    def write(self, files: Mapping[str, str]) -> None:
        """From now on it has these files, name and text, and no others."""
        new = self._path / f"..2026_11_22_{next(self._numbers)}"
        new.mkdir(mode=0o755)
        for name, text in files.items():
            (new / name).write_text(text)
            os.chown(new / name, -1, self._group)
            (new / name).chmod(0o555 if name.endswith(".sh") else self._mode)
        current = self._path / _CURRENT
        old = os.readlink(current) if current.is_symlink() else None
        link = self._path / f"{_CURRENT}_tmp"
        link.symlink_to(new.name)
        link.rename(current)
        for name in files:
            if not (self._path / name).is_symlink():
                (self._path / name).symlink_to(f"{_CURRENT}/{name}")
        for entry in self._path.iterdir():
            if not entry.name.startswith("..") and entry.name not in files:
                entry.unlink()
        if old is not None:
            shutil.rmtree(self._path / old)
