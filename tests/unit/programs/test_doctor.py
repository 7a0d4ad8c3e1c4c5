"""What no check may do: end the report."""

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.images.cache import ImageCache
from atoll.programs import doctor
from atoll.programs.layout import Layout


def cannot(error: OSError) -> Callable[..., list[str]]:
    def refuse(*_: object) -> list[str]:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("user", "error", "result"),
    [
        (65534, PermissionError(13, "denied"), "warning"),
        (0, PermissionError(13, "denied"), "failed"),
        (65534, OSError(5, "broken"), "failed"),
    ],
)
def test_what_cannot_be_read_is_one_result_among_the_others(
    user: int, error: OSError, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.os, "geteuid", lambda: user)
    monkeypatch.setattr(ImageCache, "problems", cannot(error))
    report = doctor.examine(Layout(tmp_path / "none"))
    found = {check["id"]: check for check in report["checks"]}
    assert {"instance.root", "instance.programs", "instance.oci_runtime", "instance.templates", "instance.config"} == set(found)
    assert found["instance.templates"]["result"] == result
    assert str(error) in found["instance.templates"]["detail"]
    assert found["instance.templates"]["fix"]
    assert not report["ok"]
