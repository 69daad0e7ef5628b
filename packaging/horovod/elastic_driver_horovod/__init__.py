"""Has ``import horovod`` find elastic-driver's stand-in, in any Python of the environment that this is installed in.

A .pth file calls :func:`append_stand_in` whenever Python starts, so this imports nothing that is not there by then.
"""

import os
import sys


def append_stand_in() -> None:
    """Puts the stand-in's folder at the end of ``sys.path``: an installed Horovod is found first.

    Does nothing where elastic-driver is not installed.
    """
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec and find_spec("elastic_driver", None)
        if spec and spec.submodule_search_locations:
            folder = os.path.join(next(iter(spec.submodule_search_locations)), "compat", "shim")
            if folder not in sys.path:
                sys.path.append(folder)
            return
