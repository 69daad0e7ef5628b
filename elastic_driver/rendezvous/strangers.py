"""Errors for a server at the driver's address that does not prove to be the driver.

Owns the texts for clients and agents, each of which follows "cannot contact the driver at ADDRESS: ". Callers decide
how to react and what to advise the user.
"""

from __future__ import annotations

from elastic_driver.errors import (
    NoTlsError,
    OtherCertificateError,
    RejectedError,
    UnverifiedDriverError,
    WrongTokenError,
)
from elastic_driver.rendezvous.authentication import OtherKeyError, RefusedAuthenticationError
from elastic_driver.rendezvous.credentials import Credential, Role

NO_PROOF = "the server there did not prove to be this job's driver"
# The name of each role's secret, and what else may answer there. Other roles have keys that no person types or copies.
_SECRETS = {Role.JOINER: "join token", Role.OPERATOR: "operator's key", Role.MEMBER: "token"}
_OTHERS = {
    Role.JOINER: ("another job's driver", "this job's"),
    Role.OPERATOR: ("another job's driver", "this job's"),
    Role.MEMBER: ("another rendezvous", "its"),
}


def other_certificate() -> OtherCertificateError:
    """The certificate is not the one that came with the address."""
    return OtherCertificateError(
        "the certificate there does not match the fingerprint in the URL: another driver answers there, or the "
        "driver was restarted"
    )


def no_tls() -> NoTlsError:
    """The TLS handshake has failed."""
    return NoTlsError(
        "the server there does not speak TLS 1.3: it is another program, or another version of elastic_driver"
    )


def no_proof(error: Exception, credential: Credential, *, is_driver: bool) -> UnverifiedDriverError | WrongTokenError:
    """Return the error for a failed exchange.

    Args:
        error: the failure.
        credential: the client's credential.
        is_driver: whether the certificate is known to be the driver's.
    """
    if isinstance(error, RefusedAuthenticationError):
        return RejectedError(f"{'the driver' if is_driver else 'the server'} there rejected the connection: {error}")
    secret = _SECRETS.get(credential.identity.role)
    if secret is None or not isinstance(error, OtherKeyError):
        return UnverifiedDriverError(NO_PROOF)
    source = f"the one from {credential.source}" if credential.source else "the one that was given"
    other, its = _OTHERS[credential.identity.role]
    differs = f"{its} {secret} is not {source}"
    if credential.is_without_token:
        differs = "it requires a token, and none was given"
    if is_driver:
        return WrongTokenError(differs)
    return UnverifiedDriverError(f"either {other} answers there, or {differs}")
