"""The environment that the public SDKs and our own commands need to find this instance."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from atoll.base.secret import Secret
from atoll.client.target import home_directory
from atoll.programs.instance import Config
from atoll.programs.layout import Layout, python


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


def command(layout: Layout) -> str:
    """How any shell calls this environment's `atoll` about this instance, also one that knows nothing of ATOLL_HOME."""
    own = python().with_name("atoll")
    found = shutil.which("atoll")
    name = "atoll" if found is not None and Path(found).resolve() == own.resolve() else shlex.quote(str(own))
    return name if layout.home == home_directory({}) else f"ATOLL_HOME={shlex.quote(str(layout.home))} {name}"
