"""What E2B's API has and this release has not: one table, one clear answer."""

from __future__ import annotations

from typing import Final

from atoll.base.errors import Code
from atoll.control.api.errors import e2b_body
from atoll.control.api.exchange import Answer, Call, json_answer

ROUTES: Final[tuple[tuple[str, str, str], ...]] = (
    ("PUT", "/sandboxes/{sandboxID}/network", "changing the network of a running sandbox"),
    ("GET", "/teams/{teamID}/metrics", "team metrics"),
    ("GET", "/teams/{teamID}/metrics/max", "team metrics"),
    ("GET", "/templates/{templateID}/tags/groups", "the history of tags"),
    ("GET", "/templates/{templateID}/tags/{tag}/assignments", "the history of tags"),
    ("GET", "/volumes", "volumes"),
    ("POST", "/volumes", "volumes"),
    ("GET", "/volumes/{volumeID}", "volumes"),
    ("DELETE", "/volumes/{volumeID}", "volumes"),
    *((method, f"/volumecontent/{{volumeID}}/{part}", "volumes") for part in ("path", "dir", "file") for method in ("GET", "POST", "PUT")),
    ("PATCH", "/volumecontent/{volumeID}/path", "volumes"),
    ("DELETE", "/volumecontent/{volumeID}/path", "volumes"),
    ("GET", "/secrets", "secrets"),
    ("POST", "/secrets", "secrets"),
    ("GET", "/secrets/{secretID}", "secrets"),
    ("POST", "/secrets/{secretID}", "secrets"),
    ("DELETE", "/secrets/{secretID}", "secrets"),
    ("PATCH", "/api-keys/{apiKeyID}", "renaming an API key"),
    ("POST", "/access-tokens", "access tokens"),
    ("DELETE", "/access-tokens/{accessTokenID}", "access tokens"),
    ("GET", "/nodes", "E2B's view of nodes (use /v1/hosts)"),
    ("GET", "/nodes/{nodeID}", "E2B's view of nodes (use /v1/hosts)"),
    ("POST", "/nodes/{nodeID}", "E2B's view of nodes (use /v1/hosts)"),
    ("POST", "/admin/teams/{teamID}/sandboxes/kill", "E2B's administration"),
    ("GET", "/admin/sandboxes/running-counts", "E2B's administration"),
    ("POST", "/admin/teams/{teamID}/builds/cancel", "E2B's administration"),
    ("POST", "/admin/teams/{teamID}/api-keys", "E2B's administration"),
    ("DELETE", "/admin/teams/{teamID}/api-keys/{apiKeyID}", "E2B's administration"),
    ("GET", "/events/sandboxes", "E2B's event list (use /v1/sandboxes/{id}/events)"),
    ("GET", "/events/sandboxes/{sandboxID}", "E2B's event list (use /v1/sandboxes/{id}/events)"),
    ("GET", "/events/webhooks", "webhooks"),
    ("POST", "/events/webhooks", "webhooks"),
    ("GET", "/events/webhooks/{webhookID}", "webhooks"),
    ("PATCH", "/events/webhooks/{webhookID}", "webhooks"),
    ("DELETE", "/events/webhooks/{webhookID}", "webhooks"),
)
"""Method, path, and what it would do."""


async def refuse(call: Call) -> Answer:
    """The same for every id, so that it says nothing about what exists."""
    message = f"{call.params['feature']} is not supported by this release"
    return json_answer(501, e2b_body(501, message, Code.NOT_SUPPORTED.value), ((b"should-retry", b"false"),))
