"""Golden messages: both languages read the same files, and readers are lenient where the protocol says so."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from atoll.base.errors import Code
from atoll.domain import command
from atoll.domain.placement import Observed
from atoll.store.rows import SPEC
from atoll.wire import agent, edge, guest

GOLDEN = Path(agent.__file__).parent / "golden"

MODELS: dict[str, type[BaseModel]] = {
    "agent/enroll": agent.Enroll,
    "agent/enrolled": agent.Enrolled,
    "agent/known": agent.Known,
    "agent/registration": agent.Registration,
    "agent/poll": agent.Poll,
    "agent/poll_answer": agent.PollAnswer,
    "agent/poll_answer_absent": agent.PollAnswer,
    "agent/observe": agent.Observe,
    "agent/observe_answer": agent.ObserveAnswer,
    "agent/payloads_wanted": agent.PayloadsWanted,
    "agent/payloads": agent.Payloads,
    "agent/accounts": agent.Accounts,
    "agent/accounts_answer": agent.AccountsAnswer,
    "agent/collected": agent.Collected,
    "agent/error": agent.ErrorBody,
    "guest/config": guest.GuestConfig,
    "guest/hello": guest.Hello,
    "guest/placement": guest.PlacementFile,
    "guest/init": guest.Init,
    "edge/snapshot": edge.Line,
    "edge/route": edge.Line,
    "edge/gone": edge.Line,
    "edge/ping": edge.Line,
    "edge/locate": edge.Locate,
    "edge/located": edge.Located,
}
NAMES = sorted(MODELS)
AGENT = [name for name in NAMES if name.startswith("agent/")]


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def test_every_golden_file_is_read_here() -> None:
    files = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.json")}
    assert {name for name in files if not name.startswith("manifests/")} == {*MODELS, "guest/claims"}


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_message_is_understood(name: str) -> None:
    """What is read and written again says nothing else than the file; only fields that no reader knows yet may be lost."""
    content = golden(name)
    said = MODELS[name].model_validate(content).model_dump(mode="json", exclude_unset=True)
    assert contains(content, said), f"{said} is not in {content}"


@pytest.mark.parametrize("name", AGENT)
def test_an_agent_message_in_gold_is_understood_whole(name: str) -> None:
    assert MODELS[name].model_validate(golden(name)).model_dump(mode="json") == golden(name)


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part)


def test_every_field_of_the_agents_protocol_has_a_golden_value() -> None:
    """A new field without one would be tested by nobody."""
    messages = {model for model in vars(agent).values() if isinstance(model, type) and issubclass(model, agent.Message)} - {agent.Message}
    seen: dict[type[BaseModel], set[str]] = {model: set() for model in messages}
    for name in AGENT:
        for message in parts(MODELS[name].model_validate(golden(name))):
            seen.setdefault(type(message), set()).update(field for field in type(message).model_fields if getattr(message, field))
    # Falsy on purpose in gold: nothing is quarantined, the console was there.
    seen[agent.HostHealth].add("quarantined")
    seen[agent.Collected].add("code")
    seen[agent.Check].add("fix")
    missing = {model.__name__: set(model.model_fields) - fields for model, fields in seen.items() if set(model.model_fields) - fields}
    assert not missing


def parts(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for field in type(value).model_fields:
            yield from parts(getattr(value, field))
    elif isinstance(value, dict):
        for one in value.values():
            yield from parts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from parts(one)


@pytest.mark.parametrize("name", NAMES)
def test_fields_of_the_future_are_ignored_everywhere(name: str) -> None:
    content = golden(name)
    richer = with_more(copy.deepcopy(content))
    assert richer != content
    # Maps (metadata, holds, env) take any key: there a new key is content, not a new field.
    assert MODELS[name].model_validate({**content, "of_the_future": {"a": [1]}}) == MODELS[name].model_validate(content)


def with_more(value: Any) -> Any:
    if isinstance(value, dict):
        return {**{key: with_more(one) for key, one in value.items()}, "of_the_future": 1}
    if isinstance(value, list):
        return [with_more(one) for one in value]
    return value


@pytest.mark.parametrize("name", NAMES)
def test_what_has_a_default_may_be_missing(name: str) -> None:
    """An older writer does not know the field; only fields without a default are the protocol's minimum."""
    content, model = golden(name), MODELS[name]
    for field, description in model.model_fields.items():
        shorter = {key: value for key, value in content.items() if key != field}
        if description.is_required():
            with pytest.raises(ValidationError):
                model.model_validate(shorter)
        else:
            model.model_validate(shorter)


