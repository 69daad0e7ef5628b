"""``elastic-driver-controller``, and ``python -m elastic_driver.kubernetes``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the controller. Returns its exit code."""
    try:
        from elastic_driver.kubernetes.controller import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kopf", "kubernetes_asyncio"):
            raise
        text = f"{error.name} is missing: pip install 'elastic-driver[kubernetes]'"
        print(f"elastic-driver-controller: error: {text}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
