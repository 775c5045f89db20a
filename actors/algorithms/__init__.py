"""Losses, advantages, filters, packing and staleness: pure functions of arrays and plain values.

No bus, no I/O, no clock, so each function can be checked against its paper with numbers in a test. Formulas, defaults
and origins of all algorithms are in docs/reference/losses.md.
"""
