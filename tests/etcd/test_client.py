"""The client with real servers of etcd: what it asks of them, TLS, users, and a database that is full."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from elastic_driver.etcd.client import EtcdClient, EtcdRefusedError, EtcdUnreachableError
from elastic_driver.etcd.driver_record import driver_key
from elastic_driver.etcd.messages import Put, end_of
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.launch.agent.driver_locator import DriverLocator
from tests.support.fakes.etcd_contract import EtcdContract
from tests.support.fakes.etcd_jobs import bodies, writer
from tests.support.processes.etcd import HOST, Cluster, Tls, cluster, needs_etcd, post

pytestmark = [pytest.mark.etcd, needs_etcd]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


class TestARealOne(EtcdContract):
    """What the fake is a fake of."""

    @pytest.fixture
    def client(self, etcd: Cluster) -> Iterator[EtcdClient]:
        with EtcdClient(etcd.place()) as client:
            yield client

    def test_an_answer_may_be_large(self, client: EtcdClient) -> None:
        """Larger than gRPC's 4 MiB, which the gateway is not held to."""
        value = bytes(range(256)) * 2048
        for number in range(20):
            client.txn([], [Put(f"/large/{number:02}", value)])
        page = client.range("/large/", end_of("/large/"))
        assert [each.value for each in page.found] == [value] * 20

    def test_a_request_may_not(self, client: EtcdClient) -> None:
        with pytest.raises(EtcdRefusedError, match="request is too large"):
            client.txn([], [Put("/k", bytes(1600 << 10))])


def test_a_database_that_is_full(tmp_path: Path) -> None:
    with cluster(tmp_path, flags=("--quota-backend-bytes", str(2 << 20))) as etcd, EtcdClient(etcd.place()) as client:

        def fill() -> None:
            for number in range(100):
                client.txn([], [Put(f"/k{number}", bytes(256 << 10))])

        with pytest.raises(EtcdRefusedError, match=r"database space exceeded: free space \(etcdctl compact"):
            fill()
        assert client.get("/k0") is not None


# --- users ----------------------------------------------------------------------------------------------------------


def with_users(etcd: Cluster, context: ssl.SSLContext | None = None) -> None:
    """There are root; jobs, who may do all under /jobs/a/; and agents, who may see who drives. Nothing else."""
    url = etcd.servers[0].url

    def ask(path: str, **body: object) -> None:
        post(url, f"/v3/auth/{path}", body, context)

    start, end = (base64.b64encode(key.encode()).decode() for key in ("/jobs/a/", end_of("/jobs/a/")))
    driver = base64.b64encode(driver_key(etcd.place()).encode()).decode()
    for name in ("root", "jobs", "agents"):
        ask("user/add", name=name, password=f"of {name}")
        ask("role/add", name=name)
        ask("user/grant", user=name, role=name)
    ask("role/grant", name="jobs", perm={"permType": "READWRITE", "key": start, "range_end": end})
    ask("role/grant", name="agents", perm={"permType": "READ", "key": driver})
    ask("enable")


def test_a_user_may_do_what_its_role_says(etcd: Cluster) -> None:
    with_users(etcd)
    place = etcd.place(user="jobs", password="of jobs")
    with writer(place) as made:
        made.begin(b"first")
        made.append(b"second")
        with EtcdClient(place) as client:
            assert client.keep_alive(made.lock._lease) == 5
    assert bodies(place) == [b"first", b"second"]

    elsewhere = replace(place, prefix="/jobs/b")
    for asked, why in (
        (
            elsewhere,
            "permission denied: user jobs needs a role with permission to read and write all keys under /jobs/b/",
        ),
        (replace(place, password="wrong"), "the user jobs (ETCDCTL_USER) is unknown to etcd, or the password is wrong"),
        (replace(place, user="", password=""), "set an etcd user in ETCDCTL_USER"),
    ):
        with pytest.raises(EtcdRefusedError, match=why), writer(asked):
            pass


def test_agents_may_see_who_drives_and_nothing_else(etcd: Cluster) -> None:
    with_users(etcd)
    url = str(etcd.place())
    environ = {"ETCDCTL_USER": "jobs:of jobs", "ELASTIC_DRIVER_AGENTS_ETCDCTL_USER": "agents:of agents"}
    theirs = EtcdPlace.parse(url, environ).of_agents()
    assert asyncio.run(DriverLocator(theirs).ask()) is None
    with writer(EtcdPlace.parse(url, environ)) as made:
        made.begin(b"first")
        there = asyncio.run(DriverLocator(theirs, made.lock.cluster_id).ask())
        assert there is not None
        assert there.job == "0123"
        with EtcdClient(theirs) as client:
            with pytest.raises(EtcdRefusedError, match="permission denied"):
                client.range(f"{theirs.prefix}/", end_of(f"{theirs.prefix}/"))
            with pytest.raises(EtcdRefusedError, match="permission denied"):
                client.txn([], [Put(driver_key(theirs), b"")])
            with pytest.raises(EtcdRefusedError, match="permission denied"):
                client.revoke(made.lock._lease)
        made.append(b"second")
    elsewhere = replace(theirs, prefix="/jobs/b")
    with pytest.raises(
        EtcdRefusedError, match=r"user agents needs a role with permission to read the key /jobs/b/driver$"
    ):
        asyncio.run(DriverLocator(elsewhere).ask())


