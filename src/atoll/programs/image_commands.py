"""`atoll image`: what an operator does with images on this machine: the keys that sign them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from atoll.base.errors import Code, Refused
from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.programs import hosting
from atoll.programs.files import exclusive, read_json, write_whole
from atoll.programs.layout import Layout, layout_of
from atoll.programs.users import require_root

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Images on this machine, and the keys that sign them.")
key = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys that sign images.")
app.add_typer(key, name="key")


@key.command("show")
def show(*, as_json: JsonOption = False) -> None:
    """Show which keys count: of this deployment where control is here, else those that this host trusts."""
    require_root("atoll image key show")
    found = _keys(layout_of())
    if as_json:
        output.document(found)
        return
    output.table(
        [
            ("KEY", lambda item: item["id"]),
            ("PUBLIC", lambda item: item["publicKey"]),
            ("SIGNS", lambda item: "yes" if item["signs"] else "no"),
        ],
        found["keys"],
        empty="This host has been told of no key yet.",
    )


@key.command("rotate")
def rotate(*, as_json: JsonOption = False) -> None:
    """Sign with a new key from now on (root, on control's machine). Hosts follow by themselves; the older key counts until it is retired.

    With several replicas of control, copy secrets/image-ed25519 and secrets/image-keys.json to each.
    """
    from atoll.images import signing

    _change(lambda place: signing.rotate(place.secrets, _writer(place)), "rotate", as_json=as_json)


@key.command("retire")
def retire(
    key_id: Annotated[str, typer.Argument(help="As `atoll image key show` names it.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Have a key not count any more (root, on control's machine): hosts refuse what it alone has signed once they have heard of it."""
    from atoll.images import signing

    _change(lambda place: signing.retire(place.secrets, key_id, _writer(place)), "retire", as_json=as_json)


def _change(change: Callable[[Layout], Any], what: str, *, as_json: bool) -> None:
    require_root(f"atoll image key {what}")
    place = layout_of()
    if not place.secrets.is_dir():
        raise Refused(Code.NOT_RUNNING, f"control is not on this machine: there is no {place.secrets}")
    with exclusive(place.home):
        change(place)
    found = _keys(place)
    if as_json:
        output.document(found)
        return
    for one in found["keys"]:
        print(f"{one['id']}  {'signs' if one['signs'] else 'counts'}")


def _writer(place: Layout) -> Callable[[str, bytes], None]:
    info = place.secrets.stat()

    def write(name: str, content: bytes) -> None:
        write_whole(place.secrets / name, content, mode=0o600, owner=(info.st_uid, info.st_gid))

    return write


def _keys(place: Layout) -> dict[str, Any]:
    from atoll.images import signing
    from atoll.images.trust import KEYS_FILE

    if place.secrets.is_dir():
        keys = signing.load(place.secrets)
        current, signs = keys.current, keys.id
        revision, listed = current.revision, [(one.id, one.public_key) for one in current.keys]
    else:
        hosting.load(place)
        told = read_json(place.agent / KEYS_FILE) or {}
        signs, revision = None, int(told.get("revision", 0))
        listed = [(str(one["id"]), str(one["public_key"])) for one in told.get("keys", ())]
    return {"revision": revision, "keys": [{"id": name, "publicKey": shown, "signs": name == signs} for name, shown in listed]}
