"""Measurements: run each from the repository root, for example `python -m benchmarks.decode_speed`."""
