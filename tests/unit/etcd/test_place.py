"""Where a job is in etcd, as its users say it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from elastic_driver import codec
from elastic_driver.errors import SettingsError
from elastic_driver.etcd.place import EtcdPlace, is_etcd
from elastic_driver.rendezvous.certificate import Certificate

pytestmark = pytest.mark.unit


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("url", "endpoints", "prefix"),
    [
        ("etcd://a:2379/jobs/a", ("http://a:2379",), "/jobs/a"),
        ("etcd://a/jobs", ("http://a:2379",), "/jobs"),
        ("etcd://a,b:1,[::1]:2/jobs/", ("http://a:2379", "http://b:1", "http://[::1]:2"), "/jobs"),
        ("etcd://10.0.0.1:1,10.0.0.1:1/a.b-c_d=1@2:3+4", ("http://10.0.0.1:1",), "/a.b-c_d=1@2:3+4"),
    ],
)
def test_a_url(url: str, endpoints: tuple[str, ...], prefix: str) -> None:
    assert is_etcd(url)
    place = EtcdPlace.parse(url, {})
    assert place == EtcdPlace(endpoints, prefix)
    assert place.tls() is None
    assert EtcdPlace.parse(str(place), {}) == place


def test_servers_of_the_environment() -> None:
    place = EtcdPlace.parse("etcd:///jobs", {"ETCDCTL_ENDPOINTS": "https://a:1, http://b:2,c"})
    assert place.endpoints == ("https://a:1", "http://b:2", "http://c:2379")
    assert str(place) == "etcd://a:1,b:2,c:2379/jobs"
    assert place.tls() is not None
    # What the URL says counts.
    assert EtcdPlace.parse("etcd://d/jobs", {"ETCDCTL_ENDPOINTS": "https://a:1"}).endpoints == ("http://d:2379",)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/a/folder", "expected etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("etcd://a:1", "it has no prefix"),
        ("etcd://a:1/", "it has no prefix"),
        ("etcd://a:1/a//b", "single slashes"),
        ("etcd://a:1/a b", "may contain only letters, digits"),
        ("etcd://a:1/a?x=1", "may contain only letters, digits"),
        ("etcd://a:1/" + "a" * 600, "has 601 characters; the maximum is 512"),
        ("etcd:///a", "it contains no server, and ETCDCTL_ENDPOINTS is not set"),
        ("etcd://a:x/a", "'a:x' is not HOST:PORT"),
        ("etcd://a:70000/a", "'a:70000' is not HOST:PORT"),
        ("etcd://a,/a", "'' is not HOST:PORT"),
        ("etcd://[::1/a", "'[::1' is not HOST:PORT"),
        ("etcd://etcd..example:1/a", "'etcd..example:1' is not HOST:PORT"),
        ("etcd://.example:1/a", "'.example:1' is not HOST:PORT"),
        (f"etcd://{'a' * 64}.example/a", "aaa.example' is not HOST:PORT"),
        (f"etcd://{'a.' * 127}/a", "a.' is not HOST:PORT"),
        ("etcd://http://a:1/a", "single slashes"),
    ],
)
def test_what_is_no_url(url: str, why: str) -> None:
    with pytest.raises(SettingsError, match=r"^cannot use '") as caught:
        EtcdPlace.parse(url, {})
    assert why in str(caught.value)


@pytest.mark.parametrize("server", ["unix:/a", "ftp://a:1", "http://a:1/b", "http://u@a:1", "http://a:1?b"])
def test_what_is_no_server(server: str) -> None:
    with pytest.raises(SettingsError, match=r"^cannot use ETCDCTL_ENDPOINTS: '.*' is not HOST:PORT; expected etcd://"):
        EtcdPlace.parse("etcd:///a", {"ETCDCTL_ENDPOINTS": server})


def test_a_password_is_not_in_a_url() -> None:
    with pytest.raises(SettingsError, match=r"set ETCDCTL_USER instead$") as caught:
        EtcdPlace.parse("etcd://me:secret@a:1/jobs", {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "user", "password"),
    [
        ({}, "", ""),
        ({"ETCDCTL_USER": "me:a:b"}, "me", "a:b"),
        ({"ETCDCTL_USER": "me:"}, "me", ""),
        ({"ETCDCTL_USER": "me", "ETCDCTL_PASSWORD": "a:b"}, "me", "a:b"),
    ],
)
def test_a_user(environ: dict[str, str], user: str, password: str) -> None:
    place = EtcdPlace.parse("etcd://a/jobs", environ)
    assert (place.user, place.password) == (user, password)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"ETCDCTL_USER": "me"}, "without a password"),
        ({"ETCDCTL_USER": ":secret"}, "contains no name"),
        ({"ETCDCTL_PASSWORD": "secret"}, "contains no name"),
    ],
)
def test_half_a_user(environ: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        EtcdPlace.parse("etcd://a/jobs", environ)
    assert "secret" not in str(caught.value)


def test_certificates_travel_with_it(tmp_path: Path) -> None:
    pem = Certificate.new().pem.decode()
    certificate, key = pem[: pem.index("-----BEGIN PRIVATE")], pem[pem.index("-----BEGIN PRIVATE") :]
    environ = {
        "ETCDCTL_CACERT": written(tmp_path / "ca.pem", certificate),
        "ETCDCTL_CERT": written(tmp_path / "cert.pem", certificate),
        "ETCDCTL_KEY": written(tmp_path / "key.pem", key),
        "ETCDCTL_USER": "me:secret",
    }
    place = EtcdPlace.parse("etcd://a:1/jobs", environ)
    assert place == EtcdPlace(("https://a:1",), "/jobs", "me", "secret", certificate, certificate, key)
    assert codec.decode(EtcdPlace, codec.encode(EtcdPlace, place)) == place
    context = place.tls()
    assert context is not None
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509"] == 1
    for text in (repr(place), str(place)):
        assert "secret" not in text
        assert "PRIVATE" not in text

    other = Certificate.new().pem.decode()
    environ["ETCDCTL_KEY"] = written(tmp_path / "key.pem", other[other.index("-----BEGIN PRIVATE") :])
    with pytest.raises(SettingsError, match=r"^cannot use ETCDCTL_CERT with ETCDCTL_KEY: key values mismatch"):
        EtcdPlace.parse("etcd://a:1/jobs", environ)


def pair(folder: Path, name: str) -> tuple[str, str]:
    """Files of a certificate and its key."""
    certificate, begin, key = Certificate.new().pem.decode().partition("-----BEGIN PRIVATE")
    return written(folder / f"{name}.pem", certificate), written(folder / f"{name}.key", begin + key)


def test_agents_have_what_the_driver_has_where_nothing_is_given_for_them(tmp_path: Path) -> None:
    cert, key = pair(tmp_path, "driver")
    environ = {"ETCDCTL_CACERT": cert, "ETCDCTL_CERT": cert, "ETCDCTL_KEY": key, "ETCDCTL_USER": "jobs:secret"}
    place = EtcdPlace.parse("etcd://a/jobs", environ)
    assert place.of_agents() == place
    assert place.of_agents().files == ()


@pytest.mark.parametrize("given", ["a user", "a certificate", "both"])
def test_what_is_given_for_agents_replaces_all_that_the_driver_has(tmp_path: Path, given: str) -> None:
    (cert, key), (agents_cert, agents_key) = pair(tmp_path, "driver"), pair(tmp_path, "agents")
    environ = {"ETCDCTL_CACERT": cert, "ETCDCTL_CERT": cert, "ETCDCTL_KEY": key, "ETCDCTL_USER": "jobs:secret"}
    if given != "a certificate":
        environ["ELASTIC_DRIVER_AGENTS_ETCDCTL_USER"] = "agents:other"
    if given != "a user":
        environ |= {"ELASTIC_DRIVER_AGENTS_ETCDCTL_CERT": agents_cert, "ELASTIC_DRIVER_AGENTS_ETCDCTL_KEY": agents_key}
    place = EtcdPlace.parse("etcd://a/jobs", environ)
    user = ("", "") if given == "a certificate" else ("agents", "other")
    files = ("", "") if given == "a user" else (Path(agents_cert).read_text(), Path(agents_key).read_text())
    assert place.of_agents() == EtcdPlace(("https://a:2379",), "/jobs", *user, place.ca, *files)
    assert (place.user, place.certificate) == ("jobs", Path(cert).read_text())
    sent = codec.encode(EtcdPlace, place.of_agents()).decode()
    assert "secret" not in sent
    assert tmp_path.name not in sent, "the files are another machine's"


@pytest.mark.parametrize("given", ["key", "no key", "no password"])
def test_what_is_wrong_for_agents_is_refused_at_the_start(tmp_path: Path, given: str) -> None:
    (cert, _), (_, key) = pair(tmp_path, "one"), pair(tmp_path, "other")
    environ, why = {
        "key": ({"CERT": cert, "KEY": key}, "^cannot use ELASTIC_DRIVER_AGENTS_ETCDCTL_CERT with ELASTIC_"),
        "no key": ({"CERT": cert}, "ELASTIC_DRIVER_AGENTS_ETCDCTL_CERT without ELASTIC_DRIVER_AGENTS_ETCDCTL_KEY"),
        "no password": ({"USER": "agents"}, "^cannot use ELASTIC_DRIVER_AGENTS_ETCDCTL_USER without a password"),
    }[given]
    theirs = {f"ELASTIC_DRIVER_AGENTS_ETCDCTL_{name}": value for name, value in environ.items()}
    with pytest.raises(SettingsError, match=why):
        EtcdPlace.parse("etcd://a/jobs", {"ETCDCTL_CACERT": cert, **theirs})


def test_files_of_agents_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a driver that has stood by, in the folder of the job by then."""
    monkeypatch.chdir(tmp_path)
    pair(tmp_path, "agents")
    of = "ELASTIC_DRIVER_AGENTS_"
    place = EtcdPlace.parse(
        "etcd://a/jobs", {f"{of}ETCDCTL_CERT": "agents.pem", f"{of}ETCDCTL_KEY": "agents.key", "ETCDCTL_USER": "jobs:"}
    )
    monkeypatch.chdir("/")
    before = place.of_agents()
    pair(tmp_path, "agents")
    renewed = place.of_agents()
    assert renewed.certificate == (tmp_path / "agents.pem").read_text() != before.certificate
    (tmp_path / "agents.key").unlink()
    assert place.of_agents() == before, "as it was at the start"


