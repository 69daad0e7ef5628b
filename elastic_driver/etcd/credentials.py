"""The variables with credentials for etcd: with them a process may do with a job's journal what its driver may.

Owns their names, for filtering. The driver reads them (:mod:`elastic_driver.etcd.place`); the processes that it starts
for the job, here or on other hosts, get none of them. Imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CREDENTIALS = r"ETCDCTL_(USER|PASSWORD|CERT|KEY)|ELASTIC_DRIVER_AGENTS_.*"
"""A pattern of their names."""

_CREDENTIALS = re.compile(CREDENTIALS)


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without them."""
    return {name: value for name, value in environ.items() if not _CREDENTIALS.fullmatch(name)}
