"""``elastic-horovodrun``: elasticrun, whose flags are horovodrun's; and the command by the name ``horovodrun``."""

import os
import shutil
import sys
from collections.abc import Sequence

_INSTALL = "--install-horovodrun"
_OWN = "elastic-horovodrun"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a job. With ``--install-horovodrun`` alone, makes ``horovodrun`` a name of this command."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words == [_INSTALL]:
        return _install_horovodrun()
    from elastic_driver.cli.main import main as elasticrun

    return elasticrun(words)


def _install_horovodrun() -> int:
    """Links ``horovodrun`` to this command, beside it. Never takes the place of another one."""
    folder = os.path.dirname(os.path.abspath(shutil.which(sys.argv[0]) or sys.argv[0]))
    link = os.path.join(folder, "horovodrun")
    if os.path.islink(link) and os.readlink(link) == _OWN:
        print(f"{link} is there already")
        return 0
    other = link if os.path.lexists(link) else shutil.which("horovodrun")
    try:
        if other is not None:
            raise FileExistsError(f"there is {other}")
        if not os.path.exists(os.path.join(folder, _OWN)):
            raise FileNotFoundError(f"there is no {_OWN} in {folder}")
        os.symlink(_OWN, link)  # refused, too, where somebody was quicker
    except OSError as error:
        print(f"{_OWN}: error: cannot install horovodrun: {error}", file=sys.stderr)
        return 2
    print(f"{link} is {_OWN} now; remove the link to undo this")
    return 0
