"""``python -m elastic_driver.torchrun``: elasticrun where a script has ``python -m torch.distributed.run``.

Owns nothing but that its command line is read as torchrun reads it, whichever flags there are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_driver.cli.main import main as elasticrun

# One of torchrun's flags that changes nothing; its workers are one on this node unless another flag or variable says.
_AS_TORCHRUN = "--monitor-interval=0.1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs elasticrun with torchrun's flags. Blocks until the job has ended. Returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return elasticrun([_AS_TORCHRUN, *words])


if __name__ == "__main__":
    sys.exit(main())
