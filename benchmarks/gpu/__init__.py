"""Measurements and checks that need a GPU, in phases: `python -m benchmarks.gpu --help`."""