def test_its_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cert, key = pair(tmp_path, "driver")
    environ = {"ETCDCTL_CACERT": "driver.pem", "ETCDCTL_CERT": cert, "ETCDCTL_KEY": key}
    place = EtcdPlace.parse("etcd://a/jobs", environ)
    monkeypatch.chdir("/")
    assert place.read_again() == place

    before, _ = Path(cert).read_text(), pair(tmp_path, "driver")
    renewed = place.read_again()
    assert (renewed.ca, renewed.certificate) == (Path(cert).read_text(),) * 2
    assert renewed.certificate != before
    assert renewed.read_again() == renewed

    for half in ("", "-----BEGIN CERTIFICATE-----\n", before):
        Path(cert).write_text(half)
        assert renewed.read_again() == renewed
    Path(cert).unlink()
    assert renewed.read_again() == renewed


def test_an_encrypted_key_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    secret = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
    )
    environ = {
        "ETCDCTL_CERT": written(tmp_path / "cert.pem", Certificate.new().pem.decode().partition("-----BEGIN PRIV")[0]),
        "ETCDCTL_KEY": written(tmp_path / "key.pem", secret.decode()),
    }
    with pytest.raises(SettingsError, match=r"^cannot use ETCDCTL_CERT with ETCDCTL_KEY: .*and must not be encrypted$"):
        EtcdPlace.parse("etcd://a:1/jobs", environ)


