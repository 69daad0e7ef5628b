"""Forms that are written down beside a test: what is said or stored in them changes only with its version."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest


def check_form(path: Path, form: str, version: str) -> None:
    """Fails where a form is not the one that is written down for its version.

    Args:
        path: where it is written down; the version is part of the name. ``REWRITE_FORM=1`` writes it.
        form: as it is now.
        version: the name of the version and where it stands, for the message.
    """
    if os.environ.get("REWRITE_FORM") == "1":
        path.write_text(form, encoding="utf-8")
    if not path.exists():
        pytest.fail(f"there is no {path.name} for this {version}: REWRITE_FORM=1 writes it; remove the one before")
    kept = path.read_text(encoding="utf-8")
    if form != kept:
        changes = "\n".join(
            difflib.unified_diff(kept.splitlines(), form.splitlines(), "written down", "now", n=1, lineterm="")
        )
        pytest.fail(f"the form has changed: raise {version}, then run this test with REWRITE_FORM=1\n{changes}")
