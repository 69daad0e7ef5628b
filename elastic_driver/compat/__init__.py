"""A stand-in for Horovod, for scripts that import it: ``import horovod.torch as hvd`` gives this package's names.

Workers that elasticrun starts have it unless Horovod is installed (see ``--horovod-shim``). Elsewhere ``import
horovod`` fails as usual, unless a program calls :func:`install` first.
"""

from __future__ import annotations


def install(*, mode: str = "auto") -> bool:
    """Make ``import horovod`` find this package; see :func:`elastic_driver.compat.finder.install`."""
    from elastic_driver.compat import finder

    return finder.install(mode=mode)


def uninstall() -> None:
    """Undo :func:`install`."""
    from elastic_driver.compat import finder

    finder.uninstall()


__all__ = ["install", "uninstall"]
