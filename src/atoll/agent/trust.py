"""Trust: which control an agent talks to at all.

Theory of operation. A credential goes only over a connection that shows a certificate for the name that was dialled, signed by an authority
of this machine or by the one that the operator has named; or to an address of this machine itself. There is no way to turn that off.
"""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from atoll.base.errors import Code, Refused


def is_loopback(host: str) -> bool:
    """Whether a host name can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_url(url: str) -> str:
    """The URL of control without its path's end. *Errors*: Refused INVALID_REQUEST; TLS_REQUIRED for plain HTTP to another machine."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment or port == 0:
        raise Refused(Code.INVALID_REQUEST, f"{url[:200]!r} is no address of control: give https://HOST:PORT")
    if parts.scheme == "http" and not is_loopback(host):
        raise Refused(Code.TLS_REQUIRED, f"{host} is another machine, and http:// would show it this host's credential in clear")
    return url.rstrip("/")


def context(authority: Path | None = None) -> ssl.SSLContext:
    """How certificates are verified: names too, and TLS 1.2 at least. *Errors*: Refused SETUP_FAILED when the file is no authority."""
    try:
        made = ssl.create_default_context(cafile=str(authority) if authority is not None else None)
    except (OSError, ssl.SSLError) as error:
        raise Refused(
            Code.SETUP_FAILED, f"{authority} cannot be used as an authority: {error}", hint="It must be a certificate in PEM."
        ) from error
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return made


def fingerprint(certificate_pem: str) -> str:
    """SHA-256 of a certificate, as operators hand it over. *Errors*: Refused INVALID_REQUEST when it is none."""
    try:
        return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem)).hexdigest()
    except ValueError:
        raise Refused(Code.INVALID_REQUEST, "this is no certificate in PEM") from None
