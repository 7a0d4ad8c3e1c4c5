from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.client import target


def instance(home: Path, *, port: int = 4000, key: str = "e2b_" + "a" * 40) -> Path:
    home.mkdir()
    (home / "config.toml").write_text(f"port = {port}\n")
    (home / "operator.key").write_text(key + "\n")
    return home


def test_the_environment_comes_first(tmp_path: Path) -> None:
    home = instance(tmp_path / "home")
    found = target.find(
        {
            "ATOLL_API_URL": "https://a.example/",
            "ATOLL_API_KEY": "k1",
            "ATOLL_HOME": str(home),
            "E2B_API_URL": "http://b",
            "E2B_API_KEY": "k2",
        }
    )
    assert (found.url, found.key.reveal(), found.sandbox_url) == ("https://a.example", "k1", "https://a.example")


def test_a_named_instance_comes_before_e2bs_variables(tmp_path: Path) -> None:
    home = instance(tmp_path / "home")
    found = target.find({"ATOLL_HOME": str(home), "E2B_API_URL": "http://b", "E2B_API_KEY": "k2"})
    assert (found.url, found.key.reveal()) == ("http://127.0.0.1:4000", "e2b_" + "a" * 40)


def test_what_env_prints_is_enough() -> None:
    found = target.find({"E2B_API_URL": "http://b:1", "E2B_API_KEY": "k2", "E2B_SANDBOX_URL": "http://c:2"})
    assert (found.url, found.sandbox_url, found.key.reveal()) == ("http://b:1", "http://c:2", "k2")


def test_a_lone_key_does_not_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "HOME_DEFAULT", instance(tmp_path / "home"))
    assert target.find({"E2B_API_KEY": "for another service"}).key.reveal() == "e2b_" + "a" * 40


def test_another_key_for_this_instance(tmp_path: Path) -> None:
    home = instance(tmp_path / "home")
    assert target.find({"ATOLL_HOME": str(home), "ATOLL_API_KEY": "mine"}).key.reveal() == "mine"


def test_nothing_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        target.find({"ATOLL_HOME": str(tmp_path)})
    assert refused.value.code is Code.NOT_RUNNING
    assert "make up" in refused.value.hint


def test_a_key_is_not_in_the_repr(tmp_path: Path) -> None:
    assert "aaaa" not in repr(target.find({"ATOLL_HOME": str(instance(tmp_path / "home"))}))
