"""The driver's certificate: made for one job, self-signed, identified by its fingerprint.

Owns how it is made and how both ends configure TLS. No authority vouches for it. A client gets its fingerprint together
with the driver's address (:mod:`~elastic_driver.rendezvous.driver_url`) and checks it before it sends anything; or the
client has a key, and the proof of that covers the fingerprint (:mod:`~elastic_driver.rendezvous.authentication`).
"""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from typing import Self

from elastic_driver.system.kernel import memory_file

# This package does not check the dates; for a library that does, a wrong clock must not matter.
_AGE, _LIFE = datetime.timedelta(days=365), datetime.timedelta(days=36500)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key.

    Attributes:
        fingerprint: SHA-256 of the certificate in DER, in hexadecimal digits.
        pem: both, as OpenSSL reads them.
    """

    fingerprint: str
    pem: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Make a certificate with a new key (ECDSA on P-256)."""
        # Imported late: workers import this module and need none of these.
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elasticrun")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _AGE)
            .not_valid_after(now + _LIFE)
            .sign(key, SHA256())
        )
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        fingerprint = sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
        return cls(fingerprint, certificate.public_bytes(Encoding.PEM) + secret)


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """Return the TLS context of the driver's server."""
    context = _tls_1_3(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # clients never resume a session, and strangers could request tickets
    # OpenSSL reads only files. This one has no name and is not on disk.
    descriptor = memory_file("elasticrun-certificate")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(certificate.pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def client_context() -> ssl.SSLContext:
    """Return the TLS context of a client of the driver. It accepts any certificate: after the handshake, check
    :func:`has_fingerprint` or run an exchange that covers :func:`fingerprint_of`.
    """
    context = _tls_1_3(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _tls_1_3(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.maximum_version = ssl.TLSVersion.MAXIMUM_SUPPORTED  # a site's openssl.cnf may stop at 1.2
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def fingerprint_of(connection: ssl.SSLSocket | ssl.SSLObject) -> str:
    """Return the fingerprint of the certificate shown in the handshake, in hexadecimal digits."""
    return sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


def has_fingerprint(connection: ssl.SSLSocket | ssl.SSLObject, fingerprint: str) -> bool:
    """Return whether the peer has the driver's certificate. Check it after the handshake, before anything is sent."""
    return compare_digest(fingerprint_of(connection).encode(), fingerprint.lower().encode())
