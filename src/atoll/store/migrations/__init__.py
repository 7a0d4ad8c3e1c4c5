"""Schema versions, forward only; each file is one released step and is never edited afterwards."""
