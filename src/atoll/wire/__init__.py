"""Messages between Atoll's programs, and their versions. Shapes only; imports `base`, `domain`, `planning`.

Read `agent.py` first. Golden messages under `golden/` are read by the Python and the Go tests alike. Unknown fields are ignored by
every reader, so that a newer writer can speak to an older one of the same major protocol version.
"""
