"""Runs side by side (`actors compare`, and the end of a queue): figures, differing keys, words, a picture."""
