"""The edge's configuration file: where it listens, where control is, which token it shows."""

from __future__ import annotations

import json

from atoll.programs.files import read_json, write_whole
from atoll.programs.instance import EDGE_TOKEN, Config
from atoll.programs.layout import Layout
from atoll.programs.users import Account

EDGE_ID = "edge-local"


def write(layout: Layout, config: Config, user: Account) -> None:
    """Have the file as this instance needs it. Holds no secret: the token's file is named, not its content."""
    content = {
        "listen": f"127.0.0.1:{config.port}",
        "admin": f"127.0.0.1:{config.admin_port}",
        "control": config.control_url,
        "token_file": str(layout.secrets / EDGE_TOKEN),
        "domain": config.domain,
        "edge_id": EDGE_ID,
        "registry": str(layout.registry_socket),
    }
    same = read_json(layout.edge_config) == content and layout.edge_config.stat().st_gid == user.gid
    if not same:
        write_whole(layout.edge_config, json.dumps(content, indent=2) + "\n", mode=0o640, owner=(0, user.gid))
