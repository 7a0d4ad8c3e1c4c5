"""The layers of a template's image, for whoever takes the template elsewhere."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.domain.template import Template
from atoll.images import assembling
from atoll.images.artifacts import BLOBS, key_of
from atoll.images.library import Library

_KINDS: Final = {
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar": assembling.LAYER_TYPE,
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
}
"""Docker's names of what has one in OCI, too: an image's manifest speaks one language."""


@dataclass(frozen=True, slots=True)
class TemplateLayer:
    """One layer. *Units*: bytes."""

    digest: str
    kind: str
    """Its media type, in OCI's words."""
    size: int
    tar_digest: str
    """Of the archive, when it is not compressed."""


@dataclass(frozen=True, slots=True)
class TemplateImage:
    """What a template's files are made of: `layers` on top of `base`, a ready-made image that hosts bring along; None: nothing."""

    base: str | None
    layers: tuple[TemplateLayer, ...] = ()
    processor: str = ""
    """In the images' words, e.g. `amd64`; empty: whatever the base's is."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Reads the image store."""

    library: Library

    async def of(self, template: Template) -> TemplateImage:
        """*Errors*: Refused TEMPLATE_NOT_FOUND (it was never built), IMAGE_CORRUPT; those of Artifacts."""
        if not template.image:
            raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {template.name!r} has no build that is ready")
        await self.library.documents(template.image)
        return await asyncio.to_thread(self._read, template.image)

    async def file(self, template: Template, digest: str) -> Path:
        """Where the bytes of one of its layers are. *Errors*: as `of`; Refused IMAGE_UNAVAILABLE when it has no such layer."""
        found = await self.of(template)
        if digest not in {one.digest for one in found.layers}:
            raise Refused(Code.IMAGE_UNAVAILABLE, f"template {template.name!r} has no layer {digest[:80]!r}")
        path = self._path(digest)
        if not await asyncio.to_thread(path.is_file) and self.library.shared:
            await self.library.artifacts.get(key_of(BLOBS, digest), path)
        return path

    def _read(self, image: str) -> TemplateImage:
        if not self._path(image).exists():
            return TemplateImage(image)
        manifest = self._document(image)
        config = self._document(str(manifest["config"]["digest"]))
        tars = config["rootfs"]["diff_ids"]
        layers = [
            TemplateLayer(str(one["digest"]), _KINDS.get(one["mediaType"], one["mediaType"]), int(one["size"]), str(tar))
            for one, tar in zip(manifest["layers"], tars, strict=True)
        ]
        return TemplateImage(assembling.base_of(self.library.bench, image), tuple(layers), str(config["architecture"]))

    def _document(self, digest: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path(digest).read_bytes())
        except (OSError, ValueError) as error:
            raise Refused(Code.IMAGE_CORRUPT, f"document {digest} of the image store cannot be read") from error
        return found

    def _path(self, digest: str) -> Path:
        return self.library.bench / key_of(BLOBS, digest)
