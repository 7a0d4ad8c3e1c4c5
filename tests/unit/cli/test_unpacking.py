import io
import stat
import tarfile
from pathlib import Path

import pytest

from atoll.base.errors import Refused
from atoll.cli.unpacking import unpack


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = "", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, len(data), link, mode
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "inside" / "target"
    path.mkdir(parents=True)
    return path


def outside(target: Path) -> list[str]:
    """What exists beside the target."""
    return [path.name for path in target.parent.iterdir() if path != target]


def test_files_directories_and_links_come_as_they_are(target: Path) -> None:
    left_out = unpack(
        archive(
            member(".", tarfile.DIRTYPE, mode=0o755),
            member("./a", tarfile.DIRTYPE, mode=0o500),
            member("./a/f", data=b"hello", mode=0o640),
            member("./a/hard", tarfile.LNKTYPE, link="./a/f"),
            member("./link", tarfile.SYMTYPE, link="/etc/passwd"),
            member("./empty", tarfile.DIRTYPE, mode=0o700),
        ),
        target,
    )
    assert left_out == []
    assert (target / "a" / "f").read_bytes() == b"hello"
    assert stat.S_IMODE((target / "a" / "f").stat().st_mode) == 0o640
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o500
    assert (target / "a" / "hard").samefile(target / "a" / "f")
    assert (target / "link").readlink() == Path("/etc/passwd")
    assert (target / "empty").is_dir()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "..", "a/..", "./../x"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_names_that_lead_outside(target: Path, name: str, kind: bytes) -> None:
    with pytest.raises(Refused):
        unpack(archive(member(name, kind, link="y")), target)
    assert outside(target) == []


def test_nothing_is_written_through_a_link_of_the_archive(target: Path) -> None:
    with pytest.raises(Refused):
        unpack(archive(member("d", tarfile.SYMTYPE, link=".."), member("d/x", data=b"evil")), target)
    assert outside(target) == []


def test_a_file_replaces_a_link_instead_of_following_it(target: Path) -> None:
    victim = target.parent.parent / "victim"
    victim.write_text("mine")
    unpack(archive(member("f", tarfile.SYMTYPE, link=str(victim)), member("f", data=b"evil")), target)
    assert victim.read_text() == "mine"
    assert (target / "f").read_text() == "evil"
    assert not (target / "f").is_symlink()


def test_a_directory_replaces_a_link(target: Path) -> None:
    unpack(archive(member("d", tarfile.SYMTYPE, link=".."), member("d", tarfile.DIRTYPE, mode=0o755), member("d/x", data=b"here")), target)
    assert outside(target) == []
    assert (target / "d" / "x").read_text() == "here"


def test_hard_links_lead_to_members_only(target: Path) -> None:
    for link in ("/etc/passwd", "../x", "none"):
        with pytest.raises(Refused):
            unpack(archive(member("f", tarfile.LNKTYPE, link=link)), target)
    with pytest.raises(Refused):
        unpack(archive(member("d", tarfile.SYMTYPE, link="/etc"), member("f", tarfile.LNKTYPE, link="d/passwd")), target)


def test_set_uid_is_dropped_and_devices_are_left_out(target: Path) -> None:
    left_out = unpack(
        archive(member("su", data=b"x", mode=0o4755), member("null", tarfile.CHRTYPE), member("pipe", tarfile.FIFOTYPE)),
        target,
    )
    assert left_out == ["null", "pipe"]
    assert stat.S_IMODE((target / "su").stat().st_mode) == 0o755
    assert [path.name for path in target.iterdir()] == ["su"]


def test_a_local_directory_is_not_replaced_by_a_file(target: Path) -> None:
    (target / "d").mkdir()
    (target / "d" / "mine").write_text("x")
    with pytest.raises(Refused):
        unpack(archive(member("d", data=b"x")), target)
    assert (target / "d" / "mine").exists()


def test_what_is_no_archive(target: Path) -> None:
    with pytest.raises(tarfile.TarError):
        unpack(io.BytesIO(b"x" * 2000), target)
