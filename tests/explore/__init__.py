"""A search over what may happen to a run, in any order: the real machine, and doubles of all that is around it."""
