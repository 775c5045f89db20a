"""Intervals of whole numbers; both ends belong to an interval."""


def overlap(first, second):
    """Return the number of whole numbers that two intervals (low, high) have in common."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))
