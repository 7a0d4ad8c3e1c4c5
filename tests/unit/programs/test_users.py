from pathlib import Path

from atoll.programs.users import Account, closed_on_the_way

STRANGER = Account("stranger", 4_000_000, 4_000_000)


def test_the_first_closed_directory_is_named(tmp_path: Path) -> None:
    top = tmp_path
    while top.parent != Path("/"):
        top.chmod(0o755)
        top = top.parent
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert closed_on_the_way(inner, STRANGER) is None
    (tmp_path / "a").chmod(0o700)
    assert closed_on_the_way(inner, STRANGER) == tmp_path / "a"
    (tmp_path / "a").chmod(0o701)
    assert closed_on_the_way(inner / "not-there-yet", STRANGER) is None
    assert closed_on_the_way(inner, Account("owner", inner.stat().st_uid, 1)) is None
