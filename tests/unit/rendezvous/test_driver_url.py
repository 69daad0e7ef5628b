"""The driver's address as people hand it on."""

from __future__ import annotations

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.driver_url import DriverUrl

pytestmark = pytest.mark.unit

DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "url", "fingerprint"),
    [
        ("http://a:1", "http://a:1", ""),
        (" http://10.0.0.1:1234/\n", "http://10.0.0.1:1234", ""),
        (f"https://[fd00::1]:65535#sha256:{DIGITS}", "https://[fd00::1]:65535", DIGITS),
        (f"https://a.b:1#sha256:{DIGITS.upper()}", "https://a.b:1", DIGITS),
    ],
)
def test_what_is_one(text: str, url: str, fingerprint: str) -> None:
    read = DriverUrl.parse(text)
    assert read == DriverUrl(url, fingerprint)
    assert DriverUrl.parse(str(read)) == read


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected http://HOST:PORT"),
        ("a:1", "expected http://HOST:PORT"),
        ("ftp://a:1", "expected http://HOST:PORT"),
        ("http://a", "expected http://HOST:PORT"),
        ("http://:1", "expected http://HOST:PORT"),
        ("http://a:0", "expected http://HOST:PORT"),
        ("http://a:99999", "expected http://HOST:PORT"),
        ("http://a:1/x", "expected http://HOST:PORT"),
        ("http://a:1?x=1", "expected http://HOST:PORT"),
        ("http://me:secret@a:1", "expected http://HOST:PORT"),
        (f"http://a:1#sha256:{DIGITS}", "a fingerprint goes with https only"),
        ("https://a:1", "has to stand #sha256:"),
        ("https://a:1#sha256:", "has to stand #sha256:"),
        (f"https://a:1#sha1:{DIGITS}", "has to stand #sha256:"),
        (f"https://a:1#sha256:{DIGITS}0", "has to stand #sha256:"),
    ],
)
def test_what_is_none(text: str, complaint: str) -> None:
    with pytest.raises(RendezvousProtocolError) as caught:
        DriverUrl.parse(text)
    assert complaint in str(caught.value)
