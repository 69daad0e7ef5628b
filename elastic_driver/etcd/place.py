"""Where in etcd a job keeps its journal: the servers, the prefix, and the credentials.

Owns the text form ``etcd://HOST:PORT,HOST:PORT/PREFIX``, and which of ``etcdctl``'s variables apply as well:

| variable                         | meaning                                                                       |
|----------------------------------|-------------------------------------------------------------------------------|
| ETCDCTL_ENDPOINTS                | the servers, if the URL names none (``etcd:///PREFIX``)                       |
| ETCDCTL_CACERT                   | file of the certificates with which theirs are signed                         |
| ETCDCTL_CERT, ETCDCTL_KEY        | files of a client's certificate and its key                                   |
| ETCDCTL_USER, ETCDCTL_PASSWORD   | ``NAME:PASSWORD`` in the first, or each in its own                            |

The last four with the prefix ``ELASTIC_DRIVER_AGENTS_`` are for agents, which need to read one key only. If one of
these is given, agents get none of the driver's credentials.

Connections to the servers use TLS if one of the certificates is given, or if ETCDCTL_ENDPOINTS says ``https://``. A
place contains its files' content, and can be sent to another machine, which has none of them. Where the files are, they
may be read again: certificates are renewed.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.system.kernel import memory_file
from elastic_driver.system.safe_files import read_named
from elastic_driver.words import ETCD

# Registered with IANA for etcd's clients.
_PORT = 2379
# A bundle of all authorities that a Linux distribution trusts is a quarter of that.
_MOST_PEM = 1 << 20
_FORM = f"expected {ETCD}HOST:PORT,HOST:PORT/PREFIX"
_AGENTS = "ELASTIC_DRIVER_AGENTS_"
_CA = "ETCDCTL_CACERT"
# Characters that need no quoting, in a shell or in a pattern of etcdctl's.
_PREFIX = re.compile(r"(/[A-Za-z0-9._+=@:-]+)+")
_MOST_PREFIX = 512
# A name's parts are not empty, and not too long for DNS: a lookup would raise an error of its own.
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """A prefix of keys in a cluster of etcd.

    Attributes:
        endpoints: its servers, as ``http://HOST:PORT`` or ``https://HOST:PORT``.
        prefix: begins with a slash, and does not end with one.
        user: whose permissions apply; "" for none.
        password: of that user.
        ca: certificates with which the servers' are signed, PEM; "" for those that this machine trusts.
        certificate: of the client, PEM; "" for none.
        key: of that certificate, PEM.
        files: of these three on this machine, absolute, "" for none; empty if the place has come from another machine:
            they are not sent with it.
        agents: the same place with the credentials of agents; None if they get the driver's, or the place has come from
            another machine.
    """

    endpoints: tuple[str, ...]
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    files: tuple[str, ...] = field(default=(), repr=False, compare=False)
    agents: EtcdPlace | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("it contains no server")
        for endpoint in self.endpoints:
            if _endpoint(endpoint, is_tls=False) != endpoint:
                raise ValueError(f"{endpoint!r} is not http://HOST:PORT or https://HOST:PORT")
        if why := _why_no_prefix(self.prefix):
            raise ValueError(why)

    @classmethod
    def parse(cls, url: str, environ: Mapping[str, str]) -> Self:
        """Parse a URL, and read the files that ``etcdctl``'s variables name. See the module.

        Raises:
            SettingsError: the URL, a variable or a file is invalid.
        """
        if not is_etcd(url):
            raise SettingsError(f"cannot use {url[:200]!r}: {_FORM}")
        hosts, slash, prefix = url[len(ETCD) :].partition("/")
        prefix = f"{slash}{prefix}".rstrip("/")
        if "@" in hosts:
            # Without the given text: it contains a password.
            raise SettingsError(
                f"cannot use a URL {ETCD}… that contains a user, which every user of this machine could "
                "read: set ETCDCTL_USER instead"
            )
        if why := _why_no_prefix(prefix):
            raise SettingsError(f"cannot use {url[:200]!r}: {why}; {_FORM}")
        ca = _pem(environ, _CA)
        certificate, key = _pair(environ)
        source = hosts or environ.get("ETCDCTL_ENDPOINTS", "")
        if not source.strip():
            raise SettingsError(
                f"cannot use {url[:200]!r}: it contains no server, and ETCDCTL_ENDPOINTS is not set; {_FORM}"
            )
        endpoints = []
        for text in source.split(","):
            # A scheme for each is etcdctl's form; in the URL there is one for all.
            has_scheme = "://" in text
            endpoint = "" if has_scheme and hosts else _endpoint(text.strip(), is_tls=bool(ca or certificate))
            if not endpoint:
                where = repr(url[:200]) if hosts else "ETCDCTL_ENDPOINTS"
                raise SettingsError(f"cannot use {where}: {text[:200]!r} is not HOST:PORT; {_FORM}")
            endpoints.append(endpoint)
        servers = tuple(dict.fromkeys(endpoints))
        place = cls(servers, prefix, *_user(environ), ca, certificate, key, _files(environ))
        place.tls()
        user, pair = _user(environ, _AGENTS), _pair(environ, _AGENTS)
        if not any((*user, *pair)):
            return place
        agents = cls(servers, prefix, *user, ca, *pair, _files(environ, _AGENTS))
        agents.tls(of=_AGENTS)
        return replace(place, agents=agents)

    def of_agents(self) -> EtcdPlace:
        """Return the same place as agents get it, with the present content of its files: see the module."""
        return replace((self.agents or self).read_again(), files=(), agents=None)

    def read_again(self) -> Self:
        """Return it with the present content of its files; unchanged if one cannot be read, or is no longer a file."""
        if not self.files or not all(os.path.isfile(file) for file in self.files if file):
            return self  # a pipe is read once
        try:
            ca, certificate, key = (_pem({file: file}, file) for file in self.files)
            place = replace(self, ca=ca, certificate=certificate, key=key)
            place.tls()
        except SettingsError:  # they are being written
            return self
        return place

    @property
    def is_tls(self) -> bool:
        """Whether connections to one of the servers use TLS."""
        return any(endpoint.startswith("https:") for endpoint in self.endpoints)

    def tls(self, *, of: str = "") -> ssl.SSLContext | None:
        """Return the TLS context for connections to the servers; None if they are not encrypted.

        Args:
            of: the prefix of the variables' names, in messages.

        Raises:
            SettingsError: a certificate or a key is invalid.
        """
        if not self.is_tls:
            return None
        try:
            context = ssl.create_default_context(cadata=self.ca or None)
        except (ssl.SSLError, ValueError) as error:
            raise SettingsError(f"cannot use ETCDCTL_CACERT: {in_words(error)}") from error
        context.set_alpn_protocols(["http/1.1"])
        if self.certificate:
            try:
                _load(context, self.certificate, self.key)
            except (ssl.SSLError, ValueError) as error:
                raise SettingsError(
                    f"cannot use {of}ETCDCTL_CERT with {of}ETCDCTL_KEY: {in_words(error)}; the key must match the "
                    "certificate and must not be encrypted"
                ) from error
        return context

    def __str__(self) -> str:
        """Return the URL, without credentials."""
        return f"{ETCD}{','.join(endpoint.partition('://')[2] for endpoint in self.endpoints)}{self.prefix}"


def is_etcd(text: str) -> bool:
    """Return whether a text names a place in etcd, or is meant to."""
    return text.startswith(ETCD)


def _why_no_prefix(prefix: str) -> str:
    if not prefix:
        return "it has no prefix, which separates this job's keys from all others"
    if len(prefix) > _MOST_PREFIX:
        return f"its prefix has {len(prefix)} characters; the maximum is {_MOST_PREFIX}"
    if not _PREFIX.fullmatch(prefix):
        return f"its prefix {prefix!r} may contain only letters, digits and . _ + = @ : - between single slashes"
    return ""


def _endpoint(text: str, *, is_tls: bool) -> str:
    """Return a server in its normal form; "" if it is invalid."""
    scheme, has_scheme, rest = text.rpartition("://")
    if not has_scheme:
        scheme = "https" if is_tls else "http"
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname or "", parts.port or _PORT
    except ValueError:
        return ""
    is_address = scheme in ("http", "https") and (_ADDRESS.fullmatch(host) or _NAME.fullmatch(host)) is not None
    if not is_address or "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment:
        return ""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _pem(environ: Mapping[str, str], name: str) -> str:
    path = environ.get(name, "")
    if not path:
        return ""
    try:
        text = read_named(Path(path), _MOST_PEM).decode()
    except OSError as error:
        raise SettingsError(f"cannot read {path} ({name}): {in_words(error)}") from error
    except UnicodeDecodeError:
        text = ""
    if "-----BEGIN " not in text:
        raise SettingsError(f"cannot use {path} ({name}): it is not a PEM file")
    return text


def _files(environ: Mapping[str, str], of: str = "") -> tuple[str, ...]:
    """Return EtcdPlace.files, absolute: the working directory may have changed when they are read again."""
    given = (environ.get(name, "") for name in (_CA, f"{of}ETCDCTL_CERT", f"{of}ETCDCTL_KEY"))
    return tuple(os.path.abspath(file) if file else "" for file in given)


def _pair(environ: Mapping[str, str], of: str = "") -> tuple[str, str]:
    """Return a client's certificate and its key."""
    names = f"{of}ETCDCTL_CERT", f"{of}ETCDCTL_KEY"
    certificate, key = (_pem(environ, name) for name in names)
    if bool(certificate) != bool(key):
        given, other = names if certificate else reversed(names)
        raise SettingsError(f"cannot use {given} without {other}: set both the certificate and its key")
    return certificate, key


def _user(environ: Mapping[str, str], of: str = "") -> tuple[str, str]:
    names = f"{of}ETCDCTL_USER", f"{of}ETCDCTL_PASSWORD"
    given, password = (environ.get(name, "") for name in names)
    name, has_password, rest = given.partition(":")
    if password:
        # As in etcdctl: the first one is then the name alone.
        name, rest = given, password
    if not name:
        if given or password:
            raise SettingsError(f"cannot use a password without a user name: {names[0]} contains no name")
        return "", ""
    if not password and not has_password:
        raise SettingsError(f"cannot use {names[0]} without a password: set it to {name}:PASSWORD, or set {names[1]}")
    return name, rest


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load them into OpenSSL, which reads files only: one without a name, which no other process can open."""
    descriptor = memory_file("elasticrun-etcd")
    try:
        with open(descriptor, "w", closefd=False) as file:
            file.write(f"{certificate}\n{key}\n")
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)
