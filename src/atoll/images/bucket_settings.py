"""Where a bucket is: apart from the bucket itself, whose library who only reads settings does without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Where the bucket is, and how it is spoken to."""

    bucket: str
    region: str = "us-east-1"
    endpoint: str | None = None
    """`https://HOST[:PORT]`; None: Amazon's of the region."""
    prefix: str = ""
    credentials: Path | None = None
    """JSON with access_key_id, secret_access_key and maybe session_token, which only control's user reads; None: the environment."""
    path_style: bool = True
    """`ENDPOINT/BUCKET/KEY`, as servers want it that have one name; False: `BUCKET.ENDPOINT/KEY`."""
    plain_http: bool = False
