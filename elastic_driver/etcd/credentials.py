"""Which variables prove to etcd who asks: whoever has them may do with a job's journal what its driver may.

Owns their names as they are filtered. The driver reads them (:mod:`elastic_driver.etcd.place`); what it starts for the
job, here or on other hosts, is given none of them. Imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CREDENTIALS = r"ETCDCTL_(USER|PASSWORD|CERT|KEY)|ELASTIC_DRIVER_AGENTS_.*"
"""A pattern of their names."""

_CREDENTIALS = re.compile(CREDENTIALS)


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without them."""
    return {name: value for name, value in environ.items() if not _CREDENTIALS.fullmatch(name)}