def test_a_token_that_is_not_known_any_more_is_renewed(etcd: Cluster) -> None:
    """etcd has been without users meanwhile, and forgotten all of them; and it was started again."""
    with_users(etcd)
    place = etcd.place(user="jobs", password="of jobs")
    with EtcdClient(place) as client:
        assert client.get("/jobs/a/k") is None
        before, url = client._token, etcd.servers[0].url
        with EtcdClient(etcd.place(user="root", password="of root")) as root:
            root.get("/k")
            post(url, "/v3/auth/disable", {}, token=root._token or "")
        post(url, "/v3/auth/enable", {})
        assert client.get("/jobs/a/k") is None
        assert client._token != before
        etcd.kill()
        with pytest.raises(EtcdUnreachableError, match="nothing listens there"):
            client.get("/jobs/a/k")
        etcd.start()
        etcd.wait(user="root", password="of root")
        assert client.get("/jobs/a/k") is None


# --- TLS ------------------------------------------------------------------------------------------------------------


class Authority:
    """Signs certificates, of servers and of clients."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate, _ = self._written(name, self._name, self._key, is_authority=True)

    def signs(self, file: str, name: str = "") -> tuple[Path, Path]:
        """A certificate and its key, for this machine; with that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []
        return self._written(file, x509.Name(attributes), key, is_authority=False)

    def _written(
        self, file: str, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool
    ) -> tuple[Path, Path]:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
            .sign(self._key, SHA256())
        )
        paths = self._folder / f"{file}.pem", self._folder / f"{file}.key"
        paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return paths


def place_of(etcd: Cluster, **environ: Path | str) -> EtcdPlace:
    url = f"etcd://{etcd.servers[0].url.removeprefix('https://')}/jobs/a"
    return EtcdPlace.parse(url, {name: str(value) for name, value in environ.items()})


def test_tls(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    certificate, key = authority.signs("server")
    with cluster(tmp_path, tls=Tls(certificate, key)) as etcd:
        place = place_of(etcd, ETCDCTL_CACERT=authority.certificate)
        etcd.wait(ca=authority.certificate.read_text())
        with writer(place) as made:
            made.begin(b"first")
        assert bodies(place) == [b"first"]

        wrong = place_of(etcd, ETCDCTL_CACERT=other.certificate)
        with EtcdClient(wrong) as client, pytest.raises(EtcdUnreachableError, match="certificate verify failed"):
            client.get("/k")
        plain = replace(place, endpoints=(place.endpoints[0].replace("https", "http"),))
        with EtcdClient(plain) as client, pytest.raises(EtcdUnreachableError, match="cannot reach etcd"):
            client.get("/k")

        context = ssl.create_default_context(cafile=authority.certificate)
        with_users(etcd, context)
        user = place_of(etcd, ETCDCTL_CACERT=authority.certificate, ETCDCTL_USER="jobs:of jobs")
        with EtcdClient(user) as client:
            assert client.get("/jobs/a/k") is None


def test_certificates_that_are_renewed_count_for_the_next_connection(tmp_path: Path) -> None:
    """etcd is started again, with certificates of another authority for itself and for its clients."""
    authority = Authority(tmp_path)
    certificate, key = authority.signs("server")
    client_certificate, client_key = authority.signs("client")
    files = {"ETCDCTL_CACERT": authority.certificate, "ETCDCTL_CERT": client_certificate, "ETCDCTL_KEY": client_key}
    with cluster(tmp_path, tls=Tls(certificate, key, authority.certificate)) as etcd:
        place = place_of(etcd, **files)
        etcd.wait(ca=place.ca, certificate=place.certificate, key=place.key)
        with EtcdClient(place) as client, EtcdClient(replace(place, files=())) as elsewhere:
            assert client.get("/k") is elsewhere.get("/k") is None
            etcd.kill()
            renewed = Authority(tmp_path)
            renewed.signs("server")
            renewed.signs("client")
            etcd.start()
            now = place_of(etcd, **files)
            etcd.wait(ca=now.ca, certificate=now.certificate, key=now.key)
            assert client.get("/k") is None
            with pytest.raises(EtcdUnreachableError, match="certificate verify failed"):
                elsewhere.get("/k")


def test_certificates_of_clients(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.signs("server")
    nameless, its_key = authority.signs("client")
    named, named_key = authority.signs("named", "me")
    with cluster(tmp_path, tls=Tls(certificate, key, authority.certificate)) as etcd:
        ca = authority.certificate
        place = place_of(etcd, ETCDCTL_CACERT=ca, ETCDCTL_CERT=nameless, ETCDCTL_KEY=its_key)
        etcd.wait(ca=place.ca, certificate=place.certificate, key=place.key)
        with writer(place) as made:
            made.begin(b"first")
        assert bodies(place) == [b"first"]

        without = place_of(etcd, ETCDCTL_CACERT=ca)
        with EtcdClient(without) as client, pytest.raises(EtcdUnreachableError, match="ETCDCTL_CERT"):
            client.get("/k")
        # What some versions refuse, in words of the gateway's own.
        other = place_of(etcd, ETCDCTL_CACERT=ca, ETCDCTL_CERT=named, ETCDCTL_KEY=named_key)
        refused = ""
        with EtcdClient(other) as client:
            try:
                client.get("/k")
            except EtcdUnreachableError as error:
                refused = str(error)
        assert not refused or "use a client certificate without a CommonName" in refused
