"""Identifiers: one append-only registry of prefixes, one way to make and to check an id.

A sandbox id is E2B's shape (`i` + 20 of [a-z0-9]) because clients put it into host names; every other id is `prefix_` + 20 of
[a-z0-9]. Ids are random, never derived, never reused. Source: docs/adr/0003-ids.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NewType

SandboxId = NewType("SandboxId", str)
PlacementId = NewType("PlacementId", str)
HostId = NewType("HostId", str)
TeamId = NewType("TeamId", str)
ClientId = NewType("ClientId", str)
EpochId = NewType("EpochId", str)
InstallId = NewType("InstallId", str)
TemplateId = NewType("TemplateId", str)
EventId = NewType("EventId", str)


class Prefix(StrEnum):
    """Append-only: a prefix is never renamed or given to something else."""

    SANDBOX = "i"
    PLACEMENT = "plc_"
    HOST = "hst_"
    TEAM = "tea_"
    CLIENT = "cli_"
    EPOCH = "epo_"
    INSTALL = "ins_"
    TEMPLATE = "tpl_"
    EVENT = "evt_"
    ENROLLMENT = "enr_"
    DELIVERY = "dlv_"
    IMPORT = "imp_"
    REPLICA = "rep_"
    ALERT = "alr_"
    SNAPSHOT = "snp_"
    BUILD = "bld_"
    """Before a build's own UUID: how sandboxes that a build needs name their client."""


ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
BODY_LENGTH: Final = 20

_CHARACTERS: Final = bytes(ord(ALPHABET[byte % 36]) for byte in range(256))
_UNFAIR: Final = bytes(range(252, 256))
_BODY: Final = re.compile(rf"[a-z0-9]{{{BODY_LENGTH}}}")

Dice = Callable[[int], bytes]
"""`dice(n)` gives n random bytes: `os.urandom` in programs, a seeded generator in simulations."""


def new_id(prefix: Prefix, dice: Dice) -> str:
    """A fresh random id with 103 bits of chance.

    Bytes of 252 and above are thrown away, so that each character is equally likely.
    """
    body = b""
    while len(body) < BODY_LENGTH:
        body += dice(32).translate(_CHARACTERS, _UNFAIR)
    return prefix + body[:BODY_LENGTH].decode()


def is_id(prefix: Prefix, text: str) -> bool:
    """Whether `text` has exactly the shape of an id of this kind."""
    return text.startswith(prefix) and _BODY.fullmatch(text[len(prefix) :]) is not None
