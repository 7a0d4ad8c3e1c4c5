"""Speaking with agents: who speaks for a host, what it is told, and what it brings."""
