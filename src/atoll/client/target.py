"""Where Atoll is and with which key: from the environment, or from the instance on this machine.

In this order: ATOLL_API_URL with ATOLL_API_KEY; the instance in ATOLL_HOME when that is set; E2B_API_URL with E2B_API_KEY, so that what
`atoll env` prints is enough; the instance in the usual place. A lone E2B_API_KEY says nothing about where: it may be for another service.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret

HOME_VARIABLE: Final = "ATOLL_HOME"
HOME_DEFAULT: Final = Path("/var/lib/atoll")
PORT_DEFAULT: Final = 3000
CONFIG_FILE: Final = "config.toml"
OPERATOR_KEY_FILE: Final = "operator.key"


@dataclass(frozen=True, slots=True)
class Target:
    """One Atoll and one key. `sandbox_url` takes requests to guests; on one machine it is the same edge."""

    url: str
    key: Secret
    sandbox_url: str
    source: str
    """Where this was found, for people."""
    authority: Path | None = None
    """Who signs its certificate, where this machine does not know it: ATOLL_CA_FILE."""


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the instance that commands on this machine mean."""
    return Path(environ.get(HOME_VARIABLE) or HOME_DEFAULT)


def find(environ: Mapping[str, str] = os.environ) -> Target:
    """Where to send. *Errors*: Refused NOT_RUNNING (no instance here, nothing in the environment), FORBIDDEN (its key is not readable)."""
    named = _from_environment(environ, "ATOLL")
    if named is None and not environ.get(HOME_VARIABLE):
        named = _from_environment(environ, "E2B")
    return named or of_instance(home_directory(environ), environ)


def _from_environment(environ: Mapping[str, str], prefix: str) -> Target | None:
    url, key = environ.get(f"{prefix}_API_URL"), environ.get(f"{prefix}_API_KEY")
    if not url or not key:
        return None
    sandbox_url = environ.get(f"{prefix}_SANDBOX_URL") or url
    named = environ.get("ATOLL_CA_FILE")
    return Target(url.rstrip("/"), Secret(key), sandbox_url.rstrip("/"), f"{prefix}_API_URL", Path(named) if named else None)


def of_instance(home: Path, environ: Mapping[str, str] = os.environ) -> Target:
    """The instance in `home`, with ATOLL_API_KEY or its operator key. *Errors*: as `find`."""
    try:
        config = tomllib.loads((home / CONFIG_FILE).read_text())
    except FileNotFoundError:
        raise Refused(
            Code.NOT_RUNNING,
            f"there is no instance in {home}",
            hint="Start one with `make up`, or set ATOLL_API_URL and ATOLL_API_KEY to use another machine's.",
        ) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Refused(Code.SETUP_FAILED, f"{home / CONFIG_FILE} cannot be read: {error}") from error
    url = f"http://127.0.0.1:{int(config.get('port', PORT_DEFAULT))}"
    key = environ.get("ATOLL_API_KEY")
    if not key:
        try:
            key = (home / OPERATOR_KEY_FILE).read_text().strip()
        except OSError as error:
            raise Refused(
                Code.FORBIDDEN,
                f"the operator key of {home} is not readable: {error.strerror}",
                hint="Run it as root, or set ATOLL_API_KEY to a key of yours.",
            ) from error
    return Target(url, Secret(key), url, str(home))
