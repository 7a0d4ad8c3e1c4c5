"""What replicas, and requests inside one, tell each other."""
