import io
import json
import logging

import pytest

from atoll.base.secret import Secret
from atoll.telemetry import events, keys, log


@pytest.fixture
def lines():
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    log.configure("control", "info", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_is_one_json_object_with_the_fixed_fields_first(lines) -> None:
    log.get_logger(host_id="hst_1").info(events.SANDBOX_STATE_CHANGED, sandbox_id="i1", state="ready")
    (line,) = lines()
    assert list(line)[:4] == list(keys.ALWAYS)
    assert line["level"] == "info"
    assert line["event"] == "sandbox.state.changed"
    assert line["process"] == "control"
    assert line["sandbox_id"] == "i1"
    assert line["at"].endswith("Z")


def test_no_way_out_for_a_secret(lines) -> None:
    value = "e2b_0123456789abcdef"
    log.get_logger().info("x", key=Secret(value), detail={"deep": [Secret(value)], "access_token": value}, api_key=value, key_digest="d1")
    (line,) = lines()
    assert value not in json.dumps(line)
    assert line["key"] == "***"
    assert line["detail"] == {"deep": ["***"], "access_token": "***"}
    assert line["key_digest"] == "d1"


def test_lines_of_libraries_look_the_same(lines) -> None:
    logging.getLogger("uvicorn.error").warning("port %s is slow", 3000)
    (line,) = lines()
    assert line["event"] == events.LIBRARY_SPOKE
    assert line["message"] == "port 3000 is slow"
    assert line["logger"] == "uvicorn.error"
    assert line["level"] == "warning"
    assert line["process"] == "control"


@pytest.mark.parametrize("library", ["uvicorn", "uvicorn.error", "uvicorn.access", "alembic.runtime.migration", "httpx"])
def test_what_libraries_say_in_passing_is_left_out(lines, library) -> None:
    logging.getLogger(library).info("Running upgrade 0001 -> 0002")
    assert lines() == []
    logging.getLogger(library).warning("careful")
    assert [line["message"] for line in lines()] == ["careful"]


def test_levels_are_kept(lines) -> None:
    log.get_logger().debug("unheard")
    log.get_logger().warning("heard")
    assert [line["event"] for line in lines()] == ["heard"]


def test_an_exception_is_one_line(lines) -> None:
    try:
        int("two\nlines")
    except ValueError:
        log.get_logger().exception("failed")
    (line,) = lines()
    assert "ValueError" in line["exception"]
    assert line["level"] == "error"


def test_what_is_no_json_is_still_a_line(lines) -> None:
    log.get_logger().info("x", what=object(), path=b"\xff")
    (line,) = lines()
    assert "object" in line["what"]


def test_event_names_are_distinct_and_have_the_form() -> None:
    named = [value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)]
    assert len(named) == len(set(named))
    assert all(value == value.lower() and "." in value for value in named)
    assert frozenset(named) == events.ALL
