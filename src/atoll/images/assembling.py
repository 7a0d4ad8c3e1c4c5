"""Images made of an image and one layer more: documents of the store, written by control itself.

What it stands on is an image of the store, whose layers and configuration are taken over, or one that hosts bring along ready-made: then
the new image names that by its digest (BASE) and has its own layers only. Documents appear by one rename, under their digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused

BASE: Final = "dev.atoll.base"
"""The annotation of a manifest that names a ready-made image below its layers."""
OUTSIDE: Final = "dev.atoll.outside"
"""The annotation of a manifest that counts its layers from elsewhere: those after them were captured on trees with what guests need."""
LAYERS_MAX: Final = 128
MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE: Final = "application/vnd.oci.image.layer.v1.tar"

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def extend(store: Path, image: str, *, layer: str, size: int) -> str:
    """The digest of the image with one layer (a blob of the store, a tar that is not compressed) more.

    *Errors*: Refused IMAGE_REFUSED (too many layers), IMAGE_CORRUPT (a document of the store is broken). *Idempotency*: the same image
    and layer give the same digest.
    """
    manifest, config = _documents(store, image)
    layers = [*manifest["layers"], {"mediaType": LAYER_TYPE, "digest": layer, "size": size}]
    if len(layers) > LAYERS_MAX:
        raise Refused(Code.IMAGE_REFUSED, f"the image would have {len(layers)} layers, at most {LAYERS_MAX} are unpacked")
    rootfs = {"type": "layers", "diff_ids": [*config["rootfs"]["diff_ids"], layer]}
    # Its history would have to tell of the new layer, too, and nothing reads it.
    made = {**{key: value for key, value in config.items() if key != "history"}, "rootfs": rootfs}
    config_digest, config_size = _put(store, made)
    annotations = {OUTSIDE: str(len(manifest["layers"])), **manifest.get("annotations", {})}
    document = {
        "annotations": annotations,
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": config_digest, "size": config_size},
        "layers": layers,
    }
    digest, _ = _put(store, document)
    return digest


def compose(store: Path, root: Path) -> str:
    """The digest of an image whose one layer is this archive (a tar that is not compressed), which becomes a blob of the store.

    *Errors*: OSError. *Idempotency*: the same archive gives the same digest.
    """
    size = root.stat().st_size
    with root.open("rb") as file:
        layer = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        os.fsync(file.fileno())
    path = _path(store, layer)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    # Below the same folder, so that it appears whole.
    root.chmod(0o640)
    root.replace(path)
    config = {"architecture": _processor(), "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [layer]}}
    config_digest, config_size = _put(store, config)
    document = {
        # It is from elsewhere, as what a registry has: what guests need is added to it.
        "annotations": {OUTSIDE: "1"},
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": config_digest, "size": config_size},
        "layers": [{"mediaType": LAYER_TYPE, "digest": layer, "size": size}],
    }
    digest, _ = _put(store, document)
    return digest


def layers_of(store: Path, image: str) -> list[str]:
    """Digests of an image's own layers, lowest first. *Errors*: Refused IMAGE_CORRUPT."""
    return [str(one["digest"]) for one in _documents(store, image)[0]["layers"]]


def base_of(store: Path, image: str) -> str | None:
    """The ready-made image that this one stands on; None when it has all its layers itself, or is not of the store."""
    try:
        base = json.loads(_path(store, image).read_bytes()).get("annotations", {}).get(BASE)
    except (OSError, ValueError, AttributeError):
        return None
    return base if isinstance(base, str) and _DIGEST.fullmatch(base) else None


def is_whole(store: Path, image: str) -> bool:
    """Whether every blob of an image is there, by name and size."""
    try:
        manifest = json.loads(_path(store, image).read_bytes())
        parts = [manifest["config"], *manifest["layers"]]
        return all(_path(store, str(part["digest"])).stat().st_size == part["size"] for part in parts)
    except (OSError, ValueError, KeyError, TypeError, Refused):
        return False


def _documents(store: Path, image: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and configuration; of an image that is not of the store, those of nothing on top of it."""
    if not _path(store, image).exists():
        config = {"architecture": _processor(), "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
        return {"annotations": {BASE: image}, "layers": []}, config
    manifest = _read(store, image)
    return manifest, _read(store, str(manifest["config"]["digest"]))


def _processor() -> str:
    machine = platform.machine()
    return _PROCESSORS.get(machine, machine)


def _path(store: Path, digest: str) -> Path:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise Refused(Code.IMAGE_CORRUPT, f"{digest[:80]!r} is no digest")
    return store / "blobs" / "sha256" / match[1]


def _read(store: Path, digest: str) -> dict[str, Any]:
    try:
        content = _path(store, digest).read_bytes()
        found = json.loads(content)
    except (OSError, ValueError) as error:
        raise Refused(Code.IMAGE_CORRUPT, f"document {digest} of the image store cannot be read: {error}") from error
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest or not isinstance(found, dict):
        raise Refused(Code.IMAGE_CORRUPT, f"document {digest} of the image store is not what its name says")
    return found


def _put(store: Path, document: dict[str, Any]) -> tuple[str, int]:
    return keep_document(store, json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def keep_document(store: Path, content: bytes) -> tuple[str, int]:
    """Have a small blob in the store; its digest and size."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    path = _path(store, digest)
    if not path.exists():
        partial = store / "partial"
        for directory in (partial, path.parent):
            directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        with tempfile.NamedTemporaryFile(dir=partial, prefix="document-", delete=False) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished = Path(file.name)
        unfinished.chmod(0o640)
        unfinished.replace(path)
    return digest, len(content)
