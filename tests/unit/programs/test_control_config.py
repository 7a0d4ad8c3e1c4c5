"""Where control answers other machines, as an operator has written it down; and the certificates that are made for it."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.programs import certificates, control_config
from atoll.programs.control_config import ControlConfig, Listener
from atoll.programs.layout import Layout

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def test_without_a_file_it_answers_here_only(tmp_path: Path) -> None:
    assert control_config.load(Layout(tmp_path)) == ControlConfig(None, (), "local", True)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "atoll.lan"])
@pytest.mark.parametrize("inside", [True, False])
def test_it_is_read_as_it_was_written(tmp_path: Path, host: str, inside: bool) -> None:
    place, base = Layout(tmp_path), tmp_path if inside else Path("/etc/atoll")
    mirrored = control_config.Registries({"index.docker.io": "mirror.lan:5000/hub"}, ("mirror.lan:5000",))
    config = ControlConfig(
        Listener(host, 3443, base / "tls.crt", base / "tls.key", base / "ca.pem"), ("https://a:1", "https://b:2"), "attic", False, mirrored
    )
    control_config.save(place, config)
    assert control_config.load(place) == config


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":3443", ("0.0.0.0", 3443)),
        ("a", ("a", 3443)),
        ("a:1", ("a", 1)),
        ("[::1]:5", ("::1", 5)),
        ("::1", ("::1", 3443)),
        ("[::]", ("::", 3443)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert control_config.address(text) == address


@pytest.mark.parametrize("text", ["a:0", "a:65536", "a:x", ":"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        control_config.address(text)


@pytest.mark.parametrize("text", ["[[", "agents = 1", '[agents]\nlisten = "a:1"', '[agents]\nlistn = "a:1"', '[agents]\nlisten = "a:b"'])
def test_a_broken_file_is_told(tmp_path: Path, text: str) -> None:
    place = Layout(tmp_path)
    place.control_config.write_text(text)
    with pytest.raises(Refused) as refused:
        control_config.load(place)
    assert refused.value.code is Code.SETUP_FAILED


def test_a_certificate_is_for_its_names_and_nobody_else_reads_the_keys(tmp_path: Path) -> None:
    authority, authority_key = tmp_path / "ca.pem", tmp_path / "ca.key"
    certificates.ensure_authority(authority, authority_key, name="test", now=NOW)
    kept = authority.read_bytes()
    certificates.ensure_authority(authority, authority_key, name="test", now=NOW)
    assert authority.read_bytes() == kept, "hosts know it"
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificates.issue(
        certificate, key, authority=authority, authority_key=authority_key, names=["atoll.lan", "10.0.0.1", "::1"], owner=None, now=NOW
    )
    assert {path.stat().st_mode & 0o777 for path in (key, authority_key)} == {0o600}
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    assert certificates.days_left(certificate, now=NOW) == certificates.SERVER_DAYS
    assert certificates.days_left(certificate, now=NOW + dt.timedelta(days=certificates.SERVER_DAYS + 2)) < 0


def test_half_an_authority_is_not_made_whole(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    with pytest.raises(Refused) as refused:
        certificates.ensure_authority(tmp_path / "ca.pem", tmp_path / "ca.key", name="test", now=NOW)
    assert refused.value.code is Code.SETUP_FAILED
    with pytest.raises(Refused):
        certificates.days_left(tmp_path / "ca.pem", now=NOW)
