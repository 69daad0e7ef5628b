"""Files in volumes that Kubernetes fills from a ConfigMap or a Secret, and changes while they are being read.

Owns recognizing such a volume. The files in it are symlinks through the folder's ``..data``, itself a symlink that the
kubelet replaces at a change; the folder to which it pointed is removed at once, so a file may be missing at the wrong
moment.
"""

from __future__ import annotations

import os
from pathlib import Path

_CURRENT = "..data"


def is_in_mounted_volume(path: Path) -> bool:
    """Return whether a path, existing or not, is in such a volume."""
    return os.path.lexists(path.parent / _CURRENT)
