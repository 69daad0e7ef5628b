"""Stands in for Horovod in workers of elasticrun. When Horovod is installed, it gives way to it.

This module is never left in ``sys.modules``: by the end of its import, either the installed Horovod or the forwarding
package of :mod:`elastic_driver.compat` is there in its place.
"""

import os


def _give_way() -> None:
    try:
        from elastic_driver.compat.finder import load_in_place
    except ImportError as error:
        # Another Python than elasticrun's, which does not have this package: no Horovod, so the usual error.
        raise ModuleNotFoundError(
            "No module named 'horovod' (and elastic_driver, which would stand in for it, cannot be imported by this "
            "Python: " + str(error) + ")",
            name="horovod",
        ) from error
    load_in_place(__name__, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


_give_way()
