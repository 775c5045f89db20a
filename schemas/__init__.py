"""Types at the boundaries: configuration, messages between processes, limits, errors. Needs only pydantic and numpy."""
