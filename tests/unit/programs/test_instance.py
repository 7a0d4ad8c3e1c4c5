import base64
import json
import os
import random
import stat
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from atoll.base.errors import Code, Refused
from atoll.domain.tenancy import key_digest
from atoll.programs import instance
from atoll.programs.layout import Layout
from atoll.programs.users import Account

ME = Account("me", os.geteuid(), os.getegid())


@pytest.fixture
def dice():
    return random.Random(7).randbytes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setenv("ATOLL_INSTANCES", str(tmp_path / "instances"))
    layout = Layout(tmp_path / "home")
    instance.ensure_directories(layout, ME)
    return layout


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_configuration_is_written_once(place: Layout, dice) -> None:
    first = instance.ensure_config(place, port=4000, dice=dice)
    assert instance.load(place) == first
    assert instance.ensure_config(place, port=None, dice=dice) == first
    assert first.install_id.startswith("ins_")
    assert (first.domain, first.url) == ("localhost:4000", "http://127.0.0.1:4000")
    assert sorted(first.ports().values()) == [4000, 4001, 4002]


def test_the_port_follows_while_nothing_runs(place: Layout, dice) -> None:
    first = instance.ensure_config(place, port=4000, dice=dice)
    kept = instance.ensure_config(place, port=5000, dice=dice, may_move=False)
    assert kept == first
    moved = instance.ensure_config(place, port=5000, dice=dice)
    assert (moved.port, moved.install_id, moved.subnet) == (5000, first.install_id, first.subnet)
    assert instance.load(place) == moved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "install_id = 1",
        "not toml [",
        'install_id = "ins_x"\nport = 1\nsubnet = 0\nhost_name = "h"',
        f'install_id = "ins_{"a" * 20}"\nport = 1\nsubnet = 64\nhost_name = "h"',
    ],
)
def test_a_broken_configuration_is_refused_and_not_replaced(place: Layout, dice, text: str) -> None:
    place.config.write_text(text)
    with pytest.raises(Refused) as refused:
        instance.ensure_config(place, port=None, dice=dice)
    assert refused.value.code is Code.SETUP_FAILED
    assert place.config.read_text() == text


def test_no_instance_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        instance.load(Layout(tmp_path))
    assert refused.value.code is Code.NOT_RUNNING


@pytest.mark.parametrize(("text", "port"), [("", None), ("3000", 3000), ("65533", 65533)])
def test_port_wanted(text: str, port: int | None) -> None:
    assert instance.port_wanted({"ATOLL_PORT": text}) == port


@pytest.mark.parametrize("text", ["0", "65534", "http", "-1", "3000.5"])
def test_a_port_that_is_none(text: str) -> None:
    with pytest.raises(Refused) as refused:
        instance.port_wanted({"ATOLL_PORT": text})
    assert refused.value.code is Code.INVALID_REQUEST


def test_secrets_are_made_once_and_nobody_elses_to_read(place: Layout, dice) -> None:
    instance.ensure_secrets(place, ME, dice)
    before = {name: (place.secrets / name).read_bytes() for name in instance.SECRETS}
    assert len(base64.b64decode(before[instance.SEALING_KEY])) == 32
    assert len(base64.b64decode(before[instance.TOKEN_KEY])) == 32
    assert load_pem_private_key(before[instance.GUEST_KEY], password=None)
    assert len(set(before.values())) == len(instance.SECRETS)
    assert {mode(place.secrets / name) for name in instance.SECRETS} == {0o600}
    (place.secrets / instance.EDGE_TOKEN).unlink()
    instance.ensure_secrets(place, ME, dice)
    after = {name: (place.secrets / name).read_bytes() for name in instance.SECRETS}
    assert {name for name in before if before[name] != after[name]} == {instance.EDGE_TOKEN}


def test_control_gets_digests_only(place: Layout, dice) -> None:
    config = instance.ensure_config(place, port=None, dice=dice)
    instance.ensure_bootstrap(place, ME, config)
    key, token = place.operator_key.read_text().strip(), place.enrollment_token.read_text().strip()
    text = place.bootstrap.read_text()
    assert key not in text
    assert token not in text
    assert json.loads(text) == {
        "operator_key_digest": key_digest(key),
        "operator_key_hint": key[-4:],
        "enrollment_token_digest": key_digest(token),
        "host_name": config.host_name,
    }
    assert {mode(path) for path in (place.operator_key, place.enrollment_token, place.bootstrap)} == {0o600}


def test_bootstrap_is_repeatable_and_ends_with_the_credential(place: Layout, dice) -> None:
    config = instance.ensure_config(place, port=None, dice=dice)
    instance.ensure_bootstrap(place, ME, config)
    before = place.bootstrap.read_bytes()
    instance.ensure_bootstrap(place, ME, config)
    assert place.bootstrap.read_bytes() == before
    stale = time.time() - instance.TOKEN_FRESH_S - 1
    os.utime(place.enrollment_token, (stale, stale))
    instance.ensure_bootstrap(place, ME, config)
    assert place.bootstrap.read_bytes() != before
    place.credential.write_text("{}")
    instance.ensure_bootstrap(place, ME, config)
    assert "enrollment_token_digest" not in json.loads(place.bootstrap.read_text())


def test_a_damaged_operator_key_is_replaced(place: Layout) -> None:
    place.operator_key.write_text("half")
    key = instance.ensure_operator_key(place)
    assert key.startswith("e2b_")
    assert len(key) == 44
    assert instance.ensure_operator_key(place) == key


def test_directories_get_their_modes_back(place: Layout) -> None:
    place.secrets.chmod(0o777)
    instance.ensure_directories(place, ME)
    assert mode(place.secrets) == 0o700
    assert mode(place.agent) == 0o700
    assert mode(place.control) == 0o700


def test_a_home_that_control_cannot_reach_names_the_directory(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "home").mkdir()
    stranger = Account("atoll", 4_000_000, 4_000_000)
    problem = instance.home_problem(Layout(closed / "home"), stranger)
    assert problem is not None
    assert problem.code is Code.SETUP_FAILED
    assert str(tmp_path) in problem.message
