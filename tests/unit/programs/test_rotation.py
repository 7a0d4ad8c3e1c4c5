from pathlib import Path

from atoll.programs.rotation import rotate


def test_a_small_log_stays(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("small")
    assert not rotate(log, size_bytes_max=5)
    assert log.read_text() == "small"


def test_a_missing_log_is_fine(tmp_path: Path) -> None:
    assert not rotate(tmp_path / "x.log")


def test_a_writer_that_appends_goes_on_and_older_logs_are_kept_in_order(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(5):
            writer.write(f"line {number} {'-' * 20}\n".encode())
            assert rotate(log, size_bytes_max=10, kept=3)
        writer.write(b"now\n")
    assert log.read_text() == "now\n"
    assert [(tmp_path / f"x.log.{n}").read_text()[:6] for n in (1, 2, 3)] == ["line 4", "line 3", "line 2"]
    assert not (tmp_path / "x.log.4").exists()
