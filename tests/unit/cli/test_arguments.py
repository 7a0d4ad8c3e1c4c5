import pytest
import typer

from atoll.cli import arguments, output
from atoll.cli.execution import exit_status
from atoll.client.guest import Ended

SANDBOX = "i" + "a1" * 10


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("2h", 7200), ("1d", 86400), ("1.5m", 90), (" 3M ", 180)]
)
def test_durations(text: str, seconds: int) -> None:
    assert arguments.duration_s(text) == seconds


@pytest.mark.parametrize(("text", "mib"), [("512", 512), ("512M", 512), ("2G", 2048), ("1.5GiB", 1536), ("64mb", 64)])
def test_sizes(text: str, mib: int) -> None:
    assert arguments.size_mib(text) == mib


@pytest.mark.parametrize(("text", "millis"), [("1", 1000), ("0.5", 500), ("250m", 250)])
def test_cpu(text: str, millis: int) -> None:
    assert arguments.cpu_millis(text) == millis


@pytest.mark.parametrize("read", [arguments.duration_s, arguments.size_mib, arguments.cpu_millis])
@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1e9", "1 2", "٣x"])
def test_what_is_none(read, text: str) -> None:
    with pytest.raises(typer.BadParameter):
        read(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"{SANDBOX}:/a:b", (SANDBOX, "/a:b")),
        (f"{SANDBOX}:", (SANDBOX, ".")),
        ("a.txt", (None, "a.txt")),
        ("dir:name", (None, "dir:name")),
        (f"./{SANDBOX}:x", (None, f"./{SANDBOX}:x")),
    ],
)
def test_places(text: str, place: tuple[str | None, str]) -> None:
    assert arguments.place(text) == place


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Ended(0, "exit status 0"), 0),
        (Ended(255, "exit status 255"), 255),
        (Ended(256, ""), 0),
        (Ended(-1, "signal: killed"), 137),
        (Ended(-1, "signal: segmentation fault (core dumped)"), 139),
    ],
)
def test_statuses(end: Ended, status: int) -> None:
    assert exit_status(end) == status


@pytest.mark.parametrize(
    ("value", "text"),
    [(1000.0, "0s"), (880, "2m"), (-6200.0, "2h"), ("1970-01-01T00:00:00Z", "17m"), (1600, "in 10m"), (None, None), ("x", None)],
)
def test_ages(value: object, text: str | None) -> None:
    assert output.age(value, now=1000.0) == text
