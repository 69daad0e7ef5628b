"""Runs the soak, on this machine or over several; what it does is in soak.py and soak_hosts.py.

    python tests/soak/run.py MINUTES SEED [--hosts N | --forking]

Ends with exit code 1 and the reason at the first thing that is wrong. MINUTES may be those of a night.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from soak import Soak  # noqa: E402
from soak_hosts import LEAST_HOSTS, HostsSoak  # noqa: E402

from tests.support.network import machines  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("seed", type=int)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--forking", action="store_true", help="fork all workers, so that a short soak has more events")
    which.add_argument(
        "--hosts", type=int, metavar="N", help="over so many network namespaces (as root), and cut and slow networks"
    )
    options = parser.parse_args()
    if options.hosts is None:
        return run(functools.partial(Soak, forking=options.forking), options.minutes, options.seed)
    if options.hosts < LEAST_HOSTS:
        parser.error(f"--hosts {options.hosts}: the soak needs {LEAST_HOSTS}, one of which joins by itself")
    with machines.made_machines(options.hosts) as made:
        code = run(lambda folder, seed: HostsSoak(folder, seed, made), options.minutes, options.seed)
        if code:
            # What a broken job has left is no news, and made_machines would say that instead.
            for host in made:
                host.power_off()
                for path in [path for path in host.runtime.rglob("*") if not path.is_dir()]:
                    path.unlink()
        return code


def run(make: Callable[[Path, int], Soak], minutes: float, seed: int) -> int:
    """One soak. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="elastic-soak-") as folder:
        soak: Soak | None = None
        try:
            soak = make(Path(folder), seed)
            try:
                soak.run(minutes)
            except BaseException:
                with contextlib.suppress(AssertionError):  # of what is left: the first error is the one to tell
                    soak.close()
                raise
            soak.close()
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            keep = Path(tempfile.gettempdir()) / f"elastic-soak-failed-{seed}-{os.getpid()}"
            Path(folder).rename(keep)
            Path(folder).mkdir()
            print(f"soak: FAILED with seed {seed}: {reason}\nsoak: its files are in {keep}", file=sys.stderr)
            if soak is not None:
                print(soak.summary(), file=sys.stderr)
            return 1
        print(soak.summary())
        print(f"soak: ok, {minutes:g} minutes, seed {seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
