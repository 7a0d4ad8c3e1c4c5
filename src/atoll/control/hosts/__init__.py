"""Hosts as control knows them: enrolled, remembered, looked through, drained and disabled."""