def test_the_commands_in_gold_have_the_ids_and_digests_of_their_content() -> None:
    for name in ("agent/poll_answer", "agent/poll_answer_absent"):
        (found,) = golden(name)["commands"]
        assert found["id"] == command.command_id(found["placement_id"], found["generation"], found["desired_revision"])
        left_out = {"digest", "epoch", "carried_out", "save_mode", "strict", "moment"}
        if not found["claimed"]:
            left_out.add("claimed")
        if found["kind"] == "ensure_absent":
            left_out |= {"spec", "nonce", "guest_public_key", "guest_token", "hostname", "payload_ref", "payload_digest", "ready_s"}
            left_out.add("timeout_s")
        assert found["digest"] == command.digest({key: value for key, value in found.items() if key not in left_out})


def test_a_spec_in_gold_is_the_stored_form_too() -> None:
    (found,) = golden("agent/poll_answer")["commands"]
    assert SPEC.dump_python(SPEC.validate_python(found["spec"]), mode="json") == found["spec"]
    older = {key: value for key, value in found["spec"].items() if key not in ("regions", "labels", "create_patience_s", "command")}
    assert SPEC.validate_python({**older, "of_the_future": 1}).regions == ()


def test_claims_in_gold() -> None:
    told = golden("guest/config")
    fields = {key: told[key] for key in ("sandbox_id", "placement_id", "generation", "nonce")}
    assert guest.claims(**fields, scope=guest.SCOPE_CONTROL) == golden("guest/claims")


SECRETS = {
    "agent/enroll": ["one-use"],
    "agent/enrolled": ["hk_0123456789abcdef"],
    "agent/poll_answer": ["ea_fedcba9876543210", "Grüße", "header.claims.signature"],
    "agent/payloads": ["ea_fedcba9876543210", "Grüße", "header.claims.signature"],
}


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_message_s_repr_shows_no_secret(name: str) -> None:
    message = MODELS[name].model_validate(golden(name))
    for secret in SECRETS[name]:
        assert secret in message.model_dump_json()
        assert secret not in repr(message)
        assert secret not in str(message)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("agent/poll", {"poll_seq": 0}),
        ("agent/poll", {"park_s": 26.0}),
        ("agent/poll", {"park_s": -1.0}),
        ("agent/poll", {"observations": [golden("agent/observe")["observations"][0]] * 257}),
        ("agent/observe", {"observations": [golden("agent/observe")["observations"][0]] * 257}),
        ("agent/payloads_wanted", {"refs": ["i"] * 17}),
        ("agent/poll_answer", {"commands": golden("agent/poll_answer")["commands"] * 17}),
        ("agent/enroll", {"facts": {**golden("agent/enroll")["facts"], "cpu_count": 0}}),
        ("edge/locate", {"operation": "delete"}),
        ("edge/locate", {"path": "a" * 8193}),
    ],
)
def test_what_is_beyond_the_limits_is_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MODELS[name].model_validate({**golden(name), **change})


def test_the_largest_poll_fits_in_a_message() -> None:
    """256 observations with the longest detail do not; what an agent sends at once must stay below both limits."""
    seen = golden("agent/observe")["observations"][0]
    usual = agent.Observe.model_validate({**golden("agent/observe"), "observations": [seen] * agent.OBSERVATIONS_PER_MESSAGE_MAX})
    assert len(usual.model_dump_json()) < agent.MESSAGE_BYTES_MAX


def test_errors_in_gold_have_codes_of_ours() -> None:
    assert golden("agent/error")["code"] in Code.__members__


@pytest.mark.parametrize("seen", Observed)
def test_every_observed_state_can_be_said(seen: Observed) -> None:
    content = {**golden("agent/observe")["observations"][0], "observed": seen.value}
    assert agent.Observation.model_validate(content).observed is seen
