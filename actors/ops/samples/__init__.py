"""Samples of a run while they are recorded (`actors samples RUN --follow`)."""
