"""`atoll image`: the images of this machine as a host, and the keys that sign images."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from atoll.base.errors import Code, Refused
from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.cli.session import session
from atoll.programs import hosting
from atoll.programs.files import exclusive, read_json, write_whole
from atoll.programs.layout import Layout, layout_of
from atoll.programs.users import require_root

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Images on this machine, and the keys that sign them.")
Digest = Annotated[str, typer.Argument(help="sha256:HEX, as `atoll image ls` shows it.")]
key = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys that sign images.")
app.add_typer(key, name="key")


@app.command("ls")
def ls(*, as_json: JsonOption = False) -> None:
    """Show the images that this host has ready, used last first (root)."""
    found = _ask("ls", {"do": "ls"})
    if as_json:
        output.document(found)
        return
    output.table(
        [
            ("IMAGE", lambda item: item["digest"]),
            ("NAME", lambda item: item["name"] if not item["own"] else ""),
            ("SIZE", lambda item: _amount(item["size_bytes"])),
            ("OWN", lambda item: _amount(item["own_bytes"])),
            ("USED", lambda item: time.strftime("%Y-%m-%d %H:%M", time.localtime(item["used_at"]))),
            ("", lambda item: " ".join(word for word in ("pinned", "in_use") if item[word]).replace("_", " ")),
        ],
        found["images"],
        empty="No images.",
    )
    told, limits = found["sum"], found["limits"]
    typer.echo(
        f"{told['trees']} made here, {_amount(told['tree_bytes'])} of at most {limits['treesMib']} MiB; "
        f"{told['blobs']} blobs, {_amount(told['blob_bytes'])} of at most {limits['blobsMib']} MiB; "
        f"{told['quarantined']} in quarantine",
        err=True,
    )


@app.command("verify")
def verify(*, as_json: JsonOption = False) -> None:
    """Count every image and digest every blob of this host (root). Status 4 when something is wrong: it is set aside where nothing uses it."""
    found = _ask("verify", {"do": "verify"})
    if as_json:
        output.document(found)
    else:
        print("\n".join(found["problems"]) or "all is whole")
    if found["problems"]:
        raise typer.Exit(4)


@app.command("prune")
def prune(
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="All that nothing uses and nobody has pinned, not only what is over the limit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove images that no sandbox stands on, used longest ago first (root)."""
    found = _ask("prune", {"do": "prune", "all": everything, "dry_run": dry_run})
    if as_json:
        output.document(found)
        return
    for one in found["images"]:
        print(one["digest"])
    typer.echo(f"{len(found['images'])} image(s), {_amount(found['bytes'])} {'would go' if dry_run else 'went'}", err=True)


@app.command("pin")
def pin(digest: Digest, *, as_json: JsonOption = False) -> None:
    """Keep an image on this host, whatever its limit (root)."""
    _answer(_ask("pin", {"do": "pin", "digest": digest}), as_json=as_json)


@app.command("unpin")
def unpin(digest: Digest, *, as_json: JsonOption = False) -> None:
    """Keep it no longer than others (root)."""
    _answer(_ask("unpin", {"do": "unpin", "digest": digest}), as_json=as_json)


@app.command("limit")
def limit(
    *,
    trees_mib: Annotated[int | None, typer.Option("--images-mib", min=0, help="Of what is unpacked.")] = None,
    blobs_mib: Annotated[int | None, typer.Option("--blobs-mib", min=0, help="Of what was fetched.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show or set how much this host keeps (root); it holds from the next image on, or with `atoll image prune`."""
    _answer(_ask("limit", {"do": "limit", "trees_mib": trees_mib, "blobs_mib": blobs_mib}), as_json=as_json)


@app.command("gc")
def gc(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove from the deployment's artifact store what no template, build or living sandbox needs (operators)."""
    with session() as api:
        found = api.collect_artifacts(dry_run=dry_run)
    if as_json:
        output.document(found)
        return
    for name in found["keys"]:
        print(name)
    said = "would go" if dry_run else "went"
    typer.echo(
        f"{found['count']} artifact(s), {_amount(found['bytes'])} {said}" + ("; images are being made now" if found["busy"] else ""),
        err=True,
    )


def _amount(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _answer(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.document(found)
        return
    print(", ".join(f"{name}: {str(value).lower()}" for name, value in found.items()))


def _ask(what: str, request: dict[str, Any]) -> dict[str, Any]:
    """The running agent's answer, or that of its shelf where none runs. *Errors*: Refused NOT_RUNNING: this machine is no host."""
    import asyncio

    from atoll.programs import agent_main, image_socket

    require_root(f"atoll image {what}")
    place = layout_of()
    config = hosting.load(place)
    found = image_socket.ask(place.image_socket, request)
    if found is not None:
        return found
    with agent_main.agent_stopped(place):
        shelf = agent_main.shelf(place, agent_main.own_images(place, config))
        return asyncio.run(shelf.asked(request))


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
