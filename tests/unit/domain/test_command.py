from hypothesis import given
from hypothesis import strategies as st

from atoll.domain.command import command_id, digest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_one_intent_has_one_id() -> None:
    assert command_id("plc_a", 2, 7) == "plc_a:2:7"


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=5))
def test_the_order_of_keys_does_not_matter(content: dict[str, object]) -> None:
    assert digest(content) == digest(dict(reversed(content.items())))


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=5), st.text(max_size=4), json_values)
def test_other_content_has_another_digest(content: dict[str, object], key: str, value: object) -> None:
    if key in content and repr(content[key]) == repr(value):
        return
    changed = {**content, key: value}
    if repr(changed) != repr(content):
        assert digest(changed) != digest(content)


def test_the_digest_is_fixed_for_ever() -> None:
    """Agents keep digests over upgrades of control: the canonical form must not change."""
    content = {"kind": "ensure_running", "desired_revision": 1, "spec": {"b": [1, None], "a": "Grüße"}}
    assert digest(content) == "8f80e4562231842ea3d14c2e88dcad06a9b285fcc77902f6577e55823ac4afc2"
