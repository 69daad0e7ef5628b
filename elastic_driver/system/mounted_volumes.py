"""Files in volumes that Kubernetes fills from a ConfigMap or a Secret, and changes under the feet of who reads them.

Owns how such a volume is known. The files in it are symlinks through the folder's ``..data``, itself a symlink that the
kubelet replaces at a change; the folder that it has pointed to is removed at once, so a file may be missing for who
looks at the wrong moment.
"""

from __future__ import annotations

import os
from pathlib import Path

_CURRENT = "..data"


def is_in_mounted_volume(path: Path) -> bool:
    """Whether a file, there or not, is one of such a volume."""
    return os.path.lexists(path.parent / _CURRENT)
