"""The join token: the secret with which hosts join a running job.

Owns the names of its variables, and the check who else can read its file. :mod:`~elastic_driver.rendezvous.token_file`
owns which texts are acceptable.
"""

from __future__ import annotations

import stat
from pathlib import Path

from elastic_driver.system.mounted_volumes import is_in_mounted_volume

ENV_JOIN_TOKEN = "ELASTIC_DRIVER_JOIN_TOKEN"
ENV_JOIN_TOKEN_FILE = "ELASTIC_DRIVER_JOIN_TOKEN_FILE"


def who_else_reads(path: Path) -> str:
    """Return who, besides this user, root and the file's group, may read it, in words; "" for nobody.

    A Secret mounted by Kubernetes is visible to one pod's containers only, and the manifest sets its mode.
    """
    if is_in_mounted_volume(path):
        return ""
    try:
        status = path.stat()
    except OSError:
        return ""
    return "all users can read it" if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH else ""
