"""A stand-in for Horovod in elasticrun's workers, which is replaced by Horovod where that is installed.

This module is never left in ``sys.modules``: by the end of its import, either the installed Horovod or the forwarding
package of :mod:`elastic_driver.compat` is there in its place.
"""

import os


def _give_way() -> None:
    try:
        from elastic_driver.compat.finder import load_in_place
    except ImportError as error:
        # A Python other than elasticrun's, without this package: without Horovod, too, the usual error is raised.
        raise ModuleNotFoundError(
            "No module named 'horovod' (and elastic_driver, which would stand in for it, cannot be imported by this "
            "Python: " + str(error) + ")",
            name="horovod",
        ) from error
    load_in_place(__name__, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


_give_way()
