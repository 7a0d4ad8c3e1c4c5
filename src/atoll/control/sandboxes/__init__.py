"""Sandboxes as every API asks for them: made, brought to rest, kept, cloned, made ahead, explained."""
