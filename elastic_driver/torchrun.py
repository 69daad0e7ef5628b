"""``python -m elastic_driver.torchrun``: elasticrun as a replacement of ``python -m torch.distributed.run``.

Owns only this: the command line is parsed as torchrun parses it, whatever its flags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_driver.cli.main import main as elasticrun

# A flag of torchrun's without effect here. With it, one worker runs on this node unless a flag or variable says more.
_AS_TORCHRUN = "--monitor-interval=0.1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run elasticrun with torchrun's flags. Blocks until the job has ended. Returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return elasticrun([_AS_TORCHRUN, *words])


if __name__ == "__main__":
    sys.exit(main())
