"""The environment that the public SDKs and our own commands need to find this instance."""

from __future__ import annotations

from atoll.base.secret import Secret
from atoll.programs.instance import Config
from atoll.programs.layout import Layout


def variables(layout: Layout, config: Config) -> dict[str, str]:
    """Names and values, the operator's key among them. *Errors*: OSError when the key is not readable."""
    key = Secret(layout.operator_key.read_text().strip())
    return {
        "E2B_API_KEY": key.reveal(),
        "E2B_API_URL": config.url,
        "E2B_SANDBOX_URL": config.url,
        "E2B_VOLUME_API_URL": config.url,
        "E2B_DOMAIN": config.domain,
    }


def lines(values: dict[str, str]) -> str:
    """For `eval "$(atoll env)"`; single quotes, so that no value means anything to the shell."""
    return "\n".join(f"export {name}='{value}'" for name, value in values.items())
