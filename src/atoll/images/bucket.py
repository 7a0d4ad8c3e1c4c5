"""The artifact store in a bucket of S3, or of what speaks like it.

Credentials are read from a file or from the environment (AWS_ACCESS_KEY_ID...) and stay in this process: hosts get links. A big object goes
up in parts; what a killed control began of one is an unfinished upload, which the bucket's own lifecycle rule should remove.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore import exceptions
from obstore.store import S3Store

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.images.artifacts import DOCUMENT_BYTES_MAX, Info, check, missing
from atoll.images.bucket_settings import BucketSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

PART_BYTES: Final = 8 << 20
SIDE_BY_SIDE: Final = 4
RETRY_S: Final = 20.0
CONNECT_S: Final = 5.0
ANSWER_S: Final = 300.0
_FIELDS: Final = frozenset({"access_key_id", "secret_access_key", "session_token"})


class Bucket:
    """Implements artifacts.Artifacts."""

    def __init__(self, settings: BucketSettings) -> None:
        """*Errors*: Refused SETUP_FAILED when the settings make no store. Nobody is spoken to yet."""
        self.local: Path | None = None
        self._settings = settings
        self._store = _open(settings)

    async def put(self, key: str, source: Path) -> None:
        """See Artifacts."""
        with _told(check(key)):
            await obstore.put_async(self._store, key, source, chunk_size=PART_BYTES, max_concurrency=SIDE_BY_SIDE)

    async def write(self, key: str, content: bytes) -> None:
        """See Artifacts."""
        with _told(check(key)):
            await obstore.put_async(self._store, key, content, use_multipart=False)

    async def get(self, key: str, target: Path) -> None:
        """See Artifacts."""
        with _told(check(key)):
            found = await obstore.get_async(self._store, key)
            await asyncio.to_thread(lambda: target.parent.mkdir(parents=True, exist_ok=True, mode=0o750))
            descriptor, name = tempfile.mkstemp(prefix="object-", dir=target.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    async for part in found.stream(min_chunk_size=1 << 20):
                        await asyncio.to_thread(file.write, part)
                    await asyncio.to_thread(_to_disk, file.fileno(), file.flush)
                Path(name).replace(target)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise

    async def read(self, key: str, *, bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes:
        """See Artifacts."""
        with _told(check(key)):
            found = await obstore.get_async(self._store, key)
            if found.meta["size"] > bytes_max:
                raise Refused(Code.BODY_TOO_LARGE, f"artifact {key} has more than {bytes_max} bytes")
            return bytes(await found.bytes_async())

    async def head(self, key: str) -> Info | None:
        """See Artifacts."""
        try:
            with _told(check(key)):
                return _info(await obstore.head_async(self._store, key))
        except Refused as error:
            if error.code is Code.ARTIFACT_NOT_FOUND:
                return None
            raise

    async def delete(self, key: str) -> None:
        """See Artifacts."""
        try:
            with _told(check(key)):
                await obstore.delete_async(self._store, key)
        except Refused as error:
            if error.code is not Code.ARTIFACT_NOT_FOUND:
                raise

    async def list(self, prefix: str) -> AsyncIterator[Info]:
        """See Artifacts."""
        with _told(check(prefix)):
            async for page in obstore.list(self._store, f"{prefix}/"):
                for found in page:
                    yield _info(found)

    async def link(self, key: str, *, lasts_s: float) -> str | None:
        """See Artifacts."""
        with _told(check(key)):
            return await obstore.sign_async(self._store, "GET", key, timedelta(seconds=lasts_s))

    async def put_link(self, key: str, *, lasts_s: float) -> str | None:
        """See Artifacts."""
        with _told(check(key)):
            return await obstore.sign_async(self._store, "PUT", key, timedelta(seconds=lasts_s))


def _open(settings: BucketSettings) -> S3Store:
    config: S3Config = {"region": settings.region}
    if settings.endpoint is not None:
        config["endpoint"] = settings.endpoint
    config["virtual_hosted_style_request"] = not settings.path_style
    # Not every server knows how to delete many objects by one request.
    config["disable_bulk_delete"] = True
    if settings.credentials is not None:
        config.update(_credentials(settings.credentials))  # type: ignore[typeddict-item]
    client: ClientConfig = {
        "allow_http": settings.plain_http,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=ANSWER_S),
    }
    retry: RetryConfig = {"max_retries": 4, "retry_timeout": timedelta(seconds=RETRY_S)}
    try:
        return S3Store(settings.bucket, prefix=settings.prefix.strip("/") or None, config=config, client_options=client, retry_config=retry)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        # What the library says may quote a setting, and one of them is a secret.
        raise Refused(Code.SETUP_FAILED, f"[artifacts] makes no bucket: {type(error).__name__}") from None


def _credentials(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_mode & 0o077:
            raise Refused(Code.SETUP_FAILED, f"{path} may be read by others", hint=f"`chmod 600 {path}`; it belongs to control's user.")
        found: Any = json.loads(path.read_bytes())
        values = {str(name): str(value) for name, value in found.items() if name in _FIELDS}
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(Code.SETUP_FAILED, f"{path} cannot be read: {type(error).__name__}") from None
    if not {"access_key_id", "secret_access_key"} <= set(values):
        raise Refused(Code.SETUP_FAILED, f"{path} needs access_key_id and secret_access_key")
    return values


def _info(meta: obstore.ObjectMeta) -> Info:
    return Info(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _to_disk(file: int, flush: Any) -> None:
    flush()
    os.fsync(file)


@contextlib.contextmanager
def _told(key: str) -> Iterator[None]:
    """What the library raises, in our words. Its text may hold addresses and answers of the server's, but no secret key."""
    try:
        yield
    except AtollError:
        raise
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        raise missing(key) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise Refused(Code.ARTIFACTS_DENIED, f"the artifact store does not allow what is done with {key}") from error
    except (exceptions.BaseError, TimeoutError) as error:
        raise Unavailable(
            Code.ARTIFACTS_UNAVAILABLE, f"the artifact store did not answer for {key}: {_first_line(error)}", retry_after_s=5.0
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = Code.HOST_DISK_FULL if full else Code.ARTIFACTS_UNAVAILABLE
        raise Refused(code, f"artifact {key} could not be kept here: {error.strerror}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
