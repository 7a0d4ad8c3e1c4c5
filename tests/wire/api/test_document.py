"""`/v1` against its own OpenAPI document: what it promises to take and to answer, tried from the document alone."""

from __future__ import annotations

import os

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from atoll.control.api.app import build_app
from atoll.control.api.settings import ApiSettings
from atoll.domain.tenancy import Role
from atoll.testing.fake_operations import FakeOperations
from atoll.testing.fake_service import FakeService

FULL = os.environ.get("ATOLL_TEST_MATRICES") == "full"
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


SERVICE = FakeService(now=lambda: 1_800_000_000.0)
_, KEY = SERVICE.add_team("operators", role=Role.OPERATOR, max_sandboxes=10_000)
APP = build_app(
    SERVICE,
    operations=FakeOperations(SERVICE),
    settings=ApiSettings(domain="localhost:3000", install_id="ins_abcdefgh0123456789ab", version="0.1.0"),
    ready=lambda: True,
    dice=SERVICE.dice,
)
# Streams go on for as long as the client wants: tests/sim/test_operations.py reads them.
schema = schemathesis.openapi.from_asgi("/v1/openapi.json", APP).exclude(operation_id=["streamEvents", "streamSandboxEvents"])


@schema.parametrize()
@settings(max_examples=100 if FULL else 8, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_as_documented(case) -> None:
    case.call_and_validate(headers={"X-API-KEY": KEY}, checks=CHECKS)
