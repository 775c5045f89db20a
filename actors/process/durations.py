"""Durations in words, for logs and screens."""


def seconds_in_words(seconds: float) -> str:
    """Return a duration in words: `12 s`, `3 min`, `2 h`, `4 days`."""
    # a unit is used up to twice the next one: 119 s, 119 min, 47 h
    for unit, length, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