@pytest.mark.parametrize("name", ["ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    with pytest.raises(SettingsError, match=rf"^cannot read .*file \({name}\): No such file or directory$"):
        EtcdPlace.parse("etcd://a:1/jobs", {name: str(path)})
    for data in (b"nothing", b"\xff"):
        path.write_bytes(data)
        with pytest.raises(SettingsError, match=rf"^cannot use .*file \({name}\): it is not a PEM file$"):
            EtcdPlace.parse("etcd://a:1/jobs", {name: str(path)})
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(SettingsError, match=rf"^cannot use {name}"):
        EtcdPlace.parse("etcd://a:1/jobs", {name: str(path)})


@pytest.mark.parametrize(
    "data",
    [
        b'{"endpoints":[],"prefix":"/a","user":"","password":"","ca":"","certificate":"","key":""}',
        b'{"endpoints":["a:1"],"prefix":"/a","user":"","password":"","ca":"","certificate":"","key":""}',
        b'{"endpoints":["http://a:1"],"prefix":"a","user":"","password":"","ca":"","certificate":"","key":""}',
    ],
)
def test_what_another_process_says_is_checked(data: bytes) -> None:
    with pytest.raises(codec.CodecError, match=r"^EtcdPlace cannot be: "):
        codec.decode(EtcdPlace, data)
