"""The driver's address as people hand it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous import driver_url
from elastic_driver.rendezvous.driver_url import DriverUrl

pytestmark = pytest.mark.unit

DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "url", "fingerprint"),
    [
        ("https://a:1", "https://a:1", ""),
        (" https://10.0.0.1:1234/\n", "https://10.0.0.1:1234", ""),
        (f"https://[fd00::1]:65535#sha256:{DIGITS}", "https://[fd00::1]:65535", DIGITS),
        (f"https://a.b:1#sha256:{DIGITS.upper()}", "https://a.b:1", DIGITS),
        ("unix:/a b/c.sock", "unix:/a b/c.sock", ""),
    ],
)
def test_what_is_one(text: str, url: str, fingerprint: str, caplog: pytest.LogCaptureFixture) -> None:
    read = DriverUrl.parse(text)
    assert read == DriverUrl(url, fingerprint)
    assert DriverUrl.parse(str(read)) == read
    assert caplog.text == ""


def test_its_parts() -> None:
    assert DriverUrl("https://[fd00::1]:7").address == ("fd00::1", 7)
    assert DriverUrl("https://a:7").socket is None
    assert DriverUrl("unix:/a/b.sock").socket == Path("/a/b.sock")


def test_http_is_read_as_https_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    driver_url._warn_of_http.cache_clear()
    for host in "ab":
        assert DriverUrl.parse(f"http://{host}:1#sha256:{DIGITS}") == DriverUrl(f"https://{host}:1", DIGITS)
    assert [each.getMessage() for each in caplog.records] == [
        "http:// in the driver's URL is read as https://, because drivers only speak TLS: write https://"
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected https://HOST:PORT"),
        ("a:1", "expected https://HOST:PORT"),
        ("ftp://a:1", "expected https://HOST:PORT"),
        ("http://a", "expected https://HOST:PORT"),
        ("https://:1", "expected https://HOST:PORT"),
        ("https://a:0", "expected https://HOST:PORT"),
        ("https://a:99999", "expected https://HOST:PORT"),
        ("https://a:x", "expected https://HOST:PORT"),
        ("https://[::1", "expected https://HOST:PORT"),
        ("https://a:1/x", "expected https://HOST:PORT"),
        ("https://a:1?x=1", "expected https://HOST:PORT"),
        ("https://me:secret@a:1", "expected https://HOST:PORT"),
        ("unix:relative", "expected https://HOST:PORT"),
        ("https://a:1#", "the part after # must be sha256:"),
        ("https://a:1#sha256:", "the part after # must be sha256:"),
        (f"https://a:1#sha1:{DIGITS}", "the part after # must be sha256:"),
        (f"https://a:1#sha256:{DIGITS}0", "the part after # must be sha256:"),
    ],
)
def test_what_is_none(text: str, complaint: str) -> None:
    with pytest.raises(RendezvousProtocolError) as caught:
        DriverUrl.parse(text)
    assert complaint in str(caught.value)
