"""Our own API, `/v1`: the same things as E2B's, in Atoll's words, with an OpenAPI document at `/v1/openapi.json`.

Read `models.py` for the objects, `sandboxes.py` and `deployment.py` for the routes.
"""
