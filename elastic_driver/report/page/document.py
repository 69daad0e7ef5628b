"""The page as one document: its parts put together, and what a browser may run of it.

Owns which files are its parts. They are written to be put into a ``style`` and a ``script``, and name nothing outside.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from elastic_driver.report import palette

_PARTS = ("words.js", "curves.js")


@cache
def document() -> str:
    """The page, of which nothing is known of a job yet."""
    folder = Path(__file__).parent
    page = folder.joinpath("page.html").read_text("utf-8").replace("/* palette */", palette.colours())
    for name in _PARTS:
        page = page.replace(f"/* {name} */", folder.joinpath(name).read_text("utf-8"))
    return page


def policy(page: str) -> str:
    """What the browser may load and run: what stands in the document, told by its digest, and nothing else.

    One who serves the page adds that nobody may frame it: a document cannot say that of itself.
    """

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found) or "'none'"

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
