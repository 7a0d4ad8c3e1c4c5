"""What control does without being asked: reconcile, deadlines, retention. Each pass is bounded and idempotent; the next is the retry."""
