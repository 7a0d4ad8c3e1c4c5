"""The registry's configuration: where it listens and keeps what it has, and the public key of the tokens that it takes."""

from __future__ import annotations

import base64
import json

from atoll.programs.files import make_directory, read_json, write_whole
from atoll.programs.instance import TOKEN_KEY
from atoll.programs.layout import Layout
from atoll.programs.users import Account
from atoll.wire import registry


def write(layout: Layout, user: Account) -> None:
    """Have directory and files as this instance needs them. The secrets must be there; no file of these holds one."""
    make_directory(layout.registry, mode=0o700, owner=user.owner)
    key = registry.signing_key(base64.b64decode((layout.secrets / TOKEN_KEY).read_text()))
    _have(layout, "keys.json", registry.key_set(key), user)
    content = {
        "socket": str(layout.registry_socket),
        "root": str(layout.registry / "data"),
        "keys": str(layout.registry / "keys.json"),
        "token_path": registry.TOKEN_PATH,
        "service": registry.SERVICE,
        "issuer": registry.ISSUER,
    }
    _have(layout, layout.registry_config.name, content, user)


def _have(layout: Layout, name: str, content: object, user: Account) -> None:
    path = layout.registry / name
    if read_json(path) != content:
        write_whole(path, json.dumps(content, indent=2) + "\n", mode=0o640, owner=(0, user.gid))
