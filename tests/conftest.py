"""For all tests: log lines as plain text, and no limit on how long one example of a property takes.

Structlog's default for a terminal draws each traceback with rich, with the locals of every frame: eight seconds for one that passes
through an application. A test that looks at log lines configures its own, or uses `structlog.testing.capture_logs`. How long an example
takes says how busy the machine is, not whether the code is right.
"""

import structlog
from hypothesis import HealthCheck, settings

structlog.configure(
    processors=[structlog.stdlib.add_log_level, structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
)
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")
