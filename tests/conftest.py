"""For all tests: log lines as plain text.

Structlog's default for a terminal draws each traceback with rich, with the locals of every frame: eight seconds for one that passes
through an application. A test that looks at log lines configures its own, or uses `structlog.testing.capture_logs`.
"""

import structlog

structlog.configure(
    processors=[structlog.stdlib.add_log_level, structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
)
