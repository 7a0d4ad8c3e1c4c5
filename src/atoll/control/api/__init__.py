"""HTTP over `Service`: E2B's API as its public clients speak it (`e2b`), and our own (`v1`).

Theory of operation. `app.Front` takes a request, finds who asks, reads the body within its limits, and hands it to one of two rooms.
E2B's surface is a table of bare functions (`e2b/routes.py`), because create is on the hot path and its contract is somebody else's; ours
is FastAPI, because its OpenAPI document is generated from it. Both speak `Service` only and hold no state. Read `app.py` first.
"""
