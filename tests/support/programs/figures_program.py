"""Reports figures in all ways: by the API, to the descriptor, and by a shell to the file; anew once it may end.

figures_program.py FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import elastic_driver as hvd

RANK = int(os.environ["RANK"])


def main() -> None:
    folder = Path(sys.argv[1])
    hvd.report(by_api=1 + RANK)
    line = b'{"by_descriptor": %d, "nan": NaN}\n' % (1 + RANK)
    os.write(int(os.environ["ELASTIC_DRIVER_REPORT_FD"]), line)
    # As a rule a child of Python has not inherited the descriptor.
    subprocess.run(
        ["/bin/sh", "-c", f"""echo '{{"by_path": {1 + RANK}}}' >> "$ELASTIC_DRIVER_REPORT" """], check=True, cwd="/"
    )
    while not (folder / "may_end").exists():
        time.sleep(0.05)
    hvd.report(by_api=10 + RANK)
    os.write(int(os.environ["ELASTIC_DRIVER_REPORT_FD"]), b"epoch 7 is done\n")


main()
