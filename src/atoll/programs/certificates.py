"""Certificates for control's own use, where the operator has none: a small authority, and a server's certificate signed by it.

The authority's key is root's and is used only here; hosts learn the authority by its fingerprint when they join.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.base.errors import Code, Refused
from atoll.programs.files import write_whole

AUTHORITY_DAYS: Final = 3650
SERVER_DAYS: Final = 825
"""What every TLS library still accepts."""
_EARLIER: Final = dt.timedelta(hours=2)
"""Clocks of hosts may be behind."""


def ensure_authority(certificate: Path, key: Path, *, name: str, now: dt.datetime) -> None:
    """Have an authority; one that is there is kept, because hosts know it. *Errors*: Refused SETUP_FAILED when only half of it is there."""
    if certificate.exists() != key.exists():
        raise Refused(
            Code.SETUP_FAILED,
            f"of {certificate} and {key} only one is there",
            hint="Bring the other back, or remove both: hosts must join anew.",
        )
    if certificate.exists():
        return
    private = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Atoll {name}"[:64])])
    made = (
        _builder(who, who, private, days=AUTHORITY_DAYS, now=now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    write_whole(key, _pem(private), mode=0o600)
    write_whole(certificate, made.public_bytes(serialization.Encoding.PEM), mode=0o644)


def issue(
    certificate: Path,
    key: Path,
    *,
    authority: Path,
    authority_key: Path,
    names: Sequence[str],
    owner: tuple[int, int] | None,
    now: dt.datetime,
) -> None:
    """Write a server's certificate for these names and addresses, and its key (0600, for `owner`). *Errors*: Refused SETUP_FAILED."""
    try:
        signer = x509.load_pem_x509_certificate(authority.read_bytes())
        signing = serialization.load_pem_private_key(authority_key.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise Refused(Code.SETUP_FAILED, f"the authority in {authority} cannot be used: {error}") from error
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise Refused(Code.SETUP_FAILED, f"{authority_key} is no key that was made here")
    private = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    made = (
        _builder(who, signer.subject, private, days=SERVER_DAYS, now=now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    # The key first: whoever loads both in between finds an old certificate with a new key, refuses, and tries again a moment later.
    write_whole(key, _pem(private), mode=0o600, owner=owner)
    write_whole(certificate, made.public_bytes(serialization.Encoding.PEM), mode=0o644)


def days_left(certificate: Path, *, now: dt.datetime) -> int:
    """Until it expires; less than nothing afterwards. *Errors*: Refused SETUP_FAILED."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(Code.SETUP_FAILED, f"{certificate} is no certificate: {error}") from error
    return (found.not_valid_after_utc - now).days


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int, now: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
